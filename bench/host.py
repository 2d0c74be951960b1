"""
Time what the host does for a step of an emitted program, with a driver that launches nothing; needs no GPU.

    python bench/host.py [--only gpt2] [--quick-launches] [--out FILE.json]

Models have all their layers and are narrow, on the plan for one H100, in mixed precision with AdamW. All products are
Triton's: PyTorch's would be computed here, by the CPU, which takes longer than to launch them. The other operators of
PyTorch take about as long as it takes to launch them. Times are processor time, the median
of 30 steps. They have all of Triton's Python, and neither its function in C that passes arguments to CUDA, nor CUDA's
launch, nor CUDA's allocator. Each part is what was called of it in a step, called again by itself:

- `bind`: `kernel[grid](..)` of every launch;
- `allocate`: tensors for results, `new_empty` and `empty`;
- `torch`: PyTorch's other functions;
- `python`: the rest, lines of the step and of the launchers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time_ns
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode

from unity_ir.tools.unity_opt import main as unity_opt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test" / "helpers"))

MODELS = {
    "gpt2": "gpt2,batch=1,sequence=16,hidden=48,vocabulary=130",
    "bert_large": "bert_large,layers=4,batch=1,sequence=16,hidden=64,vocabulary=130",
}
PLAN = ["--mixed-precision", "bf16", "--machine=dgx-h100:1x1", "--search=data-parallel,optimizer=adamw"]
PLAN += ["-t", "triton{matmul=triton}"]
PARTS = ("bind", "allocate", "torch", "python")
ALLOCATE = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")
NO_CALLS = ("__get__", "data_ptr", "is_floating_point", "numel", "size", "stride")
"""Names of what PyTorch hands out without an operator."""


class Calls(TorchFunctionMode):
    """PyTorch's functions that are called in it, those that allocate and the others: (function, arguments)."""

    def __init__(self):
        super().__init__()
        self.allocate: list[Any] = []
        self.torch: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in NO_CALLS:
            (self.allocate if func.__name__ in ALLOCATE else self.torch).append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Launched:
    """A kernel that appends its launches to `calls`: (kernel, grid, arguments)."""

    def __init__(self, kernel: Any, calls: list[Any]):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> None:
            self.calls.append((self.kernel, grid, args, options))

        return launch


def microseconds(function: Callable[[], object], times: int = 30) -> float:
    """Return the median processor time of a function."""
    found: list[int] = []
    for _ in range(times):
        start = thread_time_ns()
        function()
        found.append(thread_time_ns() - start)
    return median(found) / 1000


def again(calls: list[Any]) -> None:
    for function, args, kwargs in calls:
        function(*args, **kwargs)


def launch_again(calls: list[Any]) -> None:
    for kernel, grid, args, options in calls:
        kernel[grid](*args, **options)


def load_program(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def timed(path: Path) -> dict[str, Any]:
    """Return how often a step of a program calls what, and microseconds per launch of all of it and of each part."""
    program = load_program(path)
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    batch = program.Data().batch(0)

    def step() -> None:
        _, grads = program.forward_backward(ctx, weights, batch)
        program.update(weights, grads, moments, 1)

    took = {"step": microseconds(step)}  # before anything keeps tensors of a step: addresses recur, as on a GPU
    launches: list[Any] = []
    kernels = {n: kernel for n, kernel in vars(program).items() if n.endswith("_kernel")}
    vars(program).update({n: Launched(kernel, launches) for n, kernel in kernels.items()})
    with Calls() as calls:
        step()
    vars(program).update(kernels)
    took["bind"] = microseconds(lambda: launch_again(launches))
    took["allocate"] = microseconds(lambda: again(calls.allocate))
    took["torch"] = microseconds(lambda: again(calls.torch))
    took["python"] = took["step"] - sum(took[part] for part in PARTS[:-1])
    per_launch = {part: round(time / len(launches), 2) for part, time in took.items()}
    counts = {"launches": len(launches), "allocations": len(calls.allocate), "torch_functions": len(calls.torch)}
    return {**counts, "per_launch": per_launch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    parser.add_argument(
        "--quick-launches", action="store_true", help="of programs that look up compiled kernels themselves"
    )
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    import triton
    from no_gpu import without_gpu

    found: dict[str, Any] = {}
    table = Table("model", "launches", "us per launch", *PARTS)
    with without_gpu(), tempfile.TemporaryDirectory() as folder:
        for name in [options.only] if options.only else MODELS:
            path = Path(folder) / f"{name}.py"
            if unity_opt(["--model", MODELS[name], *PLAN, "-o", str(path)]):
                return 1
            found[name] = one = timed(path)
            per_launch = one["per_launch"]
            table.add_row(name, str(one["launches"]), *(f"{per_launch[part]:.2f}" for part in ("step", *PARTS)))
    Console().print(table)
    if options.out:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
        options.out.write_text(json.dumps({**versions, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""
Emitted programs on a real GPU: training steps in bf16 against PyTorch's, and `--check` over NCCL with several ranks.

    make gpu                      or: python bench/gpu.py [--json FILE] [--only mlp,dlrm] [--smoke]

Each part is a process of its own with a limit, and what is done is in the file at once, so that what hangs or dies
costs its own rows only. A step is forward, backward and SGD's update. First the loss and every gradient are compared
with the model written by hand in PyTorch in float32 on the same weights: the program in float32 may be 0.1% off, in
bf16 twice as far as PyTorch's own bf16 is, and no time is given otherwise. Then the median of the steps: the program
with Triton's kernels, the program all in PyTorch, the hand-written model eager and under torch.compile (its default
mode).

NCCL takes several ranks on one GPU only if each believes to be on a host of its own (NCCL_HOSTID, set by the program);
their times say nothing, so only `--check` is run there. `--smoke` runs everything tiny on the CPU, over gloo, to try
the script itself; it measures nothing. Without a GPU the script says that and exits with code 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

TINY_BERT = {"batch": 2, "sequence": 8, "layers": 1, "hidden": 32, "heads": 4, "vocabulary": 40}
MODELS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "mlp 8192": ("mlp", {"layers": 4}, {"batch": 8, "hidden": 16, "layers": 2, "classes": 8}),
    "BERT-Large, 4 layers": ("bert_large", {"layers": 4}, TINY_BERT),
    "ResNet-50": ("resnet101", {"depth": 50}, {"batch": 4, "image": 32, "classes": 8, "depth": 14, "channels": 8}),
    "DLRM": ("dlrm", {}, {"batch": 8, "tables": 2, "rows": 50, "features": 8, "dense": 8, "bottom": 16, "top": 16}),
}
"""Per title, the zoo's model, its keys, and the keys of a tiny one."""
CHECKS = [
    ("mnist_mlp", 1, []),
    ("mnist_mlp", 2, ["--search", "--machine=2gpu"]),
    ("digits_2x2", 4, []),
]
"""Example, ranks, and the options that make its plan."""
MODEL_SECONDS, CHECK_SECONDS = 100, 40
LR = 1e-3


# --- one model, in a process of its own


def step_part(name: str, out: Path, steps: int, smoke: bool) -> None:
    """Check and time one model; the rows so far are written to `out` after each implementation."""
    import torch

    torch.backends.cudnn.allow_tf32 = False  # of no matter to bf16, and float32 is to be exact
    sys.path.insert(0, str(ROOT / "test" / "helpers"))
    from zoo import by_hand

    from unity_ir.lowering.emit.printer import emit
    from unity_ir.machine import load
    from unity_ir.models import build
    from unity_ir.pcg.differentiate import differentiate
    from unity_ir.pcg.elements import in_type
    from unity_ir.pcg.fuse_collectives import fuse_collectives
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.plan.lower import lower
    from unity_ir.plan.plan import PlanOptions, plan_step
    from unity_ir.search import run

    model, keys, tiny = MODELS[name]
    keys = tiny if smoke else keys
    serial, on = build(model, **keys), load("box:1")
    plan = run(serial, on, "data-parallel").graph
    folder = out.parent / out.stem
    folder.mkdir(exist_ok=True)

    def load_program(kernels: str, dtype: str = "bf16") -> Any:
        path = folder / f"{kernels}_{dtype}.py"
        step = differentiate(in_type(plan, dtype), Optimizer("sgd", LR), on.mesh)
        program = lower(fuse_collectives(step), on)
        path.write_text(emit(plan_step(program, PlanOptions(kernels, kernels)), in_type(serial, dtype)).text)
        spec = importlib.util.spec_from_file_location(f"{model}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where its dataclasses look
        spec.loader.exec_module(module)
        return module

    plain = load_program("torch")
    ctx = plain.build("gloo" if smoke else "nccl")
    start = plain.init_weights(ctx)
    batch = {n: t.to(ctx.device) for n, t in plain.Data().batch(0).items()}

    def loss_of(weights: dict[str, Any], inputs: dict[str, Any]) -> Any:
        return by_hand(model, keys, weights, inputs)

    def gradients(dtype: Any) -> tuple[Any, dict[str, Any]]:
        weights = {n: w.detach().to(dtype).requires_grad_() for n, w in start.items()}
        inputs = {n: b.to(dtype) if b.is_floating_point() else b for n, b in batch.items()}
        loss = loss_of(weights, inputs)
        found = torch.autograd.grad(loss, list(weights.values()))
        return loss.detach().float(), dict(zip(weights, found, strict=True))

    exact_loss, exact = gradients(torch.float32)

    total = sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5

    def off(loss: Any, grads: dict[str, Any]) -> dict[str, float]:
        """
        Return the relative errors to PyTorch's float32: of the loss, and of the worst gradient, by norms.

        Gradients that are only noise (of a bias before a softmax) are compared with a thousandth of the norm of all
        gradients.
        """
        parts = (float((grads[n].float() - g).norm()) / max(float(g.norm()), total / 1000) for n, g in exact.items())
        return {"loss off": float((loss.float() - exact_loss).abs() / exact_loss.abs()), "gradients off": max(parts)}

    own = off(*gradients(torch.bfloat16))
    rows: list[dict[str, Any]] = []

    def add(implementation: str, wrong: dict[str, float], run_step: Callable[[], object], in_f32: float = 0.0) -> None:
        right = wrong["gradients off"] <= 2 * own["gradients off"] + 0.01 and wrong["loss off"] <= 0.02
        right = right and in_f32 <= 1e-3
        row: dict[str, Any] = {"model": name, "keys": keys, "implementation": implementation, **wrong, "correct": right}
        row["float32 gradients off"] = in_f32
        if right:
            row |= timed(run_step, ctx.device, 2 if smoke else steps)
        rows.append(row)
        out.write_text(json.dumps(rows))

    def train(module: Any) -> Callable[[], object]:
        weights = {n: w.clone() for n, w in start.items()}

        def once() -> None:
            _, grads = module.forward_backward(ctx, weights, batch)
            module.update(weights, grads, {}, 1)

        return once

    for kernels in ("torch",) if smoke else ("triton", "torch"):
        floats, wide = ({n: t.float() if t.is_floating_point() else t for n, t in d.items()} for d in (start, batch))
        in_f32 = off(*load_program(kernels, "f32").forward_backward(ctx, floats, wide))["gradients off"]
        del floats, wide
        module = plain if kernels == "torch" else load_program(kernels)
        add(f"program, {kernels}", off(*module.forward_backward(ctx, start, batch)), train(module), in_f32)

    def by_autograd(function: Callable[..., Any]) -> Callable[[], object]:
        weights = {n: w.clone().requires_grad_() for n, w in start.items()}

        def once() -> None:
            grads = torch.autograd.grad(function(weights, batch), list(weights.values()))
            with torch.no_grad():
                torch._foreach_add_(list(weights.values()), grads, alpha=-LR)

        return once

    add("PyTorch, eager", own, by_autograd(loss_of))
    if not smoke:
        add("PyTorch, torch.compile", own, by_autograd(torch.compile(loss_of)))


def timed(run: Callable[[], object], device: Any, steps: int) -> dict[str, Any]:
    """Return the median seconds of `steps` steps, after warm-up, and the quartiles."""
    import torch

    for _ in range(5):
        run()
    seconds: list[float] = []
    for _ in range(steps):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(seconds, n=4)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"seconds": middle, "quartiles": [low, high], "steps": steps, "peak bytes of the process": peak}


# --- all of them


def limited(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code, None after `seconds`, and the end of its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The ranks are torchrun's children: the whole session ends.
            os.killpg(process.pid, 9)
            process.communicate()
            return None, f"stopped after {seconds:.0f} s"
        return process.returncode, said.strip()[-400:]


def checked(example: str, ranks: int, search: list[str], folder: Path, backend: str) -> dict[str, Any]:
    """Run `--check` of an emitted example: loss, gradients and weights of some steps equal PyTorch's."""
    program = folder / f"{example}_{ranks}.py"
    kernels = 'triton{kernels="torch"}' if backend == "gloo" else "triton"
    emit = [sys.executable, "-m", "unity_ir.tools.unity_opt", str(ROOT / "examples" / f"{example}.pcg"), *search]
    code, said = limited([*emit, "-t", kernels, "-o", str(program)], CHECK_SECONDS)
    if code == 0:
        torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), str(program)]
        code, said = limited([*torchrun, "--backend", backend, "--check"], CHECK_SECONDS)
    found = re.search(r"check passed.*", said)
    return {"example": example, "ranks": ranks, "backend": backend, "check": found[0] if found else said}


def about(smoke: bool) -> dict[str, Any]:
    """Return the GPU and the versions measured with."""
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "smoke": smoke,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch.compile": "default mode",
        "float32 products": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found |= {
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver, clock, power": driver.stdout.strip(),
        }
    return found


def show(report: dict[str, Any]) -> None:
    """Print the steps as a table, with ratios to PyTorch's time, and the checks."""
    console = Console(width=160)
    base: dict[str, dict[str, float]] = {}
    for row in report["steps"]:
        if "seconds" in row:
            base.setdefault(row["model"], {})[row["implementation"]] = row["seconds"]
    device = report["about"].get("device", "the CPU, which says nothing")
    table = Table(title=f"a training step in bf16 on {device}", title_justify="left")
    for heading in ("model", "implementation", "ms", "eager / this", "compiled / this", "gradients off", "remark"):
        table.add_column(heading)
    for row in report["steps"]:
        cells = [row["model"], row.get("implementation", "")]
        seconds = row.get("seconds")
        cells.append(f"{1e3 * seconds:.3f}" if seconds else "")
        for name in ("PyTorch, eager", "PyTorch, torch.compile"):
            other = base.get(row["model"], {}).get(name)
            cells.append(f"{other / seconds:.2f}" if other and seconds else "")
        cells.append(f"{row['gradients off']:.4f}" if "gradients off" in row else "")
        cells.append(row.get("remark", "" if row.get("correct", True) else "WRONG, not timed"))
        table.add_row(*cells)
    console.print(table)
    for row in report["checks"]:
        console.print(f"{row['example']}, {row['ranks']} ranks, {row['backend']}: {row['check']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", help="models, by their zoo names, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: tries the script, measures nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        step_part(options.part, options.out, options.steps, options.smoke)
        return 0
    import torch

    if not options.smoke and not torch.cuda.is_available():
        print("bench/gpu.py: no GPU is visible to PyTorch here; nothing was run", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"about": about(options.smoke), "steps": [], "checks": []}

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    wanted = options.only.split(",") if options.only else [m for m, _, _ in MODELS.values()]
    for name, (model, _, _) in MODELS.items():
        if model not in wanted:
            continue
        part = options.out / f"{model}.json"
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--part", name, "--out", str(part), "--steps", str(options.steps)]
        code, said = limited([*command, *(["--smoke"] if options.smoke else [])], MODEL_SECONDS)
        report["steps"] += json.loads(part.read_text()) if part.exists() else []
        if code != 0:
            report["steps"].append(
                {"model": name, "correct": False, "remark": said.splitlines()[-1] if said else "died"}
            )
        keep()
    for example, ranks, search in CHECKS if not options.only else []:
        report["checks"].append(checked(example, ranks, search, options.out, "gloo" if options.smoke else "nccl"))
        keep()
    show(report)
    wrong = [r for r in report["steps"] if not r.get("correct", True)]
    wrong += [r for r in report["checks"] if not str(r["check"]).startswith("check passed")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

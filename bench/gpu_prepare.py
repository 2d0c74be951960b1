"""
Emit the programs that `bench/gpu_run.py` checks and times on a GPU; needs no GPU itself.

    python bench/gpu_prepare.py [--only bert_large,gpt2] [--out .gpu]

Writes into a folder that git ignores, of a few MB: programs at full size for one H100 in mixed precision with AdamW, in
each way of computing (`WAYS`); the zoo's small models, in float32 and in mixed precision, and some plans for several
ranks, to `--check`; and `jobs.json`, which names them. Programs are one file each and import PyTorch and Triton
only, so the GPU's machine needs neither this package nor what it depends on.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from unity_ir.tools.unity_opt import main as unity_opt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test" / "helpers"))

from zoo import SMALL  # noqa: E402

FULL: dict[str, tuple[str, int]] = {
    "bert_large": ("bert_large,layers=4,batch=32,sequence=512", 12),
    "llama3_8b": ("llama3_8b,layers=2,batch=1,sequence=4096", 40),
    "gpt2": ("gpt2,batch=8", 12),
    "mlp": ("mlp,layers=4", 10),
    "dlrm": ("dlrm", 18),
    "resnet101": ("resnet101,depth=50,batch=64", 6),
    "moe": ("moe,layers=1,dispatch=sparse", 40),
}
"""Per model, its keys at full size, and the GB of the GPU that a process may need that checks and times it."""
WAYS = {
    "triton": "triton",
    "matmul=torch": "triton{matmul=torch}",
    "torch": "triton{kernels=torch}",
}
"""The ways of computing a step, and their targets."""
RANKS = [
    ("mnist_mlp", "examples/mnist_mlp.pcg", ["--search", "--machine=2gpu"], 2),
    ("digits", "examples/digits_2x2.pcg", [], 4),
]
"""Examples that are checked on several ranks, which share the GPU."""


def emit(path: Path, source: list[str], target: str) -> bool:
    """Write a program of a graph to `path`; return whether that was possible, having said why not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return unity_opt([*source, "-t", target, "-o", str(path)]) == 0


def keys_of(text: str) -> dict[str, int | str]:
    """Given `gpt2,batch=8`, return all keys of the model, those that are not named by their defaults."""
    name, *settings = text.split(",")
    function = import_module(f"unity_ir.models.{name}").build
    keys = {key: p.default for key, p in inspect.signature(function).parameters.items()}
    pairs = (setting.split("=") for setting in settings)
    return keys | {k: int(v) if v.isdecimal() else v for k, v in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--only", help="models of full size, by names; and nothing to check")
    parser.add_argument("--smoke", action="store_true", help="all models small, to try bench/gpu_run.py on a CPU")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(FULL)
    jobs: dict[str, Any] = {"models": {}, "checks": []}
    step = ["--mixed-precision", "bf16", "--machine=dgx-h100:1x1", "--search=data-parallel,optimizer=adamw"]
    for model in wanted:
        text, size = FULL[model]
        if options.smoke:
            text = ",".join([model, *(f"{k}={v}" for k, v in SMALL[model].items())])
        programs = {}
        for way, target in WAYS.items():
            path = options.out / "full" / f"{model}_{way.replace('=', '_')}.py"
            if emit(path, ["--model", text, *step], target):
                programs[way] = str(path.relative_to(options.out))
        jobs["models"][model] = {"text": text, "keys": keys_of(text), "programs": programs, "gigabytes": size}
        Console().print(f"{model}: {', '.join(programs)}")
    for model in [] if options.only else SMALL:
        text = ",".join([model, *(f"{k}={v}" for k, v in SMALL[model].items())])
        for title, more in {"f32": [], "bf16": ["--mixed-precision", "bf16"]}.items():
            path = options.out / "small" / f"{model}_{title}.py"
            source = ["--model", text, *more, "--machine=dgx-h100:1x1", "--search=data-parallel,optimizer=adamw"]
            if emit(path, source, "triton{convolution=triton}"):
                jobs["checks"].append({"program": str(path.relative_to(options.out)), "ranks": 1})
    for name, source, search, ranks in [] if options.only else RANKS:
        path = options.out / "small" / f"{name}_{ranks}.py"
        if emit(path, [str(ROOT / source), *search], "triton"):
            jobs["checks"].append({"program": str(path.relative_to(options.out)), "ranks": ranks})
    (options.out / "jobs.json").write_text(json.dumps(jobs, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

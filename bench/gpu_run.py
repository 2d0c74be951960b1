"""
Emitted programs on a real GPU: `--check`, then training steps in bf16 against PyTorch's, with a profile of kernels.

    python bench/gpu_prepare.py            where the package is; then, where the GPU is:
    python bench/gpu_run.py [--programs .gpu] [--out FOLDER] [--only bert_large,gpt2] [--seconds 300] [--smoke]
    make gpu                               both, where a GPU is in this machine

Needs PyTorch, Triton and this tree. Each part is a process of its own with a limit, and what is done is in
`FOLDER/gpu.jsonl` at once, so that what hangs or dies costs its own rows only. No part is begun that would end after
`--seconds`.

First, side by side: all small programs check themselves (float32 and mixed precision; some on several ranks, which
share the GPU), and all that will be timed is compiled. Then, one model at a time: loss and every gradient are
compared with the model written by hand in PyTorch in float32 on the same weights, and a program that is twice as far
off as PyTorch's own bf16 is not timed. A step is forward, backward and AdamW, in mixed precision: weights, gradients
and state in float32, which both the programs and PyTorch cast to bf16 and use so; the loss is computed in float32.
Steps are launched one after the other without waiting for the GPU; timed are a whole series, and launching it.
PyTorch's are the hand-written model, eager and under torch.compile, with its fused AdamW.
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
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Condition, Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""The hyperparameters of AdamW that programs are emitted with."""


# --- one model, in a process of its own


def load_program(path: Path) -> Any:
    """Import an emitted program."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("=", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def prepare_torch() -> None:
    """Make the hand-written models what a user would time: loss in float32, rotary positions and grouped heads fast."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    sys.path.insert(0, str(ROOT / "test" / "helpers"))
    from zoo import transformers

    exact = F.cross_entropy
    F.cross_entropy = lambda x, *args, **more: exact(x.float(), *args, **more)

    def rotate(x: Tensor, base: float) -> Tensor:
        half = x.shape[-1] // 2
        places, each = (torch.arange(n, dtype=torch.float32, device=x.device) for n in (x.shape[-2], half))
        angle = places[:, None] * base ** (-each / half)
        cos, sin, (a, b) = angle.cos(), angle.sin(), x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return found.transpose(1, 2).flatten(2)

    transformers.rotate, transformers.sdpa = rotate, sdpa


class Model:
    """A model at full size on this GPU: its job, weights, a batch, and the model by hand."""

    def __init__(self, name: str, job: dict[str, Any], folder: Path, smoke: bool):
        import torch

        prepare_torch()
        from zoo import BY_HAND

        self.name, self.keys, self.folder, self.programs = name, job["keys"], folder, job["programs"]
        self.hand = BY_HAND[name]
        plain = load_program(folder / self.programs["torch"])
        self.ctx = plain.build("gloo" if smoke else "nccl")
        self.device = self.ctx.device
        generator = torch.Generator(self.device).manual_seed(0)

        def drawn(spec: Any) -> Any:
            scale = (spec.shape[0] if spec.shape else 1) ** -0.5
            return torch.randn(spec.shape, generator=generator, device=self.device).mul_(scale).to(spec.dtype)

        self.start = {n: drawn(spec) for n, spec in plain.WEIGHTS.items()}
        self.batch = {n: t.to(self.device) for n, t in plain.Data().batch(0).items()}

    def loss(self, weights: dict[str, Any], dtype: Any) -> Any:
        """Return the loss by hand, of weights and inputs cast to `dtype`."""
        cast = {n: w.to(dtype) for n, w in weights.items()}
        inputs = {n: b.to(dtype) if b.is_floating_point() else b for n, b in self.batch.items()}
        keys = self.keys | {"dispatch": "dense"} if "dispatch" in self.keys else self.keys
        return self.hand(cast, keys, **inputs)

    def gradients(self, dtype: Any) -> tuple[Any, dict[str, Any]]:
        """Return the loss by hand and the gradients of the float32 weights, computed in `dtype`."""
        import torch

        weights = {n: w.detach().clone().requires_grad_() for n, w in self.start.items()}
        loss = self.loss(weights, dtype)
        found = torch.autograd.grad(loss, list(weights.values()))
        return loss.detach().float(), dict(zip(weights, found, strict=True))

    def program(self, way: str, is_quick: bool = False) -> tuple[Any, Callable[[int], None]]:
        """Return a program, and its step by number on weights of its own; `is_quick`: with quick launches."""
        sys.argv = [sys.argv[0], *(["--quick-launches"] if is_quick else [])]  # of which programs take note
        module = load_program(self.folder / self.programs[way])
        weights = module.Weights({n: w.clone() for n, w in self.start.items()})
        moments = module.init_moments(weights)

        def once(t: int) -> None:
            _, grads = module.forward_backward(self.ctx, weights, self.batch)
            module.update(weights, grads, moments, t + 1)

        return module, once

    def captured(self, way: str) -> Callable[[int], None] | None:
        """
        Return a program's step as its training loop does it: as a CUDA graph, whose loss is read a step late; None if
        the program has none.
        """
        module = load_program(self.folder / self.programs[way])
        if not hasattr(module, "StepGraph") or self.device.type != "cuda":
            return None
        weights = module.Weights({n: w.clone() for n, w in self.start.items()})
        graph = module.StepGraph(self.ctx, weights, module.init_moments(weights), self.batch).captured()
        before: list[Callable[[], object]] = []

        def once(t: int) -> None:
            before.append(graph.step())
            if len(before) > 1:
                before.pop(0)()

        return once

    def by_torch(self, is_compiled: bool) -> Callable[[int], None]:
        """Return the step by hand: eager or under torch.compile, and PyTorch's fused AdamW."""
        import torch

        weights = {n: w.clone().requires_grad_() for n, w in self.start.items()}
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(list(weights.values()), fused=fused, **SETTINGS)

        def loss(weights: dict[str, Any]) -> Any:
            return self.loss(weights, torch.bfloat16)

        function = torch.compile(loss) if is_compiled else loss

        def once(t: int) -> None:
            function(weights).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return once


def warm(model: Model, way: str) -> Iterator[dict[str, Any]]:
    """Compile all of one way's kernels, by a step of it."""
    start = time.perf_counter()
    once = model.by_torch(True) if way == "compiled" else model.program(way)[1]
    once(0)
    yield {"part": "warm", "model": model.name, "way": way, "seconds": time.perf_counter() - start}


def steps(model: Model, count: int, ways: list[str]) -> Iterator[dict[str, Any]]:
    """Check and time all ways of computing a model's step."""
    import torch

    torch.backends.cudnn.allow_tf32 = False  # of no matter to bf16, and float32 is to be exact
    exact_loss, exact = model.gradients(torch.float32)
    total = sum(float(g.norm()) ** 2 for g in exact.values()) ** 0.5

    def off(loss: Any, grads: dict[str, Any]) -> dict[str, Any]:
        """
        Return the relative errors to PyTorch's float32: of the loss, and of the worst gradient, by norms.

        Gradients that are only noise (of a bias before a softmax) are compared with a thousandth of the norm of all
        gradients.
        """
        parts = {n: float((grads[n].float() - g).norm()) / max(float(g.norm()), total / 1000) for n, g in exact.items()}
        worst = max(parts, key=lambda n: parts[n])
        loss_off = float((loss.float() - exact_loss).abs() / exact_loss.abs())
        return {"loss off": loss_off, "gradients off": parts[worst], "worst": worst}

    own = off(*model.gradients(torch.bfloat16))
    yield {"part": "gradients", "model": model.name, "way": "PyTorch in bf16", **own}
    right: list[str] = []
    for way in [w for w in ways if w in model.programs]:
        row = {"part": "gradients", "model": model.name, "way": way}
        try:
            module, _ = model.program(way)
            wrong = off(*module.forward_backward(model.ctx, module.Weights(model.start), model.batch))
            is_right = wrong["gradients off"] <= 2 * own["gradients off"] + 0.01 and wrong["loss off"] <= 0.02
            right += [way] if is_right else []
            yield {**row, **wrong, "correct": is_right}
        except Exception as error:
            yield {**row, "failed": said(error)}
    exact.clear()
    for way in ways:
        made: dict[str, Callable[[], Callable[[int], None] | None]] = {}
        if way in ("eager", "compiled"):
            made[way] = partial(model.by_torch, way == "compiled")
        of, _, more = way.partition("+")
        if of in right:
            made[way] = (
                partial(model.captured, of)
                if more == "graph"
                else lambda of=of, q=more: model.program(of, q == "quick")[1]
            )
        for title, make in made.items():
            row = {"model": model.name, "way": title}
            try:
                once = make()
                if once is not None:
                    yield {"part": "step", **row, **timed(once, model.device, count)}
                    if model.device.type == "cuda" and not title.endswith("+graph"):
                        yield {"part": "kernels", **row, "kernels": kernels(once)}
                del once
            except Exception as error:
                yield {"part": "step", **row, "failed": said(error)}


def said(error: Exception) -> str:
    """Return an error and the last places that it went through."""
    return "".join(traceback.format_exception(error))[-900:]


def timed(run: Callable[[int], None], device: Any, count: int) -> dict[str, Any]:
    """
    Return the milliseconds of a step: the median of three series of `count` steps, each without a wait inside, and the
    processor's milliseconds until all are launched; after warm-up.
    """
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for t in range(3):
        run(t)
    wait()
    series: list[tuple[float, float]] = []
    for part in range(3):
        start = time.perf_counter()
        for t in range(count):
            run(3 + part * count + t)
        launched = time.perf_counter()
        wait()
        series.append(((time.perf_counter() - start) / count * 1e3, (launched - start) / count * 1e3))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    return {
        "ms": statistics.median(s for s, _ in series),
        "all ms": [round(s, 4) for s, _ in series],
        "host ms": statistics.median(h for _, h in series),
        "steps": count,
        "peak GB": peak,
    }


def kernels(run: Callable[[int], None], count: int = 3) -> list[tuple[str, float, float]]:
    """Return the kernels of a step: names, launches a step, and microseconds a step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for t in range(count):
            run(100 + t)
    found = [(e.key[:200], e.count / count, e.self_device_time_total / count) for e in profiled.key_averages()]
    return sorted((f for f in found if f[2] > 0), key=lambda f: -f[2])


def about() -> Iterator[dict[str, Any]]:
    """Yield what this machine is, and the ceilings that it reaches: a large copy and a large product."""
    import torch
    import triton

    row: dict[str, Any] = {
        "part": "about",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        x = torch.randn(2**29, device="cuda")
        y = torch.empty_like(x)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        copied, multiplied = (statistics.median(events(f)) for f in (lambda: y.copy_(x), lambda: a @ b))
        row |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver, clock, power": said.stdout.strip(),
            "copy TB/s": 2 * 4 * 2**29 / copied / 1e9,
            "product TFLOP/s": 2 * 8192**3 / multiplied / 1e9,
        }
    yield row


def events(run: Callable[[], object]) -> list[float]:
    """Return the milliseconds of ten runs, after three, each by its own CUDA events."""
    import torch

    found = []
    for i in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found += [begin.elapsed_time(end)] if i > 2 else []
    return found


# --- all of them


class Memory:
    """The GPU's memory, of which processes that run side by side take parts, in GB."""

    def __init__(self, gigabytes: float):
        self.left, self.changed = gigabytes, Condition()

    @contextmanager
    def taken(self, gigabytes: float) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: self.left >= gigabytes)
            self.left -= gigabytes
        try:
            yield
        finally:
            with self.changed:
                self.left += gigabytes
                self.changed.notify_all()


class Visit:
    """One run of this script: its options, the file of results, and the time that is left."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.lock = options, Lock()
        self.end = time.monotonic() + options.seconds
        options.out.mkdir(parents=True, exist_ok=True)
        self.file = options.out / "gpu.jsonl"
        self.ports = iter(range(29600, 29999))

    def keep(self, *rows: dict[str, Any]) -> None:
        with self.lock, self.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def limited(self, command: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
        """Run a command; return its exit code, None after `seconds` or at the end of all time, and its last lines."""
        seconds = min(seconds, self.end - time.monotonic())
        if seconds < 3:
            return None, "no time was left"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **out) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # the ranks are torchrun's children: the whole session ends
                said, _ = process.communicate()
                return None, f"stopped after {seconds:.0f} s: {said.strip()[-300:]}"
            return process.returncode, said.strip()[-1200:]

    def part(self, seconds: float, *arguments: str) -> None:
        """Run a part of this script in a process of its own, and keep a row if it fails."""
        own = [sys.executable, __file__, "--programs", str(self.options.programs), "--out", str(self.options.out)]
        own += ["--steps", str(self.options.steps), *(["--smoke"] if self.options.smoke else [])]
        start = time.monotonic()
        with self.lock:
            port = next(self.ports)
        code, said = self.limited([*own, "--part", *arguments], seconds, MASTER_PORT=str(port), **ALONE)
        took = time.monotonic() - start
        if code != 0:
            self.keep({"part": arguments[0], "of": arguments[1:], "failed": said, "code": code, "seconds": took})
        print(f"{' '.join(arguments)}: {code}, {took:.0f} s", flush=True)

    def check(self, job: dict[str, Any]) -> None:
        """Run `--check` of a small program: loss, gradients and weights of some steps equal PyTorch's."""
        program = str(self.options.programs / job["program"])
        backend = ["--backend", "gloo" if self.options.smoke else "nccl", "--check"]
        with self.lock:
            port = str(next(self.ports))
        command, more = [sys.executable, program], {"MASTER_PORT": port, **ALONE}
        if job["ranks"] > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job['ranks']}"]
            command, more = [*torchrun, "--master-port", port, program], {}
        start = time.monotonic()
        code, said = self.limited([*command, *backend], 120, **more)
        passed = re.search(r"check passed.*", said)
        row = {"part": "check", **job, "code": code, "check": passed[0] if passed and code == 0 else said}
        self.keep(row | {"seconds": time.monotonic() - start})


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""The environment of a rank that is the only one."""


def run_part(options: argparse.Namespace, jobs: dict[str, Any]) -> None:
    """Run one part in this process, and keep its rows."""
    visit = Visit(options)
    name, *arguments = options.part
    if name == "about":
        found = about()
    else:
        model = Model(arguments[0], jobs["models"][arguments[0]], options.programs, options.smoke)
        ways = arguments[1].split(",")
        found = warm(model, ways[0]) if name == "warm" else steps(model, options.steps, ways)
    for row in found:
        visit.keep(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--programs", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", help="models, by their zoo names, and no checks unless --checks")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument(
        "--ways",
        default="triton,torch,eager,compiled,triton+quick,triton+graph",
        help="of computing a step; a graph last, since what fails on a GPU takes all that follows with it",
    )
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--memory", type=float, default=77.0, help="GB of the GPU that may be used")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="on the CPU, of gpu_prepare.py --smoke")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.programs, options.out = options.programs.resolve(), options.out.resolve()
    jobs = json.loads((options.programs / "jobs.json").read_text())
    if options.part:
        run_part(options, jobs)
        return 0
    import torch

    if not options.smoke and not torch.cuda.is_available():
        print("bench/gpu_run.py: no GPU is visible to PyTorch here; nothing was run", file=sys.stderr)
        return 2
    visit = Visit(options)
    visit.part(60, "about")
    wanted = [m for m in jobs["models"] if not options.only or m in options.only.split(",")]
    ways, memory = options.ways.split(","), Memory(options.memory)

    def compile_way(model: str, way: str) -> None:
        with memory.taken(min(jobs["models"][model]["gigabytes"], options.memory)):
            visit.part(150, "warm", model, way)

    def check(job: dict[str, Any]) -> None:
        with memory.taken(0.8 * job["ranks"]):
            visit.check(job)

    with ThreadPoolExecutor(options.processes) as pool:
        slow = [(m, w) for w in ("compiled", "triton", "matmul=torch") for m in wanted if w in ways]
        waiting = [pool.submit(compile_way, *pair) for pair in slow]
        waiting += [pool.submit(check, job) for job in (jobs["checks"] if options.checks or not options.only else [])]
        for each in waiting:
            each.result()
    for model in wanted:
        visit.part(100, "steps", model, options.ways)
    from gpu_show import read, show

    show(read(visit.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""
Compare predicted with real time of an iteration: emitted plans of small models on 2 and 4 ranks of this machine.

    python bench/simulate_accuracy.py --plan                      # make the plans; the rest wants a quiet machine
    unity-profile out/accuracy/2/*.pcg --machine=cpu:2 --out out/accuracy/cpu.sqlite --limit 2000
    unity-profile out/accuracy/4/*.pcg --machine=cpu:4 --out out/accuracy/cpu.sqlite --limit 2000
    python bench/simulate_accuracy.py [--json FILE]               # run, predict, compare

The programs are plain PyTorch over gloo (`-t triton{kernels=torch}`). A real iteration is forward, backward and update;
its time is that of the slowest rank, the median over the steps after warm-up. The prediction is the cost of the same
training step, from the profile of its operators and collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from models import processor

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
RANKS = (2, 4)
MODELS = {
    "mlp": "mlp,batch=256,hidden=1024,layers=4,classes=512",
    "gpt2": "gpt2,batch=4,sequence=128,layers=2,hidden=256,heads=4,vocabulary=512",
    "candle_uno": "candle_uno,batch=256,hidden=512,tower=2,layers=3,shrink=2",
}
PLANS = ("data-parallel", "joint", "random-0", "random-1", "random-2")
STEPS, WARM_UP = 12, 3


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    ranks: int
    plan: str
    predicted: float
    """Seconds."""
    measured: float
    spread: float
    """Distance between the quartiles of the steps, as a fraction of the median."""
    profiled: float
    """Fraction of the predicted kernel time that was measured rather than estimated."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


# --- plans


def machine_name(ranks: int, profile: Path | None, machine: str) -> str:
    name = machine.format(ranks)
    return name if profile is None else f"{name},profile={profile}"


def make_plans(out: Path, machine: str) -> None:
    """Write a plan for each model, number of ranks and strategy."""
    from xdsl.dialects.builtin import ModuleOp

    from unity_ir.dialects.convert import from_graph
    from unity_ir.machine import load
    from unity_ir.models import from_text
    from unity_ir.search import run

    for ranks in RANKS:
        folder = out / str(ranks)
        folder.mkdir(parents=True, exist_ok=True)
        on = load(machine_name(ranks, None, machine))
        for name, text in MODELS.items():
            for plan in PLANS:
                strategy, _, seed = plan.partition("-") if plan.startswith("random") else (plan, "", "")
                found = run(from_text(text), on, strategy, options={"seed": int(seed)} if seed else None).graph
                (folder / f"{name}.{plan}.pcg").write_text(str(ModuleOp([from_graph(found)])) + "\n")


# --- predicting, and emitting what is predicted


def prepare(file: Path, ranks: int, machine: str, folder: Path) -> tuple[float, float, Path]:
    """
    Return the predicted seconds of a plan's training step, the fraction of its kernels' time that was measured, and its
    program.
    """
    from dataclasses import replace

    from unity_ir.api.graphs import read_graphs
    from unity_ir.cost.plan import cost
    from unity_ir.lowering.emit.printer import emit
    from unity_ir.machine import load
    from unity_ir.pcg.differentiate import differentiate
    from unity_ir.pcg.fuse_collectives import fuse_collectives
    from unity_ir.pcg.graph import erase
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.plan.lower import lower
    from unity_ir.plan.plan import PlanOptions, plan_step

    on = load(machine)
    (plan,) = read_graphs(str(file))
    step = fuse_collectives(differentiate(plan, Optimizer(lr=1e-3), on.mesh))
    predicted = cost(step, on)
    known = {} if on.device.profile is None else on.device.profile.kernels
    kernels = [(k, o.forward) for o in predicted.operators for k in o.work.forward]
    hits = sum(seconds for k, seconds in kernels if k.sizes in known.get(k.operator, {}))
    program = folder / f"{file.stem}.{ranks}.py"
    serial = erase(replace(step, updates=(), optimizer=None))
    program.write_text(emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), serial).text)
    return predicted.time, hits / sum(seconds for _, seconds in kernels), program


# --- running


def real_times(programs: Sequence[Path], ranks: int, steps: int) -> list[list[float]]:
    """Return the seconds [program][step] of the slowest rank. One launch runs all programs, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "times.json"
        command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), __file__]
        command += ["--rank", str(answer), "--steps", str(steps), *map(str, programs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"torchrun failed:\n{done.stderr[-3000:]}")
        return json.loads(answer.read_text())


def run_rank(programs: Sequence[Path], steps: int, answer: Path) -> None:
    """Time every program on this rank; torchrun starts this."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found: list[list[float]] = []
    for path in programs:
        spec = spec_from_file_location(path.stem.replace(".", "_").replace("-", "_"), path)
        assert spec is not None
        assert spec.loader is not None
        program: Any = module_from_spec(spec)
        sys.modules[spec.name] = program
        spec.loader.exec_module(program)
        ctx = program.build("gloo")
        weights = program.init_weights(ctx)
        moments = program.init_moments(weights)
        batch = program.Data().batch(0)
        local = {name: program.piece(ctx, batch[name], s) for name, s in program.INPUTS.items()}
        times: list[float] = []
        for t in range(WARM_UP + steps):
            dist.barrier()
            start = time.perf_counter()
            _, grads = program.forward_backward(ctx, weights, local)
            program.update(weights, grads, moments, t + 1)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(float(slowest))
        found.append(times[WARM_UP:])
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.destroy_process_group()


# --- the comparison


def ranks_of(values: Sequence[float]) -> list[float]:
    """Return the ranks of values by size; equal values share their mean rank."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    return statistics.correlation(ranks_of(a), ranks_of(b)) if len(a) > 1 else float("nan")


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Return errors and rank correlations: of all rows, per model, and per model and number of ranks."""

    def of(some: Sequence[Row]) -> dict[str, float]:
        errors = [abs(r.error) for r in some]
        correlation = spearman([r.predicted for r in some], [r.measured for r in some])
        return {"plans": len(some), "median error": statistics.median(errors), "spearman": correlation}

    groups: dict[str, list[Row]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row.model, []).append(row)
        groups.setdefault(f"{row.model} on {row.ranks}", []).append(row)
        groups.setdefault(f"{row.ranks} ranks", []).append(row)
    return {name: of(some) for name, some in groups.items()}


def show(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"an iteration, predicted and real, {processor()}")
    for heading in ("model", "ranks", "plan", "predicted ms", "real ms", "spread", "profiled", "error"):
        table.add_column(heading, justify="left" if heading in ("model", "plan") else "right")
    for r in rows:
        times = (f"{r.predicted * 1e3:.1f}", f"{r.measured * 1e3:.1f}", f"{r.spread:.0%}", f"{r.profiled:.0%}")
        table.add_row(r.model, str(r.ranks), r.plan, *times, f"{r.error:+.0%}")
    totals = Table()
    for heading in ("group", "plans", "median error", "Spearman"):
        totals.add_column(heading, justify="left" if heading == "group" else "right")
    for name, of in summary(rows).items():
        assert isinstance(of, dict)
        totals.add_row(name, str(of["plans"]), f"{of['median error']:.1%}", f"{of['spearman']:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(totals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("programs", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help="make the plans, and nothing else")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "accuracy", help="where plans and profile are")
    parser.add_argument("--profile", type=Path, help="default: cpu.sqlite in --out")
    parser.add_argument("--machine", default="cpu:{}", help="with {} for the ranks (default cpu:{})")
    parser.add_argument("--ranks", type=int, action="append", help="only so many; may be repeated")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.programs, options.steps, options.rank)
        return 0
    if options.plan:
        make_plans(options.out, options.machine)
        return 0
    profile = options.profile or options.out / "cpu.sqlite"
    programs = options.out / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for ranks in options.ranks or RANKS:
        files = sorted((options.out / str(ranks)).glob("*.pcg"))
        on = machine_name(ranks, profile, options.machine)
        prepared = [prepare(file, ranks, on, programs) for file in files]
        measured = real_times([p for _, _, p in prepared], ranks, options.steps)
        for file, (predicted, known, _), times in zip(files, prepared, measured, strict=True):
            middle = statistics.median(times)
            quartiles = statistics.quantiles(times, n=4)
            model, plan, _ = file.name.split(".")
            spread = (quartiles[2] - quartiles[0]) / middle
            rows.append(Row(model, ranks, plan, predicted, middle, spread, known))
    show(rows)
    if options.json:
        report = {"processor": processor(), "rows": [asdict(r) for r in rows], "summary": summary(rows)}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

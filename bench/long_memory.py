"""
Compare what is simulated of the memory of steps on long sequences with what their programs hold.

    python bench/long_memory.py [--json FILE]

whole: emitted programs of models at full size, run by one process as rank 0 without data (PyTorch's meta tensors, which
       have shapes and no elements; collectives that move nothing). Mixed precision, AdamW.
ranks: programs of a shrunken Llama on 4 and 8 gloo ranks, with data, in float32. PyTorch's functions of attention make
       all scores of a piece's queries and keys, so the longest sequence is what 20 GB hold of these.

Held is the most in variables of a rank between lines of the step, with weights and the optimizer's state, and in a
line, before which operands are there and after which results are; simulated, what the replay of the plan holds at ends
of operators, and at most, which is what plans are made to fit. All are without what operators hold inside, and copies
that collectives make. Exits with code 1 if what is simulated is more than 10% from what is held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import processor
from torch.testing._internal.distributed.fake_pg import FakeStore

from unity_ir.api.options import search_options
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph
from unity_ir.search.run import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.replay import replay
from unity_ir.simulate.report import peak

ROOT = Path(__file__).resolve().parent.parent
ADAMW = Optimizer("adamw")
WITHIN = 0.1
LLAMA, MIXTRAL = "llama3_8b", "moe,dispatch=sparse,capacity=100"
RING, GATHERED = "degrees,cp=8,zero=3,ring=true", "degrees,cp=8,zero=3"
Row = tuple[str, str, str, dict[str, Any]]
WHOLE: tuple[Row, ...] = (
    (f"{LLAMA},sequence=32768", "dgx-h100:1", RING, {"recompute": "block", "loss_pieces": "8"}),
    (f"{LLAMA},sequence=262144", "dgx-h100:1", f"{RING},stripes=true", {"recompute": "block", "loss_pieces": "32"}),
    (f"{LLAMA},sequence=262144", "dgx-h100:1", GATHERED, {"recompute": "all", "loss_pieces": "32"}),
    (f"{LLAMA},sequence=262144,separator=128001", "dgx-h100:1", RING, {"recompute": "block", "loss_pieces": "32"}),
    (f"{LLAMA},sequence=262144,batch=2", "dgx-h100:2", "joint", {}),
    (f"{MIXTRAL},sequence=32768,batch=16", "dgx-h100:2", "degrees,ep=8,zero=3", {"recompute": "all"}),
)
SHRUNKEN = "llama3_8b,layers=2,hidden=64,heads=1,kv_heads=1,intermediate=128,vocabulary=512,sequence="
BLOCK = {"recompute": "block", "loss_pieces": "4"}
RANKS: tuple[Row, ...] = (
    (f"{SHRUNKEN}8192", "box:4", "degrees,cp=4,zero=3,ring=true", {}),
    (f"{SHRUNKEN}8192", "box:4", "degrees,cp=4,zero=3,ring=true", BLOCK),
    (f"{SHRUNKEN}8192", "box:4", "degrees,cp=4,zero=3,stripes=true", BLOCK),
    (f"{SHRUNKEN}65536", "box:8", "degrees,cp=8,zero=3,ring=true", BLOCK),
)


def planned(row: Row, is_mixed: bool) -> tuple[Plan, Machine, str]:
    """Return a row's plan, its machine and the text of its program."""
    model, where, strategy, given = row
    graph, machine, options = from_text(model), load(where), search_options(strategy)
    graph = mixed_precision(graph, "bf16") if is_mixed else graph
    placed = run(graph, machine, str(options.pop("strategy")), ADAMW, options, **given).graph
    plan = plan_graph(placed, machine, ADAMW, PlanOptions(kernels="torch"))
    return plan, machine, emit(plan, graph).text


def simulated(plan: Plan, machine: Machine) -> dict[str, int]:
    timeline = simulate(replay(plan, machine))
    return {"simulated": timeline.held_between_tasks(), "simulated peak": peak(timeline)}


Held = tuple[int, int]
"""The most bytes between lines and in a line."""


def load_program(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    program: Any = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def held_without_data(path: Path) -> Held:
    """Return the most bytes that rank 0 of a program holds in its step, which is run on meta tensors."""
    program = load_program(path)

    def of_shape(spec: Any) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    program.initial = lambda name, spec, seed: of_shape(spec)
    program._exchange = lambda ctx, messages, axes: program.Works([])
    if hasattr(program, "HostMemory"):
        program.HostMemory.zeros = lambda memory, like: torch.empty(like.shape, dtype=like.dtype, device="meta")
        program.HostCopy._copy = lambda copy: None
    dist.init_process_group("fake", rank=0, world_size=program.WORLD, store=FakeStore())
    try:
        ctx = program.build("fake")
        ctx.device = torch.device("meta")
        return most_held(program, ctx, {name: of_shape(spec) for name, spec in program.INPUTS.items()})
    finally:
        dist.destroy_process_group()


def most_held(program: Any, ctx: Any, batch: Mapping[str, torch.Tensor]) -> Held:
    """Return the most bytes that this rank holds in its step on a whole batch, moments included."""
    weights = program.init_weights(ctx)
    local = {name: program.piece(ctx, batch[name], spec) for name, spec in program.INPUTS.items()}
    kept = program.init_moments(weights)
    between, inside, before = 0, 0, dict[int, int]()

    def after(line: int, variables: Mapping[str, Any]) -> None:
        nonlocal between, inside, before
        found = memories(program, {**variables, "": kept})
        between = max(between, sum(found.values()))
        inside = max(inside, sum((before | found).values()))
        before = found

    program.watched(program.forward_backward, after)(ctx, weights, local)
    return between, inside


def memories(program: Any, variables: Mapping[str, Any]) -> dict[int, int]:
    """
    Return the bytes of the memory of all tensors in variables, each once, as the program's `held_bytes` sums up; also
    of meta tensors, all of which lie at address 0.
    """
    found: dict[int, int] = {}
    todo = list(variables.values())
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            memory = value.untyped_storage()
            found[memory._cdata] = memory.nbytes()
        elif isinstance(value, program.Pending):
            todo += value.holds
        elif isinstance(value, dict):
            todo += (*value.values(), *getattr(value, "casts", {}).values())
        elif isinstance(value, tuple | list):
            todo += value
    return found


def held_on_ranks(path: Path, ranks: int) -> Held:
    """Return the most bytes that any rank of a program holds in its step, run by torchrun with data."""
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, __file__, "--program", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("held ")]
    between, inside = (max(map(int, each)) for each in zip(*found, strict=True))
    return between, inside


def measure(kind: str, row: Row, folder: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    plan, machine, text = planned(row, kind == "whole")
    path = folder / "program.py"
    path.write_text(text)
    between, inside = held_without_data(path) if kind == "whole" else held_on_ranks(path, machine.devices)
    said = simulated(plan, machine)
    return {
        "kind": kind,
        **dict(zip(("model", "machine", "plan"), row, strict=False)),
        **row[3],
        "held": between,
        "held in a line": inside,
        **said,
        "simulated / held": round(said["simulated"] / between, 4),
        "simulated peak / held in a line": round(said["simulated peak"] / inside, 4),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulated memory of long sequences beside what programs hold.")
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.program:
        program = load_program(options.program)
        print("held", *most_held(program, program.build("gloo"), program.Data(None, 0).batch(0)), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, row in [*(("whole", row) for row in WHOLE), *(("ranks", row) for row in RANKS)]:
            rows.append(measure(kind, row, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        found = {"processor": processor(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    ratios = [row[key] for row in rows for key in ("simulated / held", "simulated peak / held in a line")]
    return int(any(abs(ratio - 1) > WITHIN for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())

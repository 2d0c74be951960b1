"""
Measure the seconds and memory of one exact layout search, by model and machine.

    python bench/search_time.py [CASE ..] [--json FILE] [--joint]

Each case runs in a process of its own, so that every cache is cold. Imports and building the graph are not counted.
`bounding` is the time of the bound that the gap refers to, on machines that are not searched axis by axis. `rows` are
configurations and layouts: at first, and those left when elimination solves the rest. With `--joint` the whole joint
search is timed instead. Exits with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from importlib import import_module

from rich.console import Console
from rich.table import Table

from unity_ir.machine import Level, Machine, load

BERT4 = {"batch": 64, "sequence": 512, "hidden": 1024, "layers": 4}
UNITY: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("bert_large", {"batch": 64}),
    "candle_uno": ("candle_uno", {}),
    "dlrm": ("dlrm", {}),
    "inception_v3": ("inception_v3", {}),
    "mlp": ("mlp", {}),
    "resnext50": ("resnext50", {}),
    "xdl": ("xdl", {}),
}
PER_DEVICE = {"bert": 4, "candle_uno": 256, "dlrm": 1024, "inception_v3": 64, "mlp": 256, "resnext50": 64, "xdl": 1024}
"""Samples per device (Unity, section 9): a case such as `mlp-x24` has the samples of 24 devices."""
CASES: dict[str, tuple[str, dict[str, int], str, float]] = {
    "bert4-8": ("bert_large", BERT4, "dgx-h100", 1.0),
    "bert4-2x2x2": ("bert_large", BERT4, "levels", 3.0),
    "nmt-4": ("nmt", {"steps": 4}, "box:4", 10.0),
    "wresnet152-8": ("wresnet", {"depth": 152}, "box:8", 1.0),
    "rnn10-8": ("lstm_stack", {"layers": 10}, "box:8", 1.0),
    **{f"{name}-192": (*of, "summit:32", 10.0) for name, of in UNITY.items()},
    **{
        f"{name}-x{6 * nodes}": (of, {"batch": PER_DEVICE[name] * 6 * nodes}, f"summit:{nodes}", 10.0)
        for nodes in (1, 4, 16, 32)
        for name, (of, _) in UNITY.items()
    },
    **{f"bert-large-{8 * n}": ("bert_large", {"batch": 64}, f"dgx-h100:{n}", 60.0) for n in (1, 8, 64, 512)},
}
"""Per case: model, its keys, machine, and the maximum seconds it should take."""


def machine(name: str) -> Machine:
    """Return a machine: a preset, or three levels of two devices."""
    if name != "levels":
        return load(name)
    speeds = (("racks", 12.5e9, 5e-6), ("nodes", 50e9, 2.7e-6), ("gpus", 320e9, 0.6e-6))
    return Machine("2x2x2", load("dgx-h100").device, tuple(Level(n, 2, b, s) for n, b, s in speeds))


def measure(case: str, whole: bool) -> dict[str, float | None]:
    """Solve one case in this process; return what it took."""
    from unity_ir.cost.plan import cost
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.rules.algebraic import algebraic
    from unity_ir.search.bounds.axis_counts import plan_with_bound
    from unity_ir.search.exact.axis_groups import solve
    from unity_ir.search.exact.plan_graph import realise
    from unity_ir.search.joint.best_first import joint

    model, keys, name, _ = CASES[case]
    graph, on = import_module(f"unity_ir.models.{model}").build(**keys), machine(name)
    start, found = time.perf_counter(), None
    if whole:
        found = joint(graph, on, algebraic(), Optimizer())
        seconds, plan, bound, rows, left = time.perf_counter() - start, found.graph, found.bound, 0, 0
    else:
        solver, solved = solve(graph, on, Optimizer())
        seconds, rows, left = time.perf_counter() - start, solved.rows_before, solved.rows_left
        bound = solved.bound if solver.spaces.axis_by_axis else None
        plan = realise(graph, solved, solver)
    start = time.perf_counter()
    if bound is None:
        serial = found.rewritten if found else graph
        plan, _, bound = plan_with_bound(serial, on, Optimizer(), plan, cost(plan, on, Optimizer()))
    bounding = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    start = time.perf_counter()
    takes = cost(plan, on, Optimizer()).time
    return {
        "nodes": len(graph.nodes()),
        "seconds": seconds,
        "GB": peak,
        "rows": rows,
        "left": left,
        "plan ms": takes * 1e3,
        "gap %": 100 * max(0.0, takes / bound - 1) if bound else None,
        "bounding": bounding,
        "costing": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--json")
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a case may take in all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.cases[0], options.joint)))
        return 0
    results: dict[str, dict[str, float | None]] = {}
    table, missed = (
        Table("case", "nodes", "seconds", "GB", "rows", "left", "plan ms", "gap %", "bounding", "costing"),
        False,
    )
    for case in options.cases or CASES:
        command = [sys.executable, __file__, case, "--here", *(["--joint"] if options.joint else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=options.timeout)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            table.add_row(case, "", type(error).__name__)
            missed = True
            continue
        results[case] = found = json.loads(done.stdout)
        missed |= found["seconds"] > CASES[case][3]
        digits = {"seconds": 2, "GB": 2, "plan ms": 3, "gap %": 3, "bounding": 2, "costing": 2}
        table.add_row(case, *("-" if v is None else f"{v:,.{digits.get(k, 0)}f}" for k, v in found.items()))
    Console(width=120).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

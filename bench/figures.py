"""
Recompute figures of the papers that follow from shapes: bytes that data parallelism moves, and bytes that Tofu keeps.

    python bench/figures.py [--json FILE]

In data parallelism over n devices, gradients of what all samples share are all-reduced; by rings, that moves 2 (n - 1)
times their bytes, over all devices. Those are the weights; two biases that are added first need one sum only. Tofu
keeps 1/k of weights, gradients and history (here Adam's two moments) on each of k workers (its section 5). Both are
counted from the plans' moves and pieces, and compared exactly. Exits with code 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.tofu.search import tofu

DATA_PARALLEL = {
    "nmt": ("k80:16", 65.8, "FlexFlow, Figure 7b"),
    "rnnlm": ("k80:16", None, ""),
    "rnntc": ("k80:16", None, ""),
    "alexnet": ("k80:16", None, ""),
    "inception_v3": ("k80:16", None, ""),
    "resnet101": ("k80:16", None, ""),
    "resnext50": ("p100:16", None, ""),
    "bert_large,batch=64": ("dgx-h100:8", None, ""),
    "gpt2,batch=64": ("dgx-h100:8", None, ""),
    "mlp": ("p100:16", None, ""),
}
"""Per model, a machine of 64 devices, and the GB per iteration that a paper gives."""

TOFU = ("wresnet,depth=50,width=4", "wresnet,depth=152,width=10,batch=8", "lstm_stack,layers=6", "lstm_stack,layers=10")


def weight_bytes(graph: Graph) -> int:
    """Return the bytes of all weights, unsharded."""
    return sum(n.types[0].elements * ELEMENT_BYTES[n.types[0].dtype] for n in graph.weights())


def of_weights(graph: Graph) -> set[Value]:
    """Return the values that are computed from weights alone."""
    found: set[Value] = set()
    for node in graph.nodes():
        if node.op == "weight" or (node.operands and all(v in found for v in node.operands)):
            found.update(node.results)
    return found


def shared_bytes(graph: Graph) -> int:
    """
    Return the bytes of all values that samples share: weights as they are read; two biases that are added first count
    once.
    """
    found = of_weights(graph)
    read = dict.fromkeys(v for n in graph.nodes() for v in n.operands if v in found and n.results[0] not in found)
    return sum(v.type.elements * ELEMENT_BYTES[v.type.dtype] for v in read)


def synchronised(plan: PlanCost, graph: Graph) -> int:
    """Return the bytes moved to reduce the gradients of values that are computed from weights alone."""
    shared = of_weights(graph)
    moves = [
        (m, r.value.type.dtype)
        for r in (*plan.reshards, *plan.weight_reshards)
        if r.value in shared
        for m in (*r.forward, *r.backward)
    ]
    return sum(m.traffic(plan.machine.mesh) * ELEMENT_BYTES[dtype] for m, dtype in moves)


def data_parallel_rows() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for model, (where, paper, source) in DATA_PARALLEL.items():
        graph, machine = from_text(model), load(where)
        parallel = data_parallel(graph, machine)
        plan = cost(parallel, machine)
        rows.append(
            {
                "model": model,
                "machine": where,
                "weights": weight_bytes(graph),
                "synchronised": synchronised(plan, parallel),
                "expected": 2 * (machine.devices - 1) * shared_bytes(graph),
                "all transfers": plan.bytes,
                "paper GB": paper,
                "source": source,
            }
        )
    return rows


def tofu_rows() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    machine, adam = load("p2.8xlarge"), Optimizer("adam")
    for model in TOFU:
        graph = from_text(model)
        held = cost(tofu(graph, machine), machine, adam).memory
        kept = sum(held[part] for part in ("weights", "gradients", "optimizer state"))
        whole = 4 * weight_bytes(graph)
        rows.append(
            {"model": model, "kept": kept, "expected": whole / machine.devices, "activations": held["activations"]}
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures that follow from shapes alone.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=140)
    data, tofus = data_parallel_rows(), tofu_rows()
    table = Table(title="data parallelism on 64 devices, bytes per iteration over all of them")
    for heading in (
        "model",
        "machine",
        "weights, MB",
        "gradients summed, GB",
        "2 (n - 1) x shared",
        "all transfers, GB",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "machine") else "right")
    table.add_column("paper, GB", justify="right")
    for row in data:
        weights, found, expected, every = (
            float(str(row[k])) for k in ("weights", "synchronised", "expected", "all transfers")
        )
        same = "equal" if found == expected else f"{expected / 1e9:.3f}"
        paper = "" if row["paper GB"] is None else f"{row['paper GB']} ({row['source']})"
        table.add_row(
            str(row["model"]),
            str(row["machine"]),
            f"{weights / 1e6:.1f}",
            f"{found / 1e9:.3f}",
            same,
            f"{every / 1e9:.3f}",
            paper,
        )
    console.print(table)
    table = Table(title="Tofu on 8 workers, bytes on each")
    for heading in ("model", "weights, gradients, history, GB", "1/8 of all", "activations, GB"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in tofus:
        kept, expected, rest = (float(str(row[k])) for k in ("kept", "expected", "activations"))
        same = "equal" if kept == expected else f"{expected / 1e9:.6f}"
        table.add_row(str(row["model"]), f"{kept / 1e9:.6f}", same, f"{rest / 1e9:.3f}")
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"data parallel": data, "tofu": tofus}, indent=2) + "\n")
    wrong = [r["model"] for r in data if r["synchronised"] != r["expected"]]
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

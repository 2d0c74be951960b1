"""Write docs/models.md anew: `python docs/update_models.py`. A test keeps it true."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

from products import graph_products

from unity_ir.models import build, names

PATH = Path(__file__).parent / "models.md"

HEAD = """\
# The zoo

Made by `docs/update_models.py`. `--model=NAME,key=value,..` sets keys; their defaults give the published model and the
batch of the paper that compares it. GFLOPs are of one forward pass at the defaults: matrix products, convolutions and
attention alone, 2 for each multiply-accumulate, as PyTorch's `FlopCounterMode` counts (a test compares them).
Every model is a loss of weights and inputs; none has dropout. A step's backward is about twice its forward.
With a `separator`, samples are packed of documents, each of which ends with this token: attention stays within them,
and positions count from the beginning of each. FLOPs are those of whole samples.
`llama3_70b` and `llama3_405b` are `llama3_8b` with the keys of these sizes, `mixtral_8x7b` is `moe,dispatch=sparse`.
With `lora=16`, queries and values of these have adapters of rank 16, all else is [frozen](lowering.md#frozen-weights).

| model | what | keys | parameters | forward GFLOPs |
|---|---|---|---:|---:|
"""

TAIL = """
## Mixtures of experts

`moe`, `qwen3_moe` and `deepseek_v3` send each token to the experts that its router chooses. Three keys say how:

- `capacity=125`: an expert takes at most 125 per cent of an even share of every group's tokens, rounded up; what it is
  sent beyond that is dropped, second choices before first ones, and later tokens before earlier ones (GShard, Switch).
  By default, 0, nothing is dropped.
- `group=4096`: the tokens of a group. By default, 0, a group is a sample.
- `balance=100`: the weight of each layer's balance loss in ten-thousandths, here 0.01. The loss is the mean over groups
  of a sum over experts: the part of the choices that are of an expert, as a multiple of an even share, times the mean
  of its gate (Switch; DeepSeek-V3's loss of each sequence).

With a capacity, tokens of a group are put into slots of their experts (`to_slots`), a tensor like any other: it is
divided by groups where tokens are, and by slots where experts are. Between the two, devices exchange tokens
(all-to-all). That is expert parallelism; the search finds it, with any division of groups, experts, hidden sizes and
stages, and `--degrees=ep=8` makes it by hand. Capacities are those of whole groups, so no plan changes what is
computed: where the tokens of a group are divided, their choices are gathered to be counted.
A micro-batch has whole groups. Routing makes one dim of all samples' tokens, along which a divided sequence (`cp`) can
go on only where the batch is one sample: else devices gather the tokens of their samples, and route a part each.

Without a capacity, each device computes its experts' part of all tokens, and the parts are added up: more is moved.
`--degrees=ep=8,exchange=true` [sends each token to its experts alone](search.md#row-exchange) instead, however many
come; with `imbalance=1.5` a device has room for at most 1.5 even shares.
"""


def row(name: str) -> str:
    module = import_module(f"unity_ir.models.{name}")
    keys = ", ".join(f"{key}={p.default}" for key, p in inspect.signature(module.build).parameters.items())
    graph = build(name)
    parameters = sum(w.types[0].elements for w in graph.weights())
    cells = (
        name,
        inspect.getdoc(module).splitlines()[0],
        keys,
        f"{parameters:,}",
        f"{graph_products(graph) / 1e9:,.2f}",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return HEAD + "\n".join(map(row, names())) + "\n" + TAIL


if __name__ == "__main__":
    PATH.write_text(table())

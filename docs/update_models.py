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

| model | what | keys | parameters | forward GFLOPs |
|---|---|---|---:|---:|
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
    return HEAD + "\n".join(map(row, names())) + "\n"


if __name__ == "__main__":
    PATH.write_text(table())

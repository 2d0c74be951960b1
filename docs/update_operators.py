"""Write docs/operator_table.md anew: `python docs/update_operators.py`. A test keeps it true."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unity_ir.ops import operators
from unity_ir.ops.operator import Operator
from unity_ir.tdl.analysis import Analysis
from unity_ir.tdl.regions import halo, leading, region
from unity_ir.tdl.syntax import (
    Access,
    AttrValue,
    Composite,
    Entry,
    Expr,
    Line,
    Pack,
    Starred,
    StarredSegments,
    Window,
    WrittenIndex,
    children,
)
from unity_ir.tdl.syntax import accesses as bound_accesses

BAR = "\\|"
"""A bar inside a table's cell."""

PATH = Path(__file__).parent / "operator_table.md"

HEAD = """\
# Every operator

Made by `docs/update_operators.py` from the lines themselves, with packs of one variable and variadic operands twice.
Under *divided* are the index variables that may have a degree and leave the results divided (with what worker p of d
then reads or adds to, where that is more than its piece); under *summed* those that leave addends; under *addends* the
sets of operands that may come in addends together. All other variables need their dims whole.

| operator | line | divided | summed | addends |
|---|---|---|---|---|
"""


_WINDOW: Mapping[str, AttrValue] = {"stride": (1, 1), "padding": (1, 1)}
_CONV: Mapping[str, AttrValue] = {**_WINDOW, "dilation": (1, 1)}
_POOL: Mapping[str, AttrValue] = {**_WINDOW, "kernel": (3, 3)}
_IMAGE, _KERNEL = (2, 4, 8, 8), (4, 4, 3, 3)
SAMPLES: Mapping[str, tuple[tuple[tuple[int, ...], ...], Mapping[str, AttrValue]]] = {
    "adaptive_avg_pool2d": ((_IMAGE,), {"sizes": (2, 2)}),
    "adaptive_avg_pool2d_grad": (((2, 4, 2, 2),), {"sizes": (8, 8)}),
    "avg_pool2d": ((_IMAGE,), _POOL),
    "avg_pool2d_grad": ((_IMAGE,), {**_POOL, "sizes": (8, 8), "degrees": (1, 1)}),
    "broadcast_grad": (((2, 2, 2),), {"shape": (2, 1)}),
    "conv2d": ((_IMAGE, _KERNEL), _CONV),
    "conv2d_data_grad": ((_IMAGE, _KERNEL), {**_CONV, "sizes": (8, 8)}),
    "conv2d_weight_grad": ((_IMAGE, _IMAGE), {**_CONV, "sizes": (3, 3)}),
    "cumsum": (((2, 2, 2),), {"dim": 1}),
    "lstm_cell": (((2, 4, 2), (2, 2)), {}),
    "lstm_cell_grad": (((2, 2), (2, 2), (2, 4, 2), (2, 2)), {}),
    "max_pool2d": ((_IMAGE,), {**_POOL, "dilation": (1, 1)}),
    "max_pool2d_grad": ((_IMAGE, _IMAGE), {**_POOL, "dilation": (1, 1), "sizes": (8, 8)}),
    "pad": (((2, 4),), {"dim": 1, "before": 1, "after": 1}),
    "reshape": (((4, 6),), {"shape": (4, 2, 3)}),
    "slice": (((2, 4),), {"dim": 1, "start": 1, "size": 2}),
}
"""Shapes and attributes of operators for which the smallest would not do."""


def accesses(expr: Expr) -> list[Access]:
    return [expr] if isinstance(expr, Access) else [a for child in children(expr) for a in accesses(child)]


def extent(index: WrittenIndex) -> int:
    return 4 if isinstance(index, Composite | StarredSegments) else 2


def sample(operator: Operator) -> Analysis:
    """The operator at the smallest shapes that show all of its line."""
    if operator.name in SAMPLES:
        shapes, given = SAMPLES[operator.name]
        return operator.bind(shapes, operator.attributes(given))
    line = operator.line
    found: dict[str, tuple[int, ...]] = {}
    for result in line.results:
        for access in accesses(result.expr):
            found.setdefault(access.tensor, tuple(map(extent, access.indices)))
    shapes = [found[p.name] for p in line.parameters for _ in range(2 if p.variadic else 1)]
    return operator.bind(tuple(shapes), operator.attributes(attributes(line)))


def attributes(line: Line) -> dict[str, AttrValue]:
    given: dict[str, AttrValue] = {}
    for clause in line.clauses:
        if isinstance(clause.value, Entry):
            many = isinstance(clause.index, Starred)
            one = 2 if clause.kind == "size" else 1
            plain = isinstance(clause.index, Pack) and clause.kind != "rank"
            given[clause.value.attribute] = (one, one) if many else (one,) if plain or clause.kind == "degree" else one
    for attribute in line.attributes:
        if attribute.name not in given and attribute.default is None:
            given[attribute.name] = {"ints": (0,), "int": 1, "float": 1.0, "name": "identity", "dtype": "f32"}[
                attribute.kind
            ]
    return given


def halos(analysis: Analysis, variable: str) -> str:
    """The symbolic regions of a variable that reach beyond a piece."""
    indices = {
        i for r in analysis.bound.results for i in (*r.indices, *(i for a in bound_accesses(r.expr) for i in a.indices))
    }
    windows = [i for i in indices if isinstance(i, Window) and leading(i, analysis.bound.extents) == variable]
    texts = sorted({f"`{region(i, variable)}`" for i in windows if any(halo(i, variable, analysis.bound.extents))})
    return f" {' and '.join(texts)}" if texts else ""


def row(operator: Operator) -> str:
    analysis = sample(operator)
    bound = analysis.bound
    divided = [v + halos(analysis, v) for v in analysis.splittable if any(v in dims for dims in analysis.result_dims)]
    summed = [v for v in analysis.splittable if any(v not in dims for dims in analysis.result_dims)]
    sets = [" + ".join(sorted(s)) for s in analysis.carriers]
    line = operator.tdl if isinstance(operator.tdl, str) else f"{operator.signature} (made from the shapes)"
    cells = (bound.operator, f"`{' '.join(line.split())}`", ", ".join(divided), ", ".join(summed), "; ".join(sets))
    return f"| {' | '.join(c.replace('|', BAR) for c in cells)} |"


def table() -> str:
    rows = [row(operator) for operator in operators().values()]
    whole = sum(r.endswith("|  |  |  |") for r in rows)
    count = f"{len(rows)} operators, {len(rows) - whole} of which can be divided in some way.\n"
    return HEAD + "\n".join(rows) + "\n\n" + count


if __name__ == "__main__":
    PATH.write_text(table())

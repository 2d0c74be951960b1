"""
Sample shapes and attributes for every operator, at which tables of how operators can be sharded, and proofs of that,
start.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.ops.operator import Operator, Shapes
from unity_ir.tdl.divisibility import Analysis
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
    WrittenIndex,
    children,
)

_WINDOW: Mapping[str, AttrValue] = {"stride": (1, 1), "padding": (1, 1)}
_CONV: Mapping[str, AttrValue] = {**_WINDOW, "dilation": (1, 1)}
_POOL: Mapping[str, AttrValue] = {**_WINDOW, "kernel": (3, 3)}
_IMAGE, _KERNEL = (2, 4, 8, 8), (4, 4, 3, 3)
_ORDER: Mapping[str, AttrValue] = {"stripes": 2, "rounds": 2, "block": 2}
_STRIPED: Mapping[str, AttrValue] = {"scale": 1.0, **_ORDER}
_HEADS = (2, 4, 8, 2), (2, 2, 8, 2), (2, 2, 8, 2)
_STRIPED_ATTENTION = {
    "": _HEADS,
    "_grad": (_HEADS[0], *_HEADS),
    "_saving": _HEADS,
    "_saved_grad": (_HEADS[0], *_HEADS, _HEADS[0], _HEADS[0][:3]),
}
SAMPLES: Mapping[str, tuple[tuple[tuple[int, ...], ...], Mapping[str, AttrValue]]] = {
    "adaptive_avg_pool2d": ((_IMAGE,), {"sizes": (2, 2)}),
    "adaptive_avg_pool2d_grad": (((2, 4, 2, 2),), {"sizes": (8, 8)}),
    **{f"attention_striped{kind}": (shapes, _STRIPED) for kind, shapes in _STRIPED_ATTENTION.items()},
    "avg_pool2d": ((_IMAGE,), _POOL),
    "avg_pool2d_grad": ((_IMAGE,), {**_POOL, "sizes": (8, 8), "degrees": (1, 1)}),
    "broadcast_grad": (((2, 2, 2),), {"shape": (2, 1)}),
    "conv2d": ((_IMAGE, _KERNEL), _CONV),
    "conv2d_data_grad": ((_IMAGE, _KERNEL), {**_CONV, "sizes": (8, 8)}),
    "conv2d_weight_grad": ((_IMAGE, _IMAGE), {**_CONV, "sizes": (3, 3)}),
    "cumsum": (((2, 2, 2),), {"dim": 1}),
    "documents": (((2, 4),), {"separator": 1}),
    "lstm_cell": (((2, 4, 2), (2, 2)), {}),
    "lstm_cell_grad": (((2, 2), (2, 2), (2, 4, 2), (2, 2)), {}),
    "max_pool2d": ((_IMAGE,), {**_POOL, "dilation": (1, 1)}),
    "max_pool2d_grad": ((_IMAGE, _IMAGE), {**_POOL, "dilation": (1, 1), "sizes": (8, 8)}),
    "pad": (((2, 4),), {"dim": 1, "before": 1, "after": 1}),
    "queue": (((2, 4),), {}),
    "reshape": (((4, 6),), {"shape": (4, 2, 3)}),
    "reshape_sample": (((1, 4, 6),), {"shape": (4, 6), "dims": (0, 0)}),
    "rotary_striped": (((2, 8, 4),), _ORDER),
    "row_order": (((2, 4),), {}),
    "slice": (((2, 4),), {"dim": 1, "start": 1, "size": 2}),
}
"""Shapes and attributes of operators for which the smallest would not do."""


def _accesses(expr: Expr) -> list[Access]:
    return [expr] if isinstance(expr, Access) else [a for child in children(expr) for a in _accesses(child)]


def _extent(index: WrittenIndex) -> int:
    return 4 if isinstance(index, Composite | StarredSegments) else 2


def analysed(operator: Operator) -> Analysis:
    """
    Bind an operator's TDL line at small sample shapes and attributes (`sample`); return the analysis: which index
    variables can be sharded, the dims that they shard, and the operands that may be partial sums.
    """
    shapes, given = sample(operator)
    return operator.bind(shapes, operator.attributes(given))


def sample(operator: Operator) -> tuple[Shapes, Mapping[str, AttrValue]]:
    """
    Return (operand shapes, attributes by name) at which an operator applies, to see the structure of its line. Sizes
    are small, but none is 1: a line bound to a dim of size 1 lacks that dim and its index variable.
    """
    if operator.name in SAMPLES:
        return SAMPLES[operator.name]
    line = operator.line
    found: dict[str, tuple[int, ...]] = {}
    for result in line.results:
        for access in _accesses(result.expr):
            found.setdefault(access.tensor, tuple(map(_extent, access.indices)))
    shapes = [found[p.name] for p in line.parameters for _ in range(2 if p.variadic else 1)]
    return tuple(shapes), _attributes(line)


def _attributes(line: Line) -> dict[str, AttrValue]:
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

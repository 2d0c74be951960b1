"""Random graphs with parallel operators and views, and a context that reads their text."""

from __future__ import annotations

from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.universe import Universe

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, Update
from unity_ir.pcg.node import apply, grid, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.pcg.view import View

NAMES = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=8)
DEGREES = st.sampled_from([1, 2, 4])


def context() -> Context:
    ctx = Context()
    for name, factory in Universe.get_multiverse().all_dialects.items():
        ctx.register_dialect(name, factory)
    return ctx


CONTEXT = context()


@st.composite
def types(draw: st.DrawFn) -> TensorType:
    degrees = tuple(draw(st.lists(DEGREES, min_size=2, max_size=2)))
    return tensor_type((8, 8), "f32", degrees, draw(DEGREES), draw(DEGREES))


def view_for(draw: st.DrawFn, degrees: tuple[int, ...]) -> View | None:
    """A view of devices in a row, some of them doing everything again, or none."""
    if not draw(st.booleans()):
        return None
    axes, stride = [], 1
    for degree in reversed(degrees):
        axes.append(((degree, stride),))
        stride *= degree
    return View(draw(st.integers(0, 5)), tuple(reversed(axes)), ((2, stride),) if draw(st.booleans()) else ())


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs over every kind of node: leaves, parallel operators, operators of one, two and several operands."""
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    inputs = tuple(leaf("input", t := draw(types()), view_for(draw, _grid(t)), name=n) for n in names)
    weights = [
        leaf("weight", t := draw(types()), view_for(draw, _grid(t)), name=n)
        for n in draw(st.lists(NAMES, max_size=2, unique=True))
    ]
    number = draw(st.floats(allow_nan=False, allow_infinity=False))
    constant = leaf("constant", tensor_type((8, 8), "f32"), value=number)
    values = [n.result for n in (*inputs, *weights, constant)]
    for _ in range(draw(st.integers(0, 12))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        dim, to, by = draw(st.integers(0, 1)), draw(st.integers(0, 1)), draw(DEGREES)
        kind = draw(
            st.sampled_from([*PARALLEL_OPERATORS, "add", "mul", "relu", "matmul", "transpose", "split", "concat"])
        )
        try:
            if kind in PARALLEL_OPERATORS:
                given = {"dim": dim, "to": to, "by": by, "low": draw(st.integers(0, 2)), "high": to}
                given |= {"source": draw(st.integers(0, 2)), "target": to}
                node = parallel(kind, x, **{a: given[a] for a in PARALLEL_OPERATORS[kind].attributes})
                node = parallel(kind, x, view_for(draw, grid(node)), **{k: int(v) for k, v in node.attributes})
            else:
                operands = [x] if kind in ("relu", "transpose", "split") else [x, y]
                attributes = {
                    "matmul": {"act": draw(st.sampled_from(["identity", "relu", "gelu"]))},
                    "transpose": {"perm": (1, 0)},
                    "split": {"dim": dim, "sizes": (x.shape[min(dim, len(x.shape) - 1)] // 2,) * 2},
                    "concat": {"dim": dim},
                }.get(kind, {})
                node = apply(kind, operands, attributes)
                node = apply(kind, operands, attributes, view_for(draw, grid(node)))
        except UnityError:
            continue
        values += node.results
    outputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3)))
    optimizer = draw(
        st.sampled_from([None, Optimizer(), Optimizer("sgd", lr=1e-3), Optimizer("adam", lr=3e-4, eps=1e-6)])
    )
    updates = tuple(
        Update(w.result, g) for w in weights for g in values if g.shape == w.result.shape and draw(st.booleans())
    )
    return Graph(draw(NAMES), inputs, outputs, updates, optimizer)


def _grid(type: TensorType) -> tuple[int, ...]:
    return tuple(d for d in (*type.degrees, type.copy, type.sum) if d > 1)

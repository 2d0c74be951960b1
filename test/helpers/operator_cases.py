"""Random uses of every operator: a strategy of shapes and attributes for each, in `CASES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import window_cases
from case import Case, Shape
from hypothesis import strategies as st

from unity_ir.tdl.syntax import AttrValue

SIZES = st.sampled_from([1, 2, 3, 4, 6])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@st.composite
def same(draw: st.DrawFn, count: int) -> Case:
    shape = draw(SHAPES)
    return Case((shape,) * count, {})


@st.composite
def broadcast(draw: st.DrawFn, count: int = 2, with_grad: bool = False) -> Case:
    """Operands that broadcast to one shape: without some leading dims, and with sizes of 1; or the gradient first."""
    full = draw(SHAPES)
    shapes: list[Shape] = []
    for _ in range(count):
        own = full[draw(st.integers(0, len(full))) :]
        shapes.append(tuple(draw(st.sampled_from([size, size, 1])) for size in own))
    if with_grad:
        return Case((full, *shapes), {})
    if not draw(st.booleans()):
        shapes[draw(st.integers(0, count - 1))] = full
    return Case(tuple(shapes), {})


@st.composite
def broadcast_grad(draw: st.DrawFn) -> Case:
    full, shape = draw(broadcast(1, with_grad=True)).shapes
    return Case((full,), {"shape": shape})


@st.composite
def compared(draw: st.DrawFn) -> Case:
    """Of numbers that are often equal."""
    return replace(draw(broadcast()), classes=3, dtypes=draw(st.sampled_from([("i64", "i64"), ("f64", "f64")])))


@st.composite
def integers(draw: st.DrawFn) -> Case:
    return replace(draw(broadcast()), classes=9)


@st.composite
def select_grad(draw: st.DrawFn) -> Case:
    case = draw(broadcast(1, with_grad=True))
    return replace(case, attributes={"chosen": draw(st.integers(0, 1))})


@st.composite
def cast(draw: st.DrawFn) -> Case:
    given = draw(st.sampled_from(["f64", "f64", "i64", "bool"]))
    wanted = draw(st.sampled_from(["f64", "f32", "f16", "bf16", "i64", "i32", "bool"]))
    # What the narrowest holds exactly, so that it does not matter which addends are converted.
    return Case((draw(SHAPES),), {"to": wanted}, classes=5, dtypes=(given,), grain=0.25)


def bounded(cases: st.SearchStrategy[Case], low: float = 0.5, high: float = 2.0) -> st.SearchStrategy[Case]:
    return cases.map(lambda case: replace(case, bounds=(low, high)))


positive = bounded


@st.composite
def with_numbers(draw: st.DrawFn, count: int, **ranges: tuple[float, float]) -> Case:
    """Operands of one shape, and attributes that are numbers."""
    return Case((draw(SHAPES),) * count, {name: draw(st.floats(*limits)) for name, limits in ranges.items()})


@st.composite
def matmul(draw: st.DrawFn, transposed: bool, **choices: Sequence[AttrValue]) -> Case:
    lead, k, n = draw(st.lists(SIZES, max_size=2)), draw(SIZES), draw(SIZES)
    given = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    return Case(((*lead, k), (n, k) if transposed else (k, n)), given)


@st.composite
def matmul_tn(draw: st.DrawFn) -> Case:
    lead = draw(st.lists(SIZES, max_size=2))
    return Case(((*lead, draw(SIZES)), (*lead, draw(SIZES))), {})


@st.composite
def loss(draw: st.DrawFn, with_grad: bool, saved: bool = False) -> Case:
    b, c = draw(SIZES), draw(SIZES)
    return Case((((),) if with_grad else ()) + ((b, c), (b,)) + (((b,),) if saved else ()), {}, c)


@st.composite
def mse_grad(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    return Case(((), shape, shape), {})


@st.composite
def concat(draw: st.DrawFn) -> Case:
    before, after = draw(st.lists(SIZES, max_size=1)), draw(st.lists(SIZES, max_size=1))
    sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    return Case(tuple((*before, s, *after) for s in sizes), {"dim": len(before)})


@st.composite
def split(draw: st.DrawFn) -> Case:
    joined = draw(concat())
    dim = joined.attributes["dim"]
    assert isinstance(dim, int)
    sizes = tuple(s[dim] for s in joined.shapes)
    shape = (*joined.shapes[0][:dim], sum(sizes), *joined.shapes[0][dim + 1 :])
    return Case((shape,), {"dim": dim, "sizes": sizes})


@st.composite
def transpose(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    return Case((shape,), {"perm": tuple(draw(st.permutations(range(len(shape)))))})


@st.composite
def split_heads(draw: st.DrawFn) -> Case:
    b, h, s, d = (draw(SIZES) for _ in range(4))
    return Case(((b, s, h * d),), {"heads": h})


@st.composite
def merge_heads(draw: st.DrawFn) -> Case:
    return Case((tuple(draw(SIZES) for _ in range(4)),), {})


@st.composite
def reshape_sample(draw: st.DrawFn) -> Case:
    """A sample of its own dim, or in that of its positions, and back."""
    positions, size = draw(SIZES), draw(SIZES)
    apart, joined = (1, positions, size), (positions, size)
    old, new = draw(st.permutations((apart, joined)))
    return Case((old,), {"shape": new, "dims": (0, 0)})


@st.composite
def reshape(draw: st.DrawFn) -> Case:
    """Two ways to put neighbouring factors together."""
    factors = draw(SHAPES)

    def grouped() -> Shape:
        out: list[int] = []
        for factor in factors:
            if out and draw(st.booleans()):
                out[-1] *= factor
            else:
                out.append(factor)
            if draw(st.booleans()):
                out.append(1)
        return tuple(out)

    return Case((grouped(),), {"shape": grouped()})


@st.composite
def reduce_sum(draw: st.DrawFn) -> Case:
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape)))
    return Case((shape,), {"dim": dim, "count": draw(st.integers(0, len(shape) - dim))})


@st.composite
def expand(draw: st.DrawFn) -> Case:
    shape, sizes = draw(SHAPES), draw(st.lists(SIZES, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    return Case((shape,), {"dim": dim, "sizes": tuple(sizes), "degrees": (1,) * len(sizes)})


@st.composite
def batch_matmul(draw: st.DrawFn, x: str, y: str) -> Case:
    """Shapes over `m`, `n`, `k`, as the two letters of each operand say, with leading dims."""
    lead = draw(st.lists(SIZES, max_size=2))
    sizes = {letter: draw(SIZES) for letter in "mnk"}
    return Case(tuple((*lead, *(sizes[letter] for letter in operand)) for operand in (x, y)), {})


@st.composite
def scale(draw: st.DrawFn) -> Case:
    return Case((draw(SHAPES),), {"by": draw(st.floats(-4, 4))})


@st.composite
def rows(draw: st.DrawFn, operands: str, eps: bool = False) -> Case:
    """Operands of a matrix's shape (`x`), of a row's (`w`)."""
    lead, size = draw(st.lists(SIZES, max_size=2)), draw(SIZES)
    shapes = {"x": (*lead, size), "w": (size,)}
    return Case(tuple(shapes[o] for o in operands), {"eps": 1e-5} if eps else {})


@st.composite
def attention(draw: st.DrawFn, operands: str, drop: bool = False) -> Case:
    sizes = st.sampled_from([1, 2, 3, 4])
    b, h, g, i, j, e, d = (draw(sizes) for _ in range(7))
    causal = draw(st.integers(0, 1))
    shapes = {"q": (b, h * g, i, e), "k": (b, h, j, e), "v": (b, h, j, d), "y": (b, h * g, i, d)}
    shapes |= {"a": shapes["y"], "l": (b, h * g, i)}
    more: dict[str, AttrValue] = {"drop": draw(st.floats(0, 0.9)), "seed": draw(st.integers(0, 2**40))} if drop else {}
    return Case(tuple(shapes[o] for o in operands), {"scale": draw(st.floats(0.1, 2)), "causal": causal, **more})


@st.composite
def attention_ranges(draw: st.DrawFn, operands: str) -> Case:
    """Operands of whole attention, and of `ranges`, `f` and `n`: each of their numbers is one of -1 to the keys."""
    given = draw(attention(operands.replace("fn", "")))
    of = dict(zip(operands.replace("fn", ""), given.shapes, strict=True))
    of |= dict.fromkeys("fn", (of["q"][0], of["q"][2]))
    return Case(tuple(of[o] for o in operands), {"scale": given.attributes["scale"]}, of["k"][2] + 1)


@st.composite
def capped(draw: st.DrawFn, of: st.SearchStrategy[Case]) -> Case:
    """A case of attention, with a cap of its scores."""
    given = draw(of)
    return replace(given, attributes={**given.attributes, "cap": draw(st.floats(0.5, 4))})


@st.composite
def attention_part(draw: st.DrawFn, operands: str) -> Case:
    given = draw(attention_ranges(operands))
    return replace(given, attributes={**given.attributes, "seen": draw(st.floats(0, 1))})


@st.composite
def merge_parts(draw: st.DrawFn) -> Case:
    b, h, i, d = (draw(SIZES) for _ in range(4))
    return Case(((b, h, i, d), (b, h, i)) * 2, {})


@st.composite
def turn_of_a_ring(draw: st.DrawFn, operands: int, blocks: bool = False) -> Case:
    """Integers for every query of a sequence in pieces: `block`s, one after the other."""
    sizes = st.sampled_from([1, 2, 3])
    pieces, rounds, block = draw(sizes), draw(sizes), draw(sizes)
    order = {"turn": draw(st.integers(0, pieces - 1)), "pieces": pieces, "length": rounds * block}
    more = {"block": block} if blocks else {}
    length = pieces * rounds * block
    return Case(((draw(SIZES), length),) * operands, {**order, **more}, length + 1)


@st.composite
def striped(draw: st.DrawFn, operands: str) -> Case:
    """Operands of attention of a sequence in striped order; `x`: a tensor with one in the dim before the last."""
    sizes = st.sampled_from([1, 2, 3])
    order = {"stripes": draw(sizes), "rounds": draw(sizes), "block": draw(sizes)}
    length = order["stripes"] * order["rounds"] * order["block"]
    if operands == "x":
        return Case(((*draw(st.lists(SIZES, max_size=2)), length, 2 * draw(sizes)),), order)
    b, h, g, e, d = (draw(sizes) for _ in range(5))
    shapes = {"q": (b, h * g, length, e), "k": (b, h, length, e), "v": (b, h, length, d), "y": (b, h * g, length, d)}
    shapes |= {"a": shapes["y"], "l": (b, h * g, length)}
    return Case(tuple(shapes[o] for o in operands), {"scale": draw(st.floats(0.1, 2)), **order})


@st.composite
def stripe(draw: st.DrawFn) -> Case:
    given = draw(striped("x"))
    (shape,) = given.shapes
    order = {name: given.attributes[name] for name in ("stripes", "block")}
    return replace(given, attributes={**order, "dim": len(shape) - 2})


@st.composite
def rotary_striped(draw: st.DrawFn) -> Case:
    given = draw(striped("x"))
    more = {"base": 100.0, "direction": draw(st.sampled_from([1.0, -1.0]))}
    return replace(given, attributes={**given.attributes, **more})


@st.composite
def rotary(draw: st.DrawFn) -> Case:
    lead, s, half = draw(st.lists(SIZES, max_size=2)), draw(SIZES), draw(SIZES)
    return Case(((*lead, s, 2 * half),), {"base": 100.0, "direction": draw(st.sampled_from([1.0, -1.0]))})


@st.composite
def rotary_at(draw: st.DrawFn) -> Case:
    given = draw(rotary())
    *lead, s, e = given.shapes[0]
    b = draw(SIZES)
    return Case(((b, *lead, s, e), (b, s)), given.attributes, 100)


@st.composite
def documents(draw: st.DrawFn) -> Case:
    shape = (*draw(st.lists(SIZES, max_size=2)), draw(st.integers(1, 12)))
    return Case((shape,), {"separator": draw(st.integers(0, 2)), "causal": draw(st.integers(0, 1))}, 4)


@st.composite
def embedding(draw: st.DrawFn, with_grad: bool) -> Case:
    lead, size, e = tuple(draw(st.lists(SIZES, max_size=2))), draw(SIZES), draw(SIZES)
    if with_grad:
        return Case(((*lead, e), lead), {"size": size, "degrees": (1,)}, size)
    return Case((lead, (size, e)), {}, size)


@st.composite
def routed(draw: st.DrawFn, weight: str) -> Case:
    """Rows, a weight of the dims `kn` or `nk` for each of some experts, or rows of its gradient, and their experts."""
    lead, v = tuple(draw(st.lists(SIZES, max_size=2))), draw(SIZES)
    sizes = {"k": draw(SIZES), "n": draw(SIZES)}
    if weight == "":
        return Case(((*lead, sizes["k"]), (*lead, sizes["n"]), lead), {"size": v, "degrees": (1,)}, v)
    return Case(((*lead, sizes["k"]), (v, *(sizes[d] for d in weight)), lead), {}, v)


@st.composite
def slots(draw: st.DrawFn, operands: str) -> Case:
    """
    Of groups of tokens, each of which has some slots: tokens or their gradient (`x`), slots (`y`), or for each choice
    of a token a number below 9 (`i`), or its share (`s`).
    """
    g, t, k, h, v = (draw(SIZES) for _ in range(5))
    shapes = {"x": (g, t, h), "y": (v, g, h), "i": (g, k, t), "s": (g, k, t)}
    attributes: dict[str, AttrValue] = {}
    if operands in ("ii", "si"):
        attributes = {"capacity": draw(st.integers(1, 4))}
    elif operands == "xis":
        attributes = {"size": v, "degrees": (1,)}
    return Case(tuple(shapes[o] for o in operands), attributes, 9 if set(operands) <= set("is") else v)


@st.composite
def queue(draw: st.DrawFn) -> Case:
    return Case(((*draw(st.lists(SIZES, max_size=2)), draw(st.integers(1, 12))),), {}, 3)


@st.composite
def taken(draw: st.DrawFn, operands: str) -> Case:
    """The rows of `x`, or the integers of `e`, of each piece, at the places `i`."""
    p, v, r, h = (draw(SIZES) for _ in range(4))
    shapes = {"x": (p, v, h), "e": (p, v), "i": (p, r)}
    return Case(tuple(shapes[o] for o in operands), {}, v)


@st.composite
def row_tokens(draw: st.DrawFn) -> Case:
    return Case((tuple(draw(st.lists(SIZES, max_size=2))),), {"chosen": draw(st.integers(1, 4))}, 12)


@st.composite
def expert_matmul(draw: st.DrawFn, left: str, right: str) -> Case:
    """Rows of several dims, or none, of each expert, with the dims `r` in the place of these."""
    rows = tuple(draw(st.lists(SIZES, max_size=2)))
    sizes = {d: draw(SIZES) for d in "ekn"}
    shapes = (tuple(s for d in dims for s in (rows if d == "r" else (sizes[d],))) for dims in (left, right))
    return Case(tuple(shapes), {})


@st.composite
def reduction(draw: st.DrawFn, operands: str = "x", sizes: str = "") -> Case:
    """Operands of a shape (`x`), of it without the dims that are reduced (`y`); `sizes` names attributes of those."""
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape)))
    count = draw(st.integers(0, len(shape) - dim))
    dims = shape[dim : dim + count]
    shapes = {"x": shape, "y": (*shape[:dim], *shape[dim + count :])}
    attributes: dict[str, AttrValue] = {"dim": dim}
    attributes |= {"sizes": dims} if sizes else {"count": count}
    attributes |= {"degrees": (1,) * count} if sizes == "degrees" else {}
    return Case(tuple(shapes[o] for o in operands), attributes)


@st.composite
def along(draw: st.DrawFn, operands: str, new: str | None = None) -> Case:
    """
    Operands of a shape (`x`), of it with another size along one dim (`i`), and of that size alone (`k`); `new` is the
    one whose size along the dim attributes have to give.
    """
    shape = draw(st.lists(SIZES, min_size=1, max_size=3).map(tuple))
    dim, other = draw(st.integers(0, len(shape) - 1)), draw(SIZES)
    shapes = {"x": shape, "i": (*shape[:dim], other, *shape[dim + 1 :]), "k": (other,)}
    attributes: dict[str, AttrValue] = {"dim": dim}
    if new is not None:
        attributes |= {"size": shapes[new][dim], "degrees": (1,)}
    return Case(tuple(shapes[o] for o in operands), attributes, shape[dim])


@st.composite
def topk(draw: st.DrawFn, with_grad: bool) -> Case:
    lead, size = draw(st.lists(SIZES, max_size=2)), draw(SIZES)
    k = draw(st.integers(1, size))
    if with_grad:
        return Case(((*lead, k), (*lead, k)), {"size": size}, size)
    return Case(((*lead, size),), {"k": k})


@st.composite
def embedding_bag(draw: st.DrawFn, with_grad: bool) -> Case:
    lead, bag, size, e = draw(st.lists(SIZES, max_size=1)), draw(SIZES), draw(SIZES), draw(SIZES)
    ids = (*lead, bag)
    if with_grad:
        return Case(((*lead, e), ids), {"size": size, "degrees": (1,)}, size)
    return Case((ids, (size, e)), {}, size)


@st.composite
def one_hot(draw: st.DrawFn) -> Case:
    classes = draw(SIZES)
    return Case((draw(SHAPES),), {"classes": classes}, classes)


@st.composite
def batch(draw: st.DrawFn, operands: str) -> Case:
    """Samples with channels (`x`), statistics of groups of them (`m`), and vectors over channels (`c`)."""
    g, n, c, space = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=2))
    shapes = {"x": (g * n, c, *space), "m": (g, c), "c": (c,)}
    has_eps = "mmm" in operands
    attributes: dict[str, AttrValue] = {"eps": 1e-5} if has_eps else {} if "m" in operands else {"groups": g}
    # The mean square is above the square of the mean's distance to the center.
    lift = (0.0,) * (operands.find("mm") + 1) + (60.0,) if has_eps else ()
    return Case(tuple(shapes[o] for o in operands), attributes, lift=lift)


@st.composite
def running(draw: st.DrawFn, operands: str) -> Case:
    """Samples with channels (`x`), statistics of groups of them (`m`), and vectors over channels (`c`)."""
    g, n, c, space = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=2))
    shapes = {"x": (n, c, *space), "m": (g, c), "c": (c,)}
    if "x" in operands:
        # The variance is above 0.
        return Case(
            tuple(shapes[o] for o in operands), {"eps": 1e-5}, lift=(*(0.0,) * operands.rfind("x"), 0.0, 0.0, 60.0)
        )
    count, momentum = draw(st.integers(2, 50)), draw(st.sampled_from([0.0, 0.1, 0.75, 1.0]))
    return Case(tuple(shapes[o] for o in operands), {"count": count, "momentum": momentum})


@st.composite
def gates(draw: st.DrawFn, operands: str) -> Case:
    lead = draw(st.lists(SIZES, max_size=2))
    k, q, n = draw(SIZES), draw(st.sampled_from([2, 3, 4])), draw(SIZES)
    shapes = {"x": (*lead, k), "w": (k, q, n), "g": (*lead, q, n)}
    return Case(tuple(shapes[o] for o in operands), {})


@st.composite
def lstm_cell(draw: st.DrawFn, operands: str) -> Case:
    """Gates (`z`) and states (`c`)."""
    lead, n = draw(st.lists(SIZES, max_size=2)), draw(SIZES)
    shapes = {"z": (*lead, 4, n), "c": (*lead, n)}
    return Case(tuple(shapes[o] for o in operands), {})


@st.composite
def dropout(draw: st.DrawFn) -> Case:
    return Case((draw(SHAPES),), {"p": draw(st.floats(0, 0.9)), "seed": draw(st.integers(0, 2**40))})


@st.composite
def uniform(draw: st.DrawFn) -> Case:
    return Case((draw(SHAPES),), {"seed": draw(st.integers(0, 2**40))})


@st.composite
def of_scalar(draw: st.DrawFn, count: int) -> Case:
    """The gradient of a scalar, then operands of one shape."""
    return Case(((), *((draw(SHAPES),) * count)), {})


@st.composite
def classes(draw: st.DrawFn, operands: str, parts: bool = False, size: bool = False) -> Case:
    """Rows of classes (`x`), a number for each row (`m`) or part of a row (`p`), or the row's class (`m`, too)."""
    lead, p, c = draw(st.lists(SIZES, max_size=2)), draw(SIZES), draw(SIZES)
    shapes = {"x": (*lead, p * c), "p": (*lead, p), "m": (*lead,)}
    attributes: dict[str, AttrValue] = {"parts": p} if parts else {"size": p * c, "degrees": (1,)} if size else {}
    return Case(tuple(shapes[o] for o in operands), attributes, p * c)


CASES: Mapping[str, st.SearchStrategy[Case]] = {
    "batch_mean": batch("x"),
    "batch_norm": batch("xmmmcc"),
    "batch_norm_data_grad": batch("xxmmmccc"),
    "batch_norm_grad": batch("xxmmmc"),
    "batch_norm_weight_grad": batch("xxmmm"),
    "batch_stats": batch("xm"),
    "batch_stats_grad": batch("mmxm"),
    "running_batch_norm": running("xcccc"),
    "running_batch_norm_grad": running("xxccc"),
    "running_stats": running("ccmmm"),
    "bce": bounded(same(2), 0.1, 0.9),
    "bce_grad": bounded(of_scalar(2), 0.1, 0.9),
    "bce_target_grad": bounded(of_scalar(1), 0.1, 0.9),
    "bce_with_logits": same(2),
    "bce_with_logits_grad": of_scalar(2),
    "bce_with_logits_target_grad": of_scalar(1),
    "class_score": classes("xm"),
    "class_score_grad": classes("mm", size=True),
    "cumsum": along("x"),
    "cumsum_grad": along("x", "x"),
    "dropout": dropout(),
    "int_add": integers(),
    "int_mul": integers(),
    "uniform": uniform(),
    "embedding_bag": embedding_bag(False),
    "embedding_bag_grad": embedding_bag(True),
    "gate_matmul": gates("xw"),
    "gate_matmul_data_grad": gates("gw"),
    "gate_matmul_weight_grad": gates("xg"),
    "gather": along("xi"),
    "gather_grad": along("ii", "x"),
    "index_select": along("xk"),
    "index_select_grad": along("ik", "x"),
    "lstm_cell": lstm_cell("zc"),
    "lstm_cell_grad": lstm_cell("cczc"),
    "max_of_parts": classes("x", parts=True),
    "max_of_parts_grad": classes("pxp"),
    "one_hot": one_hot(),
    "reduce_extreme_grad": reduction("yxy"),
    "reduce_max": reduction(),
    "reduce_mean": reduction(),
    "reduce_mean_grad": reduction("y", "degrees"),
    "reduce_min": reduction(),
    "reduce_prod": reduction(),
    "reduce_prod_grad": reduction("yx", "sizes"),
    "scatter_add": along("xii"),
    "scatter_max": along("xii"),
    "scatter_max_grad": along("xxiix").map(lambda case: replace(case, grain=1.0)),
    "sum_exp": classes("xm"),
    "sum_exp_grad": classes("mxm"),
    "topk": topk(False),
    "topk_grad": topk(True),
    "broadcast_grad": broadcast_grad(),
    "cast": cast(),
    "clamp": with_numbers(1, low=(-1, 0), high=(0, 1)),
    "clamp_grad": with_numbers(2, low=(-1, 0), high=(0, 1)),
    "detach": same(1),
    "elu": with_numbers(1, alpha=(0.1, 2)),
    "elu_grad": with_numbers(2, alpha=(0.1, 2)),
    "eq": compared(),
    "erf": same(1),
    "erf_grad": same(2),
    "floor": same(1),
    "ge": compared(),
    "gelu_tanh": same(1),
    "gelu_tanh_grad": same(2),
    "gt": compared(),
    "hardsigmoid": bounded(same(1), -5, 5),
    "hardswish": bounded(same(1), -5, 5),
    "hardswish_grad": bounded(same(2), -5, 5),
    "hardtanh": same(1),
    "inside_grad": with_numbers(2, low=(-1, 0), high=(0, 1), slope=(0.1, 2)),
    "le": compared(),
    "leaky_relu": with_numbers(1, slope=(0, 1)),
    "leaky_relu_grad": with_numbers(2, slope=(0, 1)),
    "logical_and": broadcast(),
    "logical_not": same(1),
    "logical_or": broadcast(),
    "lt": compared(),
    "maximum": broadcast(),
    "maximum_grad": broadcast(2, with_grad=True),
    "minimum": broadcast(),
    "ne": compared(),
    "pow": positive(broadcast()),
    "pow_exponent_grad": positive(broadcast(2, with_grad=True)),
    "pow_grad": positive(broadcast(2, with_grad=True)),
    "pow_scalar": positive(with_numbers(1, exponent=(-3, 3))),
    "pow_scalar_grad": positive(with_numbers(2, exponent=(-3, 3))),
    "reciprocal": positive(same(1)),
    "reciprocal_grad": same(2),
    "relu6": bounded(same(1), -2, 8),
    "select": broadcast(3),
    "select_grad": select_grad(),
    "shift": with_numbers(1, by=(-4, 4)),
    "sign": same(1),
    "softplus": bounded(same(1), -30, 30),
    "softplus_grad": bounded(same(2), -30, 30),
    "square": same(1),
    "square_grad": same(2),
    "abs": same(1),
    "abs_grad": same(2),
    "add": broadcast(),
    "attention": attention("qkv"),
    "attention_capped": capped(attention("qkv")),
    "attention_capped_grad": capped(attention("yqkv")),
    "attention_capped_ranges": capped(attention_ranges("qkvfn")),
    "attention_capped_ranges_grad": capped(attention_ranges("yqkvfn")),
    "attention_capped_ranges_saved_grad": capped(attention_ranges("yqkvfnal")),
    "attention_capped_ranges_saving": capped(attention_ranges("qkvfn")),
    "attention_capped_saved_grad": capped(attention("yqkval")),
    "attention_capped_saving": capped(attention("qkv")),
    "attention_dropout": attention("qkv", drop=True),
    "attention_dropout_grad": attention("yqkv", drop=True),
    "attention_dropout_saved_grad": attention("yqkval", drop=True),
    "attention_dropout_saving": attention("qkv", drop=True),
    "attention_grad": attention("yqkv"),
    "attention_part": attention_part("qkvfn"),
    "attention_part_grad": attention_part("yqkvfnal"),
    "attention_ranges": attention_ranges("qkvfn"),
    "attention_ranges_grad": attention_ranges("yqkvfn"),
    "attention_ranges_saved_grad": attention_ranges("yqkvfnal"),
    "attention_ranges_saving": attention_ranges("qkvfn"),
    "attention_saved_grad": attention("yqkval"),
    "attention_saving": attention("qkv"),
    "attention_striped": striped("qkv"),
    "attention_striped_grad": striped("yqkv"),
    "attention_striped_saved_grad": striped("yqkval"),
    "attention_striped_saving": striped("qkv"),
    "batch_matmul": batch_matmul("mk", "kn"),
    "batch_matmul_nt": batch_matmul("mk", "nk"),
    "batch_matmul_tn": batch_matmul("km", "kn"),
    "concat": concat(),
    "cos": same(1),
    "cross_entropy": loss(False),
    "cross_entropy_grad": loss(True),
    "cross_entropy_saved_grad": loss(True, True),
    "cross_entropy_saving": loss(False),
    "causal_part": turn_of_a_ring(1, blocks=True),
    "merge_parts": merge_parts(),
    "ranges_part": turn_of_a_ring(2),
    "documents": documents(),
    "div": positive(broadcast()),
    "div_grad": positive(broadcast(2, with_grad=True)),
    "embedding": embedding(False),
    "embedding_grad": embedding(True),
    "exp": same(1),
    "expand": expand(),
    "gelu": same(1),
    "gelu_grad": same(2),
    "layer_norm": rows("xww", eps=True),
    "layer_norm_grad": rows("xxw", eps=True),
    "layer_norm_weight_grad": rows("xx", eps=True),
    "log": positive(same(1)),
    "log_softmax": rows("x"),
    "log_softmax_grad": rows("xx"),
    "float8_matmul": matmul(False, all=[0, 1]),
    "float8_matmul_nt": matmul(True, all=[0, 1]),
    "float8_matmul_tn": matmul_tn(),
    "matmul": matmul(False, act=["identity", "relu", "gelu"]),
    "matmul_nt": matmul(True),
    "matmul_tn": matmul_tn(),
    "merge_heads": merge_heads(),
    "mse": same(2),
    "mse_grad": mse_grad(),
    "mul": broadcast(),
    "neg": same(1),
    "reduce_sum": reduce_sum(),
    "relu": same(1),
    "relu_grad": same(2),
    "reshape": reshape(),
    "reshape_sample": reshape_sample(),
    "rms_norm": rows("xw", eps=True),
    "rms_norm_grad": rows("xxw", eps=True),
    "rms_norm_weight_grad": rows("xx", eps=True),
    "rotary": rotary(),
    "rotary_at": rotary_at(),
    "rotary_striped": rotary_striped(),
    "routed_matmul": routed("kn"),
    "routed_matmul_nt": routed("nk"),
    "routed_matmul_tn": routed(""),
    "expert_matmul": expert_matmul("erk", "ekn"),
    "expert_matmul_nt": expert_matmul("ern", "ekn"),
    "expert_matmul_tn": expert_matmul("erk", "ern"),
    "row_order": queue(),
    "row_tokens": row_tokens(),
    "rows_matmul": routed("kn"),
    "rows_matmul_nt": routed("nk"),
    "rows_matmul_tn": routed(""),
    "take_numbers": taken("ei"),
    "take_rows": taken("xi"),
    "from_slots": slots("yis"),
    "in_slots": slots("si"),
    "queue": queue(),
    "slot": slots("ii"),
    "slot_shares": slots("xyi"),
    "to_slots": slots("xis"),
    "rsqrt": positive(same(1)),
    "rsqrt_grad": positive(same(2)),
    "scale": scale(),
    "sigmoid": same(1),
    "sigmoid_grad": same(2),
    "silu": same(1),
    "silu_grad": same(2),
    "sin": same(1),
    "softmax": rows("x"),
    "softmax_grad": rows("xx"),
    "split": split(),
    "split_heads": split_heads(),
    "sqrt": positive(same(1)),
    "sqrt_grad": positive(same(2)),
    "stripe": stripe(),
    "unstripe": stripe(),
    "sub": broadcast(),
    "tanh": same(1),
    "tanh_grad": same(2),
    "transpose": transpose(),
    **window_cases.CASES,
}


DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}

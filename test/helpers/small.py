"""Serial graphs of a few operators each, of every family: what everything can be tried on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from graphs import random_cnn, random_graph

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.syntax import AttrValue

SIZES = (2, 4, 6, 12)


def given(name: str, *shape: int, dtype: str = "f64") -> Value:
    return leaf("input", tensor_type(shape, dtype), name=name).result


def weight(name: str, *shape: int) -> Value:
    return leaf("weight", tensor_type(shape, "f64"), name=name).result


def op(name: str, *operands: Value, **attributes: AttrValue) -> Value:
    return apply(name, operands, attributes).result


def whole(*outputs: Value) -> Graph:
    """The graph of these outputs; inputs in the order in which they are met."""
    nodes = Graph("small", (), outputs).nodes()
    return Graph("small", tuple(n for n in nodes if n.op == "input"), outputs)


def loss(random: Random, x: Value) -> Value:
    return op("mse", x, given("target", *x.shape)) if random.random() < 0.5 else total(x)


def total(x: Value) -> Value:
    return op("reduce_sum", x, dim=0, count=len(x.shape))


def layers(random: Random, size: int) -> Graph:
    """Products, pointwise, broadcasts, reductions, concat, split, reshape, weights read twice, second outputs."""
    return random_graph(random, size, dims=SIZES)


def images(random: Random, size: int) -> Graph:
    """Convolutions and poolings, with halos."""
    if size > 1:
        return random_cnn(random, min(size - 1, 2))
    x = weight("x", 2, 2, 4, 4)
    around: dict[str, AttrValue] = {"stride": (1, 1), "padding": (1, 1)}
    if random.random() < 0.5:
        return whole(op("avg_pool2d", x, kernel=(3, 3), **around))
    return whole(op("conv2d", x, weight("k", 2, 2, 3, 3), dilation=(1, 1), groups=1, **around))


def words(random: Random, size: int) -> Graph:
    """Embeddings, whose ids have no gradient, and a loss over classes."""
    batch, words, wide = (random.choice(SIZES) for _ in range(3))
    ids, table = given("ids", batch, dtype="i64"), weight("table", words, wide)
    x = op("embedding", ids, table)
    if size > 2:
        x = op(random.choice(["relu", "gelu"]), x)
    if size > 1:
        return whole(op("mse", x, op("embedding", ids, table)) if random.random() < 0.4 else loss(random, x))
    return whole(x)


def attended(random: Random, size: int) -> Graph:
    """Softmax or a norm, and products of two values of the graph."""
    b, m, n = (random.choice((2, 4)) for _ in range(3))
    x = op("add", given("x", b, m, n), weight("bias", n)) if size > 2 else weight("x", b, m, n)
    last = op("batch_matmul_nt", x, x) if random.random() < 0.5 else op("softmax", x)
    if size > 1 and random.random() < 0.3:
        last = op("layer_norm", last, weight("scale", last.shape[-1]), weight("shift", last.shape[-1]), eps=1e-5)
    return whole(total(last)) if random.random() < 0.7 else whole(last)


def fanned(random: Random, size: int) -> Graph:
    """A value with up to five users, of which several want its rows whole, or several its columns; and what is left."""
    rows, columns = (random.choice((4, 12, 24)) for _ in range(2))
    x, dim = weight("x", rows, columns), random.randrange(2)
    if random.random() < 0.7:
        x = op("cumsum", x, dim=1 - dim)
    whole_along: list[Callable[[Value], Value]] = [
        lambda v: op("cumsum", v, dim=dim),
        lambda v: op("reduce_max", v, dim=dim),
        lambda v: op("reduce_prod", v, dim=dim),
        lambda v: op("softmax", v if dim == 1 else op("transpose", v, perm=(1, 0))),
    ]
    random.shuffle(whole_along)
    other: list[Callable[[Value], Value]] = [
        lambda v: op("cumsum", v, dim=1 - dim),
        lambda v: op("reduce_max", v, dim=1 - dim),
        lambda v: op("matmul", v, given("m", columns, random.choice(SIZES))),
        lambda v: op("mul", v, given("s", columns)),
        lambda v: op("square", v),
    ]
    kinds = [whole_along[0], random.choice(other), *whole_along[1:3], random.choice(other)]
    outputs = [kind(x) for kind in kinds[:size]]
    if size > 1 and random.random() < 0.3:
        # Users beside the loss, from which no gradient comes back.
        outputs.insert(0, total(x))
    return whole(*dict.fromkeys(outputs))


def inferred(random: Random, size: int) -> Graph:
    """Nothing is trained; constants, and integers."""
    rows, columns = random.choice(SIZES), random.choice(SIZES)
    x = given("x", rows, columns)
    for i in range(size):
        one = leaf("constant", tensor_type(random.choice([(), (columns,)]), "f64"), value=2.0).result
        x = random.choice(
            [
                lambda v: op("mul", v, one),
                lambda v: op("maximum", v, one),
                lambda v: op("matmul", v, given(f"w{i}", v.shape[-1], columns)),
                lambda v: op("softmax", v),
                lambda v: op("add", v, v),
            ]
        )(x)
    return whole(x, op("reduce_max", x, dim=1)) if random.random() < 0.5 else whole(x)


FAMILIES = (layers, images, words, attended, fanned, inferred)


def small(seed: int, size: int) -> Graph:
    """A graph of about so many operators, of the family whose turn it is."""
    return FAMILIES[seed % len(FAMILIES)](Random(seed), size)

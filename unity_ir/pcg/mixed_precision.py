"""Mixed precision: trained weights, their gradients and the optimizer's state in f32, the rest in a shorter type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, apply, leaf, rebuild
from unity_ir.pcg.types import divided_type, tensor_type
from unity_ir.tdl.counts import has_contractions
from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.functions import ROUNDED

ALL = f"{ROUNDED}-all"
ROUNDINGS = (ROUNDED, ALL)
"""Products in 8 bits: forward and for gradients of activations, or for those of weights, too."""
SMALLEST = 2048
"""
Least rows and columns of a weight whose product is in 8 bits: with fewer, to round its operands takes as long as
8 bits save (H100).
"""


def mixed_precision_options(text: str, where: str = "unity-opt: --mixed-precision") -> dict[str, Any]:
    """
    Parse the value of `--mixed-precision` into arguments of `mixed_precision`, with the element type as `type`: given
    `bf16,reduce=f32,products=float8,smallest=512`, returns `{"type": "bf16", "reduce": "f32", "products": "float8",
    "smallest": 512}`. Raises `UnityError`, in a message that begins with `where`, for other options; whether the types
    exist is checked later.
    """
    dtype, *settings = text.split(",")
    found: dict[str, Any] = {"type": dtype}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in ("reduce", "products", "smallest") or not value:
            raise UnityError(f"{where}: {setting!a} is no option of it; it has reduce, products and smallest")
        if key in found:
            raise UnityError(f"{where}: {key} is given twice; leave one out")
        if key == "smallest" and not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise UnityError(f"{where}: smallest is {value!a}; it must be a number")
        found[key] = int(value) if key == "smallest" else value
    if "smallest" in found and "products" not in found:
        raise UnityError(f"{where}: smallest is of products in 8 bits; say products=float8")
    return found


def in_mixed_precision(graph: Graph, text: str, where: str = "unity-opt: --mixed-precision") -> Graph:
    """
    Return a forward graph in the mixed precision that `text` says, as `--mixed-precision` has it. Raises `UnityError`,
    in a message that begins with `where`, for options that there are not.
    """
    options = mixed_precision_options(text, where)
    return mixed_precision(graph, options.pop("type"), **options)


def mixed_precision(
    graph: Graph, dtype: str, reduce: str = "f32", products: str = "", smallest: int = SMALLEST
) -> Graph:
    """
    Return a forward graph that computes in `dtype` (bf16 or f16), with weights, their gradients and the optimizer's
    state in f32, as FSDP's `MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)` does.

    A weight gets the type `dtype` and a master in f32, which is stored and updated: each piece is cast where it is
    stored, so that moves carry `dtype`. Its gradient is summed over operators and devices in `reduce`, f32 or `dtype`.
    Kernels add up in f32. With `products` float8, those of a weight with at least `smallest` rows and columns,
    multiples of 16, read both operands in 8 bits (`forms.float8`), all but the last before the loss; with float8-all
    those for the weights' gradients, too. A frozen weight is stored in `dtype`, as no update needs more of it. These
    stay f32:

    - inputs, which are cast where they are read;
    - operators whose results are outputs (the loss), and a loss in several operators from its `log_softmax` on, as in
      PyTorch's autocast;
    - operators that read only integers and constants, and weights that these read.

    Raises `UnityError` for another `dtype`, `reduce` or `products`, for a whole training step, and if no input or
    weight is f32.
    """
    if dtype not in HALVES:
        raise UnityError(f"mixed precision: {dtype!a} is no type to compute in; use {' or '.join(HALVES)}")
    if reduce not in (dtype, "f32"):
        raise UnityError(f"mixed precision: gradients cannot be reduced in {reduce!a}; use f32 or {dtype}")
    if products not in ("", *ROUNDINGS):
        raise UnityError(f"mixed precision: products cannot be {products!a}; use {' or '.join(ROUNDINGS)}")
    if smallest < 1:
        raise UnityError(f"mixed precision: smallest is {smallest}; it must be at least 1")
    if graph.updates:
        raise UnityError("mixed precision: the function is a whole training step; do it before pcg-differentiate")
    last = _losses(graph)
    rounded = _products(graph, smallest) if products else set[Node]()
    if not any(_is_long(v) for n in graph.nodes() if n.is_leaf for v in n.results):
        raise UnityError("mixed precision: no input or weight is f32; there is nothing to cast")
    read_long = {v for n in last for v in (*n.operands, *n.results)}
    short: dict[Value, Value] = {}
    long: set[Value] = set()
    """Constants, and what is made of integers and of these alone, such as positions, which are too long for `dtype`."""

    def cast(value: Value, to: str) -> Value:
        return apply("cast", (value,), {"to": to}, value.node.view).result

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node in last and node.is_compute:
            operands = tuple(cast(v, "f32") if v.type.dtype == dtype else v for v in operands)
            return rebuild(node, operands, node.view).results
        floats = [v for v in operands if v.type.is_floating]
        if not node.is_leaf and not long.issuperset(floats):
            operands = tuple(shortened(v) for v in operands)
            if node.op == "cast" and node.attribute("to") == "f32":
                return apply(node.op, operands, {"to": dtype}, node.view).results
            if node in rounded:
                return apply(IN_FLOAT8[node.op], operands, {"all": int(products == ALL)}, node.view).results
            return rebuild(node, operands, node.view).results
        results = rebuild(node, operands, node.view).results
        if node.op == "constant" or not node.is_leaf:
            long.update(results)
        return results

    def shortened(value: Value) -> Value:
        if not _is_long(value):
            return value
        if value not in short and value.node.op == "constant":
            type = divided_type(value.shape, dtype, value.type.parts, value.type.grad)
            short[value] = leaf("constant", type, value.node.view, **dict(value.node.attributes)).result
        elif value not in short and value.node.op == "weight" and value not in read_long:
            is_trained = value.node.is_trained
            grad, master = (reduce, {"master": value.dtype}) if is_trained else ("", {})
            type = tensor_type(value.shape, dtype, value.degrees, value.type.sum, value.type.copy, grad=grad)
            own = {**dict(value.node.attributes), **master}
            short[value] = leaf("weight", type, value.node.view, **own).result
        elif value not in short:
            short[value] = cast(value, dtype)
        return short[value]

    return rewrite(graph, changed)


IN_FLOAT8 = {"matmul": "float8_matmul", "matmul_nt": "float8_matmul_nt"}
"""Products, and the same of operands in 8 bits."""


def _products(graph: Graph, smallest: int) -> set[Node]:
    """
    Return the products with large weights, of at least `smallest` rows and columns, that another contraction follows.
    """
    users = graph.users()
    leads: dict[Node, bool] = {}
    found: set[Node] = set()
    for node in reversed(graph.nodes()):
        after = [user for v in node.results for user, _ in users.get(v, ())]
        leads[node] = any(leads[user] or has_contractions(user.analysis.bound) for user in after)
        if node.op not in IN_FLOAT8 or not leads[node] or dict(node.attributes).get("act", "identity") != "identity":
            continue
        weight = node.operands[1]
        if weight.node.op == "weight" and all(size >= smallest and size % 16 == 0 for size in weight.shape):
            found.add(node)
    return found


def _losses(graph: Graph) -> set[Node]:
    """
    Return the operators that compute in f32: those whose results are outputs and, of a loss in several operators, all
    from `log_softmax` on that lead nowhere else, but for matrix products and what is before these.
    """
    found = {v.node for v in graph.outputs}
    after: set[Node] = set()
    for node in graph.nodes():
        if node.op == "log_softmax" or any(v.node in after for v in node.operands):
            after.add(node)
    users = graph.users()
    for node in reversed(graph.nodes()):
        is_part = node in after and node.is_compute and not has_contractions(node.analysis.bound)
        if is_part and all(user in found for v in node.results for user, _ in users.get(v, ())):
            found.add(node)
    return found


def _is_long(value: Value) -> bool:
    return value.type.dtype == "f32"

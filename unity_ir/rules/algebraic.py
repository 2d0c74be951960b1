"""Algebraic rules over serial graphs."""

from __future__ import annotations

from collections.abc import Iterator

from unity_ir.pcg.graph import Node, apply
from unity_ir.rules.rule import Match, Rule, Users
from unity_ir.tdl.functions import FUSED


def _fuse(node: Node, users: Users) -> Iterator[Match]:
    """
    rewrite: act(matmul(x, w)) -> matmul(x, w) {act}

    Only where nothing else reads the product, which is no longer there afterwards.
    """
    if node.op not in FUSED:
        return
    product = node.operands[0]
    if product.node.op == "matmul" and product.node.attribute("act") == "identity" and len(users[product]) == 1:
        yield {node.result: apply("matmul", product.node.operands, {"act": node.op}).result}


def _unfuse(node: Node, users: Users) -> Iterator[Match]:
    """
    rewrite: matmul(x, w) {act} -> act(matmul(x, w))

    Lets the contracted dim be split: the sum is whole before the activation sees it (Unity, Figure 16a).
    """
    del users
    if node.op == "matmul" and node.attribute("act") in FUSED:
        yield {node.result: apply(node.attribute("act"), [apply("matmul", node.operands).result]).result}


def _merge(node: Node, users: Users) -> Iterator[Match]:
    """
    rewrite: matmul(x, a), matmul(x, b) -> split(matmul(x, concat(a, b)))

    Applied at the first of the two; both must have the same activation, and neither weight may depend on the other
    product.
    """
    if node.op != "matmul":
        return
    x, a = node.operands
    for other, slot in users[x]:
        if other is node or slot != 0 or other.op != "matmul" or other.attributes != node.attributes:
            continue
        b = other.operands[1]
        if _order(node, other, users) or not (a.node.is_leaf and b.node.is_leaf):
            continue
        joined = apply("concat", [a, b], {"dim": 1}).result
        product = apply("matmul", [x, joined], dict(node.attributes)).result
        parts = apply("split", [product], {"dim": len(product.shape) - 1, "sizes": (a.shape[1], b.shape[1])})
        yield {node.result: parts.results[0], other.result: parts.results[1]}


def _order(node: Node, other: Node, users: Users) -> bool:
    """True if `other` comes first among the users of their common operand, so that each pair is merged once."""
    at = [u for u, _ in users[node.operands[0]]]
    return at.index(other) < at.index(node)


def _split_of_concat(node: Node, users: Users) -> Iterator[Match]:
    """rewrite: split(concat(x, y)) -> x, y"""
    del users
    if node.op != "split":
        return
    joined = node.operands[0].node
    if joined.op != "concat" or joined.attribute("dim") != node.attribute("dim"):
        return
    dim = int(node.attribute("dim"))
    if tuple(v.shape[dim] for v in joined.operands) == node.attribute("sizes"):
        yield dict(zip(node.results, joined.operands, strict=True))


def _concat_of_split(node: Node, users: Users) -> Iterator[Match]:
    """rewrite: concat(split(x)) -> x"""
    del users
    if node.op != "concat":
        return
    parted = node.operands[0].node
    if parted.op == "split" and parted.attribute("dim") == node.attribute("dim") and node.operands == parted.results:
        yield {node.result: parted.operands[0]}


ALGEBRAIC: tuple[Rule, ...] = (
    Rule("fuse-activation", _fuse),
    Rule("unfuse-activation", _unfuse),
    Rule("merge-matmuls", _merge),
    Rule("split-of-concat", _split_of_concat),
    Rule("concat-of-split", _concat_of_split),
)

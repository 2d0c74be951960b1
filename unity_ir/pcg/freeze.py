"""Freeze weights of a graph, by patterns of their names: a step then leaves them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, leaf, rebuild
from unity_ir.pcg.types import divided_type


def freeze(graph: Graph, weights: str) -> Graph:
    """
    Return a forward graph in which the weights that `weights` names are frozen: they have no gradient, no update and no
    optimizer state. They keep the type in which they are computed with, without the master of mixed precision.

    `weights` is a list of patterns of full names (as in `fnmatch`), with commas between them. One that begins with `!`
    names weights that stay trained, or are trained again. The last pattern that a weight's name matches counts: given
    `*,!lm_head.*`, all are frozen but those of `lm_head`. Weights that none matches stay as they are.

    Raises `UnityError` for a whole training step, a pattern that matches no weight, and if no weight stays trained.
    """
    if graph.updates:
        raise UnityError("freeze: the function is a whole training step; do it before pcg-differentiate")
    patterns = [part.strip() for part in weights.split(",")]
    names = [node.name for node in graph.weights()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            known = ", ".join(names[:3]) + ", .." * (len(names) > 3) if names else "none"
            raise UnityError(f"freeze: {pattern!a} matches no weight of @{graph.name}; it has {known}")

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op != "weight":
            return rebuild(node, operands, node.view).results
        last = next((p for p in reversed(patterns) if fnmatchcase(node.name, p.removeprefix("!"))), None)
        return (node if last is None else _trained(node) if last.startswith("!") else frozen(node)).results

    found = rewrite(graph, changed)
    if not any(node.is_trained for node in found.weights()):
        raise UnityError(f"freeze: {weights!a} leaves no weight of @{graph.name} to train")
    return found


def frozen(weight: Node) -> Node:
    """Return a weight's leaf frozen: without a master, and without the element type of a gradient."""
    (type,) = weight.types
    alone = divided_type(type.shape, type.dtype, type.parts, time=type.time)
    return leaf("weight", alone, weight.view, name=weight.name, frozen=1)


def _trained(node: Node) -> Node:
    own = {name: value for name, value in node.attributes if name != "frozen"}
    return leaf("weight", node.types[0], node.view, **own)

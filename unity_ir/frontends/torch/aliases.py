"""
Analyse memory sharing in an exported graph: which nodes are needed, and which in-place operators cannot be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx


def needed(graph: fx.Graph, wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """
    Return the nodes that must be run for the nodes `wanted`, themselves among them: those they depend on through
    operands, and those that write in place into memory they read.
    """
    root = _roots(graph)
    writers = [(n, {root[t] for t in targets}) for n in graph.nodes if (targets := written(n))]
    found: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.all_input_nodes
        read = {root[n] for n in found}
        stack = [n for n, targets in writers if n not in found and targets & read]
    return found


def written(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an operator writes into in place, as its ATen schema declares them; [] for most."""
    return _aliased(node, write=True)


MAY_RETURN = {"dropout", "type_as"}
"""Operators that return their first operand itself where there is nothing to do, which their schemas do not say."""


def _aliased(node: fx.Node, write: bool) -> list[fx.Node]:
    if not write and getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in MAY_RETURN:
        value, *rest = node.args
        is_random = len(rest) == 2 and rest[0] != 0 and rest[1] is True
        return [value] if isinstance(value, fx.Node) and not is_random else []
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or (write and not info.is_write):
            continue
        value: Any = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
        found += [v for v in values if isinstance(v, fx.Node)]
    return found


def _roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """
    Map each node of the graph to the first node whose memory it may share through views and in-place operators; to
    itself if there is none.
    """
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shared = _aliased(node, write=False)
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            shared = node.all_input_nodes[:1]
        root[node] = root[shared[0]] if shared else node
    return root


def stale(graph: fx.Graph, kept: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """
    Return the in-place operators that cannot be imported, each with one later node that reads the written memory by
    another name (an alias); only readers in `kept`, the nodes to be imported, count.

    torch.export replaces later uses of the written tensor by the operator's result, but not uses of views taken before
    the write, nor of the tensor that the written one is a view of.
    """
    root = _roots(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for target in written(node):
            for user in kept:
                if order[user] <= order[node]:
                    continue
                for operand in user.all_input_nodes:
                    if root[operand] is root[target] and order[operand] < order[node]:
                        found[node] = user
    return found

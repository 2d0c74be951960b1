"""
Analyse memory sharing in an exported graph: which nodes share a memory, how each lies in it, and which are needed.

Nodes share a memory where PyTorch's own results at export did, so copies that `reshape` or `contiguous` make or leave
out are known as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Layout:
    """
    The sizes, strides and offset of a tensor, counted in elements: where its elements lie in the memory (PyTorch's
    storage) that it shares with its views. No layout in the sense of a sharding.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def positions(self) -> torch.Tensor:
        """
        Return, for each element of the tensor, its position in the memory, counted in elements: an int64 tensor of the
        tensor's shape, except that expanded dims (of stride 0) have size 1.
        """
        at = torch.full((1,) * len(self.size), self.offset)
        for dim, (size, stride) in enumerate(zip(self.size, self.stride, strict=True)):
            if stride:
                shape = [-1 if d == dim else 1 for d in range(len(self.size))]
                at = at + stride * torch.arange(size).reshape(shape)
        return at


def layout(node: fx.Node) -> Layout | None:
    """
    Return the sizes, strides and offset, in elements, of the tensor that a node of an exported graph computes; dims of
    size 1 get stride 1. Of complex numbers it is the layout of their real view, [.., 2], which may share the memory.
    None if the node computes no tensor or several, or one whose sizes are not fixed.
    """
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(isinstance(s, torch.SymInt) for s in value.shape):
        return None
    size, stride, offset = tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
    if value.is_complex():
        size, stride, offset = (*size, 2), (*(2 * step for step in stride), 1), 2 * offset
    # The stride of a dim of size 1 says nothing.
    return Layout(size, tuple(1 if n == 1 else step for n, step in zip(size, stride, strict=True)), offset)


class Memories:
    """
    Tells which nodes of exported graphs share a memory (PyTorch's storage): each memory has an integer key, and nodes
    whose tensors share it, such as a tensor and its views, have the same key.
    """

    def __init__(self) -> None:
        self._same: dict[int, int] = {}
        """Memories that are one when the model runs, though torch.export has two."""

    def of(self, node: fx.Node) -> int | None:
        """
        Return the key of the memory of the tensor that a node computes; None if it computes no tensor, several, or one
        whose sizes are not fixed.
        """
        return next(iter(self.all_of(node)), None) if layout(node) else None

    def all_of(self, node: fx.Node) -> set[int]:
        """Return the keys of the memories of all tensors that a node computes; empty if it computes none."""
        value: Any = node.meta.get("val")
        values: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
        keys = {_address(v) for v in values if isinstance(v, torch.Tensor)}
        return {self._same.get(key, key) for key in keys}

    def same(self, nodes: Sequence[Any], others: Sequence[Any]) -> None:
        """
        Record that each of `nodes`, the placeholders of a subgraph, has the same memory as the operand passed for it,
        the entry of `others` at the same position: from now on both have one key. Pairs are ignored in which either is
        not exactly one tensor.
        """
        for node, other in zip(nodes, others, strict=True):
            keys, operands = self.all_of(node), self.all_of(other) if isinstance(other, fx.Node) else set[int]()
            if len(keys) == len(operands) == 1 and keys != operands:
                self._same[keys.pop()] = operands.pop()

    def unite(self, graph: fx.Graph) -> None:
        """
        Give one key to the operand and the result of each operator in a graph, or in its subgraphs, that returns its
        operand unchanged (`returns_operand`): torch.export gives them two memories, but when the model runs they are
        one.
        """
        for node in graph.nodes:
            if returns_operand(node):
                self.same([node], [node.args[0]])
        for module in _subgraphs(graph):
            self.unite(module.graph)

    def written(self, node: fx.Node) -> set[int]:
        """Return the keys of the memories that a node writes into in place, by itself or in its subgraphs."""
        found = {key for target in written(node) for key in self.all_of(target)}
        for module in _modules(node):
            for inner in module.graph.nodes:
                found |= self.written(inner)
        return found

    def needed(self, graph: fx.Graph, wanted: Sequence[fx.Node], outer: set[int]) -> set[fx.Node]:
        """
        Return the nodes of `graph` that must be run to compute the nodes `wanted`: these nodes; with each node, its
        operands; and all nodes that write in place into a memory that the result of one of these nodes has, or into one
        whose key is in `outer` (memories that nodes outside of the graph may read).
        """
        writers = [(n, keys) for n in graph.nodes if (keys := self.written(n))]
        found: set[fx.Node] = set()
        stack = [*wanted, *(n for n, keys in writers if keys & outer)]
        while stack:
            while stack:
                node = stack.pop()
                if node not in found:
                    found.add(node)
                    stack += node.all_input_nodes
            read = {key for n in found for key in self.all_of(n)}
            stack = [n for n, keys in writers if n not in found and keys & read]
        return found


def _address(x: torch.Tensor) -> int:
    """Return where the memory of a tensor is kept; the same for views of it."""
    storage: Any = x.untyped_storage()
    return int(storage._cdata)


def _modules(node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the subgraphs that an operator such as `wrap_with_set_grad_enabled` runs."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" and node.op == "call_function":
            module = getattr(node.graph.owning_module, str(operand.target), None)
            if isinstance(module, fx.GraphModule):
                yield module


def _subgraphs(graph: fx.Graph) -> Iterator[fx.GraphModule]:
    for node in graph.nodes:
        yield from _modules(node)


def written(node: fx.Node) -> list[fx.Node]:
    """
    Return the operands that an operator writes into in place, as its ATen schema declares them; [] for operators that
    write nowhere, which most are.
    """
    schema: Any = getattr(node.target, "_schema", None)
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value: Any = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
        found += [v for v in values if isinstance(v, fx.Node)]
    return found


def returns_written(node: fx.Node) -> bool:
    """
    Return whether an operator's result is the operand that it writes into, as the result of `add_` is: the importer
    then writes the result into that operand's memory.
    """
    schema: Any = getattr(node.target, "_schema", None)
    info = schema.returns[0].alias_info if schema and len(schema.returns) == 1 else None
    return info is not None and info.is_write


def returns_operand(node: fx.Node) -> bool:
    """
    Return whether an operator returns its operand itself, the same tensor, though its ATen schema does not say so:
    dropout with probability 0, or outside of training.
    """
    if getattr(getattr(node.target, "overloadpacket", None), "__name__", "") != "dropout":
        return False
    _, p, train = node.args
    return p in (0, 0.0) or train is False

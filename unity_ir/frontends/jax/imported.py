# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Import a loss function of JAX as a graph."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.fx.traceback import preserve_node_meta

from unity_ir.errors import UnityError, UnityReport
from unity_ir.frontends.jax.random import RandomKey
from unity_ir.frontends.jax.run import JaxprRunner, StackedWeight
from unity_ir.frontends.jax.trace import ArrayLeaf, LossTrace, trace
from unity_ir.frontends.jax.values import tensor_of, to_torch, torch_type
from unity_ir.frontends.torch.imported import Imported, from_torch
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, leaf, rebuild
from unity_ir.pcg.types import tensor_type


@dataclass(frozen=True)
class ImportedLoss(Imported):
    """A graph imported from a loss function of JAX; its weights are the arrays of the function's first argument."""

    trace: LossTrace | None = None
    """The function's jaxpr, and the names of the arrays of its arguments."""


def from_jax(loss: Callable[..., Any], arguments: Sequence[Any], name: str | None = None) -> ImportedLoss:
    """
    Import what `loss(weights, *batch)` computes, for arrays of the shapes of `arguments`, as a graph. `loss` returns a
    scalar, or a tuple or list whose first element is one.

    `arguments` are an example of what the function is called with: any trees of arrays, of which the first holds the
    weights. Arrays may be `jax.ShapeDtypeStruct`s. Names are paths in these trees, with dots (`layers.0.kernel`); those
    of a batch of several arguments begin with the argument's. `name` is the graph's, by default the function's. Loops
    of known length are unrolled; a weight that is only scanned over becomes one for each position of its first dim. One
    that is only read as a matrix, such as [features, heads, size] as [features, heads * size], has that shape.

    Raises `UnityError` where the function fails, is no scalar, or depends on no weight, and where an operator cannot be
    imported.
    """
    traced = trace(loss, arguments)
    module = _TracedModule(traced)
    given = {input_name(array): _example(array) for array in traced.batch if not array.is_key}
    with _said_of_jax(), preserve_node_meta():
        found = from_torch(module, given, name=name or traced.name)
    graph = with_flat_weights(found.graph)
    shapes = {node.name: node.result.shape for node in graph.weights()}
    weights = {n: module.given.get(n, torch.empty_like(w, device="meta")) for n, w in found.weights.items()}
    weights = {n: w.reshape(shapes[n]) for n, w in weights.items()}
    tables = {n: module.given.get(n, t) for n, t in found.tables.items()}
    return ImportedLoss(graph, weights, tables, found.names, found.counters, traced)


def with_flat_weights(graph: Graph) -> Graph:
    """
    Return a graph with each weight that is read in one other shape only, by reshapes, in that shape: plans divide the
    columns of matrices.
    """
    users, outputs = graph.users(), set(graph.outputs)
    flat: dict[Node, tuple[int, ...]] = {}
    for node in graph.weights():
        readers = [user for user, _ in users.get(node.result, ())]
        shapes = {user.result.shape if user.op == "reshape" else () for user in readers}
        if node.result not in outputs and len(shapes) == 1 and (shape := shapes.pop()):
            flat[node] = shape

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node in flat:
            return [leaf("weight", tensor_type(flat[node], node.result.type.dtype), name=node.name).result]
        if node.op == "reshape" and node.operands[0].node in flat:
            return operands
        return rebuild(node, operands, node.view).results

    return rewrite(graph, changed) if flat else graph


def input_name(given: ArrayLeaf) -> str:
    """Return the name of an input of the graph: PyTorch's are arguments of a function, so identifiers."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in given.name)
    return name if name.isidentifier() and not iskeyword(name) else f"input_{name}"


class _TracedModule(nn.Module):
    """A traced loss as a PyTorch module, whose parameters have the names of the weights."""

    def __init__(self, traced: LossTrace):
        super().__init__()
        self.traced = traced
        self.given: dict[str, torch.Tensor] = {}
        """The weights' tensors by name, of those that are arrays and not only shapes."""
        self._own: dict[str, torch.Tensor] = {}
        for array_leaf in traced.weights:
            array = (
                None if isinstance(array_leaf.array, jax.ShapeDtypeStruct) else tensor_of(np.asarray(array_leaf.array))
            )
            for at, full in enumerate(array_leaf.names):
                shape = array_leaf.shape[1:] if array_leaf.stacked else array_leaf.shape
                # Memory that is never written takes none: the values of trained weights do not matter here.
                tensor = torch.empty(shape, dtype=torch_type(array_leaf.dtype))
                if array is not None:
                    self.given[full] = array[at] if array_leaf.stacked else array
                    tensor = tensor if tensor.is_floating_point() else self.given[full]
                self._own[full] = self._register(full, tensor)

    def _register(self, full: str, tensor: torch.Tensor) -> torch.Tensor:
        *path, last = full.split(".")
        at: nn.Module = self
        for part in path:
            child = at._modules.get(part)
            if child is None:
                child = nn.Module()
                at.add_module(part, child)
            at = child
        if tensor.is_floating_point():
            at.register_parameter(last, nn.Parameter(tensor))
        else:
            at.register_buffer(last, tensor)
        return at.get_parameter(last) if tensor.is_floating_point() else at.get_buffer(last)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, whose arrays are given by their names."""
        own = dict((*self.named_parameters(), *self.named_buffers()))
        arguments: list[Any] = []
        for array_leaf in self.traced.weights:
            parts = [own[full] for full in array_leaf.names]
            arguments.append(StackedWeight(parts) if array_leaf.stacked else parts[0])
        for array_leaf in self.traced.batch:
            arguments.append(RandomKey() if array_leaf.is_key else inputs[input_name(array_leaf)])
        jaxpr, runner = self.traced.jaxpr, JaxprRunner(self.traced.name)
        loss = runner.run(jaxpr.jaxpr, jaxpr.consts, arguments)[0]
        runner.report.check()
        return to_torch(loss)


def _example(given: ArrayLeaf) -> torch.Tensor:
    if not isinstance(given.array, jax.ShapeDtypeStruct):
        return tensor_of(np.asarray(given.array))
    return torch.zeros(given.shape, dtype=torch_type(jnp.dtype(given.dtype)))


@contextmanager
def _said_of_jax() -> Generator[None]:
    """Have errors of the import, in the `with` statement, say that it is one from JAX."""
    try:
        yield
    except UnityError as error:
        text = str(error).replace("--from-torch: torch.export failed: ", "--from-jax: ", 1)
        said = text.replace("--from-torch: ", "--from-jax: ", 1)
        said = said if said.startswith("--from-jax: ") else f"--from-jax: {said}"
        raise type(error)(said) if type(error) is UnityReport else UnityError(said) from error

"""Import a PyTorch module as a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unity_ir.frontends.torch.export import Exported, export
from unity_ir.frontends.torch.importer import Importer
from unity_ir.frontends.torch.slices import with_slices_joined
from unity_ir.frontends.torch.weights import save_weights
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.origin import Origin


@dataclass(frozen=True)
class Imported:
    """
    A graph imported from a PyTorch module, whose first output is the loss, and the tensors of its weights and tables.

    Tables are inputs whose values come with the model: buffers and constants. Further outputs are what a step replaces
    tables by: the running statistics of batch norms.
    """

    graph: Graph
    weights: dict[str, torch.Tensor]
    """
    The parameters the loss depends on, trained and frozen, by full name; they share memory with the module.
    """
    tables: dict[str, torch.Tensor]
    """Inputs of the graph that were folded from buffers and constants, by name; and `counters`."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of the module's state dict (of tied weights and tables), each with the name of its weight or table."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tables that are no inputs: numbers of batches (`num_batches_tracked`), with what a step adds to each."""

    @property
    def origin(self) -> Origin:
        """
        The names by which an emitted program reads the module's state dict: the tables (inputs whose values come with
        the module, such as buffers), the further keys of tied weights, and the counters (`num_batches_tracked`).
        """
        return Origin(tuple(t for t in self.tables if t not in self.counters), self.names, self.counters)

    def save(self, path: str | Path) -> None:
        """
        Write the weights, under all of their names in the state dict, and the tables (buffers, constants) to one
        safetensors file at `path`, which is replaced only when complete.

        Raises `UnityError` for tensors on the meta device, `OSError` where the file cannot be written.
        """
        found = {**self.weights, **self.tables}
        save_weights({**found, **{key: found[of].clone() for key, of in self.names.items() if key not in found}}, path)


def from_torch(
    module: nn.Module, example_inputs: Any, loss: Callable[..., Any] | None = None, name: str | None = None
) -> Imported:
    """
    Import what a PyTorch module and its loss compute in training mode, on inputs of the example's shapes, as a graph.
    The module is put into training mode.

    `example_inputs` are a tensor, a tuple of positional arguments, or a dict of arguments by name. `loss` is called as
    `loss(output, *targets)`: the targets are the last example inputs of a tuple, or those with the names of its
    parameters in a dict. Without a loss, it is in the module's output (`export.loss_in`). `name` is the graph's, by
    default that of the module's class.

    Raises `UnityError` where torch.export fails, the loss is no scalar, or it depends on no trained parameter, and
    `UnityReport` with a line for each operator that has no mapping.
    """
    return convert(export(module, example_inputs, loss), name or type(module).__name__)


def convert(exported: Exported, name: str) -> Imported:
    """
    Return an exported module with its loss (`export.export`) as a graph called `name`, together with the tensors of its
    weights and of its tables (inputs whose values come with the module: buffers, constants).

    Raises `UnityReport` with a line for each operator that has no mapping, and `UnityError` if the loss depends on no
    trained parameter.
    """
    importer = Importer(exported, name)
    outputs = (importer.loss(), *importer.tables.replaced.values())
    used = {n.name for n in topological(outputs) if n.op in ("input", "weight")}
    inputs = [n for n in (*importer.inputs.values(), *importer.tables.leaves) if n.name in used]
    counters = _counters(exported, importer.tables.calls)
    numbers = {full: tensor.detach() for full, tensor in exported.buffers.values() if full in counters}
    kept = used | counters.keys()
    return Imported(
        with_slices_joined(Graph(name, tuple(inputs), outputs)),
        {n: w for n, w in importer.weights.items() if n in used},
        {n: t.detach() for n, t in importer.tables.values.items() if n in used} | numbers,
        {key: of for key, of in exported.state.items() if of in kept and of not in importer.inputs},
        counters,
    )


def _counters(exported: Exported, calls: Mapping[str, int]) -> dict[str, int]:
    """
    Return the names of the numbers of batches of batch norms, with what a step adds to each: how many times it replaces
    the running mean of the same module, as `calls` has it by name.
    """
    there = {full for full, _ in exported.buffers.values()}
    means = {
        name.rpartition("running_mean")[0]: count for name, count in calls.items() if name.endswith("running_mean")
    }
    found = {f"{module}num_batches_tracked": count for module, count in means.items()}
    return {name: count for name, count in found.items() if name in there}

"""Export a plan's training step as Chakra execution traces, a file for each rank, which ASTRA-sim runs on a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property

from unity_ir.interop.chakra.nodes import NodeList
from unity_ir.interop.chakra.ranks import ClassTrace, ProcessGroups
from unity_ir.interop.chakra.schema import TraceAttribute, TraceNode, encoded_metadata
from unity_ir.interop.chakra.staged import StagedNodes
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.simulate.replay import replay
from unity_ir.simulate.streams import pinned_axes
from unity_ir.simulate.tasks import TaskGraph

PREFIX = "step"
"""The traces are `step.0.et`, `step.1.et`, ..: ASTRA-sim takes the name up to the rank."""

GROUPS = "comm_groups.json"
"""The file of process groups, for ASTRA-sim's `--comm-group-configuration`."""


def is_file_of_traces(name: str) -> bool:
    """Return whether a file has a name that traces are written under, so that traces may replace it."""
    return name == GROUPS or re.fullmatch(rf"{PREFIX}\.\d+\.et", name) is not None


class ChakraStep:
    """
    The traces of one step of a plan on a machine. Raises `UnityError` for a schedule that goes on from step to step.
    """

    def __init__(self, plan: Plan, machine: Machine):
        self.plan, self.machine = plan, machine
        self.groups = ProcessGroups()
        self._classes: dict[tuple[int, ...], ClassTrace] = {}
        self._staged = None if plan.pipeline is None else StagedNodes(plan, machine)

    @cached_property
    def _apart(self) -> tuple[int, ...]:
        """The mesh axes along which devices differ in what they do."""
        leading = () if self._staged is None else self._staged.leading
        pinned = pinned_axes(tensor.layout for tensor in self.plan.program.tensors.values())
        return tuple(sorted({*leading, *pinned}))

    def _trace(self, rank: int) -> ClassTrace:
        """Return the trace of the class of a rank."""
        mesh = self.machine.mesh
        at = mesh.coordinates(rank)
        place = tuple(at[axis] for axis in self._apart)
        if place not in self._classes:
            if self._staged is None:
                made = NodeList(self.machine, rank)
                made.play(self.plan, self._tasks)
            else:
                made = self._staged.nodes(rank)
            self._classes[place] = ClassTrace(made.nodes, mesh, self.groups)
        return self._classes[place]

    @cached_property
    def _tasks(self) -> TaskGraph:
        return replay(self.plan, self.machine)

    def nodes(self, rank: int) -> list[TraceNode]:
        """Return the nodes of a rank's trace, in the order in which they are issued."""
        return list(self._trace(rank).of_rank(rank))

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each file: a trace for each rank, and the process groups."""
        about = (
            TraceAttribute("model", "string", self.plan.program.name),
            TraceAttribute("machine", "string", self.machine.name),
        )
        head = encoded_metadata(about)
        for rank in range(self.plan.program.devices):
            yield f"{PREFIX}.{rank}.et", b"".join((head, *self._trace(rank).encoded_rank(rank)))
        lines = [f"{json.dumps(name)}: {json.dumps(ranks)}" for name, ranks in self.groups.by_name().items()]
        yield GROUPS, ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def chakra_step(graph: Graph, machine: Machine, optimizer: Optimizer | None = None) -> ChakraStep:
    """
    Return the traces of the training step of a placed graph (one with machine views), as it is emitted. `optimizer` is
    used if the graph names none; None means SGD.
    """
    return ChakraStep(plan_graph(graph, machine, optimizer), machine)

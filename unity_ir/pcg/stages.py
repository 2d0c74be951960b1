"""
Put the operators of a plan in stages: contiguous parts of the graph, each on a part of the machine of its own.

The machine is cut along its leading mesh axes into as many equal parts as there are stages. A plan for one part, with
the whole graph on it, becomes a plan of the machine by pinning each operator to the part of its stage. What a later
stage reads is then in another place, and what leads there (a send) follows from types, as every reshard does; so do the
sends of gradients back, by duality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.loss_part import head
from unity_ir.pcg.node import Node, Value, parallel, rebuild
from unity_ir.pcg.parallel import HALO_OPERATORS
from unity_ir.pcg.sharding import (
    REPEAT,
    Layout,
    Mesh,
    grid_order,
    layout_view,
    pinned_at,
    place,
    view_of,
)


def stage_axes(mesh: Mesh, stages: int) -> int:
    """
    Return how many mesh axes, from the outermost, lead from one part of the machine to the next in a pipeline of
    `stages` parts, each of which runs one stage (or several, its chunks): the sizes of these axes multiply to `stages`.
    On a mesh of sizes (2, 2, 2), given 4, returns 2.

    Raises `UnityError` if no leading axes have sizes that multiply to `stages`.
    """
    known = [prod(mesh.sizes[:i]) for i in range(len(mesh.sizes) + 1)]
    if stages not in known:
        *some, last = map(str, known)
        raise UnityError(
            f"stages: {stages} is no product of the outermost mesh axes, {' x '.join(map(str, mesh.sizes)) or 1}; use "
            f"{', '.join(some) + ' or ' if some else ''}{last}"
        )
    return known.index(stages)


def stage_axes_of(graph: Graph, mesh: Mesh) -> int:
    """
    Return how many mesh axes, from the outermost, lead from one part of the machine to the next in the pipeline of a
    graph (`stage_axes`); 0 if the graph has no stages. Raises `UnityError` if no leading axes have sizes that multiply
    to the ranks of its pipeline.
    """
    return 0 if graph.pipeline is None else stage_axes(mesh, graph.pipeline.ranks)


def in_stages(plan: Graph, stage_of: Mapping[Node, int], rank_of: Sequence[int], mesh: Mesh) -> Graph:
    """
    Return a plan in stages on the whole machine, given `plan`, which has all operators on one part of the machine.
    Stage s is on part `rank_of[s]`; a part may have several stages. `mesh` is that of the whole machine; its leading
    axes lead from part to part.

    `stage_of` has the stage, from 0, of compute nodes of `plan`. A node that it leaves out, such as the cast of a
    weight, is in the first stage that reads its result; if it depends on no weight, it is in every stage that does. A
    weight is stored in the first stage that reads it. A loss in pieces is made by one stage, the last of its operators'
    stages.

    Raises `UnityError` for stages that do not fit the mesh, and for a stage that reads what a later one makes.
    """
    staged = _Stages(plan, _with_whole_loss(plan, stage_of), rank_of, mesh)
    found = staged.graph()
    # Without a view a parallel operator's result is where its operand leads it; a view says where that is elsewhere.
    at = place(found, mesh).layouts
    staged.viewed = {old for value, (old, layout) in staged.layouts.items() if at.get(value, layout) != layout}
    return staged.graph() if staged.viewed else found


class _Stages:
    """A plan in stages, in the making: each value once where it is made, and again in other stages that read it."""

    def __init__(self, plan: Graph, stage_of: Mapping[Node, int], rank_of: Sequence[int], mesh: Mesh):
        self.plan = plan
        self.mesh = mesh
        self.rank_of = rank_of
        self.count = stage_axes(mesh, max(rank_of) + 1)
        self.part = Mesh(mesh.sizes[self.count :])
        self.placement = place(plan, self.part)
        self.of_weights = _of_weights(plan)
        self.where = _stages(plan, stage_of, len(rank_of))
        self.viewed: set[Node] = set()
        """Parallel operators of the plan that need a view, where they have none."""
        self.layouts: dict[Value, tuple[Node, Layout]] = {}
        """For what parallel operators make: the plan's operator, and where its result is to be."""
        self.made: dict[tuple[Value, int | None], Value] = {}

    def graph(self) -> Graph:
        """Return the plan in stages."""
        self.made.clear()
        self.layouts.clear()
        for node in self.plan.nodes():
            self._node(node, self.where[node])
        return replace(
            self.plan,
            inputs=tuple(self.made[n.result, self.where[n]].node for n in self.plan.inputs),
            outputs=tuple(self.made[v, self.where[v.node]] for v in self.plan.outputs),
        )

    def _node(self, node: Node, stage: int | None) -> None:
        """Make a node in a stage; None are all of them."""
        leading = (REPEAT,) * self.count if stage is None else self._pinned(stage)
        operands = [self._read(v, stage) for v in node.operands]
        if node.is_compute:
            view = view_of((*leading, *self.placement.assignments[node]), grid_order(node), self.mesh)
            new = rebuild(node, operands, view)
        else:
            layout = (*leading, *self.placement.layouts[node.result])
            has_view = node.is_leaf or node.view is not None or node in self.viewed
            new = rebuild(
                node, operands, layout_view(layout, len(node.types[0].shape), self.mesh) if has_view else None
            )
            self.layouts[new.result] = node, layout
        self.made.update(((old, stage), value) for old, value in zip(node.results, new.results, strict=True))

    def _read(self, value: Value, stage: int | None) -> Value:
        """Return a value of the plan as a stage reads it: by a send, where another one has made it."""
        home = self.where[value.node]
        if (value, stage) in self.made:
            return self.made[value, stage]
        if home is None or home == stage:
            return self.made[value, home]
        if value.node.op == "recompute":
            # What a stage receives is kept there: to compute it again another stage would have to.
            return self._read(value.node.operands[0], stage)
        if value.node.is_parallel and not self._is_sent(value):
            self._node(value.node, stage)
            return self.made[value, stage]
        assert stage is not None
        return self._sent(value, home, stage)

    def _sent(self, value: Value, home: int, stage: int) -> Value:
        """
        Return a value of stage `home` in a later one: a weight, which is sent once per step, at once, and what
        micro-batches make from stage to stage. What an earlier stage on the same devices has received is read again.
        """
        if (value, stage) in self.made:
            return self.made[value, stage]
        is_weight = value.node.op == "weight"
        near = range(home, stage if is_weight else stage - 1)
        held = next((s for s in near if self.rank_of[s] == self.rank_of[stage] and (value, s) in self.made), None)
        if held is not None:
            return self.made.setdefault((value, stage), self.made[value, held])
        source = home if is_weight else stage - 1
        layout = (*self._pinned(stage), *self.placement.layouts[value])
        view = layout_view(layout, len(value.shape), self.mesh)
        found = parallel("send", self._sent(value, home, source), view, source=source, target=stage)
        return self.made.setdefault((value, stage), found.result)

    def _pinned(self, stage: int) -> Layout:
        """Return the roles of the leading axes of values of a stage."""
        leading = Mesh(self.mesh.sizes[: self.count])
        return tuple(pinned_at(c) for c in leading.coordinates(self.rank_of[stage]))

    def _is_sent(self, value: Value) -> bool:
        """
        Return whether what a parallel operator makes is sent, and not an operand of its chain: the smallest piece is,
        of equal ones the last. Chains of weights are done by each stage, so that in time only what is whole is sent;
        so are halos, which are copies of what the neighbours have.
        """
        if value.node in self.of_weights or value.node.op in HALO_OPERATORS:
            return False
        own = before = _piece(value)
        while value.node.is_parallel:
            (value,) = value.node.operands
            before = min(before, _piece(value))
        return own == before


def _with_whole_loss(plan: Graph, stage_of: Mapping[Node, int]) -> Mapping[Node, int]:
    """Return the stages in which the head, of a loss in pieces, is in that of the loss, with all between them."""
    if plan.loss_pieces == 1:
        return stage_of
    after = {head(plan)}
    for node in plan.nodes():
        if not after.isdisjoint(v.node for v in node.operands):
            after.add(node)
    last = max((stage_of[n] for n in after if n in stage_of), default=0)
    return {node: last if node in after else stage for node, stage in stage_of.items()}


def _piece(value: Value) -> int:
    """Return the elements of a device's piece."""
    return prod(value.shape) // prod(value.degrees)


def _of_weights(plan: Graph) -> set[Node]:
    """Return the weights of a plan, and all that is made of weights alone."""
    found = set[Node]()
    for node in plan.nodes():
        if node.op == "weight" or (node.operands and all(v.node in found for v in node.operands)):
            found.add(node)
    return found


def _stages(plan: Graph, stage_of: Mapping[Node, int], stages: int) -> Mapping[Node, int | None]:
    """Return the stage of each node of a plan; None for those that every stage does."""
    nodes = plan.nodes()
    needs = set[Node]()
    """Nodes that need a weight."""
    for node in nodes:
        if node.op == "weight" or any(v.node in needs for v in node.operands):
            needs.add(node)
    readers: dict[Node, set[int]] = {node: set() for node in nodes}
    for node in reversed(nodes):
        if node in stage_of and node in needs:
            readers[node] = {stage_of[node]}
        elif node in needs and not node.is_parallel:
            readers[node] = {min(readers[node], default=stages - 1)}
        for value in node.operands:
            readers[value.node] |= readers[node]
    found: dict[Node, int | None] = {}
    for node in nodes:
        if node.is_parallel and node in needs:
            found[node] = found[node.operands[0].node]
        else:
            found[node] = next(iter(readers[node])) if len(readers[node]) == 1 else None
        mine = found[node]
        late = [v.node for v in node.operands if (found[v.node] or 0) > (stages if mine is None else mine)]
        if late:
            raise UnityError(
                f"pcg.{node.op}: is in stage {mine}, and reads pcg.{late[0].op} of stage {found[late[0]]}; a stage "
                "reads what stages before it make"
            )
    return found

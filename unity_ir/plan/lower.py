"""
Lower a placed graph to one rank's program: instructions on local tensors, with explicit collectives.

Every rank runs the same instructions on its own pieces (SPMD). Moves of one kind in a row become one collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.anchors import Anchors
from unity_ir.pcg.graph import Graph, optimizer_of_step, topological
from unity_ir.pcg.loss_part import head
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.parallel import IN_TIME
from unity_ir.pcg.reshard import Move, group_role
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    GridRole,
    Layout,
    Mesh,
    assignment_for,
    copies_as_repeats,
    is_pinned,
    pins_of,
    place,
)
from unity_ir.pcg.stages import stage_axes_of
from unity_ir.pcg.types import TensorType
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.host_values import values_to_host, with_values_at_host
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    Tensor,
    TimeStep,
    UpdateWeight,
    makers_of,
    reads,
)
from unity_ir.plan.loss_pieces import in_loss_pieces
from unity_ir.plan.moves import plan_moves
from unity_ir.plan.program import Program, global_line, running_statistic
from unity_ir.tdl.divisibility import Halos

JOINED = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds of collectives of which one over all axes does what two in a row do."""

SLOWER_CALL = 1.05
"""
Times the seconds of two collectives in a row that one in their place may take. No price has what a second call costs:
its launch, and a compute stream that waits for the first.
"""


def lower(graph: Graph, machine: Machine) -> Program:
    """
    Return one rank's program for a placed graph (one whose operators have machine views) on a machine: a training step,
    or a forward alone.

    Raises `UnityError` if the views do not fit the machine, if operators have different numbers of micro-batches, or if
    the loss cannot be made in the graph's number of pieces (`loss_pieces`).
    """
    lowering = _Lowering(graph, machine)
    program = with_single_calls(lowering.program(), machine)
    if graph.loss_pieces > 1:
        program = in_loss_pieces(program, graph.loss_pieces, lowering.made_by(head(graph)))
    if not graph.offloads_activations or program.optimizer is None:
        return program
    if graph.pipeline is not None:
        raise UnityError("offload: a step in stages keeps its values on the devices; leave offload or the stages out")
    return with_values_at_host(program, values_to_host(program, graph.staying))


class _Lowering:
    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.machine = machine
        self.placement = place(graph, machine.mesh)
        self.micro_batches = _micro_batches(graph)
        self.stage_axes = stage_axes_of(graph, machine.mesh)
        """How many leading mesh axes stages are along."""
        self.anchors = Anchors(graph)
        self.registers: dict[tuple[Value, Layout, Halos, Halos], Register] = {}
        self.pieces: dict[tuple[Value, Layout, Halos], Register] = {}
        """A register by its value and pieces: its layout with REPEAT for COPY."""
        self.found: dict[tuple[Value, Layout], Register] = {}
        """The registers that `_at` returned, by value and layout, where no `name` was given."""
        self.types: dict[tuple[TensorType, Layout], Tensor] = {}
        """The types of registers, by those of values."""
        self.masters: dict[Value, Register] = {}
        """The register of each weight as it is stored, where it is computed with in another element type."""
        self.tensors: dict[Register, Tensor] = {}
        self.body: list[Instruction] = []

    def program(self) -> Program:
        early = self._early()
        done = self._before_the_loop(early) if early else set[Node]()
        for node in self.graph.nodes():
            if node not in done:
                self._node(node)
        updates: list[Instruction] = []
        is_at_host = optimizer_of_step(self.graph).at_host
        for update in self.graph.updates:
            layout = self.placement.layouts[update.weight]
            master = self.masters.get(update.weight)
            weight = self._at(update.weight, layout) if master is None else master
            own = UpdateWeight(weight, self._at(update.grad, layout))
            updates += [StateMove(weight, "from_host"), own, StateMove(weight, "to_host")] if is_at_host else [own]
        made = makers_of(self.body)
        outputs = tuple(self._output(v, made) for v in self.graph.outputs)
        sizes = self.placement.mesh.sizes
        mesh = Mesh((*sizes, self.micro_batches)) if self.micro_batches > 1 else self.placement.mesh
        body = (*self.body, *updates)
        return Program(
            self.graph.name,
            mesh,
            self.tensors,
            body,
            outputs,
            self.graph.optimizer,
            self.micro_batches,
            pipeline=self.graph.pipeline,
            ring_attention=self.graph.ring_attention,
            exchange_rows=self.graph.exchange_rows,
            bucket=self.graph.bucket,
        )

    def _output(self, value: Value, made: Mapping[Register, Instruction]) -> Register:
        """
        Return the register of an output: in its own layout, or in that of the input whose next value it is. `made` has
        the instruction that makes each register.
        """
        register = self._at(value, self.placement.layouts[value])
        running = running_statistic(made, register)
        return register if running is None else self._at(value, self.tensors[running.leaf.result].layout)

    def made_by(self, node: Node) -> Register:
        """Return the register of the first result of a compute node."""
        value = node.results[0]
        return self.registers[value, self.placement.layouts[value], value.type.halo, value.type.halo_sum]

    def _node(self, node: Node) -> None:
        if node.is_leaf:
            self._leaf(node)
        elif node.is_compute:
            self._compute(node)
        elif node.op in IN_TIME:
            self._time_step(node)
        elif node.op == "send" and self.stage_axes:
            self._send(node)
        elif node.op != "halo" and self.anchors.materialised(node.result):
            self._at(node.operands[0], self.placement.layouts[node.result], node.result)

    def _early(self) -> list[Node]:
        """
        Return the steps that add up over all micro-batches what each of them needs, such as how many labels count.
        Raises `UnityError` where that is no matter of the inputs alone, as every operator would be run twice for it.
        """
        found: dict[Node, None] = {}
        for node in self.graph.nodes():
            late = _sums_before(node.operands[0]) if node.op in ("reuse", "pipeline") else []
            for each in late:
                before = topological(each.operands)
                if any(n.op == "weight" or _sums_before(n.results[0]) for n in before):
                    reader = next(v for v in reversed(topological(node.operands)) if each.result in v.operands)
                    raise UnityError(
                        f"pcg.{reader.op}: each of the {self.micro_batches} micro-batches needs its gradient, which is "
                        "of all: a loss must be a sum over samples, and terms without any, or that over a number of "
                        "labels; use 1 micro-batch"
                    )
                found[each] = None
        return [*found]

    def _before_the_loop(self, sums: list[Node]) -> set[Node]:
        """
        Append the loop before: the operators that make these sums of inputs, apart from those that do the same in the
        loop. Return the nodes that need no other lines.
        """
        before = topological([v for node in sums for v in node.operands])
        inputs = {node for node in before if node.op == "input"}
        for node in inputs:
            self._leaf(node)
        registers, pieces = dict(self.registers), dict(self.pieces)
        for node in (*before, *sums):
            if node not in inputs:
                self._node(node)
        only = {*sums}
        users = self.graph.users()
        for node in reversed(before):
            if all(user in only for v in node.results for user, _ in users.get(v, ())):
                only.add(node)
        kept = {node.result for node in sums}
        self.registers = registers | {key: r for key, r in self.registers.items() if key[0] in kept}
        self.pieces = pieces | {key: r for key, r in self.pieces.items() if key[0] in kept}
        self.found.clear()
        return {*inputs, *only}

    def _with_time(self, value: Value, layout: Layout) -> Layout:
        """Return the role of each axis of the program's mesh: a value's layout over devices, and its role in time."""
        if self.micro_batches == 1:
            return layout
        time = value.type.time
        role = REPEAT if time is None else {"copy": COPY, "sum": SUM}.get(str(time.role), time.role)
        assert isinstance(role, int)
        return (*layout, role)

    def _register(self, value: Value, layout: Layout) -> Register:
        register, type = len(self.tensors), value.type
        tensor = self.types.get((type, layout))
        if tensor is None:
            at = self._with_time(value, layout)
            tensor = self.types[type, layout] = Tensor(type.shape, type.dtype, at, type.halo, type.halo_sum)
        self.tensors[register] = tensor
        self.registers.setdefault((value, layout, type.halo, type.halo_sum), register)
        return register

    def _leaf(self, node: Node) -> None:
        attributes = dict(node.attributes)
        result, layout = node.result, self.placement.layouts[node.result]
        name, value = attributes.get("name", ""), attributes.get("value", 0.0)
        assert isinstance(value, float | int)
        if node.master == result.dtype:
            self.body.append(Leaf(node.op, self._register(result, layout), str(name), float(value)))
            return
        # The cast rests with the weight's pieces, so that what moves is what is computed with.
        master = self.masters[result] = len(self.tensors)
        at = self._with_time(result, layout)
        self.tensors[master] = Tensor(result.shape, node.master, at)
        self.body.append(Leaf(node.op, master, str(name)))
        to = (("to", result.dtype),)
        assignment = assignment_for(global_line("cast", [self.tensors[master]], to), [at], at)
        assert assignment is not None
        self.body.append(Compute("cast", (master,), (self._register(result, layout),), to, assignment))

    def _compute(self, node: Node) -> None:
        operands = tuple(self._at(v, self.placement.needs(node, i)) for i, v in enumerate(node.operands))
        results = tuple(self._register(v, self.placement.layouts[v]) for v in node.results)
        assignment = self.placement.assignments[node]
        if self.micro_batches > 1:
            assignment = (*assignment, _role_in_time(node))
        self.body.append(Compute(node.op, operands, results, node.attributes, assignment))

    def _time_step(self, node: Node) -> None:
        """Append the step by which a value enters the loop over micro-batches, or leaves it, on the same devices."""
        (operand,) = node.operands
        layout = self.placement.layouts[node.result]
        if node.op in ("pipeline", "batch") and int(node.attribute("dim")) in layout:
            dim = node.attribute("dim")
            raise UnityError(
                f"pcg.{node.op}: dim {dim} is divided over devices, too, of which each would need other parts; "
                f"combine dim {dim} before, or make inputs in micro-batches"
            )
        given = self._at(operand, layout)
        self.body.append(TimeStep(given, self._register(node.result, layout), node.op))

    def _send(self, node: Node) -> None:
        """
        Append the send of a value from one stage to another: all its pieces, as they are, between two parts of the
        machine, each in one move; a change of name where both stages are on one part.
        """
        value, mesh = node.operands[0], self.placement.mesh
        at = self.placement.layouts[node.result]
        axes = tuple(range(self.stage_axes))
        before = (*self.placement.layouts[value][: self.stage_axes], *at[self.stage_axes :])
        if not all(is_pinned(before[axis]) and is_pinned(at[axis]) for axis in axes):
            self._at(value, at, node.result)
            return
        given, result = self._at(value, before), self._register(node.result, at)
        stages = int(node.attribute("source")), int(node.attribute("target"))
        if before == at:
            self.body.append(ReshardMove(given, result, "retype", (), REPEAT, REPEAT, stages))
            return
        axes = tuple(axis for axis in axes if before[axis] != at[axis])
        source, target = group_role(before, axes, mesh), group_role(at, axes, mesh)
        self.body.append(ReshardMove(given, result, "send", axes, source, target, stages))

    def _at(self, value: Value, layout: Layout, name: Value | None = None) -> Register:
        """
        Return the register that holds a value in a layout; append the moves that make one if there is none yet.

        Given `name`, the result of a parallel operator on the value, the register has that one's type, and is found
        under it from then on.
        """
        known = self.found.get((value, layout)) if name is None else None
        if known is None:
            known = self._found(value, layout, name)
            if name is None:
                self.found[value, layout] = known
        return known

    def _found(self, value: Value, layout: Layout, name: Value | None) -> Register:
        type = (name or value).type
        while value.node.op == "halo":
            # Values are resharded before their halo is fetched.
            (value,) = value.node.operands
        anchor = self.anchors.of(value)
        found = self.registers.get((anchor, layout, type.halo, type.halo_sum))
        if found is None and type.halo:
            found = self._at(value, layout)
            borders = ((0, 0),) * len(type.shape)
            for dim, border in enumerate(type.halo):
                if any(border):
                    borders = (*borders[:dim], border, *borders[dim + 1 :])
                    found = self._exchange("halo", found, dim, replace(self.tensors[found], halo=borders))
        elif found is None:
            at = self.placement.layouts[anchor]
            found = self.registers[(anchor, at, anchor.type.halo, anchor.type.halo_sum)]
            borders = anchor.type.halo_sum
            for dim, border in enumerate(borders):
                if any(border) and (not type.halo_sum or not any(type.halo_sum[dim])):
                    borders = (*borders[:dim], (0, 0), *borders[dim + 1 :])
                    left = borders if any(map(any, borders)) else ()
                    found = self._exchange("halo_reduce", found, dim, replace(self.tensors[found], halo_sum=left))
            self.registers.setdefault((anchor, at, type.halo, type.halo_sum), found)
            # Replicas that do the same work, or not, are the same pieces: only the role changes.
            alike = (anchor, copies_as_repeats(layout), type.halo_sum)
            found = self.pieces.setdefault((anchor, copies_as_repeats(at), type.halo_sum), found)
            if alike in self.pieces:
                found = self.pieces[alike]
                at = self.tensors[found].layout[: len(layout)]
            for move in plan_moves(anchor, at, layout, self.machine, stage_axes=self.stage_axes):
                at = move.after(at, self.machine.mesh)
                found = self._move(anchor, found, move, at)
            self.pieces.setdefault(alike, found)
        self.registers[(anchor, layout, type.halo, type.halo_sum)] = found
        if name is not None:
            self.registers.setdefault((name, layout, type.halo, type.halo_sum), found)
        return found

    def _exchange(self, kind: str, operand: Register, dim: int, after: Tensor) -> Register:
        low, high = (self.tensors[operand] if kind == "halo_reduce" else after).borders[dim]
        axes = tuple(i for i, role in enumerate(after.layout) if role == dim)
        register = len(self.tensors)
        self.tensors[register] = after
        self.body.append(HaloExchange(operand, register, kind, axes, dim, low, high))
        return register

    def _move(self, anchor: Value, operand: Register, move: Move, layout: Layout) -> Register:
        register = len(self.tensors)
        self.tensors[register] = Tensor(anchor.type.shape, anchor.type.dtype, self._with_time(anchor, layout))
        self.body.append(ReshardMove(operand, register, move.kind, move.axes, move.source, move.target))
        return register


def _micro_batches(graph: Graph) -> int:
    """Return the number of micro-batches of a step. Raises `UnityError` if values are in different numbers of them."""
    found = sorted({t.micro_batches for n in graph.nodes() for t in n.types} - {1})
    if len(found) > 1:
        raise UnityError(f"func.func @{graph.name}: has values in {found[0]} and in {found[1]} micro-batches; use one")
    return found[0] if found else 1


def _sums_before(value: Value) -> list[Node]:
    """Return the steps on the way to a value that add up, or join, what all micro-batches made."""
    return [node for node in topological([value]) if node.op in ("accumulate", "batch")]


def _role_in_time(node: Node) -> GridRole:
    """Return what a compute node's micro-batches do: an index variable that they divide, addends of operands, COPY."""
    time = node.configuration_in_time
    if time.copy > 1:
        return COPY
    return next(iter((*time.degrees, *time.sums)), REPEAT)


def with_single_calls(program: Program, machine: Machine) -> Program:
    """
    Return the program in which two collectives in a row are one over the mesh axes of both, if they have the same kind
    and change of role (all-gathers, reduce-scatters or all-reduces).

    It is done where nothing else reads the tensor between them, no mesh axis is pinned (all devices have a piece), and
    the single call takes at most `SLOWER_CALL` times the seconds of both on `machine`.

    rewrite: all_gather(all_gather(x, axes (2,)), axes (0, 1)) -> all_gather(x, axes (0, 1, 2))
    """
    users = Counter(r for instruction in program.body for r in reads(instruction))
    users.update(program.outputs)
    made: dict[Register, ReshardMove] = {}
    gone: set[Register] = set()
    for instruction in program.body:
        if not isinstance(instruction, ReshardMove):
            continue
        made[instruction.result] = instruction
        before = made.get(instruction.operand)
        if before is None or users[before.result] > 1:
            continue
        both = _joined(program, before, instruction)
        if both is not None and _seconds(program, both, machine) <= SLOWER_CALL * (
            _seconds(program, before, machine) + _seconds(program, instruction, machine)
        ):
            made[instruction.result] = both
            gone.add(before.result)
    body = (made.get(i.result, i) if isinstance(i, ReshardMove) else i for i in program.body)
    kept = tuple(i for i in body if not isinstance(i, ReshardMove) or i.result not in gone)
    return replace(program, body=kept)


def _joined(program: Program, first: ReshardMove, then: ReshardMove) -> ReshardMove | None:
    """Return the collective that does what two in a row do; None where none does."""
    alike = (first.kind, first.source, first.target) == (then.kind, then.source, then.target)
    if not alike or first.kind not in JOINED or pins_of(program.tensors[first.operand].layout):
        return None
    return replace(then, operand=first.operand, axes=tuple(sorted((*first.axes, *then.axes))))


def _seconds(program: Program, move: ReshardMove, machine: Machine) -> float:
    return machine.move_time(move_of(program, move), program.tensors[move.operand].dtype)

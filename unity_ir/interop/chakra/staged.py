"""
Make the nodes of a step in stages: the replays of its parts in the order of the pipeline's schedule, with the sends and
receives between them, as `lowering.runtime.pipeline` runs them and `simulate.stages` times them.
"""

from __future__ import annotations

from functools import cache

from unity_ir.cost.kernels import seconds_of_update
from unity_ir.cost.plan import norm_seconds
from unity_ir.errors import UnityError
from unity_ir.interop.chakra.calls import NetworkCall
from unity_ir.interop.chakra.nodes import NodeList
from unity_ir.machine.model import Machine
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.deadlock import register_names
from unity_ir.plan.instructions import Register, ReshardMove, UpdateWeight
from unity_ir.plan.pipeline.actions import COMPUTE, StageAction
from unity_ir.plan.plan import Plan
from unity_ir.simulate.replay import replay
from unity_ir.simulate.streams import ticks
from unity_ir.simulate.tasks import TaskGraph


class StagedNodes:
    """
    The nodes of each rank of a plan in stages (`Plan.pipeline` is not None). Raises `UnityError` for a schedule that
    goes on from step to step, of which a trace of one step is no part.
    """

    def __init__(self, plan: Plan, machine: Machine):
        assert plan.pipeline is not None
        if plan.pipeline.schedule.gradient_delay:
            raise UnityError(
                f"chakra: {plan.pipeline.schedule.name} of @{plan.program.name} goes on from step to step, and traces "
                "are of one step; use 1f1b"
            )
        self.plan = plan
        self.program = plan.program
        self.machine = machine
        self.parts = plan.pipeline
        self.schedule = plan.pipeline.schedule
        self.plans = {part.name: own for part, own in plan.parts}
        self.leading = tuple(range(len(plan.pipeline.mesh.sizes)))
        """The mesh axes along which the ranks of the pipeline lie."""
        self.moves = {i.result: i for i in plan.program.body if isinstance(i, ReshardMove)}
        self.names = register_names(plan.program)
        self.most_sent = max((len(part.sends) for part in plan.pipeline.parts), default=0)
        """The most values that a part sends."""
        self.replayed = cache(self._replayed)

    def _replayed(self, name: str, is_first: bool, is_last: bool) -> TaskGraph:
        return replay(self.plans[name], self.machine, is_last=is_last, is_first=is_first)

    def nodes(self, device: int) -> NodeList:
        """Return the nodes of a device, and of those that do the same."""
        return _RankNodes(self, device).made()


class _RankNodes:
    def __init__(self, step: StagedNodes, device: int):
        self.step = step
        self.out = NodeList(step.machine, device)
        self.at = step.machine.mesh.coordinates(device)
        self.rank = 0
        for coordinate, size in zip(self.at, step.parts.mesh.sizes, strict=False):
            self.rank = self.rank * size + coordinate
        self.transfers: dict[tuple[str, int], int] = {}
        """The last send or receive, by kind and the other rank of the pipeline."""
        self.done: dict[str, int] = {}

    def made(self) -> NodeList:
        step, out = self.step, self.out
        if "before" in step.plans:
            self._play("before", 0)
        for action in step.schedule.ranks[self.rank]:
            stage, kind, k = action
            if kind in COMPUTE and k is not None:
                if kind != "W":
                    received = step.parts.received(stage, "F" if kind == "F" else "B")
                    out.wait_for(out.made(step.plan, received, k))
                for part in step.parts.run_by(stage, kind):
                    self._play(part.name, k)
            elif k is not None:
                self._transfer(action, k)
        out.ports = dict(out.sum_ports)
        out.play(step.plans["after"], step.replayed("after", True, True))
        self._update()
        return out

    def _play(self, name: str, micro_batch: int) -> None:
        step = self.step
        done = self.done[name] = self.done.get(name, 0) + 1
        is_last = name == "before" or done == step.schedule.micro_batches
        self.out.play(step.plans[name], step.replayed(name, done == 1, is_last), micro_batch)

    def _transfer(self, action: StageAction, k: int) -> None:
        """Add the sends or receives of an action, a message for each value that a device has."""
        step, out, (stage, kind, _) = self.step, self.out, action
        way = 1 if kind.endswith("F") else -1
        sender = stage if kind.startswith("SEND") else stage - way
        ranks = step.schedule.rank_of[sender], step.schedule.rank_of[sender + way]
        names = (f"{sender}F",) if way == 1 else (f"{sender}B", f"{sender}I")
        sent = [s for name in names if name in step.parts.by_name for s in step.parts.by_name[name].sends]
        for n, value in enumerate(sent):
            if not self._has(value.held):
                continue
            # Odd numbers: messages of other lines have even ones.
            tag = ((k * step.most_sent + n) * step.schedule.stages + sender) * 4 + (way == 1) * 2 + 1
            call = NetworkCall("send", step.leading, step.program.bytes[value.held], *ranks, tag=tag)
            move = step.moves[value.received]
            length = ticks(step.machine.move_time(move_of(step.program, move), step.program.tensors[move.result].dtype))
            key = kind[:4], ranks[kind.startswith("SEND")]
            behind = [self.transfers[key]] if key in self.transfers else []
            read = out.made(step.plan, [value.held], k) if kind.startswith("SEND") else []
            label = f"{action} of {step.names[value.held]}"
            made = out.communicate(label, call, (), read, length, behind=behind)
            (self.transfers[key],) = made
            if not kind.startswith("SEND"):
                out.make([value.received], made, k)

    def _has(self, register: Register) -> bool:
        """Return whether the device is, beside its place in the pipeline, where a register is."""
        pins = pins_of(self.step.program.tensors[register].layout)
        return all(self.at[axis] == c for axis, c in pins if axis not in self.step.leading)

    def _update(self) -> None:
        step, program, machine = self.step, self.step.program, self.step.machine
        optimizer = program.optimizer or Optimizer()
        updates = [i for i in program.body if isinstance(i, UpdateWeight)]
        if optimizer.clip and program.devices > 1:
            self.out.norm([i.grad for i in updates], ticks(norm_seconds(optimizer, machine)))
        for update in updates:
            pins = pins_of(program.tensors[update.weight].layout)
            if all(self.at[axis] == c for axis, c in pins):
                seconds = seconds_of_update(program, update, optimizer, machine.device)
                label = f"{optimizer.name} of {step.names[update.weight]}"
                self.out.update(program, update, label, ticks(seconds))

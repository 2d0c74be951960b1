"""
Keep the optimizer's state and saved values in the memory of the host, as asked for; by itself (`auto`) where memory is
short, and that costs less than recompute (ZeRO-Offload, Ren et al., 2021; vDNN, Rhu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.device import COPIES
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import OFFLOADS, Graph, rewrite
from unity_ir.pcg.node import Node, Value, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.search.recompute.fit import bytes_needed, without_recompute
from unity_ir.search.worker import ForkedWorker, is_large_machine
from unity_ir.simulate.report import fastest_seconds

AUTO = "auto"

KINDS = (*OFFLOADS, AUTO)

ASKED = tuple(kind for kind in OFFLOADS if kind != "none")
"""The kinds that put something at the host wherever it may be put there."""


def check_offload(given: str, in_stages: bool) -> None:
    """
    Raise `UnityError` for another kind of offload than those of `KINDS`, and for one that is asked for of a step that
    is `in_stages`.
    """
    if given not in KINDS:
        raise UnityError(f"search: offload is {given!a}; it must be one of {', '.join(KINDS)}")
    if given in ASKED and in_stages:
        raise UnityError(f"search: offload={given} is for a step without stages; leave offload or the stages out")


ROOM = (0.95, 0.7, 0.0)
"""
Parts of the room that a device has at the end of the forward if all values go; they are tried, in order, for values
that stay, as the peak may be higher than what is held then.
"""


def may_offload(machine: Machine) -> bool:
    """Return whether there is a link over which state, or values, can go."""
    return machine.device.host is not None


def at_host(plan: Graph, kind: str) -> Graph:
    """
    Return a placed forward graph with what a kind of offload, one of `ASKED`, says at the host. What the search within
    the memory has recomputed is saved again then, if values go to the host.
    """
    found = replace(plan, offload=kind)
    return saving_values(found) if found.offloads_activations else found


def saving_values(plan: Graph) -> Graph:
    """Return a placed forward graph that saves all that its backward reads, but for weights that are gathered again."""

    def kept(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op == "recompute" and not is_weight(node.operands[0]):
            return operands
        return rebuild(node, operands, node.view).results

    def is_weight(value: Value) -> bool:
        while value.node.is_parallel:
            (value,) = value.node.operands
        return value.node.op == "weight"

    return rewrite(plan, kept)


def least_seconds(
    found: Graph,
    plan: Graph,
    fitted: Callable[[Graph], Graph],
    cheap: Callable[[Graph], Graph] | None,
    whole: Callable[[Graph], Graph],
    machine: Machine,
    optimizer: Optimizer,
) -> Graph:
    """
    Return the fastest, as emitted, of `found`, a plan with as much recompute as makes it fit, and the same layouts with
    the optimizer's state at the host (unless `found` has it there), with values, and with both. If none fits, returns
    the one that needs the least.

    `plan` is the plan without that recompute, `fitted(plan)` adds as much of it as a plan needs, `cheap(plan)` adds
    what hardly takes time (None: as nothing may be recomputed but what was asked for), and `whole(plan)` returns the
    step of a plan of one micro-batch. A plan that fits without recompute is returned as it is.
    """
    limit = machine.device.usable
    need = bytes_needed(whole, machine, optimizer)
    if need(found) <= limit and not not_kept(found) and found.loss_pieces == plan.loss_pieces:
        return found
    others = _Others(found, plan, fitted, cheap, whole, machine, optimizer)
    first = others.evaluated(found)

    def with_values(plan: Graph) -> list[_Evaluated]:
        return [others.evaluated(each) for each in others.with_values(plan)]

    with ForkedWorker(with_values, beside=is_large_machine(machine)) as worker:
        answer = worker.ask(plan)
        with_state = others.with_state() if optimizer.states and found.offload == "none" else []
        tried = [first, *map(others.evaluated, with_state), *answer()]
    known = {each.plan: each for each in tried}
    return fastest_that_fits([*known], lambda plan: known[plan].needs, lambda plan: known[plan].seconds, limit)


def fastest_that_fits(
    plans: Sequence[Graph], need: Callable[[Graph], int], seconds: Callable[[Graph], float], limit: int
) -> Graph:
    """
    Return the plan of the fewest `seconds` of `plans`, at least one, among those that `need` at most `limit` bytes on a
    device; if none does, the one that needs the least.
    """
    fitting = [plan for plan in plans if need(plan) <= limit]
    if not fitting:
        return min(plans, key=need)
    return min(fitting, key=seconds) if len(fitting) > 1 else fitting[0]


@dataclass(frozen=True)
class _Evaluated:
    """A plan of one micro-batch, with what its step needs and takes."""

    plan: Graph
    needs: int
    """Bytes on a device."""
    seconds: float
    """Simulated as emitted; infinite for a step that does not fit."""


class _Others:
    """The plans that `least_seconds` compares `found` with: those that may be faster, or fit where it does not."""

    def __init__(
        self,
        found: Graph,
        plan: Graph,
        fitted: Callable[[Graph], Graph],
        cheap: Callable[[Graph], Graph] | None,
        whole: Callable[[Graph], Graph],
        machine: Machine,
        optimizer: Optimizer,
    ):
        self.found, self.plan = found, plan
        self.fitted, self.cheap, self.whole = fitted, cheap, whole
        self.machine, self.optimizer = machine, optimizer
        self.need = bytes_needed(whole, machine, optimizer)
        self.limit = machine.device.usable
        self.fits = self.need(found) <= self.limit

    def seconds(self, plan: Graph) -> float:
        """Return the simulated seconds of the step of a plan."""
        return fastest_seconds(self.whole(plan), self.machine, self.optimizer)

    def evaluated(self, plan: Graph) -> _Evaluated:
        """Return a plan with the bytes that its step needs and, if it fits, its seconds."""
        needs = self.need(plan)
        return _Evaluated(plan, needs, self.seconds(plan) if needs <= self.limit else inf)

    def with_state(self) -> list[Graph]:
        """Return the plan with the optimizer's state at the host, and the recompute that it then needs."""
        bare = replace(without_recompute(self.plan), offload="state")
        try:
            priced = self._cost(bare)
            if priced.host_shortage or (self.fits and priced.time >= self._cost(self.found).time):
                return []  # copies cost more than all of the recompute
            other = self.fitted(bare)
            self.need(other)
        except UnityError:
            return []  # the host has less memory than that takes
        return [other]

    def with_values(self, plan: Graph) -> list[Graph]:
        """
        Return the plans that a plan becomes with values at the host, as many as do not fit: with nothing recomputed or
        what hardly takes time, which are fewer copies, and with the state on the device or at the host.
        """
        kinds = [kind for kind in ("activations", "all") if kind == "activations" or self.optimizer.states]
        kinds = ["all"] if self.found.offload == "state" else kinds
        bare = replace(saving_values(plan), loss_pieces=self.found.loss_pieces)
        bases = [self.fitted(plan)] if self.cheap is None else [bare, self.cheap(bare)]
        filled = (self._filled(replace(base, offload=kind)) for kind in kinds for base in bases)
        return [each for each in filled if each is not None]

    def _filled(self, plan: Graph) -> Graph | None:
        """
        Return a plan with values at the host where as many stay as the device has room for; None if it does not fit
        without any, or cannot be faster than what was found.
        """
        priced = self._cost(plan)
        room = self.limit - priced.memory_bytes
        if room < 0 or (self.fits and self._copies_take_longer(priced, room)):
            return None
        most = min(room, priced.activations_at_host)
        tried = (replace(plan, staying=int(part * most)) for part in ROOM)
        return next((each for each in tried if self.need(each) <= self.limit and self._host_has_room(each)), None)

    def _host_has_room(self, plan: Graph) -> bool:
        return not self._cost(plan).host_shortage

    def _copies_take_longer(self, priced: PlanCost, room: int) -> bool:
        """
        Return whether the copies of a plan of this cost alone take longer than `found`, if a device has `room` for
        values that stay: those to the host are in the forward, those back in the backward.
        """
        times = max(operator.node.micro_batches for operator in priced.operators)
        copied = times * max(priced.activations_at_host - room, 0)
        link = self.machine.host_link
        return sum(copied / link.bandwidth(kind) for kind in COPIES) >= self.seconds(self.found)

    def _cost(self, plan: Graph) -> PlanCost:
        return cost(self.whole(plan), self.machine, self.optimizer)

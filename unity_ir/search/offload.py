"""
Keep the optimizer's state in the memory of the host, as asked for; by itself (`auto`) where memory is short, and that
costs less than recompute (ZeRO-Offload, Ren et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import OFFLOADS, Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.search.recompute.fit import bytes_needed, without_recompute
from unity_ir.simulate.report import as_emitted

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


def may_offload(machine: Machine, optimizer: Optimizer) -> bool:
    """Return whether there is state to offload, and a link over which it can go."""
    return machine.device.host is not None and optimizer.states > 0


def at_host(plan: Graph, kind: str) -> Graph:
    """
    Return a placed forward graph with what a kind of offload, one of `ASKED`, says at the host. What the search within
    the memory has recomputed is saved again then, if values go to the host.
    """
    found = replace(plan, offload=kind)
    return without_recompute(found) if found.offloads_activations else found


def least_seconds(
    found: Graph,
    plan: Graph,
    fitted: Callable[[Graph], Graph],
    whole: Callable[[Graph], Graph],
    machine: Machine,
    optimizer: Optimizer,
) -> Graph:
    """
    Return `found`, a plan with as much recompute as makes it fit, or the same layouts with the optimizer's state at the
    host, if they fit and simulate faster, or if `found` does not fit and they need less.

    `plan` is the plan without that recompute, `fitted(plan)` adds as much of it as a plan needs, and `whole(plan)`
    returns the step of a plan of one micro-batch. A plan that fits without recompute is returned as it is.
    """
    limit = machine.device.usable
    need = bytes_needed(whole, machine, optimizer)
    fits = need(found) <= limit
    if fits and not not_kept(found) and found.loss_pieces == plan.loss_pieces:
        return found
    bare = replace(without_recompute(plan), offload="state")
    try:
        if fits and _sum(whole(bare), machine, optimizer) >= _sum(whole(found), machine, optimizer):
            return found  # copies cost more than all of the recompute
        other = fitted(bare)
        least = need(other)
    except UnityError:
        return found  # the host has less memory than that takes
    if least > limit:
        return found if fits or need(found) <= least else other
    return (
        other
        if not fits or _seconds(whole(other), machine, optimizer) < _seconds(whole(found), machine, optimizer)
        else found
    )


def _sum(step: Graph, machine: Machine, optimizer: Optimizer) -> float:
    return cost(step, machine, optimizer).time


def _seconds(step: Graph, machine: Machine, optimizer: Optimizer) -> float:
    return as_emitted(step, machine, optimizer)[0]

"""
Recompute in a plan, and make its loss in pieces, as asked for; by itself (`auto`), as little as makes it fit a device.

`auto` of recompute lowers the bytes that are saved until the simulated peak is within the limit: the values that are
cheapest to recompute for the bytes they take come first, at one price per byte in all layers (`chosen.Recomputable`).
`auto` of the pieces of the loss takes the fewest with which the plan fits; where it needs recompute, too, as many as
lower the peak, if that is faster than recompute alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache

from unity_ir.budget import spend
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.moves import MachineKey
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.recompute.chosen import ANY_PRICE, Recomputable, check_kind, in_blocks, in_groups
from unity_ir.simulate.report import as_emitted, fastest_seconds

PIECES = (2, 4, 8, 16)
"""
Numbers of pieces of the loss that are tried, where memory is short: the logits of 16 pieces are less than the sum of
the head's gradient, which all have.
"""

LESS = 0.99
"""Part of the peak with fewer pieces, at most, that more of them must need: each takes launches and additions."""


def with_recompute_and_pieces(
    plan: Graph,
    kind: str,
    pieces: int | None,
    machine: Machine,
    optimizer: Optimizer,
    whole: Callable[[Graph], Graph] | None = None,
    *,
    weights: bool = False,
    compared: bool = True,
    on: Machine | None = None,
) -> Graph:
    """
    Return a placed forward graph with recompute of a `kind` (`none`, `attention`, `block`, `all` or `auto`, see
    `chosen.KINDS`) added, and with its loss made in `pieces`. It may still not fit; callers check.

    If `pieces` is None, their number is chosen:

    1. If `kind` is `none` or `auto`, a plan that fits a device of `machine` as it is, is returned unchanged.
    2. The plan with recompute, its loss in one piece, is returned if it fits, unless `kind` is `auto` and `compared`.
    3. Else pieces are added (`PIECES`) until the plan fits or needs hardly less memory; with `auto`, that is tested
       before recompute is added. If that plan and the one of step 2 both fit, the one that simulates faster is
       returned, else the one that needs less memory.

    If `plan` is of one micro-batch, `whole(plan)` returns the plan of the step, else `whole` is None; `on` is the
    step's machine where that is larger than `machine`. With `weights`, `auto` may also gather weights again (all as in
    `recomputed`). Raises `UnityError` as `recomputed` does, and where the loss cannot be made in that number of pieces.
    """
    step, of_step = whole or same_plan, on or machine

    def with_pieces(count: int) -> Graph:
        found = recomputed(replace(plan, loss_pieces=count), kind, machine, optimizer, whole, weights=weights, on=on)
        if count > 1:
            as_emitted(step(found), of_step, optimizer)  # it may turn out that it has no program
        return found

    if pieces is not None:
        return with_pieces(pieces)
    need, limit = bytes_needed(step, of_step, optimizer), machine.device.usable
    if kind in ("none", "auto") and need(plan) <= limit:
        return plan
    alone, best = with_pieces(1), 1
    if need(alone) <= limit and (kind != "auto" or not compared):
        return alone
    with suppress(UnityError):
        for count in PIECES:
            # Without recompute of `auto`, which takes long to find.
            less = with_pieces(count) if kind != "auto" else replace(plan, loss_pieces=count)
            if need(less) > LESS * need(replace(less, loss_pieces=best)):
                break
            best = count
            if need(less) <= limit:
                break
    if best == 1:
        return alone
    tried = alone, with_pieces(best)
    if any(need(each) > limit for each in tried):
        return min(tried, key=need)
    return min(tried, key=lambda each: fastest_seconds(step(each), of_step, optimizer))


def without_recompute(plan: Graph) -> Graph:
    """Return a placed forward graph with nothing recomputed: it saves all that its backward reads."""

    def kept(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        return operands if node.op == "recompute" else rebuild(node, operands, node.view).results

    return rewrite(plan, kept)


def same_plan(plan: Graph) -> Graph:
    """Return the plan of a step that is not in micro-batches."""
    return plan


def bytes_needed(
    whole: Callable[[Graph], Graph], machine: Machine, optimizer: Optimizer, quick: bool = False
) -> Callable[[Graph], int]:
    """
    Return a function that tells the bytes that a device must have for the step of a plan; if `quick`, those held at the
    end of the forward where they are too many already. Memoised.
    """

    @cache
    def need(plan: Graph) -> int:
        step = whole(plan)
        spend(limits().work_candidate * len(step.nodes()))
        priced = cost(step, machine, optimizer)
        # What is held at the end of the forward may be too much already: then the peak need not be simulated.
        enough = quick and priced.memory_bytes > machine.device.usable
        return priced.memory_bytes if enough else needed(step, priced, optimizer)

    return need


def recomputed(
    plan: Graph,
    kind: str,
    machine: Machine,
    optimizer: Optimizer,
    whole: Callable[[Graph], Graph] | None = None,
    *,
    weights: bool = False,
    on: Machine | None = None,
) -> Graph:
    """
    Return a placed forward graph with recompute of a `kind` added to what it recomputes already: `none`, `attention`,
    `block`, `all` or `auto` (see `chosen.KINDS`). The kind `auto` recomputes as little as makes the plan fit a device
    of `machine`; if nothing does, the result is the plan found that needs the least memory.

    If `plan` is of one micro-batch, `whole(plan)` returns the plan of the step that runs it for each micro-batch; else
    `whole` is None. `on` is the machine of the step where that is larger than `machine`, the part on which `plan` runs
    (pipelines). With `weights`, `auto` may also gather weights again for the backward instead of keeping what was
    gathered. Raises `UnityError` for another kind, and for `block` where no layers repeat.
    """
    check_kind(kind)
    if kind == "none":
        return plan
    if kind == "block":
        return in_blocks(plan)
    if kind == "all":
        return in_groups(plan)
    if kind == "attention":
        few = Recomputable.of(cost(plan, machine, optimizer), plan, with_products=False)
        return few.marked(few.at(ANY_PRICE))
    if whole is None:
        return _fitted(plan, MachineKey(machine), optimizer, weights)
    return _fitting(plan, machine, optimizer, whole, weights, on)


@lru_cache(maxsize=64)
def _fitted(plan: Graph, machine: MachineKey, optimizer: Optimizer, weights: bool) -> Graph:
    return _fitting(plan, machine.machine, optimizer, same_plan, weights)


def _fitting(
    plan: Graph,
    machine: Machine,
    optimizer: Optimizer,
    whole: Callable[[Graph], Graph],
    weights: bool,
    on: Machine | None = None,
) -> Graph:
    """Return the plan with the least recompute that fits a device; with that of the least peak, if none does."""
    limit = machine.device.usable
    need = bytes_needed(whole, on or machine, optimizer, quick=True)
    if need(plan) <= limit:
        return plan
    alone = cost(plan, machine, optimizer)
    if on is None and alone.memory_bytes - alone.memory["activations"] > limit:
        return plan  # weights and what belongs to them are too large by themselves
    tried = [plan]
    for by_groups in (False, True):
        within = Recomputable.of(alone, plan, True, by_groups, weights)
        found = _least(within, need(plan) - limit, need, limit)
        if need(found) <= limit:
            return found
        tried.append(found)
    return min(tried, key=need)


def _least(within: Recomputable, over: int, need: Callable[[Graph], int], limit: int) -> Graph:
    """
    Return the plan with the fewest seconds of recompute found that fits; if none does, the one with all there can be.

    `over` is by how many bytes the plan without recompute exceeds the limit, at least.
    """
    none, most = tuple(frozenset[int]() for _ in within.layers), within.marked(within.at(ANY_PRICE))
    best, low, high = None, within.bytes(within.at(ANY_PRICE)), within.bytes(none)
    spare = limits().spare_memory * limit
    target = high - over - spare / 2
    for _ in range(limits().peak_rounds):
        # Bytes that are saved between those of a plan that fits and one that does not.
        if not low < target < high:
            if best is None and need(most) > limit:
                break
            best, target = best or most, (low + high) / 2
        again = within.with_least_time(target)
        assert again is not None
        plan = within.marked(again)
        over = need(plan) - limit
        if over <= 0:
            best, low = plan, target
            if -over < spare:
                break
        else:
            # The plan may save less than it may: the next one must save less than this one does.
            high = target = min(target, within.bytes(again))
        # Bytes that are saved come in steps: aim at the middle of what may be left free.
        target -= over + spare / 2
    return best or most

# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false
"""
Run the steps of a pipeline that never drains (PipeDream-2BW): w(t+1) = update(w(t), g(w(t-1))).

On each rank a step ends with its last backward. By then the rank has begun the next batch, with the weights as they are
before this step's update; so each batch is computed with the weights of one step ago, of which a copy is held.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.pieces import Weights, trained
from unity_ir.lowering.runtime.pipeline import UnderWay, actions_of, start_groups, wait_for
from unity_ir.lowering.runtime.plan import MICRO_BATCHES, PIPELINE
from unity_ir.lowering.runtime.ranks import fail_alike
from unity_ir.lowering.runtime.recipe import loss_part

# --- copied into the program from here on ---


# --- steps that overlap


class Flight:
    """
    What a rank of a pipeline that never drains keeps from step to step: the next batch, as far as it has come, sends
    not yet waited for, and the weights of one step ago. A run has one Flight. Before a step, set `following` to this
    rank's pieces of the next batch, which the step then begins; a step without it begins none, and computes the same.
    """

    def __init__(self):
        self.following = None
        self.unwaited = None  # the sends of what is under way that somebody else waits for; None: nobody does
        self._older = None
        self._ahead = None  # the next batch, as far as it has come
        self._sent = {"F": [], "B": []}
        self._groups = {}  # of sends to later stages: in one group sends there and back would wait for each other
        self._gradients = []  # sends of gradients to other stages, once per step
        self._said = None  # the loss under way to all ranks, and what else is to be said of its step

    def apart(self, ctx, program):
        """
        Return a copy of `ctx` with an empty Flight of `program`, another program's module (a float64 copy of this one,
        for the check): running it leaves this Flight as it is.
        """
        alone = copy.copy(ctx)
        alone.flight = program.flight()
        return alone

    def older(self, weights):
        """
        Return the Weights of one step ago (not a copy), with which batches are computed; at first a copy of `weights`.
        Frozen ones are the same tensors in both.
        """
        if self._older is None:
            own = trained(weights)
            self._older = Weights({n: weight.clone() if n in own else weight for n, weight in weights.items()})
        return self._older

    def step(self, ctx, weights, batch, before, after):
        """
        Run forward and backward of `batch`, this rank's pieces (those that were `following` in the last step, if any),
        with the weights of one step ago; return (its part of the loss, {name: gradient}). `before` and `after` are the
        program's functions that run once per step. At the end `weights` has copies of its tensors, to update in place.
        """
        if not ctx.ways:
            start_groups(ctx)
            self._groups = {axes: ctx._group(axes) for axes in ctx.groups if not {*axes}.isdisjoint(PIPELINE)}
        older, now = self.older(weights), self._ahead
        if now is None:
            now = UnderWay(batch)
            for stage, kind, k in actions_of(ctx):
                if k >= MICRO_BATCHES:
                    self._run(ctx, older, now, before, stage, kind, k - MICRO_BATCHES, True)
        self._ahead = None if self.following is None else UnderWay(self.following)
        self.following = None
        for stage, kind, k in actions_of(ctx):
            if k < MICRO_BATCHES:
                self._run(ctx, older, now, before, stage, kind, k, False)
            elif self._ahead:
                self._run(ctx, weights, self._ahead, before, stage, kind, k - MICRO_BATCHES, True)
        ctx.micro_batch = 0
        # What these read is about to change; all other ranks receive it in this step.
        wait_for([*now.sends, *self._gradients])
        result, self._gradients = without_waiting(ctx, after, older, batch, now.once, now.sums)
        if not self._ahead:
            wait_for([*self._sent["F"], *self._sent["B"], *self._gradients])
            self._sent, self._gradients = {"F": [], "B": []}, []
        for before, after in ((older, weights), (older.casts, weights.casts)):
            for name, spare in trained(before).items():
                spare.copy_(after[name])
                before[name], after[name] = after[name], spare
        return result

    def _run(self, ctx, weights, under_way, before, stage, kind, k, is_ahead):
        """Do one thing that the schedule has, of a batch that is computed with `weights`."""
        if kind.startswith("SEND"):
            way = kind[-1]
            if not is_ahead:  # else the other rank may receive what was sent before in its next step only
                wait_for(self._sent[way])
                self._sent[way] = []
            self._sent[way] += under_way.send(ctx, stage, kind, k)
            return
        if under_way.once is None and not kind.startswith("RECV"):
            own, ctx.groups = ctx.groups, {**ctx.groups, **self._groups}
            under_way.once, under_way.sends = without_waiting(ctx, before, weights, under_way.batch)
            ctx.groups = own
        under_way.run(ctx, weights, stage, kind, k)

    def say_later(self, ctx, loss, t, say):
        """
        Start to sum `loss` of step `t` (from 0), a part of the loss on each rank. The next `say_later` waits, and calls
        `say` with the sum, a float; so does this one at once if no next batch has begun. All ranks call it.
        """
        mine = loss_part(ctx, loss)
        work = dist.all_reduce(mine, async_op=True)
        self.say()
        self._said = work, mine, t, say
        if not self._ahead:
            self.say()

    def say(self):
        """Wait for the loss that `say_later` left, if any, and call its `say`; end the run if it is nan or infinite."""
        if self._said:
            (work, loss, t, say), self._said = self._said, None
            work.wait()
            if not torch.isfinite(loss).all():
                fail_alike(
                    f"step {t + 1}: loss {float(loss):.6f}; 2bw cannot do a step again, so emit the model by another "
                    "schedule for --check-nan to find what made it"
                )
            say(float(loss))


def without_waiting(ctx, part, *arguments):
    """
    Call `part(ctx, *arguments)` but do not wait for the sends that it starts; return (its result, the list of these for
    `wait_for`). `part` is the program's `before` or `after`, which run once per step, around all micro-batches.
    """
    ctx.flight.unwaited = []
    result = part(ctx, *arguments)
    sends, ctx.flight.unwaited = ctx.flight.unwaited, None
    return result, sends

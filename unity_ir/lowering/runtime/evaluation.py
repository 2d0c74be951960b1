# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Evaluate on data that is not trained on, by the forward alone."""

from __future__ import annotations

import math

import torch

from unity_ir.lowering.runtime.data import Data
from unity_ir.lowering.runtime.pieces import whole
from unity_ir.lowering.runtime.plan import COUNT, LOSS, forward
from unity_ir.lowering.runtime.ranks import fail_alike

# --- copied into the program from here on ---


# --- evaluation


class Evaluation:
    """
    Evaluates on other data (`options.eval_data`) by the forward alone: the mean loss over its whole batches in order,
    or over the first `options.eval_batches`. Where a loss is a mean over labels, batches are weighted by their labels.
    Tables and running statistics are those of the Data `trained_on`. Rank 0 prints how many samples are left over.
    """

    def __init__(self, ctx, options, trained_on):
        self.every = options.eval_every
        self.data = Data(options.eval_data, 0, trained_on.tables, False, options.document_end)
        # Those of training, as they are then.
        self.data.running = trained_on.running
        self.data.say_how_packed(ctx)
        there, left = self.data.whole_batches()
        if there is None and not options.eval_batches:
            fail_alike("--eval-data is a function, which has no end; say by --eval-batches how many it is called for")
        if there is not None and options.eval_batches > there:
            fail_alike(f"--eval-batches is {options.eval_batches}, and {options.eval_data} has {there}")
        self.batches: int = options.eval_batches or there or 0
        if left and ctx.rank == 0:
            print(f"{options.eval_data}: {left} rows fill no last batch and are left out", flush=True)

    def is_due(self, step, last):
        """Return whether to evaluate after step `step` (from 1): each `options.eval_every`th one, and number `last`."""
        return step == last or bool(self.every and step % self.every == 0)

    def loss(self, ctx, weights):
        """
        Return the mean loss of the batches, or of all their labels that are not ignored, as a float; nan if there are
        none. PyTorch's random state is left as it was. All ranks call it.
        """
        total = number = 0.0
        with torch.random.fork_rng([ctx.device] if ctx.device.type == "cuda" else []):
            for t in range(self.batches):
                ctx.note_progress()
                found = forward(ctx, weights, self.data.pieces(ctx, t))
                loss, count = found if COUNT else (found, None)
                many = float(whole(ctx, count, COUNT)[0]) if COUNT else 1.0
                # A batch without labels has no mean, and no part in that of all.
                total += many * float(whole(ctx, loss, LOSS)[0]) if many else 0.0
                number += many
        return total / number if number else math.nan

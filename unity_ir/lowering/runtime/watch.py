# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""Trace a step line by line: to find the first nan or inf, and for profiles."""

from __future__ import annotations

import inspect
import re
import sys

import torch

from unity_ir.lowering.runtime.plan import WEIGHTS, forward_backward
from unity_ir.lowering.runtime.ranks import fail, from_all

# --- copied into the program from here on ---


# --- looking at the step line by line


def parts_of_step(function):
    """Return a tuple of the functions whose lines make a step: `function` itself, or its parts if it runs stages."""
    return getattr(function, "parts", (function,))


def watched(function, after, begin=None):
    """
    Return a wrapper of `function` that calls `after(line number, {variable: value})` after each of its lines, or of
    those of its parts (`parts_of_step`), and `begin()` before the first line of each of these functions.
    """
    codes = {each.__code__ for each in parts_of_step(function)}

    def entered(frame, event, argument):
        last = None

        def inside(frame, event, argument):
            nonlocal last
            if event in ("line", "return"):
                if last is not None:
                    after(last, frame.f_locals)
                last = frame.f_lineno
            return inside

        if frame.f_code not in codes:
            return None
        if begin is not None:
            begin()
        return inside

    def run(*arguments):
        before = sys.gettrace()
        sys.settrace(entered)
        try:
            return function(*arguments)
        finally:
            sys.settrace(before)

    return run


def lines_of(function):
    """Return {line number in the file: (list of the variables it assigns, its comment without #)} of a function."""
    source, first = inspect.getsourcelines(function)
    found = {}
    for number, line in enumerate(source, first):
        code, _, comment = f" {line}".partition(" # ")
        targets = re.match(r"\s+([\w, ]+) = ", code)
        found[number] = (targets[1].split(", ") if targets else [], comment.strip())
    return found


def first_not_finite(ctx, weights, batch):
    """
    Run forward_backward once more on this rank's pieces. Return, for the first nan or inf in it, (line of this
    program's file, 0 for a weight or input; a text: which value is nan or inf; rank), or None. All ranks call it.
    """
    lines, found = {}, []
    for part in parts_of_step(forward_backward):
        lines |= lines_of(part)

    def look(what, number, value):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            found.append((number, f"{what} is {'nan' if bool(value.isnan().any()) else 'inf'}", ctx.rank))

    def after(number, variables):
        for name in lines[number][0]:
            if not found:
                look(f"the result of {lines[number][1] or name} at line {number}", number, variables.get(name))

    for name, value in [*batch.items(), *weights.items()]:
        look(f"{'weight' if name in WEIGHTS else 'input'} {name!r}", 0, value)
    watched(forward_backward, after)(ctx, weights, batch)
    return min((first for mine in from_all(found[:1]) for first in mine), default=None)


def guard(ctx, weights, batch, t, loss, always):
    """
    End the run if the loss of step `t` (from 0) or, with `always`, any value in the step is nan or inf, naming the line
    of the program that made the first, for which the step's forward and backward run again. All ranks call it.
    """
    if always or not torch.isfinite(loss).all():
        first = first_not_finite(ctx, weights, batch)
        if first is None and torch.isfinite(loss).all():
            return
        what = f"{first[1]}, on rank {first[2]}" if first else "nothing in it is when it is done again"
        hint = "" if always or (first and first[0]) else "; --check-nan finds the step that made it"
        fail(f"step {t + 1}: loss {float(loss):.6f}; first {what}{hint}")

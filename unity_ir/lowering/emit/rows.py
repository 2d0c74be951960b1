"""Merge rows of a printed step, as peephole optimisers merge instructions: moves nest, waits follow what they await."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from unity_ir.plan.instructions import Register, When

MOVES = 4
"""Most moves nested in one line; more are unreadable."""

TOGETHER = 16
"""Most collectives awaited, or pieces padded, in one line; more are unreadable."""


@dataclass(slots=True)
class Row:
    """One line of the step's code: assigns the value of `code` to the variables `targets`, then deletes `dies`."""

    targets: list[str]
    code: str = ""
    comment: str = ""
    starts: tuple[Register, ...] = ()
    """Registers that a collective of this line makes, if all ranks take part and it may be awaited in the same line."""
    dies: list[str] = field(default_factory=list[str])
    """Variables read here for the last time."""
    awaits: tuple[Register, ...] = ()
    """Registers whose collectives this line waits for."""
    waits: bool = False
    """Whether it waits for the collectives that its `targets` hold, which then hold the results; it has no `code`."""
    pinned: bool = False
    """Whether only some ranks execute it, or hold its value."""
    operand: str = ""
    """The variable that a move reads, if all ranks do the move."""
    around: tuple[str, ...] = ()
    """Text before and after the operand of such a move."""
    moves: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Kind of every move in this line, and the role of its axes before the move."""
    joined: list[str] = field(default_factory=list[str])
    """Operands of a move that can be one call for several tensors."""
    when: When = "every"
    """In which micro-batches it runs. Lines of different ones are not merged."""
    is_early: bool = False
    """Whether the loop before that over micro-batches has it, too: an input's part."""
    dies_last: list[str] = field(default_factory=list[str])
    """Variables made once that are read here for the last time in the last micro-batch."""
    in_pieces: bool = False
    """Whether it is in the loop over the pieces of the loss. Its lines are not merged with others."""
    dies_after: list[str] = field(default_factory=list[str])
    """Variables made before the loop over pieces that are read there for the last time, in its last line."""

    def text(self) -> tuple[str, str]:
        """
        Return (code, comment): the line's Python statements (the assignment to `targets`, and deletions), and the text
        of the comment after them, without `#`; either may be empty.
        """
        if not self.targets:
            return self.code, self.comment
        comment = self.comment
        if self.moves:
            kinds, were = (", ".join(each) for each in zip(*self.moves, strict=True))
            comment = f"{kinds} {comment}, was {were}"
        target, code = ", ".join(self.targets), self.code
        if self.waits and len(self.targets) > 1:
            code = f"wait({target})"
        elif self.waits:
            code = f"{target} and {target}.wait()" if self.pinned else f"{target}.wait()"
        died = f"; del {', '.join(self.dies)}" if self.dies else ""
        return f"{target} = {code}{died}", comment


def merged(rows: Iterable[Row]) -> list[Row]:
    """
    Merge each line of the step's code into the one before it, where it can be and collectives stay in their order;
    return the lines that are left. Rows are changed in place.

    rewrite: x = all_reduce(..); x = x.wait()            -> x = all_reduce(..).wait()
             x = slice(y); z = all_gather(x); del x      -> z = all_gather(slice(y))
             x = x.wait(); y = f(x, a); del x            -> y = f(x.wait(), a); del x
             x = zero_pad(a, ..); y = zero_pad(b, ..)    -> x, y = zero_pad_many((a, b), ..)
             x = x.wait(); y = y.wait()                  -> x, y = wait(x, y)
    """
    out: list[Row] = []
    for row in rows:
        if out and ((out[-1].when, out[-1].in_pieces) != (row.when, row.in_pieces) or out[-1].dies_last):
            out.append(row)
            continue
        _nest(out, row)
        _inline(out, row)
        if out and (_joins(out[-1], row) or _awaits(out[-1], row)):
            out[-1].dies_last += row.dies_last
            out[-1].dies_after += row.dies_after
        else:
            out.append(row)
    return out


def _nest(rows: list[Row], move: Row) -> None:
    """Take the last row into a move that is the only reader of its result."""
    if not rows or not move.around or rows[-1].targets != [move.operand] or move.operand not in move.dies:
        return
    last = rows[-1]
    if last.pinned:
        return
    if last.waits:
        # The variable holds the collective and dies only now.
        inner = f"{move.operand}.wait()"
    elif 0 < len(last.moves) < MOVES:
        inner = last.code
        move.dies.remove(move.operand)
    else:
        return
    rows.pop()
    move.code = inner.join(move.around)
    move.moves[:0], move.dies[:0] = last.moves, last.dies
    move.joined = []


def _inline(rows: list[Row], call: Row) -> None:
    """Take the last row, a wait, into the operator's call that alone reads its result."""
    last = rows[-1] if rows else None
    if last is None or not last.waits or last.pinned or len(last.targets) > 1 or call.around or call.waits:
        return
    (name,) = last.targets
    found = re.findall(rf"\b{name}\b", call.code)
    if name in call.dies and len(found) == 1 and not call.pinned and " if " not in call.code:
        call.code = re.sub(rf"\b{name}\b", f"{name}.wait()", call.code)
        call.dies[:0] = last.dies
        rows.pop()


def _joins(last: Row, move: Row) -> bool:
    """Make the move in the last row too, if they differ in the operand alone; return whether that was done."""
    if not last.joined or not move.joined or len(last.joined) == TOGETHER:
        return False
    same = (last.around, last.moves, last.comment) == (move.around, move.moves, move.comment)
    if not same or {*last.targets} & {*move.joined}:
        return False
    last.targets, last.joined = last.targets + move.targets, last.joined + move.joined
    last.code = f"{last.moves[0][0]}_many(ctx, ({', '.join(last.joined)}){last.around[1]}"
    last.dies += move.dies
    return True


def _awaits(last: Row, wait: Row) -> bool:
    """Wait in the last row too, if it starts or awaits collectives itself; return whether that was done."""
    if wait.awaits and last.starts == wait.awaits:
        last.targets, last.code, last.starts = wait.targets, f"{last.code}.wait()", ()
    elif last.waits and wait.waits and len(last.targets) < TOGETHER:
        last.targets += wait.targets
    else:
        return False
    last.dies += wait.dies
    return True

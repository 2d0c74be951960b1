"""Print the forward and backward of a rank's program: a row for each instruction, rows merged, columns aligned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import prod

from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.lowering.emit.rows import Row, merged
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.reshard import role_kind
from unity_ir.pcg.sharding import REPEAT, SUM, coordinate_of, is_pinned, is_shard, pins_of, role_name
from unity_ir.plan.deadlock import ranks_of_move, register_names
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Leaf,
    Register,
    ReshardMove,
    RowMove,
    TimeStep,
    UpdateWeight,
    ValueMove,
    makes,
    reads,
)
from unity_ir.plan.plan import Plan
from unity_ir.plan.schedule import BUCKET_BYTES
from unity_ir.plan.scheduled import Bucket, ScheduledLine, Wait
from unity_ir.tdl.element_types import HALVES

BACKWARD = "# --- backward"
"""Line of its own, a comment, after the line that computes the loss; profiles look for it."""

WIDTH = 72
"""Widest column of code; comments of longer lines follow where these end."""


class StepWriter:
    """
    Writes the emitted function `forward_backward` from the plan of a rank's step, or the function `forward` from a plan
    without a backward. Call `text` once; after that `groups` has, as keys, the mesh axes of every process group that
    the function uses.

    `calls` has, for every operator, the name of its launcher and the Python expressions of the global indices at which
    this rank's piece starts. `identifier`, called with a name, returns an unused identifier like it.
    """

    def __init__(
        self,
        plan: Plan,
        calls: Mapping[Compute, tuple[str, Sequence[str]]],
        identifier: Callable[[str], str],
    ):
        self.program = plan.program
        self.schedule = plan.schedule
        self.in_place = plan.in_place
        self.calls = calls
        self.identifier = identifier
        self.makers = register_names(plan.program)
        self.groups: dict[tuple[int, ...], None] = {}
        """Mesh axes of every process group that the step uses, as an ordered set."""
        self.own: dict[Register, str] = {}
        """Expression of every register's value: a variable, or a weight by its name."""
        self.buckets: dict[Register, str] = {}
        """Variable of the bucket that has a register's collective."""
        self.here: dict[tuple[tuple[int, int], ...], str] = {}
        """Variable that tells whether this rank is at some pinned coordinates."""
        self.sums: list[str] = []
        """Variables in which micro-batches add up, or join, what they make."""
        self.early = {
            r for i in plan.program.body for r in reads(i) if any(plan.program.when[m] == "early" for m in makes(i))
        }
        """Registers that the loop before that over micro-batches reads."""
        self.flags: dict[str, str] = {}
        """Variables that tell whether a micro-batch is the first, or the last."""
        self.last_piece = ""
        """Variable that tells whether a piece of the loss is the last."""
        self.adds = {i.operand: i for i in plan.program.body if isinstance(i, TimeStep) and i.is_added}
        """Steps that a product's kernel does, by what that makes."""
        self.sums_of_pieces: list[str] = []
        """Variables in which pieces of the loss add up, or join, what they make."""

    def text(self) -> str:
        """
        Return the Python text of the emitted function. `forward_backward(ctx, weights, batch)` returns this rank's part
        of the loss, and a dict of its parts of the gradients by weight name and of the next values of running
        statistics by input name. `forward(ctx, weights, batch)` returns the loss alone or, if it is a mean over labels,
        with their number.
        """
        program = self.program
        if program.micro_batches > 1:
            self.flags = {flag: self.identifier(flag) for flag in ("first", "last")}
        if program.loss_pieces > 1:
            self.last_piece = self.identifier("last_piece")
        rows = merged(row for line in self.schedule.lines for row in self._rows(line))
        lines = [(f"{name} = ctx.at({pinned!r})", "whether this rank is there") for pinned, name in self.here.items()]
        lines += self._looped(rows) if self.flags else self._in_order(rows)
        if program.optimizer is None:
            count = ", and the number of labels that it is the mean over" if program.outputs[1:] else ""
            out = [
                "def forward(ctx, weights, batch):",
                f'    """This rank\'s part of the loss, without dropout{count}."""',
            ]
        else:
            out = ["def forward_backward(ctx, weights, batch):"]
            kept = ", and of new running statistics," if program.replaced else ""
            out.append(f'    """This rank\'s part of the loss, and of the gradient of every weight{kept} by name."""')
        width = min(max((len(code) for code, _ in lines), default=0), WIDTH)
        for code, comment in lines:
            out.append(f"    {code:<{width}}  # {comment}" if comment else f"    {code}")
        if program.optimizer is None:
            found = ", ".join(map(self._use, program.outputs))
            return "\n".join([*out, f"    return {found}"]) + "\n"
        weights = {leaf.result: leaf.name for leaf in program.leaves("weight")}
        made = {weights[i.weight]: i.grad for i in program.body if isinstance(i, UpdateWeight)}
        found = ", ".join(f"{name!r}: {self._use(r)}" for name, r in {**made, **program.replaced}.items())
        out.append(f"    return {self._use(program.outputs[0])}, {{{found}}}")
        return "\n".join(out) + "\n"

    def _looped(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """
        Return the lines (code, comment) of a loop over micro-batches with these rows in it; those that run in the first
        or the last of them alone are under an `if`.
        """
        early = [row for row in rows if row.when == "early" or row.is_early]
        made = f"{' = '.join(self.sums)} = None" if self.sums else ""
        lines = [(made, "what micro-batches add up")] if made else []
        if early:
            lines.append((self._loop(), "a loop before: what each of them needs of all"))
            lines += [(f"    {code}", comment) for code, comment in (row.text() for row in early)]
        lines.append((self._loop(), "whether it is the first of them, or the last"))
        when = "every"
        for in_pieces, found in groupby((row for row in rows if row.when != "early"), lambda row: row.in_pieces):
            some = [*found]
            if in_pieces:
                lines += ((f"    {code}", comment) for code, comment in self._loop_over_pieces(some))
            for row in () if in_pieces else some:
                if row.when not in ("every", when):
                    lines.append((f"    if {self.flags[row.when]}:", ""))
                when = row.when
                code, comment = row.text()
                lines.append((f"{'    ' * (1 if when == 'every' else 2)}{code}", comment))
                if row.dies_last:
                    lines += self._freed_in_the_last(row.dies_last)
                    when = "every"
            if in_pieces and (late := some[-1].dies_last):
                lines += self._freed_in_the_last(late)
            when = "every" if in_pieces else when
        return lines

    def _freed_in_the_last(self, names: Sequence[str]) -> list[tuple[str, str]]:
        return [(f"    if {self.flags['last']}:", ""), (f"        del {', '.join(names)}", "")]

    def _in_order(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """Return the lines (code, comment) of these rows, those of the loop over pieces of the loss in one."""
        lines: list[tuple[str, str]] = []
        for in_pieces, found in groupby(rows, lambda row: row.in_pieces):
            lines += self._loop_over_pieces([*found]) if in_pieces else (row.text() for row in found)
        return lines

    def _loop_over_pieces(self, rows: Sequence[Row]) -> list[tuple[str, str]]:
        """Return the lines (code, comment) of a loop over the pieces of the loss with these rows in it."""
        count = self.program.loss_pieces
        lines = [(f"{' = '.join(self.sums_of_pieces)} = None", "what pieces of the tokens add up, or join")]
        lines.append((f"for {self.last_piece} in loss_pieces(ctx, {count}):", "whether it is the last of them"))
        lines += ((f"    {code}", comment) for code, comment in (row.text() for row in rows))
        freed = [name for row in rows for name in row.dies_after]
        return [*lines, *([(f"del {', '.join(freed)}", "")] if freed else [])]

    def _loop(self) -> str:
        flags = ", ".join(self.flags.values())
        return f"for {flags} in micro_batches(ctx, {self.program.micro_batches}):"

    # -- a row per instruction

    def _rows(self, line: ScheduledLine) -> list[Row]:
        action = line.action
        match action:
            case Leaf("weight" | "cast", result) if not pins_of(self.program.tensors[result].layout):
                self.own[result] = stored(action)
                return []
            case Leaf():
                row = self._leaf(action)
            case Compute():
                row = self._compute(action)
            case ReshardMove():
                row = self._reshard(action)
            case HaloExchange():
                row = self._exchange(action)
            case TimeStep(is_added=True):
                return []
            case TimeStep():
                row = self._time_step(action)
            case ValueMove():
                row = self._copy(action)
            case Bucket():
                row = self._bucket(action)
            case Wait():
                row = self._wait(action)
        pieces = self.program.in_pieces
        here = [r for r in line.dies if not line.in_pieces or r in pieces]
        row.dies, row.dies_last = list(map(self._use, here)), list(map(self._use, line.dies_last))
        row.dies_after = [self._use(r) for r in line.dies if r not in here]
        row.when, row.in_pieces = line.when, line.in_pieces
        row.is_early = isinstance(action, Leaf) and action.result in self.early
        is_loss = isinstance(action, Compute) and self.program.loss in action.results
        return [row, Row([], BACKWARD, in_pieces=line.in_pieces)] if is_loss else [row]

    def _leaf(self, leaf: Leaf) -> Row:
        target = self._name(leaf.result, leaf.name or "constant")
        texts = {"input": f"batch[{leaf.name!r}]", "weight": stored(leaf), "cast": stored(leaf)}
        time = self._role_in_time(leaf.result)
        if leaf.op == "input" and is_shard(time):
            texts["input"] = self._part(texts["input"], time)
        text = texts.get(leaf.op) or self._constant(leaf.result, leaf.value)
        text = self._only(text, pins_of(self.program.tensors[leaf.result].layout))
        return Row([target], text, self._comment(leaf.op, leaf.result))

    def _compute(self, compute: Compute) -> Row:
        name, starts = self.calls[compute]
        operands = [*map(self._use, compute.operands), *starts]
        if (step := self.adds.get(compute.results[0])) is not None:
            target, before = self._total_of(step)
            text = self._only(
                f"{name}({', '.join([*operands, before])})", pins_of(self.program.tensors[step.result].layout)
            )
            self.own[step.operand] = target
            return Row([target], text, self._comment(f"{compute.operator}, added up", step.operand))
        text = f"{name}({', '.join(operands)})"
        targets = [self._name(r, self.makers[r]) for r in compute.results]
        text = self._only(text, pins_of(self.program.tensors[compute.results[0]].layout), len(targets))
        return Row(targets, text, self._comment(compute.operator, *compute.results))

    def _reshard(self, move: ReshardMove) -> Row:
        pinned, operand = ranks_of_move(self.program, move), self._use(move.operand)
        row = Row([self._name(move.result, move.kind)], moves=[(move.kind, role_name(move.source))])
        around = self._call(move)
        row.code = self._only(operand.join(around), pinned)
        row.comment = self._comment(f"of {_printable(self.makers[move.operand])}", move.result)
        ways = prod(self.program.mesh.sizes[axis] for axis in move.axes)
        if pinned or (move.kind == "send" and ways > 2):  # of whose ranks only two take part
            row.pinned = True
            return row
        row.starts, row.operand, row.around = (move.result,), operand, around
        # Pinned values are padded by another function, which does one at a time.
        is_small = self.program.bytes[move.result] < BUCKET_BYTES
        if move.kind == "zero_pad" and is_small and not is_pinned(move.source):
            row.joined = [operand]
        return row

    def _exchange(self, move: HaloExchange) -> Row:
        self.groups.setdefault(move.axes)
        pinned = ranks_of_move(self.program, move)
        arguments = f"{self._use(move.operand)}, {move.dim}, {move.low}, {move.high}, {move.axes!r}"
        text = self._only(f"{move.kind}(ctx, {arguments})", pinned)
        target = self._name(move.result, move.kind)
        what = self._comment(f"{move.kind} of {_printable(self.makers[move.operand])}", move.result)
        return Row([target], text, f"{what}, {move.low} before and {move.high} after", () if pinned else (move.result,))

    def _time_step(self, step: TimeStep) -> Row:
        """Return the row of a step into a loop over micro-batches or pieces, or out of it; `reuse` does nothing."""
        operand = self._use(step.operand)
        comment = self._comment(f"{step.kind} of {_printable(self.makers[step.operand])}", step.result)
        if step.is_of_pieces:
            target = self._name(step.result, step.kind)
            return Row([target], self._step_of_pieces(step, operand, target), comment)
        if step.kind == "pipeline":
            target = self._name(step.result, step.kind)
            return Row([target], self._part(operand, self._role_in_time(step.result)), comment)
        target, before = self._total(step)
        copied = ".clone()" if step.kind == "accumulate" and step.result not in self.in_place else ""
        dim = f", {self._role_in_time(step.operand)}" if step.kind == "batch" else ""
        function = {"accumulate": "accumulated", "batch": "join_micro_batches"}[step.kind]
        text = f"{function}({before}, {operand}{copied}{dim}, {self.flags['last']})"
        return Row([target], self._only(text, pins_of(self.program.tensors[step.operand].layout)), comment)

    def _total_of(self, step: TimeStep) -> tuple[str, str]:
        """Return what `_total` does, of micro-batches or of the pieces of the loss."""
        if not step.is_of_pieces:
            return self._total(step)
        target = self._name(step.result, step.kind)
        self.sums_of_pieces.append(target)
        return target, target

    def _total(self, step: TimeStep) -> tuple[str, str]:
        """Return where a total over micro-batches is stored, and the expression of that of the micro-batches before."""
        target = self._name(step.result, step.kind)
        self.sums.append(target)
        return target, target

    def _step_of_pieces(self, step: TimeStep, operand: str, target: str) -> str:
        """Return the expression of a step into the loop over the pieces of the loss, or out of it."""
        axis, tensors, count = self.program.axes, self.program.tensors, self.program.loss_pieces
        pinned = pins_of(tensors[step.operand].layout)
        if step.kind == "pipeline":
            return self._only(f"take_piece(ctx, {operand}, {tensors[step.result].layout[axis]}, {count})", pinned)
        self.sums_of_pieces.append(target)
        if step.kind == "batch":
            dim = tensors[step.operand].layout[axis]
            return self._only(f"put_piece(ctx, {target}, {operand}, {dim}, {count})", pinned)
        before, after = tensors[step.operand].dtype, tensors[step.result].dtype
        is_own = step.result in self.in_place or before != after or before in HALVES
        dtype = f", {TORCH_DTYPES[after]}" if before != after else ""
        copied = "" if is_own else ".clone()"
        return self._only(f"accumulated({target}, {operand}{copied}, {self.last_piece}{dtype})", pinned)

    def _copy(self, move: ValueMove) -> Row:
        """Return the row of a copy of a value to the host, or back."""
        operand, made = self._use(move.operand), self.makers[move.operand]
        comment = self._comment(f"of {_printable(made)}", move.operand)
        if move.kind == "to_host":
            target = self._name(move.result, f"{made}_at_host")
            return Row([target], f"to_host(ctx, {target!r}, {operand})", f"to the host, {comment}", (move.result,))
        return Row([self._name(move.result, made)], f"from_host(ctx, {operand})", f"back, {comment}", (move.result,))

    def _part(self, text: str, dim: int) -> str:
        """Return the expression of a micro-batch's part of a tensor along a dim."""
        return f"take_micro_batch(ctx, {text}, {dim}, {self.program.micro_batches})"

    def _role_in_time(self, register: Register) -> int:
        """Return what a micro-batch has of a register: the dim of which it has a shard, SUM, COPY or REPEAT."""
        return self.program.tensors[register].layout[-1] if self.program.micro_batches > 1 else REPEAT

    def _bucket(self, bucket: Bucket) -> Row:
        first, moves = bucket.moves[0], bucket.moves
        self.groups.setdefault(first.axes)
        dims = "".join(f"{dim!r}, " for dim in _dims(moves))
        operands = ", ".join(self._use(m.operand) for m in moves)
        target = self.identifier("bucket")
        for move in moves:
            self.buckets[move.result] = target
            self._name(move.result, move.kind)
        what = f"{first.kind} of {len(moves)} {'weights' if first.kind == 'all_gather' else 'gradients'}"
        pinned = ranks_of_move(self.program, first)
        text = self._only(f"{first.kind}_many(ctx, ({operands}), {dims}{first.axes!r})", pinned)
        row = Row([target], text, what, () if pinned else tuple(m.result for m in moves))
        row.pinned = bool(pinned)
        return row

    def _wait(self, wait: Wait) -> Row:
        first = wait.registers[0]
        row = Row(list(map(self._use, wait.registers)), awaits=wait.registers)
        if first in self.buckets:
            pinned = pins_of(self.program.tensors[first].layout)
            row.code = self._only(f"{self.buckets[first]}.wait()", pinned, len(wait.registers))
        else:
            row.waits, row.pinned = True, bool(pins_of(self.program.tensors[first].layout))
        return row

    # -- parts of a row

    def _use(self, register: Register) -> str:
        return self.own[self.schedule.held(register)]

    def _name(self, register: Register, wish: str) -> str:
        self.own[register] = self.identifier(wish)
        return self.own[register]

    def _only(self, text: str, pinned: tuple[tuple[int, int], ...], results: int = 1) -> str:
        """Return an expression that is None on the ranks that are not at the pinned coordinates."""
        if not pinned:
            return text
        if pinned not in self.here:
            self.here[pinned] = self.identifier("at_" + "_".join(f"{i}_{c}" for i, c in pinned))
        nothing = f"({', '.join(['None'] * results)})" if results > 1 else "None"
        return f"{text} if {self.here[pinned]} else {nothing}"

    def _comment(self, what: str, *registers: Register) -> str:
        """Return `what`, followed by the whole shape of the first register and the role of each mesh axis."""
        tensor = self.program.tensors[registers[0]]
        roles = ", ".join(map(role_name, tensor.layout[: self.program.axes])) or "one device"
        time = self._role_in_time(registers[0])
        is_piece = registers[0] in self.program.in_pieces
        pieces = f", {role_name(tensor.layout[self.program.axes])} in pieces" if is_piece else ""
        in_time = f", {role_name(time)} in time" if time != REPEAT else ""
        stored = ", channels last" if tensor.is_channels_last else ""
        return f"{what} {list(tensor.shape)}, {roles}{in_time}{pieces}{stored}"

    def _constant(self, register: Register, value: float) -> str:
        tensor = self.program.tensors[register]
        axes = tuple(i for i, r in enumerate(tensor.layout[: self.program.axes]) if r == SUM)
        shape = tensor.local(self.program.mesh)
        number = f"{value!r}"
        if self._role_in_time(register) == SUM and value:
            number = f"{value!r} if {self.flags['first']} else 0.0"
        return f"constant(ctx, {number}, {shape!r}, {TORCH_DTYPES[tensor.dtype]}, {axes!r})"

    def _call(self, move: ReshardMove) -> tuple[str, str]:
        """Return the text before and after the operand of a move: the runtime call of its collective's row."""
        collective = COLLECTIVES[move.kind]
        if collective.crosses_links:
            self.groups.setdefault(move.axes)
        call = collective.calls[role_kind(move.source), role_kind(move.target)]
        if call is None:
            return "", ""
        held = self.program.tensors[move.operand]
        words = {
            "source": _dim_or_rank(move.source),
            "target": _dim_or_rank(move.target),
            "held": f"{held.local(self.program.mesh)!r}, {TORCH_DTYPES[held.dtype]}",
        }
        if isinstance(move, RowMove):
            words |= {"rows": repr(move.rows), "experts": repr(move.experts), "layer": repr(move.layer)}
            words["counts"] = "" if move.counts is None else self._use(move.counts)
        copied = ".clone()" if move.kind == "all_reduce" and move.result not in self.in_place else ""
        rest = "".join(f", {words[a]}" for a in call.arguments)
        return f"{call.function}(ctx, ", f"{copied}{rest}, {move.axes!r})"


def _dim_or_rank(role: int) -> str:
    """Return a role as an argument of the runtime: a sharded dim, the rank that pieces are pinned at, or None."""
    return repr(role if is_shard(role) else coordinate_of(role) if is_pinned(role) else None)


def _dims(moves: Sequence[ReshardMove]) -> tuple[tuple[int, ...], ...]:
    """Return the dims a bucket's moves gather or scatter along, as an argument; nothing for all-reduces."""
    if moves[0].kind == "all_reduce":
        return ()
    return (tuple(m.source if m.kind == "all_gather" else m.target for m in moves),)


def _printable(name: str) -> str:
    """Return a name as part of a comment, which it cannot end."""
    return name if name.isprintable() else ascii(name)


def stored(leaf: Leaf) -> str:
    """
    Return the Python expression by which an emitted step reads `leaf`: for a weight (its `op` is `weight`), such as
    `weights['w']`; for the kept cast of a weight (`cast`), such as `weights.casts['w']`.
    """
    return f"weights[{leaf.name!r}]" if leaf.op == "weight" else f"weights.casts[{leaf.name!r}]"

"""
Print a step whose operators are in stages: a function for each part of it (what is done once, a stage's forward, its
backward or the halves of that), and the order in which each rank of the pipeline runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.lowering.emit.rows import Row, merged
from unity_ir.lowering.emit.step_text import WIDTH, StepWriter, stored
from unity_ir.pcg.sharding import Pins, pins_of
from unity_ir.plan.instructions import Compute, Leaf, Register, TimeStep, UpdateWeight, makers_of
from unity_ir.plan.pipeline.parts import StepPart, StepParts
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Program
from unity_ir.plan.scheduled import ScheduledLine

_NAMES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}

_WHAT = {
    "F": "forward of a micro-batch",
    "B": "backward of a micro-batch",
    "I": "gradient of its input, of a micro-batch",
    "W": "gradients of its weights, of a micro-batch",
}


class PartWriter(StepWriter):
    """
    Writes the Python function of one part of a step in stages: of what is done once per step before all micro-batches
    (`before`) or after them (`after`), or of one stage's forward or backward of a micro-batch. `part` is that part,
    `plan` the plan of its function alone, and `parts` has all parts of the step. `calls` has the launcher of each
    operator; `identifier`, called with a name, returns an unused identifier like it.

    In the function the dict `kept` has what the parts of a micro-batch hand on to each other, `once` what is made once
    per step, and `sums` what micro-batches add up.
    """

    def __init__(
        self,
        part: StepPart,
        plan: Plan,
        parts: StepParts,
        calls: Mapping[Compute, tuple[str, Sequence[str]]],
        identifier: Callable[[str], str],
    ):
        super().__init__(plan, calls, identifier)
        self.part = part
        self.keys = parts.keys
        self.late = {leaf.result for leaf in parts.by_name["after"].program.leaves("sum")}
        """Registers that are read once all micro-batches have run."""
        self.known = dict(part.place)
        self.flags = {"first": "ctx.micro_batch == 0", "last": "ctx.is_last"}

    @property
    def function(self) -> str:
        """
        The name of the part's function: `before` or `after`; for a stage's part, `forward_2` or `backward_2` of stage
        2, or the halves of its backward, `input_gradient_2` and `weight_gradient_2`.
        """
        return self.part.kind if self.part.stage is None else f"{_NAMES[self.part.kind]}_{self.part.stage}"

    def text(self) -> str:
        """
        Return the Python text of the part's function. `before(ctx, weights, batch)` returns `once`, a dict of what is
        made once per step. A stage's function takes (ctx, weights, batch, once, sums, kept), and returns a tuple of the
        tensors to send, None if there are none; it adds to the dict `sums` what micro-batches add up, and to the dict
        `kept` what later parts of the same micro-batch read. `after(ctx, weights, batch, once, sums)` returns what
        `forward_backward` does: the loss and gradients.
        """
        kind = self.part.kind
        if self.program.in_pieces:
            self.last_piece = self.identifier("last_piece")
        rows = merged(row for line in self.schedule.lines for row in self._rows(line))
        early = [row for row in rows if row.when == "early" or row.is_early]
        lines: list[tuple[str, str]] = []
        if early:
            lines += [(f"{' = '.join(self.sums)} = None", "what micro-batches add up"), (self._loop(), "")]
            lines += [(f"    {code}", comment) for code, comment in (row.text() for row in early)]
        for is_last, some in groupby((r for r in rows if r.when != "early"), self._is_of_the_last):
            found = self._in_order([*some])
            lines += [("if ctx.is_last:", ""), *((f"    {code}", what) for code, what in found)] if is_last else found
        lines[:0] = [
            (f"{name} = ctx.at({pinned!r})", "whether this rank is there") for pinned, name in self.here.items()
        ]
        width = min(max((len(code) for code, _ in lines), default=0), WIDTH)
        body = [f"    {code:<{width}}  # {comment}" if comment else f"    {code}" for code, comment in lines]
        given = ", ".join(f"{self.keys[r]!r}: {self._use(r)}" for r in self._kept())
        if kind == "before":
            head = "def before(ctx, weights, batch):"
            what = "What a step makes once, before all micro-batches, by name."
            body.append(f"    return {{{given}}}")
        elif kind == "after":
            head = "def after(ctx, weights, batch, once, sums):"
            what = "This rank's part of the loss, and of the gradient of every weight by name."
            body.append(self._returned())
        else:
            head = f"def {self.function}(ctx, weights, batch, once, sums, kept):"
            what = f"Stage {self.part.stage}: {_WHAT[kind]}."
            body += [f"    kept.update({{{given}}})"] if given else []
            late = ", ".join(f"{self.keys[r]!r}: {self._use(r)}" for r in self._handed_on() if r in self.late)
            body += [f"    sums.update({{{late}}})"] if late else []
            sent = ", ".join(self._use(each.held) for each in self.part.sends)
            body += [f"    return ({sent},)"] if sent else []
        return "\n".join([head, f'    """{what}"""', *(body or ["    pass"])]) + "\n"

    def _is_of_the_last(self, row: Row) -> bool:
        """Return whether a row is of the last micro-batch that the part is done for."""
        return self.part.stage is not None and row.when == "last"

    def _loop(self) -> str:
        first, last = self.identifier("first"), self.identifier("last")
        self.flags = {"first": first, "last": last}
        return f"for {first}, {last} in micro_batches(ctx, {self.program.micro_batches}):"

    def _kept(self) -> list[Register]:
        """Return the registers that the part hands to other parts of the same micro-batch or, if `before`, to all."""
        if self.part.kind == "before":
            return [r for r in self.program.outputs if r in self.keys]
        return [r for r in self._handed_on() if r not in self.late]

    def _handed_on(self) -> list[Register]:
        """Return the registers that the part hands to other parts of the rank, but for sums over micro-batches."""
        makers = makers_of(self.program.body)
        handed = [r for r in self.program.outputs if r in self.keys and r not in self.program.started]
        return [r for r in handed if not (isinstance(step := makers[r], TimeStep) and not step.is_of_pieces)]

    def _returned(self) -> str:
        step = self.program.part_of
        assert step is not None
        weights = {leaf.result: leaf.name for leaf in step.leaves("weight")}
        made = {weights[i.weight]: i.grad for i in step.body if isinstance(i, UpdateWeight)}
        found = ", ".join(f"{name!r}: {self._use(r)}" for name, r in {**made, **step.replaced}.items())
        return f"    return {self._use(step.outputs[0])}, {{{found}}}"

    # -- rows

    def _rows(self, line: ScheduledLine) -> list[Row]:
        action = line.action
        if isinstance(action, Leaf) and action.op in ("once", "sum", "started", "kept", "last"):
            return self._handed(action, line)
        if isinstance(action, Leaf) and action.op in ("weight", "cast") and self.known:
            self.own[action.result] = stored(action)
            return []
        found = super()._rows(line)
        if not found:
            return []
        row, *marker = found
        # A loss in pieces has its backward in the forward of its stage.
        return [row, *(marker if line.in_pieces else ())] if row.targets else []

    def _handed(self, leaf: Leaf, line: ScheduledLine) -> list[Row]:
        """Return the row that takes what another part has made."""
        texts = {
            "once": f"once[{leaf.name!r}]",
            "sum": f"sums.pop({leaf.name!r}, None)",
            "started": f"sums.pop({leaf.name!r}, None)",
            "kept": f"kept[{leaf.name!r}]",
            "last": f"kept.pop({leaf.name!r})",
        }
        if leaf.op == "once":
            self.own[leaf.result] = texts["once"]
            return []
        target = self._name(leaf.result, leaf.name)
        return [Row([target], texts[leaf.op], dies=[self._use(r) for r in line.dies])]

    def _total(self, step: TimeStep) -> tuple[str, str]:
        if self.part.kind == "before":
            return super()._total(step)
        key = self.keys[step.result]
        self.own[step.result] = f"sums[{key!r}]"
        return self.own[step.result], f"sums.get({key!r})"

    def _name(self, register: Register, wish: str) -> str:
        if register not in self.program.started:
            return super()._name(register, wish)
        self.own[register] = f"sums[{self.keys[register]!r}]"
        return self.own[register]

    def _only(self, text: str, pinned: Pins, results: int = 1) -> str:
        return super()._only(text, tuple(pin for pin in pinned if self.known.get(pin[0]) != pin[1]), results)


def schedule_text(parts: StepParts, functions: Mapping[str, str], program: Program) -> str:
    """
    Return the text of a step in stages: constants, and the function `forward_backward`, which runs the parts in the
    order of SCHEDULE. If the pipeline never drains, there is the function `flight`, too, which makes the state
    (`Flight`) that a rank keeps from step to step.

    The constants are PIPELINE, the mesh axes along which the pipeline's ranks are; SCHEDULE, the actions of each of
    these ranks, as text; RANK_OF, the rank of each stage; PARTS, the function of each part; and RECEIVES, the tensors
    that each stage receives.

    `parts` is the step, divided; `program` is the whole step. `functions` has the name of each part's function by the
    part's name, such as `2F` for stage 2's forward.
    """
    words = [" ".join(map(str, actions)) for actions in parts.schedule.ranks]
    axes = tuple(range(len(parts.mesh.sizes)))
    out = [
        f"PIPELINE = {axes!r}  # mesh axes along which its ranks are",
        f"SCHEDULE = (  # {parts.schedule.name}: what each of them does, in order; 2F0: stage 2's forward of the first",
        *_overlap(parts),
        *(f"    {_wrapped(row)}," for row in words),
        ")",
        f"RANK_OF = {parts.schedule.rank_of!r}  # the rank of each stage",
        "PARTS = {",
        *(f"    {word!r}: {name}," for word, name in functions.items() if word not in ("before", "after")),
        "}",
        "RECEIVES = {  # what a stage receives: name, shape, element type, and which of its ranks do",
    ]
    for stage in range(parts.schedule.stages):
        for direction in ("F", "B"):
            received = parts.received(stage, direction)
            if received:
                rows = ", ".join(_received(parts, program, r) for r in received)
                out.append(f"    {f'{stage}{direction}'!r}: ({rows},),")
    return "\n".join([*out, "}"]) + "\n" + (_OVERLAPPING if parts.schedule.gradient_delay else _STEP) + _PARTS


def _overlap(parts: StepParts) -> list[str]:
    """Return the comment that says what micro-batches are those of the next step, if any are."""
    if not parts.schedule.gradient_delay:
        return []
    first = parts.schedule.micro_batches
    return [
        f"    # from the end of a rank's last backward to that of the next step; from {first} on, micro-batches are of",
        "    # the step after that: the first step begins with these, as its own, and the last leaves them out",
    ]


_STEP = '''

def forward_backward(ctx, weights, batch):
    """This rank's part of the loss, and of the gradient of every weight by name."""
    once, sums = before(ctx, weights, batch), {}
    run_schedule(ctx, weights, batch, once, sums)
    return after(ctx, weights, batch, once, sums)
'''

_OVERLAPPING = '''

def forward_backward(ctx, weights, batch):
    """This rank's part of the loss, and of the gradient of every weight by name at the weights of one step ago."""
    return ctx.flight.step(ctx, weights, batch, before, after)


def flight():
    """What is under way between steps."""
    return Flight()
'''

NO_FLIGHT = "flight = None  # each step ends before the next begins\n"
"""What a program has in place of `flight`."""

_PARTS = """

forward_backward.parts = (before, *PARTS.values(), after)  # whose lines profiles and --check-nan look at
"""


def _wrapped(words: str, width: int = 100) -> str:
    """Return a string literal, over several lines if it is long."""
    lines, line = list[str](), ""
    for word in words.split(" "):
        if line and len(line) + len(word) + 1 > width:
            lines.append(line + " ")
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines.append(line)
    return repr(lines[0]) if len(lines) == 1 else "(\n        " + "\n        ".join(map(repr, lines)) + "\n    )"


def _received(parts: StepParts, program: Program, register: Register) -> str:
    tensor = program.tensors[register]
    pinned = pins_of(tensor.layout)
    return f"({parts.keys[register]!r}, {tensor.local(program.mesh)!r}, {TORCH_DTYPES[tensor.dtype]}, {pinned!r})"

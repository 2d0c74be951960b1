"""
A rank's program as one readable Python file.

Header and plan, the kernels, a launcher per operator and shape, the step in straight lines (each with its operator,
shape and placement as a comment), the same forward in plain PyTorch for `--check`, and the fixed part
(`lowering.runtime`). Text of the source graph never becomes code: names are printed as string literals, and
identifiers are made anew.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unity_ir import __version__
from unity_ir.errors import UnityError
from unity_ir.forms.classify import is_convolution
from unity_ir.forms.contraction import contraction
from unity_ir.lowering import runtime
from unity_ir.lowering.emit.fusing import with_fusions
from unity_ir.lowering.emit.plan_text import plan_text
from unity_ir.lowering.emit.reference_text import reference_text
from unity_ir.lowering.emit.tuning import Piece, Table, piece_of
from unity_ir.lowering.launchers import launcher
from unity_ir.lowering.pytorch.value import TORCH_DTYPES
from unity_ir.lowering.rank.deadlock import calls, check_order, makers, there
from unity_ir.lowering.rank.program import (
    Compute,
    Exchange,
    Fused,
    Leaf,
    Program,
    Register,
    Reshard,
    UpdateWeight,
    check_step,
)
from unity_ir.lowering.rank.saved_softmax import with_savings
from unity_ir.lowering.rank.schedule import BUCKET_BYTES, Bucket, Schedule, Wait, piece_bytes, schedule
from unity_ir.lowering.triton.expression import tdl_text
from unity_ir.lowering.triton.optimizer import optimizer_launcher
from unity_ir.lowering.triton.step import Compiled, Launcher
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.origin import Origin
from unity_ir.pcg.reshard import COLLECTIVES, PINNED_KINDS
from unity_ir.pcg.sharding import PINNED, SUM, at, pins, role_name
from unity_ir.tdl.syntax import Bound

BACKWARD = "# --- backward"
"""A comment of its own after the line that makes the loss."""

IMPLEMENTATIONS = ("triton", "torch")

_IMPORT_TRITON = """
if not torch.cuda.is_available() or "gloo" in sys.argv or "--backend=gloo" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Emitted:
    """The program's text, and what its launches compile to, for ahead-of-time checks."""

    text: str
    kernels: Mapping[str, str]
    """Text of every kernel by name."""
    compiled: tuple[Compiled, ...]


def emit(
    program: Program,
    reference: Graph,
    matmul: str = "triton",
    file: str = "train.py",
    kernels: str = "triton",
    convolution: str = "torch",
    bucket: int = BUCKET_BYTES,
    links: Sequence[str] = (),
    tuned: Table | None = None,
    fuse: bool = True,
    origin: Origin | None = None,
) -> Emitted:
    """
    Print a training step. `reference` is its serial forward; `matmul` says what multiplies matrices, triton or torch,
    `convolution` what convolves (torch's cuDNN unless told otherwise), and `kernels` what does all the rest. A program
    with all in torch runs at full speed on CPUs, and needs no Triton. All-reduces of gradients of fewer bytes than
    `bucket` are done together. `links` are the names of the links each mesh axis is over, for profiles.
    Where `tuned` has measured an operator's implementations, the faster is taken whatever else is said. Operators that
    one kernel computes together are one line, unless told not to `fuse`. `origin` is that of an imported model.

    Raises `UnityError` for a program without a backward, operators no kernel covers, and ranks that would wait for each
    other for ever.
    """
    for name, value in (("matmul", matmul), ("kernels", kernels), ("convolution", convolution)):
        if value not in IMPLEMENTATIONS:
            raise UnityError(f"triton: {name} is {value!r}; it must be {' or '.join(IMPLEMENTATIONS)}")
    if bucket < 0:
        raise UnityError(f"triton: bucket is {bucket}; it must be 0 or more bytes")
    check_step(program, reference)
    if kernels == "torch":
        if tuned is not None:
            raise UnityError("triton: with kernels in torch there is nothing to choose; leave out tune or kernels")
        matmul = convolution = "torch"
    choice = Implementations(matmul, kernels, convolution, tuned)
    if kernels == "triton":
        program = with_savings(program)
        if fuse:
            program = with_fusions(program, choice.of)
    lines = schedule(program, bucket)
    check_order(program.name, calls(program, lines))
    return _Printer(program, reference, lines, choice, file, links, origin).emit()


@dataclass(frozen=True)
class Implementations:
    """What computes what: as it was measured, or else as it was told."""

    matmul: str
    kernels: str
    convolution: str
    tuned: Table | None = None

    def of(self, piece: Piece) -> str:
        """What computes a piece: `triton` or `torch`."""
        if piece.fused:
            return "triton"
        measured = None if self.tuned is None else self.tuned.choice(piece.key)
        return measured or self._told(piece.line)

    def _told(self, line: Bound) -> str:
        if all(is_convolution(r, line.extents) for r in line.results):
            return self.convolution
        product = all(contraction(r, line.extents) is not None for r in line.results)
        return self.matmul if product else self.kernels


class _Printer:
    def __init__(
        self,
        program: Program,
        reference: Graph,
        schedule: Schedule,
        choice: Implementations,
        file: str,
        links: Sequence[str],
        origin: Origin | None,
    ):
        self.program = program
        self.reference = reference
        self.schedule = schedule
        self.origin = origin
        self.links = tuple(links) or ("network",) * len(program.mesh.sizes)
        self.choice = choice
        self.kernels = choice.kernels
        self.file = file
        self.launchers: dict[str, Launcher] = {}
        self.alike: dict[object, tuple[Launcher, list[str]]] = {}
        self.texts: dict[str, str] = {}
        """The name of the kernel of each text without its name."""
        self.groups: dict[tuple[int, ...], None] = {}
        self.makers = makers(program)
        self.calls = {i: self._launcher(i) for i in program.body if isinstance(i, Compute)}
        self.taken = self._reserved()

    # -- names

    def _identifier(self, wish: str) -> str:
        """A fresh identifier like `wish`; every character that is not of one is dropped."""
        stem = re.sub(r"\W", "_", wish, flags=re.ASCII).strip("_") or "x"
        if not stem[0].isalpha() or keyword.iskeyword(stem):
            stem = f"x_{stem}"
        name, number = stem, 1
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name

    def _reserved(self) -> set[str]:
        """Names a function of the program may read, which no local variable may hide."""
        names = {*dir(builtins), *self.launchers, "ctx", "weights", "batch", "grads"}
        for statement in ast.parse(self._header() + runtime.text()).body:
            match statement:
                case ast.FunctionDef(name) | ast.ClassDef(name):
                    names.add(name)
                case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                    names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
                case _:
                    pass
        return names

    # -- the whole

    def emit(self) -> Emitted:
        step = self._step()
        update = self._update()
        self.taken = self._reserved()
        reference = reference_text(self.reference, self._identifier, self.taken)
        kernels: dict[str, str] = {}
        for name, text in (item for each in self.launchers.values() for item in each.kernels.items()):
            assert kernels.setdefault(name, text) == text, f"two kernels are called {name}"
        parts = [
            self._header(),
            plan_text(self.program, self.reference, tuple(self.groups), self.links, self.origin),
            "# --- kernels\n\n\n" + _once(kernels.values()) if kernels else "",
            "# --- operators: one function for each shape a kernel is launched on\n\n\n"
            + _once(each.source for each in self.launchers.values()),
            "# --- the step\n\n\n" + step,
            update,
            reference,
            runtime.text(step=step),
        ]
        text = "\n\n".join(part.rstrip("\n") + "\n" for part in parts if part)
        compile(text, self.file, "exec")
        compiled = tuple(c for each in self.launchers.values() for c in each.compiled)
        return Emitted(text, kernels, compiled)

    def _header(self) -> str:
        world = self.program.mesh.devices
        command = "python" if world == 1 else f"torchrun --nproc-per-node {world}"
        title = ascii(self.program.name)[1:-1].replace("\\", "_").replace('"', "_")
        return (
            f'"""\n{title}: one training step for {world} rank{"s" * (world > 1)}. '
            f"Written by unity-ir {__version__}.\n\n"
            f"    {command} {self.file} --check\n"
            f"    {command} {self.file} --steps 100 --save checkpoints\n\n"
            f"{self._without_gpu()}\n"
            '"""\n\n' + runtime.imports(("plan", *runtime.PARTS)) + (_IMPORT_TRITON if self.kernels == "triton" else "")
        )

    def _without_gpu(self) -> str:
        if self.kernels == "torch":
            return "Without a GPU the ranks talk over gloo."
        return "Without a GPU the kernels run in Triton's interpreter and the ranks talk over gloo."

    # -- the step

    def _step(self) -> str:
        program = self.program
        rows: list[_Row] = []
        here: dict[tuple[tuple[int, int], ...], str] = {}
        own: dict[Register, str] = {}
        """What the value of a register is read as: a variable, or a weight by its name."""
        buckets: dict[Register, str] = {}

        def use(register: Register) -> str:
            return own[self.schedule.held(register)]

        def only(text: str, pinned: tuple[tuple[int, int], ...], results: int = 1) -> str:
            """What is done on some ranks only; the others have None."""
            if not pinned:
                return text
            if pinned not in here:
                here[pinned] = self._identifier("at_" + "_".join(f"{i}_{c}" for i, c in pinned))
            nothing = f"({', '.join(['None'] * results)})" if results > 1 else "None"
            return f"{text} if {here[pinned]} else {nothing}"

        for line in self.schedule.lines:
            starts: tuple[Register, ...] = ()
            match line.action:
                case Leaf("weight", result, name) if not pins(program.tensors[result].layout):
                    own[result] = f"weights[{name!r}]"
                    continue
                case Leaf(op, result, name, value):
                    target = own[result] = self._identifier(name or "constant")
                    text = {
                        "input": f"batch[{name!r}]",
                        "weight": f"weights[{name!r}]",
                        "constant": self._constant(result, value),
                    }[op]
                    text, what = only(text, pins(program.tensors[result].layout)), self._comment(op, result)
                case Compute(name, operands, results) as compute:
                    text = self._compute(compute, [use(r) for r in operands])
                    for r in results:
                        own[r] = self._identifier(self.makers[r])
                    text = only(text, pins(program.tensors[results[0]].layout), len(results))
                    target, what = ", ".join(own[r] for r in results), self._comment(name, *results)
                case Reshard(operand, result, kind, _, source) as move:
                    pinned, dies = there(program, move), list(map(use, line.dies))
                    before = None if pinned else _inside(rows, use(operand), dies)
                    target = own[result] = self._identifier(kind)
                    row = _Row([target], self._reshard(before.code if before else use(operand), move), dies)
                    row.code = only(row.code, pinned)
                    row.moves = [*(before.moves if before else ()), (kind, role_name(source))]
                    row.comment = self._comment(f"of {_printable(self.makers[operand])}", result)
                    row.starts, row.pinned = () if pinned else (result,), bool(pinned)
                    if before:
                        row.dies[:0] = before.dies
                    elif kind == "zero_pad" and not pinned and piece_bytes(program, result) < BUCKET_BYTES:
                        row.operands = [use(operand)]
                        row.how = row.code.removeprefix(f"zero_pad(ctx, {use(operand)}")
                    if not (rows and rows[-1].joins(row)):
                        rows.append(row)
                    continue
                case Exchange(operand, result, kind, axes, dim, low, high) as move:
                    self.groups.setdefault(axes)
                    text = only(f"{kind}(ctx, {use(operand)}, {dim}, {low}, {high}, {axes!r})", there(program, move))
                    target = own[result] = self._identifier(kind)
                    name = f"{kind} of {_printable(self.makers[operand])}"
                    what = f"{self._comment(name, result)}, {low} before and {high} after"
                    starts = () if there(program, move) else (result,)
                case Bucket(moves):
                    axes = moves[0].axes
                    self.groups.setdefault(axes)
                    dims = "".join(f"{dim!r}, " for dim in _dims(moves))
                    text = f"{moves[0].kind}_many(ctx, ({', '.join(use(m.operand) for m in moves)}), {dims}{axes!r})"
                    target = self._identifier("bucket")
                    for move in moves:
                        buckets[move.result] = target
                        own[move.result] = self._identifier(move.kind)
                    what = (
                        f"{moves[0].kind} of {len(moves)} {'weights' if moves[0].kind == 'all_gather' else 'gradients'}"
                    )
                    starts = tuple(m.result for m in moves)
                case Wait(registers):
                    wait = _Row(list(map(use, registers)), "", list(map(use, line.dies)))
                    if registers[0] in buckets:
                        wait.code = f"{buckets[registers[0]]}.wait()"
                    else:
                        wait.waits = True
                        wait.pinned = bool(pins(program.tensors[registers[0]].layout))
                    if not (rows and rows[-1].takes(wait, registers)):
                        rows.append(wait)
                    continue
            rows.append(_Row([target], text, list(map(use, line.dies)), what, starts))
            if isinstance(line.action, Compute) and program.outputs[0] in line.action.results:
                rows.append(_Row([], BACKWARD))
        lines = [row.text() for row in rows]
        out = ["def forward_backward(ctx, weights, batch):"]
        out.append('    """This rank\'s part of the loss, and of the gradient of every weight by name."""')
        lines[:0] = [(f"{name} = ctx.at({pinned!r})", "whether this rank is there") for pinned, name in here.items()]
        width = min(max((len(code) for code, _ in lines), default=0), 72)
        for code, comment in lines:
            out.append(f"    {code:<{width}}  # {comment}" if comment else f"    {code}")
        weights = {leaf.result: leaf.name for leaf in program.leaves("weight")}
        updates = [i for i in program.body if isinstance(i, UpdateWeight)]
        found = ", ".join(f"{weights[i.weight]!r}: {use(i.grad)}" for i in updates)
        out.append(f"    return {use(program.outputs[0])}, {{{found}}}")
        return "\n".join(out) + "\n"

    def _comment(self, what: str, *registers: Register) -> str:
        """Operator, whole shape, and what each mesh axis does, of the first result."""
        tensor = self.program.tensors[registers[0]]
        roles = ", ".join(map(role_name, tensor.layout)) or "one device"
        return f"{what} {list(tensor.shape)}, {roles}"

    def _constant(self, register: Register, value: float) -> str:
        tensor = self.program.tensors[register]
        axes = tuple(i for i, r in enumerate(tensor.layout) if r == SUM)
        shape = tensor.local(self.program.mesh)
        return f"constant(ctx, {value!r}, {shape!r}, {TORCH_DTYPES[tensor.dtype]}, {axes!r})"

    def _launcher(self, instruction: Compute) -> tuple[Launcher, list[str]]:
        """The function of an operator, and the positions its piece starts at where it must know them."""
        program = self.program
        operands = tuple(program.tensors[r] for r in instruction.operands)
        line = tdl_text(self.program.local_line(instruction)) if isinstance(instruction, Fused) else ""
        key = instruction.operator, instruction.attributes, instruction.assignment, operands, line
        if key not in self.alike:
            self.alike[key] = self._new_launcher(instruction)
        return self.alike[key]

    def _new_launcher(self, instruction: Compute) -> tuple[Launcher, list[str]]:
        piece = piece_of(self.program, instruction)
        made = self._sharing(launcher(piece.line, piece.dtypes, self.choice.of(piece), piece.divided))
        self._add(made)
        axes = [tuple(i for i, what in enumerate(instruction.assignment) if what == v) for v in piece.divided]
        starts = zip(piece.divided, axes, strict=True)
        return made, [f"ctx.index({a!r}) * {piece.line.extents[v]}" for v, a in starts]

    def _compute(self, instruction: Compute, operands: Sequence[str]) -> str:
        made, starts = self.calls[instruction]
        return f"{made.name}({', '.join([*operands, *starts])})"

    def _sharing(self, made: Launcher) -> Launcher:
        """The launcher with the kernels of others, where only their names differ from its own."""
        names = {n: self.texts.setdefault(re.sub(rf"\b{n}\b", "", text), n) for n, text in made.kernels.items()}
        source = made.source
        for own, name in names.items():
            source = re.sub(rf"\b{own}\b", name, source)
        kernels = {n: re.sub(rf"\b{own}\b", n, made.kernels[own]) for own, n in names.items()}
        compiled = tuple(replace(c, kernel=names[c.kernel]) for c in made.compiled)
        return replace(made, source=source, kernels=kernels, compiled=compiled)

    def _add(self, made: Launcher) -> None:
        old = self.launchers.setdefault(made.name, made)
        assert old.source == made.source, f"two launchers are called {made.name}"

    def _reshard(self, operand: str, move: Reshard) -> str:
        kind, axes, source, target = move.kind, move.axes, move.source, move.target
        if kind in (*COLLECTIVES, *PINNED_KINDS):
            self.groups.setdefault(axes)
        if source <= PINNED:
            held = self.program.tensors[move.operand]
            local = f"{held.local(self.program.mesh)!r}, {TORCH_DTYPES[held.dtype]}"
            match kind:
                case "broadcast":
                    return f"broadcast(ctx, {operand}, {at(source)}, {local}, {axes!r})"
                case "scatter":
                    return f"scatter(ctx, {operand}, {target}, {at(source)}, {local}, {axes!r})"
                case "send":
                    return f"send(ctx, {operand}, {at(source)}, {at(target)}, {local}, {axes!r})"
                case _:
                    return f"zero_elsewhere(ctx, {operand}, {at(source)}, {local}, {axes!r})"
        match kind:
            case "retype":
                return operand
            case "gather":
                return f"gather(ctx, {operand}, {source}, {at(target)}, {axes!r})"
            case "reduce":
                return f"reduce(ctx, {operand}, {at(target)}, {axes!r})"
            case "all_reduce":
                return f"all_reduce(ctx, {operand}, {axes!r})"
            case "all_gather":
                return f"all_gather(ctx, {operand}, {source}, {axes!r})"
            case "reduce_scatter":
                return f"reduce_scatter(ctx, {operand}, {target}, {axes!r})"
            case "all_to_all":
                return f"all_to_all(ctx, {operand}, {source}, {target}, {axes!r})"
            case "slice":
                return f"keep_part(ctx, {operand}, {target}, {axes!r})"
            case _:
                return f"zero_pad(ctx, {operand}, {source if source >= 0 else None}, {axes!r})"

    # -- the update

    def _update(self) -> str:
        program = self.program
        optimizer = program.optimizer
        assert optimizer is not None
        out = ["def update(weights, grads, moments, t):"]
        out.append(
            f'    """The optimizer\'s step number `t`, counted from 1, on this rank\'s pieces: {optimizer.name}."""'
        )
        out.append("    for name, weight in weights.items():")
        dtypes = list(dict.fromkeys(program.tensors[leaf.result].dtype for leaf in program.leaves("weight")))
        for i, dtype in enumerate(dtypes):
            made = optimizer_launcher(optimizer.name, dtype, self.kernels, gradient=dtype, state=dtype)
            self._add(made)
            moments = ", *moments[name], t" if optimizer.states else ""
            indent = "        "
            if len(dtypes) > 1:
                out.append(f"{indent}{'elif' if i else 'if'} weight.dtype == {TORCH_DTYPES[dtype]}:")
                indent += "    "
            given = ", ".join(map(repr, optimizer.settings.values()))
            out.append(f"{indent}{made.name}(weight, grads[name]{moments}, {given})  # {optimizer.name}")
        return "\n".join(out) + "\n"


def _once(texts: Iterable[str]) -> str:
    """Texts of kernels or launchers one after the other; what stands before several is written once."""
    return "\n\n\n".join(dict.fromkeys(block for text in texts for block in text.rstrip("\n").split("\n\n\n")))


MOVES = 4
"""At most so many moves after each other are one line, that it stays readable."""

WAITS = 16
"""At most so many collectives are waited for in one line, that it stays readable."""


@dataclass(slots=True)
class _Row:
    """A line of the step, before it is text."""

    targets: list[str]
    code: str
    dies: list[str] = field(default_factory=list[str])
    comment: str = ""
    starts: tuple[Register, ...] = ()
    """Registers of a collective on all ranks that is waited for at once if the next line waits for it."""
    waits: bool = False
    """For collectives that are called as their results are; the line has no code of its own."""
    pinned: bool = False
    """For what only some ranks do, or have."""
    moves: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The kinds of the reshard's moves in this line, and what axes did before each."""
    operands: list[str] = field(default_factory=list[str])
    """What it moves, if others like it may be in this line."""
    how: str = ""
    """What of the call follows the operand."""

    def joins(self, other: _Row) -> bool:
        """Whether this line also does what the next would, which differs in the operand alone and then is none."""
        if not self.operands or not other.operands or len(self.operands) == WAITS:
            return False
        same = (self.how, self.moves, self.comment) == (other.how, other.moves, other.comment)
        if not same or {*self.targets} & {*other.operands}:
            return False
        self.targets, self.operands = self.targets + other.targets, self.operands + other.operands
        self.code = f"{self.moves[0][0]}_many(ctx, ({', '.join(self.operands)}){self.how}"
        self.dies += other.dies
        return True

        self.dies += other.dies
        return True

    def takes(self, wait: _Row, registers: tuple[Register, ...]) -> bool:
        """Whether this line also waits for what the next would wait for, which then is none."""
        if self.starts == registers:
            self.targets, self.code, self.starts = wait.targets, f"{self.code}.wait()", ()
        elif self.waits and wait.waits and len(self.targets) < WAITS:
            self.targets += wait.targets
        else:
            return False
        self.dies += wait.dies
        return True

    def text(self) -> tuple[str, str]:
        """Its code and its comment."""
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


def _inside(rows: list[_Row], operand: str, dies: list[str]) -> _Row | None:
    """
    What the next move is to have its operand from, if nothing else reads it: the last row, which waits for it, or makes
    it by a move or two, and from now on is none of its own. What dies with it is no longer among `dies`.
    """
    if not rows or rows[-1].targets != [operand] or operand not in dies or rows[-1].pinned:
        return None
    last = rows[-1]
    if last.waits:
        # Until then the variable holds the collective.
        return replace(rows.pop(), code=f"{operand}.wait()")
    if not last.moves or len(last.moves) == MOVES:
        return None
    dies.remove(operand)
    return rows.pop()


def _dims(moves: Sequence[Reshard]) -> tuple[tuple[int, ...], ...]:
    """The dims along which the moves of a bucket gather or scatter, as an argument; none of all-reduces."""
    if moves[0].kind == "all_reduce":
        return ()
    return (tuple(m.source if m.kind == "all_gather" else m.target for m in moves),)


def _printable(name: str) -> str:
    """A name as part of a comment, which it cannot end."""
    return name if name.isprintable() else ascii(name)

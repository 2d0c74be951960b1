"""
Print a rank's program as one readable Python file.

The file has a header, the plan, the kernels, a launcher per operator and local shape, the step as straight-line code
(each line with its operator, shape and layout as a comment), the serial forward in plain PyTorch for `--check`, and the
runtime (`lowering.runtime`). Text of the source graph never becomes code: its names are printed as string literals, and
identifiers are new.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from textwrap import indent
from types import MappingProxyType

from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton.expression import tdl_text
from unity_ir.kernels.triton.launch import Compiled, Launcher
from unity_ir.kernels.triton.optimizer import BLOCK, optimizer_launcher
from unity_ir.lowering import runtime
from unity_ir.lowering.emit.plan_text import plan_text, spec_text
from unity_ir.lowering.emit.reference_text import reference_text
from unity_ir.lowering.emit.stages_text import NO_FLIGHT, PartWriter, schedule_text
from unity_ir.lowering.emit.step_text import StepWriter
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.origin import Origin
from unity_ir.plan.check_step import check_step
from unity_ir.plan.host_state import WindowUpdate
from unity_ir.plan.instructions import Compute, Fused, HaloExchange, ReshardMove, RowMove, UpdateWeight
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Program
from unity_ir.version import __version__

_IMPORT_TRITON = """
if not torch.cuda.is_available() or "gloo" in sys.argv or "--backend=gloo" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
"""


_CAST = """\
        if name in weights.casts:
            weights.casts[name].copy_(weight)  # kept cast
"""
"""End of the update of a weight in PyTorch."""

_BETWEEN = "\n\n\n"
"""Between top-level definitions."""

KEPT_TABLES = 16
"""How many tables of weights a program with state at the host keeps, beside two for each window."""

NO_FORWARD = "forward = COUNT = None  # emit with evaluate for a forward alone, which --eval-data needs\n"
"""What a program has in place of `forward`."""


@dataclass(frozen=True)
class Emitted:
    """The text of an emitted program, its kernels by name, and their specialisations, for ahead-of-time compilation."""

    text: str
    kernels: Mapping[str, str]
    """Text of every kernel, by name."""
    compiled: tuple[Compiled, ...]
    """The specialisation of every launch."""


def emit(
    plan: Plan,
    reference: Graph,
    file: str = "train.py",
    links: Sequence[str] = (),
    origin: Origin | None = None,
    peaks: Mapping[str, float] = MappingProxyType({}),
    forward: Plan | None = None,
) -> Emitted:
    """
    Return the plan of a rank's training step as the text of a Python program, with its kernels. `reference` is the
    step's serial forward. `forward` is the plan of the forward alone (`plan.forward`); given it, the program can
    evaluate, too.

    `file` is the name of the program in the usage that it prints; nothing is written. `links` has the name of the link
    that each mesh axis crosses, for profiles (`network` for all if empty). `origin` has the tables and tied names of an
    imported model's checkpoint, None for other models. `peaks` has the most FLOP/s of all devices together, by element
    type. Raises `UnityError` for a program without a backward, and for operators that no kernel covers.
    """
    check_step(plan.program, reference)
    return _Printer(plan, reference, file, links, origin, peaks, forward).emit()


def _check_syntax(part: str) -> None:
    """Raise `SyntaxError` where some top-level statements of a program are not Python."""
    try:
        for statements in part.split(_BETWEEN):
            _compile(statements)
    except SyntaxError:
        # Unless what is between definitions is also in one, in a string.
        compile(part, "train.py", "exec")


@lru_cache(maxsize=4096)
def _compile(statements: str) -> None:
    # Most of a program, the runtime and many kernels, is the same in others.
    compile(statements, "train.py", "exec")


class _Printer:
    def __init__(
        self,
        plan: Plan,
        reference: Graph,
        file: str,
        links: Sequence[str],
        origin: Origin | None,
        peaks: Mapping[str, float],
        forward: Plan | None,
    ):
        self.plan = plan
        self.program = program = plan.program
        self.reference = reference
        self.origin = origin
        self.peaks = peaks
        self.links = tuple(links) or ("network",) * program.axes
        self.kernels = plan.options.kernels
        self.file = file
        self.launchers: dict[str, Launcher] = {}
        self.alike: dict[object, tuple[Launcher, list[str]]] = {}
        self.texts: dict[str, str] = {}
        """Kernel name by text (without the name in it), for kernels that differ in their names only."""
        steps = [own for _, own in plan.parts] or [plan]
        plans = steps if forward is None else [*steps, forward]
        self.calls = [
            (each, {i: self._launcher(each, i) for i in each.program.body if isinstance(i, Compute)}) for each in plans
        ]
        self.taken = self._reserved()

    # -- names

    def _identifier(self, wish: str) -> str:
        """Return a fresh identifier like `wish`, underscores for every character an identifier cannot hold."""
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
        """Return the names that functions of the program read, which no local variable may hide."""
        own = {*dir(builtins), *self.launchers, "ctx", "weights", "batch", "grads", "kept", "once", "sums"}
        return own | runtime.defined_names(self._header()) | runtime.runtime_names()

    # -- the whole

    def emit(self) -> Emitted:
        steps: list[str] = []
        groups: dict[tuple[int, ...], None] = {}
        functions: dict[str, str] = {}
        parts = [part for part, _ in self.plan.parts]
        for i, (plan, launchers) in enumerate(self.calls):
            calls = {i: (made.name, starts) for i, (made, starts) in launchers.items()}
            writer = StepWriter(plan, calls, self._identifier)
            if i < len(parts) and self.plan.pipeline is not None:
                writer = PartWriter(parts[i], plan, self.plan.pipeline, calls, self._identifier)
                functions[parts[i].name] = writer.function
            steps.append(writer.text())
            groups |= writer.groups
            self.taken = self._reserved()
        has_forward = len(self.calls) > max(len(parts), 1)
        if self.plan.pipeline is not None:
            steps.insert(len(parts), schedule_text(self.plan.pipeline, functions, self.program))
        if self.plan.pipeline is None or not self.plan.pipeline.schedule.gradient_delay:
            steps.append(NO_FLIGHT)
        steps.append(_count_text(self.calls[-1][0].program) if has_forward else NO_FORWARD)
        step = "\n\n".join(steps)
        update = self._update()
        self.taken = self._reserved()
        outputs = zip(self.program.running, self.reference.outputs, strict=False)
        running = {each.leaf.name: value for each, value in outputs if each is not None}
        reference = reference_text(self.reference, self._identifier, self.taken, running)
        kernels: dict[str, str] = {}
        for name, text in (item for each in self.launchers.values() for item in each.kernels.items()):
            assert kernels.setdefault(name, text) == text, f"two kernels are called {name}"
        optimizer = self.program.optimizer
        window = self.plan.options.window if self.program.state_at_host else None
        parts = [
            self._header(),
            plan_text(
                self.program,
                self.reference,
                tuple(groups),
                self.links,
                self.origin,
                self.peaks,
                self._on_host(),
                window,
            ),
            runtime.text(runtime.BEFORE_KERNELS) if kernels else "",
            "# --- kernels\n\n\n" + _once(_launched(*item) for item in kernels.items()) if kernels else "",
            "# --- operators: one function for each shape a kernel is launched on\n\n\n"
            + _once(each.source for each in self.launchers.values()),
            "# --- the step\n\n\n" + step,
            update,
            reference,
            runtime.text(
                step=step + update,
                on_host=self._on_host() is not None,
                has_average=optimizer is None or "average" in optimizer.line.state,
            ),
        ]
        text = "\n\n".join(part.rstrip("\n") + "\n" for part in parts if part)
        for part in parts:
            _check_syntax(part)
        compiled = tuple(c for each in self.launchers.values() for c in each.compiled)
        return Emitted(text, kernels, compiled)

    def _header(self) -> str:
        world = self.program.devices
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

    # -- launchers

    def _launcher(self, plan: Plan, instruction: Compute) -> tuple[Launcher, list[str]]:
        """Return an operator's launcher, and the expressions of the global indices it takes after the operands."""
        program = plan.program
        tensors = tuple(program.tensors[r] for r in (*instruction.operands, *instruction.results))
        line = tdl_text(program.local_line(instruction)) if isinstance(instruction, Fused) else ""
        adds = instruction.results[0] in program.added
        key = instruction.operator, instruction.attributes, instruction.assignment, tensors, line, adds
        if key not in self.alike:
            self.alike[key] = self._new_launcher(plan, instruction)
        return self.alike[key]

    def _new_launcher(self, plan: Plan, instruction: Compute) -> tuple[Launcher, list[str]]:
        operator = local_operator(plan.program, instruction)
        adds = instruction.results[0] in plan.program.added
        implementation = plan.implementations[instruction]
        made = self._sharing(launcher(operator.line, operator.dtypes, implementation, operator.divided, adds))
        self._add(made)
        axes = [tuple(i for i, what in enumerate(instruction.assignment) if what == v) for v in operator.divided]
        starts = zip(operator.divided, axes, strict=True)
        return made, [f"{self._index(a)} * {operator.line.extents[v]}" for v, a in starts]

    def _index(self, axes: tuple[int, ...]) -> str:
        """
        Return the expression of this rank's position along mesh axes, of which that of micro-batches is the outermost,
        and that of the pieces of the loss the innermost.
        """
        program = self.program
        over = tuple(axis for axis in axes if axis < program.axes)
        is_in_time = program.micro_batches > 1 and len(program.mesh.sizes) - 1 in axes
        found = f"ctx.index({over!r}, ctx.micro_batch)" if is_in_time else f"ctx.index({over!r})"
        is_in_pieces = program.loss_pieces > 1 and program.axes in axes
        return f"({found} * {program.loss_pieces} + ctx.piece)" if is_in_pieces else found

    def _sharing(self, made: Launcher) -> Launcher:
        """Return the launcher with earlier kernels in place of its own wherever only their names differ."""
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

    def _on_host(self) -> str | None:
        """Return why a step needs the host, so that it can be no CUDA graph; None if it does not."""
        if self.plan.pipeline is not None:
            return "its stages run in an order that the host keeps"
        if any(isinstance(i, HaloExchange) for i in self.program.body):
            return "halos are exchanged by messages that the host starts"
        if any(isinstance(i, ReshardMove) and i.kind == "ring_shift" for i in self.program.body):
            return "pieces go around a ring by messages that the host starts"
        if any(isinstance(i, RowMove) for i in self.program.body):
            return "the host reads how many rows go to each device's experts"
        if self.program.state_at_host:
            return "the optimizer's state rests at the host"
        if self.program.values_at_host:
            return "values of the step go to the host and come back"
        return "the optimizer in PyTorch takes numbers from the host" if self.kernels == "torch" else None

    # -- the update

    def _update(self) -> str:
        optimizer = self.program.optimizer
        assert optimizer is not None
        tensors, updates = self.program.tensors, (i for i in self.program.body if isinstance(i, UpdateWeight))
        types = dict.fromkeys((tensors[i.weight].dtype, tensors[i.grad].dtype) for i in updates)
        cast = next((self.program.tensors[leaf.result].dtype for leaf in self.program.leaves("cast")), None)
        made = [
            optimizer_launcher(
                optimizer.name, dtype, self.kernels, grad, dtype, optimizer.clip > 0, cast, optimizer.ema > 0
            )
            # In PyTorch one function takes all; those that cast gradients take others as well.
            for dtype, grad in sorted(types, key=lambda of: of[0] == of[1])
        ]
        for each in made[:1] if self.kernels == "torch" else made:
            self._add(each)
        given = ["step=t"] if optimizer.line.reads_step else []
        scaled = ["scale=scale"] if optimizer.clip else []
        pieces = "pieces" if cast is None else "pieces and their kept casts"
        what = f"Step `t` of {optimizer.name} (from 1 on) on this rank's {pieces}, in place, at `rate` times its"
        of_windows = (
            "    for weights, grads, moments in state_windows(weights, grads, moments):  # from the host, and back\n"
        )
        number = sum(isinstance(line, WindowUpdate) for line in self.plan.updates)
        if self.kernels == "torch":
            state = ["*moments[name]"] if optimizer.states else []
            words = ["weight", "grads[name]", *state, *given, "**hyperparameters(name, rate)", *scaled]
            body = (
                "    for name, weight in trained(weights).items():\n"
                f"        {optimizer.name}_torch({', '.join(words)})  # {optimizer.name}\n"
                + ("" if cast is None else _CAST)
            )
            return (
                "def update(weights, grads, moments, t, rate=1.0, scale=1.0):\n"
                f'    """{what}\n    learning rate, by gradients times `scale`."""\n'
                + (of_windows + indent(body, "    ") if number else body)
            )
        words = [f"{optimizer.name}_numbers", "grads" if number else "weights", "rate", "live", *given, *scaled]
        kept = f", kept={2 * number + KEPT_TABLES}" if number else ""
        body = (
            f"    for table in weight_tables(weights, grads, moments, block={BLOCK}{kept}):\n"
            f"        {optimizer.name}(table, numbers)  # {optimizer.name} of all weights\n"
        )
        return (
            "def update(weights, grads, moments, t, rate=1.0, scale=1.0, live=1.0):\n"
            f'    """\n    {what} learning rate, by\n'
            "    gradients times `scale`; none where `live` is 0. These may be tensors on the device.\n"
            '    """\n'
            f"    numbers = numbers_of({', '.join(words)})  # the same for all elements\n"
            + (of_windows + indent(body, "    ") if number else body)
        )


def _count_text(forward: Program) -> str:
    """Return the line that says whether `forward` returns a number of labels beside the loss, and in which layout."""
    if len(forward.outputs) == 1:
        return "COUNT = None  # the loss is a mean over as many samples in every batch, or none\n"
    return f"COUNT = {spec_text(forward, forward.outputs[1])}  # how many labels the loss is the mean over\n"


def _launched(name: str, text: str) -> str:
    """Return the text of a kernel, and of functions that it calls, as the host launches it (`runtime/launches.py`)."""
    return text.replace(f"@triton.jit\ndef {name}(", f"@launched\n@triton.jit\ndef {name}(")


def _once(texts: Iterable[str]) -> str:
    """Join the texts of kernels or launchers; functions and options that several of them define are written once."""
    return _BETWEEN.join(dict.fromkeys(block for text in texts for block in text.rstrip("\n").split(_BETWEEN)))

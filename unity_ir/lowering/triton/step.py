"""Define the parts of launchers: stages (one result each) and steps (one launch of one kernel each)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from textwrap import wrap
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names
from unity_ir.forms.classify import Form, form_of
from unity_ir.forms.contraction import Contraction
from unity_ir.lowering.triton.expression import Writer
from unity_ir.tdl.syntax import NOT_FLOATING, Bound, Expr, Name, Result, accesses, children

Scalar = int | float | str

POINTERS: Mapping[str, str] = MappingProxyType(
    {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i64": "*i64", "i32": "*i32", "bool": "*i1"}
)
"""Triton's name of a pointer to each element type that kernels take."""


def pointer(dtype: str) -> str:
    """
    Triton's name of a pointer to `dtype`.

    Raises `UnityError` for an element type no kernel takes.
    """
    if dtype not in POINTERS:
        raise UnityError(f"lowering: no kernel takes {dtype}; use {', '.join(POINTERS)}")
    return POINTERS[dtype]


@dataclass(frozen=True)
class Compiled:
    """
    One ahead-of-time compilation: what a launch specialises to.

    `signature` has a type per parameter, in order: `*fp32`, `i32`, `fp32`, `constexpr`; `i32:16` is an integer that 16
    divides. Pointers are taken to be aligned to 16 bytes, as torch allocates them. `constants` has the constexprs.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Scalar]
    num_warps: int
    num_stages: int
    expects: tuple[str, ...] = ()
    """What its code has to hold: `mma`, a matrix unit's instructions; `pipelined`, copies beside the arithmetic."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Work distribution of one launch."""

    kind: str
    """`elements` of results by themselves, `rows` that are reduced, a `product` of matrices; empty for all else."""
    programs: int
    """Programs in the grid."""
    passes: int
    """Times a program reads its input."""


@dataclass(frozen=True)
class Launcher:
    """
    A function of the emitted program that computes one operator on one rank's pieces.

    `name` says operator and local shapes; equal names mean equal texts, and so do equal names in `kernels`.
    """

    name: str
    source: str
    """
    `def name(x, w): ...`; takes contiguous tensors and returns one contiguous tensor, or a tuple of them. Before it
    stand the options that several launchers have in common.
    """
    kernels: Mapping[str, str]
    """Text of every kernel it launches, by name; each may be defined anywhere before the launcher runs."""
    compiled: tuple[Compiled, ...]
    """What its launches specialise to, for ahead-of-time compilation."""
    launches: tuple[Launch, ...] = ()


@dataclass(frozen=True, slots=True)
class Argument:
    """What is passed for a parameter that is no constexpr: an expression of the launcher, and its type."""

    text: str
    type: str

    @staticmethod
    def integer(value: int) -> Argument:
        """A size or stride, with the type the just-in-time compiler specialises it to."""
        if value == 1:
            return Argument("1", "constexpr")
        width = "i32" if value < 2**31 else "i64"
        return Argument(str(value), f"{width}:16" if value % 16 == 0 else width)


@dataclass(frozen=True)
class Step:
    """One launch of one kernel by a launcher."""

    kernel: str
    text: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Scalar]
    num_warps: int
    num_stages: int | None = None
    """None where the kernel has no loop to pipeline."""
    allocation: str | None = None
    """The line of the launcher that makes the buffer this step fills; None if an earlier one did."""
    before: tuple[str, ...] = ()
    """Lines of the launcher that make other tensors the kernel takes."""
    expects: tuple[str, ...] = ()
    """As of `Compiled`."""
    kind: str = ""
    passes: int = 1
    """As of `Launch`."""
    options_name: str = ""
    """Of a dict with the constants, warps and stages, where launches of many shapes have the same."""
    after: tuple[str, ...] = ()
    """Lines of the launcher that finish the result."""

    @property
    def options(self) -> Mapping[str, Scalar]:
        """What the launch is given by name."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        return {**self.constants, "num_warps": self.num_warps, **stages}

    @property
    def head(self) -> str:
        """What stands before the launcher."""
        return f"{self.options_name} = {dict(self.options)}\n\n\n" if self.options_name else ""

    @property
    def call(self) -> tuple[str, ...]:
        """The lines that launch it."""
        options = [f"**{self.options_name}"] if self.options_name else [f"{n}={v!r}" for n, v in self.options.items()]
        arguments = [*(a.text for a in self.arguments.values()), *options]
        line = f"{self.kernel}[{self.grid}]({', '.join(arguments)})"
        if len(line) <= 116:
            return (line,)
        inside = ", ".join(arguments)
        if len(inside) <= 112:
            return (f"{self.kernel}[{self.grid}](", f"    {inside}", ")")
        count = len(self.arguments)
        halves = [", ".join(part) for part in (arguments[:count], arguments[count:])]
        return (f"{self.kernel}[{self.grid}](", *(f"    {half}," for half in halves), ")")

    @property
    def launch(self) -> Launch:
        return Launch(self.kind, prod(self.grid), self.passes)

    @property
    def compiled(self) -> Compiled:
        signature = {n: a.type for n, a in self.arguments.items()} | dict.fromkeys(self.constants, "constexpr")
        ones = {n: 1 for n, a in self.arguments.items() if a.type == "constexpr"}
        constants = {**ones, **self.constants}
        return Compiled(self.kernel, signature, constants, self.num_warps, self.num_stages or 3, self.expects)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in a launcher: its identifier, its element type, and that type as an expression of the launcher."""

    name: str
    dtype: str
    torch_dtype: str

    @property
    def argument(self) -> Argument:
        return Argument(self.name, pointer(self.dtype))


@dataclass(frozen=True)
class Stage:
    """One result to compute from tensors in hand."""

    result: Result
    extents: Mapping[str, int]
    buffers: Mapping[str, Buffer]
    """Buffer of every tensor the result's expression reads."""
    output: Buffer
    device: str
    """The tensor of the launcher on whose device the result is made."""
    kernel: str
    """Name of the kernel, if nothing else has that text."""
    family: str | None
    """Name of the kernel where its text holds nothing of the shapes; None if it has to be `kernel` even so."""
    wide: bool = False
    """Positions need 64 bits."""
    starts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables used as values whose piece starts elsewhere than at 0, and the launcher's name of that position."""
    names: Names = field(default_factory=Names)
    """Identifiers of the launcher."""
    operator: str = "matmul"
    """What is computed, as part of an identifier."""

    @cached_property
    def form(self) -> Form:
        """Form of the result."""
        return form_of(self.result, self.extents)

    @property
    def product(self) -> Contraction | None:
        """The matrix product of tensors of one floating type that the result is made of, if any."""
        dtypes = {b.dtype for b in self.buffers.values()}
        one = len(dtypes) == 1 and not dtypes & {*NOT_FLOATING}
        return self.form if isinstance(self.form, Contraction) and one else None

    @property
    def expr(self) -> Expr:
        return self.result.expr

    @property
    def shape(self) -> tuple[int, ...]:
        return Bound("", (), (), self.extents, {}).result_shape(self.result)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors read, in reading order."""
        return tuple(dict.fromkeys(a.tensor for a in accesses(self.expr)))

    @property
    def allocation(self) -> str:
        """The line that allocates the result."""
        out = self.output
        return f"{out.name} = torch.empty({self.shape}, dtype={out.torch_dtype}, device={self.device}.device)"


class Kernel:
    """A kernel in the making: parameters, body, and the step that launches it."""

    OUT = "result of the stage"
    """The key of the result's pointer; no tensor of TDL has such a name."""

    def __init__(self, stage: Stage, extents: Mapping[str, int] | None = None, more: Sequence[Stage] = ()):
        self.stage = stage
        self.more = tuple(more)
        """Other stages of the same shape whose results it stores, too."""
        self.names = Names()
        stages = (stage, *self.more)
        buffers = {t: each.buffers[t] for each in stages for t in each.tensors}
        used = {n for n in stage.starts if any(mentions(each.expr, n) for each in stages)}
        outputs = {self.out(k): each.output for k, each in enumerate(stages)}
        pointers = {t: self.names.new(f"{t}_ptr") for t in buffers}
        pointers |= {k: self.names.new("out_ptr") for k in outputs}
        starts = {n: self.names.new(f"{n}_start") for n in stage.starts if n in used}
        self.arguments: dict[str, Argument] = {
            **{pointers[t]: buffer.argument for t, buffer in (buffers | outputs).items()},
            **{starts[n]: Argument(stage.starts[n], "i32") for n in starts},
        }
        self.constants: dict[str, Scalar] = {}
        integers = frozenset(t for t, buffer in buffers.items() if buffer.dtype in NOT_FLOATING)
        self.writer = Writer(extents or stage.extents, pointers, integers, self.names, starts, stage.wide)

    def out(self, number: int) -> str:
        """The key of the pointer to the result of a stage."""
        return f"{self.OUT} {number}" if number else self.OUT

    def constant(self, wish: str, value: int) -> str:
        """A new constexpr parameter."""
        name = self.names.new(wish)
        self.constants[name] = value
        return name

    def argument(self, wish: str, value: int) -> str:
        """A new integer parameter."""
        name = self.names.new(wish)
        self.arguments[name] = Argument.integer(value)
        return name

    def program(self, axis: int) -> str:
        """The number of the program along an axis of the grid."""
        return f"tl.program_id({axis})" + (".to(tl.int64)" if self.stage.wide else "")

    def step(
        self, name: str, grid: tuple[int, ...], num_warps: int, helpers: str = "", kind: str = "", passes: int = 1
    ) -> Step:
        """The finished kernel."""
        head = signature(name, self.arguments, self.constants)
        text = "\n".join([f"{helpers}@triton.jit", head, *self.writer.lines]) + "\n"
        allocation = self.stage.allocation
        before = tuple(each.allocation for each in self.more)
        last = (allocation, before, (), kind, passes)
        return Step(name, text, grid, self.arguments, self.constants, num_warps, None, *last)


def signature(name: str, arguments: Iterable[str], constants: Iterable[str]) -> str:
    """The `def` of a kernel: in one line if it fits, else arguments and constexprs in lines of their own."""
    constexprs = [f"{c}: tl.constexpr" for c in constants]
    line = f"def {name}({', '.join([*arguments, *constexprs])}):"
    if len(line) <= 120:
        return line
    rows = [row for part in (arguments, constexprs) for row in wrap(f"{', '.join(part)},", 116, break_on_hyphens=False)]
    return "\n    ".join([f"def {name}(", *rows]) + "\n):"


def mentions(expr: Expr, variable: str) -> bool:
    """Whether an expression uses a variable as a value."""
    return expr == Name(variable) or any(mentions(c, variable) for c in children(expr))


def warps(elements: int) -> int:
    """Return the warps of a tile: 16 elements per thread, between 1 and 16 warps."""
    return max(1, min(16, elements // 512))

"""
Define the parts of a launcher (a Python function that computes an operator on a rank's pieces): stages (one result
each), the kernel of a stage, and the launch of that kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from textwrap import wrap
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names
from unity_ir.forms.classify import Form, form_of
from unity_ir.forms.contraction import Contraction
from unity_ir.kernels.triton.expression import KernelWriter
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.syntax import NOT_FLOATING, Bound, Expr, Name, PaddedVar, Result, accesses, children

Scalar = int | float | str

POINTERS: Mapping[str, str] = MappingProxyType(
    {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", FLOAT8: "*fp8e4nv", "i64": "*i64", "i32": "*i32", "bool": "*i1"}
)
"""Triton's name of a pointer to each element type that kernels take."""


def pointer(dtype: str) -> str:
    """
    Return Triton's type of a pointer to element type `dtype`: given `f32`, `*fp32`. Raises `UnityError` for types no
    kernel takes.
    """
    if dtype not in POINTERS:
        raise UnityError(f"lowering: no kernel takes {dtype}; use {', '.join(POINTERS)}")
    return POINTERS[dtype]


@dataclass(frozen=True)
class Compiled:
    """
    One specialisation of a kernel, as Triton compiles it for a launch, just in time or ahead of time.

    `signature` has a type per parameter, in order: `*fp32`, `i32`, `fp32`, `constexpr`; `i32:16` is an integer that 16
    divides. Pointers are taken to be aligned to 16 bytes, as torch allocates them. `constants` has the values of the
    constexpr parameters.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Scalar]
    num_warps: int
    num_stages: int
    expects: tuple[str, ...] = ()
    """
    What its machine code must be like, as `unity-aot` checks: `mma`: with instructions of the matrix units;
    `pipelined`: with asynchronous copies to shared memory; and on Hopper `wgmma`: with those of groups of four warps,
    in the loop; `short`: as `wgmma`, with few instructions in a step of K.
    """
    descriptors: bool | None = None
    """Whether it is launched on GPUs that copy tiles by descriptors, or on the others; None: on all."""
    on_amd: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Constants, `num_warps` or `num_stages` that are others on GPUs of AMD."""

    def is_for(self, target: str) -> bool:
        """
        Return whether launchers run this specialisation on GPUs of `target`, such as `cuda:80`, `cuda:90` or
        `hip:gfx942`, so that `unity-aot` compiles it for them. True for every target if `descriptors` is None; else the
        specialisation is only for GPUs that copy tiles by descriptors (TMA), or only for the others. One with elements
        of 8 bits is for NVIDIA's from sm_89 on.
        """
        backend, _, arch = target.partition(":")
        if POINTERS[FLOAT8] in self.signature.values() and (backend != "cuda" or int(arch) < 89):
            return False
        return self.descriptors in (None, backend == "cuda" and 90 <= int(arch) < 120)

    def on(self, backend: str) -> Compiled:
        """
        Return this specialisation as it is on GPUs of a backend of Triton, `cuda` or `hip`: on `hip` the values of
        `on_amd` replace constants and launch options.
        """
        other = {} if backend == "cuda" else dict(self.on_amd)
        warps, stages = (
            int(other.pop(n, v)) for n, v in (("num_warps", self.num_warps), ("num_stages", self.num_stages))
        )
        return replace(self, constants={**self.constants, **other}, num_warps=warps, num_stages=stages, on_amd={})


DESCRIPTORS = """\
def has_descriptors():
    \"""Return whether GPUs copy large tiles by descriptors; if so, say where kernels make these.\"""
    # Before Hopper there are no descriptors. GPUs for graphics have half the shared memory, and the interpreter takes
    # tiles from multiples of 16 bytes only.
    if torch.version.hip or triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    if not (9, 0) <= torch.cuda.get_device_capability() < (12, 0):
        return False
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    return True


DESCRIPTORS = has_descriptors()


"""
"""Text of a program that tells which of two launches it does (`KernelLaunch.otherwise`)."""


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """
    How much work one launch has, by which groups of operators to fuse are chosen: its kind, its number of programs, and
    of passes over the input.
    """

    kind: str
    """
    One of `elements` (pointwise), `rows` (reductions), `product` (matrix products), `scatter`, `grouped` (gradients of
    weights that integers pick) and `attention`; empty for other kernels.
    """
    programs: int
    """Number of programs in the grid; of a product, that of tiles of 64 x 64, however large its own are."""
    passes: int
    """Number of times that a program reads its input."""
    seconds: float = 0.0
    """Estimated time of a product of 16 bits on an H100; 0 for other kernels."""


@dataclass(frozen=True)
class Launcher:
    """
    A Python function of the emitted program that computes one operator on one rank's pieces, and the kernels it
    launches.

    `name` is made of the operator and the local shapes; launchers of one name have one text, and so have `kernels`.
    """

    name: str
    source: str
    """
    `def name(x, w): ...`, which takes contiguous tensors and returns one contiguous tensor, or a tuple of them; before
    it the dicts of launch options that it shares with other launchers.
    """
    kernels: Mapping[str, str]
    """Text of every kernel it launches, by name; each may be defined anywhere before the launcher runs."""
    compiled: tuple[Compiled, ...]
    """The specialisation of each launch, for ahead-of-time compilation."""
    work: tuple[LaunchWork, ...] = ()
    """
    The work of each launch, in order, but for those that round operands; () for functions in PyTorch, and for
    optimizers.
    """
    roundings: int = 0
    """Launches that round operands to 8 bits for the one after them."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kernel launch: its expression in the launcher, and its type as in `Compiled.signature`."""

    text: str
    type: str

    @staticmethod
    def integer(value: int) -> Argument:
        """
        Return the argument for a size or stride `value`, with the type as which Triton specialises it: `i32:16` for 16,
        `i32` for 5, `constexpr` for 1, and `i64` (or `i64:16`) from 2^31 on.
        """
        if value == 1:
            return Argument("1", "constexpr")
        width = "i32" if value < 2**31 else "i64"
        return Argument(str(value), f"{width}:16" if value % 16 == 0 else width)


@dataclass(frozen=True)
class KernelLaunch:
    """
    One launch of one kernel by a launcher: the kernel's name and text, its grid (programs along up to three axes), its
    arguments, constexpr values (`constants`) and options. It may have an alternative, `otherwise`: another kernel's
    launch, for GPUs that cannot copy tiles by descriptors (TMA).
    """

    kernel: str
    text: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Scalar]
    num_warps: int
    num_stages: int | None = None
    """Pipeline stages of the kernel's loop; None if it has no loop to pipeline."""
    allocation: str | None = None
    """The line of the launcher that allocates the buffer this launch fills; None if an earlier line did."""
    before: tuple[str, ...] = ()
    """Lines of the launcher, before the launch, that make other tensors the kernel takes."""
    expects: tuple[str, ...] = ()
    """As `Compiled.expects`."""
    kind: str = ""
    passes: int = 1
    """As `LaunchWork.kind` and `LaunchWork.passes`."""
    options_name: str = ""
    """Name of the dict of the program that holds `options`, if launches of several shapes share it; else empty."""
    after: tuple[str, ...] = ()
    """Lines of the launcher, after the launch, that finish the result."""
    otherwise: KernelLaunch | None = None
    """The launch on GPUs that do not copy tiles by descriptors; None: this one."""
    tiles: int | None = None
    """As `LaunchWork.programs`, if that is not the number of programs in the grid."""
    seconds: float = 0.0
    """As `LaunchWork.seconds`."""
    on_amd: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """As `Compiled.on_amd`."""

    @property
    def options(self) -> Mapping[str, Scalar]:
        """The keyword arguments of the launch: constexpr values, warps and pipeline stages."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        return {**self.constants, "num_warps": self.num_warps, **stages}

    @property
    def head(self) -> str:
        """
        The text that must stand before the launcher in the emitted program: the definition of `DESCRIPTORS` (whether
        the GPU copies tiles by descriptors), if the launch has an alternative (`otherwise`) for GPUs that do not; and
        the dict of launch options, if it has a name. Empty if it needs neither.
        """
        items = ", ".join(f"{name!r}: {value!r}" for name, value in self.options.items())
        own = f"{self.options_name} = {{{items}}}\n\n\n" if self.options_name else ""
        if len(own) > 120:
            rows = "\n    ".join(wrap(f"{items},", 116))
            own = f"{self.options_name} = {{\n    {rows}\n}}\n\n\n"
        return own if self.otherwise is None else DESCRIPTORS + own + self.otherwise.head

    @property
    def call(self) -> tuple[str, ...]:
        """
        The launcher's lines of code that launch the kernel; with an alternative (`otherwise`), an `if` that launches
        the one for the GPU at hand.
        """
        if self.otherwise is None:
            return self._call
        return (
            "if DESCRIPTORS:",
            *(f"    {line}" for line in self._call),
            "else:",
            *(f"    {line}" for line in self.otherwise.call),
        )

    @property
    def _call(self) -> tuple[str, ...]:
        options = [f"**{self.options_name}"] if self.options_name else [*map(self._option, self.options)]
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

    def _option(self, name: str) -> str:
        other = f"{self.on_amd[name]!r} if torch.version.hip else " if name in self.on_amd else ""
        return f"{name}={other}{self.options[name]!r}"

    @property
    def work(self) -> LaunchWork:
        """
        The launch's amount of work: its kind, number of programs, and passes over its input. `plan.groups` decides by
        it whether operators are fused.
        """
        return LaunchWork(self.kind, self.tiles or prod(self.grid), self.passes, self.seconds)

    @property
    def compiled(self) -> Compiled:
        """
        The specialisation of the kernel that Triton compiles for this launch. That of the alternative `otherwise` is
        not included; ask that launch for it.
        """
        signature = {n: a.type for n, a in self.arguments.items()} | dict.fromkeys(self.constants, "constexpr")
        ones = {n: 1 for n, a in self.arguments.items() if a.type == "constexpr"}
        constants = {**ones, **self.constants}
        warps, stages = self.num_warps, self.num_stages or 3
        return Compiled(self.kernel, signature, constants, warps, stages, self.expects, on_amd=self.on_amd)


@dataclass(frozen=True, slots=True)
class Buffer:
    """
    A tensor in a launcher: its identifier, its element type, and that type as Python code (`torch.float32` or
    `x.dtype`).
    """

    name: str
    dtype: str
    torch_dtype: str

    @property
    def argument(self) -> Argument:
        """The tensor as a kernel's pointer argument."""
        return Argument(self.name, pointer(self.dtype))


def new_tensor(buffer: Buffer, shape: tuple[int, ...], like: str) -> str:
    """
    Return a launcher's line of code that allocates an uninitialised tensor, of the name and type of `buffer`, on the
    device of the tensor variable `like`. (`torch.empty` takes the host longer than its `new_empty`.)
    """
    dtype = "" if buffer.torch_dtype == f"{like}.dtype" else f", dtype={buffer.torch_dtype}"
    return f"{buffer.name} = {like}.new_empty({shape}{dtype})"


@dataclass(frozen=True)
class Stage:
    """
    One result to be computed by one kernel: its expression, the buffers (tensors of the launcher) that it reads, and
    the buffer that it fills. It is no stage of a pipeline.
    """

    result: Result
    extents: Mapping[str, int]
    buffers: Mapping[str, Buffer]
    """The buffer of every tensor that the result's expression reads, by the tensor's name in the line."""
    output: Buffer
    device: str
    """The launcher's variable of the tensor on whose device the result is allocated."""
    kernel: str
    """Name of the kernel if its text depends on the shapes."""
    family: str | None
    """Name of the kernel if its text serves all shapes; None if the kernel is to be named `kernel` in any case."""
    wide: bool = False
    """Whether addresses need 64-bit integers."""
    starts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """
    The launcher's parameter with the global index at which the piece starts, for each index variable that is used as a
    value; variables that are not in it start at 0.
    """
    names: Names = field(default_factory=Names)
    """Identifiers of the launcher."""
    operator: str = "matmul"
    """The operator's name as part of an identifier."""
    total: str = ""
    """The launcher's parameter with the tensor to which the result is added in place, unless it is None; or empty."""

    @cached_property
    def form(self) -> Form:
        """The kind of computation that the result's expression is, such as a matrix product (`forms.classify`)."""
        return form_of(self.result, self.extents)

    @property
    def product(self) -> Contraction | None:
        """
        The matrix product that the result is a function of; None if there is none, or the buffers read differ in
        element type or hold no floats. Beside factors in 8 bits there may be others.
        """
        if not isinstance(self.form, Contraction):
            return None
        dtypes = {b.dtype for b in self.buffers.values()}
        if all(self.buffers[n].dtype == FLOAT8 for n in (self.form.x, self.form.w)):
            return self.form
        return self.form if len(dtypes) == 1 and not dtypes & {*NOT_FLOATING} else None

    @property
    def expr(self) -> Expr:
        """The TDL expression of the result's elements."""
        return self.result.expr

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result's piece on this rank."""
        return Bound("", (), (), self.extents, {}).result_shape(self.result)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the expression reads, each once, in reading order."""
        return tuple(dict.fromkeys(a.tensor for a in accesses(self.expr)))

    @property
    def allocation(self) -> str:
        """
        The launcher's line of code that allocates the result; if its rows are padded, the result is a view of a wider
        tensor. If the result is to be added to a tensor (`total`, a parameter of the launcher), the line takes that
        tensor as the result, and allocates one only where the parameter is None.
        """
        out, (*outer, last) = self.output, self.result.indices or (None,)
        if isinstance(last, PaddedVar):
            stored = (*self.shape[:-1], last.row)
            return f"{new_tensor(out, stored, self.device)}[{':, ' * len(outer)}:{self.shape[-1]}]"
        text = new_tensor(out, self.shape, self.device)
        return f"{text} if {self.total} is None else {self.total}" if self.total else text


class KernelBuilder:
    """
    Builds the kernel of `stage`, a result to compute: add parameters first, then write the body by the `KernelWriter`
    `writer`, and finally call `launch`.

    `extents` are those of the stage unless given. The kernel stores the results of `more` stages, too.
    """

    OUT = "result of the stage"
    """The writer's key for the result's pointer; no tensor of TDL has such a name."""

    def __init__(self, stage: Stage, extents: Mapping[str, int] | None = None, more: Sequence[Stage] = ()):
        self.stage = stage
        self.more = tuple(more)
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
        self.writer = KernelWriter(extents or stage.extents, pointers, integers, self.names, starts, stage.wide)

    def out(self, number: int) -> str:
        """
        Return the name by which to pass a result to `writer.store` as the tensor to store to. The results are numbered:
        0 is that of `stage`, the constructor's first stage; from 1 on come those of `more`, its further stages.
        """
        return f"{self.OUT} {number}" if number else self.OUT

    def constant(self, wish: str, value: int) -> str:
        """Add a constexpr parameter, called `wish` or like it, for which the launch passes `value`; return its name."""
        name = self.names.new(wish)
        self.constants[name] = value
        return name

    def argument(self, wish: str, value: int) -> str:
        """Add an integer parameter, called `wish` or like it, for which the launch passes `value`; return its name."""
        name = self.names.new(wish)
        self.arguments[name] = Argument.integer(value)
        return name

    def program(self, axis: int) -> str:
        """
        Return code for the index of this program along axis `axis` (0 to 2) of the launch grid, in 64 bits where
        addresses need them.
        """
        return f"tl.program_id({axis})" + (".to(tl.int64)" if self.stage.wide else "")

    def launch(
        self, name: str, grid: tuple[int, ...], num_warps: int, helpers: str = "", kind: str = "", passes: int = 1
    ) -> KernelLaunch:
        """
        Finish the kernel, to be called `name`, and return its launch.

        `grid` is the number of programs along each axis. `helpers` is the text of functions that the kernel calls;
        `kind` (`elements`, `rows`, `product` or empty) and `passes`, the times a program reads its input, are as in
        `LaunchWork`.
        """
        head = signature(name, self.arguments, self.constants)
        text = "\n".join([f"{helpers}@triton.jit", head, *self.writer.lines]) + "\n"
        allocation = self.stage.allocation
        before = tuple(each.allocation for each in self.more)
        last = (allocation, before, (), kind, passes)
        return KernelLaunch(name, text, grid, self.arguments, self.constants, num_warps, None, *last)


def signature(name: str, arguments: Iterable[str], constants: Iterable[str]) -> str:
    """
    Return the `def` line of the kernel `name`, given the names of its arguments and of its constexpr parameters. If it
    is longer than 120 columns, they are on lines of their own.
    """
    constexprs = [f"{c}: tl.constexpr" for c in constants]
    line = f"def {name}({', '.join([*arguments, *constexprs])}):"
    if len(line) <= 120:
        return line
    rows = [row for part in (arguments, constexprs) for row in wrap(f"{', '.join(part)},", 116, break_on_hyphens=False)]
    return "\n    ".join([f"def {name}(", *rows]) + "\n):"


def mentions(expr: Expr, variable: str) -> bool:
    """
    Return whether an expression uses the index variable of that name as a value, not only to index tensors. A kernel of
    such an expression must know the global index at which the rank's piece starts.
    """
    return expr == Name(variable) or any(mentions(c, variable) for c in children(expr))


def warps(elements: int) -> int:
    """Return the number of warps for a tile of this many elements: 16 elements per thread, between 1 and 16 warps."""
    return max(1, min(16, elements // 512))

"""
Generate the Python function (launcher) that computes a bound line, an operator's TDL line at given sizes, and the
kernels it launches, by the line's form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names, address, needs_int64, operand_shapes
from unity_ir.forms.attention import Attention
from unity_ir.forms.classify import Pointwise, classify, is_opaque, is_product_or_convolution, without_activation
from unity_ir.forms.column_sums import ColumnSums
from unity_ir.forms.compose import AND
from unity_ir.forms.contraction import Contraction, contraction, product_factors, strides
from unity_ir.forms.convolution import Convolution
from unity_ir.forms.float8 import float8_lines, without_rounding
from unity_ir.forms.grouped import Grouped, routed
from unity_ir.forms.implicit_gemm import implicit_gemm
from unity_ir.forms.moments import Moments
from unity_ir.forms.rewrite import simplified, with_variables_of, without_ones
from unity_ir.forms.row_sums import RowSums
from unity_ir.forms.scatter import Scatter
from unity_ir.forms.stored import IMAGE_RANK, padded_rows
from unity_ir.forms.window_writes import WindowWrites, is_covered
from unity_ir.forms.windows import masked
from unity_ir.kernels.pytorch.attention import HAS_CUDNN, cudnn_attention, cudnn_lines
from unity_ir.kernels.pytorch.code import torch_body, torch_factors
from unity_ir.kernels.pytorch.product import FLOAT8_PRODUCT, MATRIX_PRODUCT
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.kernels.triton.attention.body import Scope
from unity_ir.kernels.triton.attention.launches import attention_launches
from unity_ir.kernels.triton.column_sums import column_sum_launches
from unity_ir.kernels.triton.convolution import convolution_launch
from unity_ir.kernels.triton.expression import KERNEL_FUNCTIONS, tdl_lines, tdl_text
from unity_ir.kernels.triton.grouped import grouped_launch
from unity_ir.kernels.triton.launch import POINTERS, Buffer, Compiled, KernelLaunch, Launcher, Stage
from unity_ir.kernels.triton.matmul import matmul_launch
from unity_ir.kernels.triton.moments import moments_launches
from unity_ir.kernels.triton.optimizer import optimizer_launcher
from unity_ir.kernels.triton.pointwise import fit_one_kernel, pointwise_launch, reads_nothing_of
from unity_ir.kernels.triton.reduction import reduction_launches, rounding_launch
from unity_ir.kernels.triton.results import Results
from unity_ir.kernels.triton.row_sums import row_sum_launches
from unity_ir.kernels.triton.scatter import scatter_launches
from unity_ir.kernels.triton.tiling import have_rows_in_common
from unity_ir.kernels.triton.window_writes import window_write_launch
from unity_ir.tdl.counts import rounds
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.element_types import FLOAT8, HALVES
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Bound,
    Call,
    Cases,
    Const,
    Expr,
    Reduce,
    Result,
    Window,
    accesses,
    children,
)

__all__ = ["Compiled", "Launcher", "launcher", "optimizer_launcher"]


def launcher(
    bound: Bound,
    operand_dtypes: Sequence[str],
    impl: str = "triton",
    offsets: Sequence[str] = (),
    adds: bool = False,
) -> Launcher:
    """
    Return the launcher of `bound`, a TDL line bound to one rank's local extents: the text of a Python function that
    computes the operator on this rank's pieces, and of the kernels that it launches. Raises `UnityError` for an element
    type, an implementation or a function that is not covered.

    `operand_dtypes` has `f32`, `f16`, `bf16`, `i64`, `i32` or `bool` for each operand. Results have the type of the
    first floating point operand, unless the line gives another.

    `impl` is `triton`, `torch`, or, for attention that `cudnn_attention` matches, `cudnn`: cuDNN where it can, else
    Triton. A line for which there is no Triton kernel is written in PyTorch in any case.

    `offsets` are index variables that are used as values and whose piece may not start at 0. After the operands, the
    function takes the global index at which each of them starts.

    `adds` is only for a product for which `can_add` is true. Its function takes a tensor last, to which it adds the
    result in place, unless that is None.
    """
    return _launcher(_Written(repr(bound), bound), tuple(operand_dtypes), impl, tuple(offsets), adds)


def can_add(bound: Bound, operand_dtypes: Sequence[str], impl: str, offsets: Sequence[str] = ()) -> bool:
    """
    Return whether the function that `launcher` writes for a line can add its only result to a tensor of the result's
    type. It can if the line is a matrix product by one Triton kernel whose tiles do not overlap or, with `impl`
    `torch`, a product summed over the first dims of two tensors (a weight's gradient), by PyTorch's BLAS.

    Arguments are those of `launcher`. Returns False for a line that it refuses, and for one that rounds its operands.
    """
    if rounds(bound, HALVES):
        return False
    if impl == "torch":
        return torch_factors(bound, [p.name for p in bound.operands]) is not None
    try:
        alone = launcher(bound, operand_dtypes, impl, offsets)
        if len(bound.results) > 1 or [each.kind for each in alone.work] != ["product"]:
            return False
        launcher(bound, operand_dtypes, impl, offsets, True)
    except UnityError:
        return False
    return True


def can_store_float32(bound: Bound, operand_dtypes: Sequence[str]) -> bool:
    """
    Return whether a line is a product of two 16-bit tensors, summed over the first dims of both (a weight's gradient):
    PyTorch's BLAS can store its result in float32 without rounding it to 16 bits first.
    """
    if rounds(bound, HALVES) or not {*operand_dtypes} <= {*HALVES}:
        return False
    return torch_factors(bound, [p.name for p in bound.operands]) is not None


@dataclass(frozen=True, slots=True)
class _Written:
    """A bound line, equal to those that are written alike: 0.0 and -0.0 are equal numbers, but other texts."""

    text: str
    bound: Bound = field(compare=False)


@lru_cache(maxsize=4096)
def _launcher(
    written: _Written, operand_dtypes: tuple[str, ...], impl: str, offsets: tuple[str, ...], adds: bool
) -> Launcher:
    # Fusing asks for the launchers that the program then has, and most programs have those of others.
    bound = written.bound
    for dtype in (*operand_dtypes, *(r.dtype for r in bound.results if r.dtype)):
        if dtype not in POINTERS or dtype == FLOAT8:
            known = ", ".join(d for d in POINTERS if d != FLOAT8)
            raise UnityError(f"pcg.{bound.operator}: no kernel takes {dtype}; use {known}")
    if impl not in ("torch", "triton", "cudnn"):
        raise UnityError(f"pcg.{bound.operator}: implementation {impl!r} is not known; use triton or torch")
    if impl == "torch" or any(is_opaque(r.expr) for r in bound.results):
        return torch_launcher(bound, operand_dtypes, offsets, adds)
    function = _Function(bound, operand_dtypes, offsets, adds)
    if rounds(bound, HALVES):
        if (made := _float8(function)) is not None:
            return made
        bound = function.bound = without_rounding(bound)
    line = simplified(bound, function.starts)
    match classify(line, function.starts):
        case Convolution() as form:
            made = _convolution(function, line, form)
        case Attention() as form:
            made = _attention(function, line, form, impl == "cudnn")
        case Grouped() as form:
            made = _grouped(function, line, form)
        case ColumnSums() as form:
            made = _column_sums(function, line, form)
        case Moments() | RowSums() as form:
            made = _rows(function, line, form)
        case _:
            made = None
    if made is None and not is_covered(bound):
        return torch_launcher(bound, operand_dtypes, offsets)
    return made or _stages(_Function(bound, operand_dtypes, offsets, adds), line)


# --- names -----------------------------------------------------------------------------------------------------------


def _name(bound: Bound, dtypes: Sequence[str], offsets: Sequence[str]) -> str:
    """
    Return an identifier that only equal lines have: operator, shapes, activation, and the element types unless all are
    f32.

    A digest of the line is added if attributes may have changed it without changing a shape.
    """
    shapes = operand_shapes(bound)
    # `pow` of two scalars is not `pow_scalar` of one.
    parts = [f"{_words(bound)}_of" if bound.operator.endswith("_scalar") else _words(bound)]
    parts += ["x".join(map(str, shapes[p.name])) or "scalar" for p in bound.operands if p.name in shapes]
    first = bound.results[0].expr
    form = without_activation(first)
    if form != first and isinstance(first, Call):
        parts.append(first.function)
    is_known = _reads_as_product(form) and not _has_images(bound)
    if AND in bound.operator or not is_known or len(bound.results) > 1 or offsets or bound.has_windows:
        parts += _digest(bound)
    parts += _elements(bound, dtypes)
    if rows := padded_rows(bound):
        parts.append(f"rows_{_digest_of(repr(rows))}")
    if offsets:
        parts += ["from", *offsets]
    return Names().new("_".join(parts))


def _elements(bound: Bound, dtypes: Sequence[str]) -> list[str]:
    """Return the element types a name mentions: all if floats differ, one if it is not f32, and the results' own."""
    own = [r.dtype for r in bound.results if r.dtype]
    floats = dict.fromkeys(d for p, d in zip(bound.operands, dtypes, strict=True) if p.floating)
    if len(floats) > 1:
        return [*dtypes, *own]
    if own:
        return [*dict.fromkeys((*dtypes, *own))]
    return [d for d in floats if d != "f32"]


def _reads_as_product(expr: Expr) -> bool:
    """Return whether operator and shapes determine the expression: a sum of a product of two reads."""
    factors = product_factors(expr) if isinstance(expr, Reduce) else None
    return factors is not None and all(isinstance(f, Access) for f in factors)


def _has_images(bound: Bound) -> bool:
    """Return whether a line reads or makes tensors of as many dims as images, whose dims have one of two orders."""
    return any(len(own.indices) == IMAGE_RANK for r in bound.results for own in (*r.accesses, r))


def _digest(bound: Bound) -> list[str]:
    """Return the digest in a name; none for a line that its operator and shapes determine."""
    # The attributes of an operator that only moves elements say where to.
    if (
        not bound.has_windows
        and AND not in bound.operator
        and len(bound.results) == 1
        and not Analysis(bound).moves_data_only
        and not _holds_sizes(bound.results[0].expr)
    ):
        (result,) = bound.results
        read = [a.indices for a in accesses(result.expr)]
        if result.indices in read and all(i == result.indices[len(result.indices) - len(i) :] for i in read):
            return []
    # A window's text does not say where the whole tensor ends.
    ends = [(i.low, i.size, i.whole) for i in _windows(bound)]
    return [_digest_of(f"{tdl_text(bound)}{ends or ''}")]


def _windows(bound: Bound) -> list[Window]:
    indices = (i for r in bound.results for i in (*r.indices, *(i for a in accesses(r.expr) for i in a.indices)))
    return [i for i in indices if isinstance(i, Window)]


def _holds_sizes(expr: Expr) -> bool:
    """Return whether an expression's constants, positions or reductions may depend on shapes or attributes."""
    if isinstance(expr, Const):
        return expr.value != 0
    return not isinstance(expr, Access) and (isinstance(expr, Reduce | Cases) or any(map(_holds_sizes, children(expr))))


# --- functions -------------------------------------------------------------------------------------------------------


class _Function:
    """
    Builder of a line's function: its parameters, and the stages of the kernels it launches.

    `starts` has the parameter that holds the global start of each variable in `offsets`, `total` is that of the tensor
    to which a function that `adds` does so; else empty.
    """

    def __init__(self, bound: Bound, dtypes: Sequence[str], offsets: Sequence[str], adds: bool = False):
        self.bound = bound
        self.dtypes = dtypes
        self.names = Names()
        self.operands = [self.names.new(p.name) for p in bound.operands]
        self.variables = dict(zip((p.name for p in bound.operands), self.operands, strict=True))
        self.starts = {n: self.names.new(f"{n}_start") for n in offsets}
        self.total = self.names.new("total") if adds else ""
        self.name = f"{_name(bound, dtypes, offsets)}{'_added' * adds}"
        given = list(zip(bound.operands, self.operands, dtypes, strict=True))
        self.like = next((o for p, o, _ in given if p.floating), self.operands[0])
        """The operand from which results take their device, and their element type unless the line gives another."""
        self.dtype = next((d for p, _, d in given if p.floating), "f32")
        self.buffers = {p.name: Buffer(o, d, TORCH_DTYPES[d]) for p, o, d in given}

    def output(self, result: Result) -> Buffer:
        """Return a new buffer for a result."""
        dtype = result.dtype or self.dtype
        into = TORCH_DTYPES[dtype] if result.dtype else f"{self.like}.dtype"
        return Buffer(self.names.new(result.name), dtype, into)

    def stage(self, line: Bound, result: Result, output: Buffer, **more: Any) -> Stage:
        """Return the stage that computes a result of a line, by a kernel named after the function."""
        base = Stage(result, line.extents, self.buffers, output, self.like, f"{self.name}_kernel", None)
        own = {"starts": self.starts, "names": self.names, "total": self.total}
        return replace(base, wide=needs_int64(line), **own, **more)

    def text(self, body: Sequence[str]) -> str:
        """Return the function with that body, and its line of TDL as docstring."""
        said = tdl_lines(self.bound)
        if self.total:
            said = [*said, f"The result is added to `{self.total}` in place, unless that is None."]
        doc = [f'"""{said[0]}"""'] if len(said) == 1 else ['"""', *said, '"""']
        total = [self.total] if self.total else []
        head = f"def {self.name}({', '.join([*self.operands, *self.starts.values(), *total])}):"
        return "\n".join([head, *(f"    {line}" for line in [*doc, *body])]) + "\n"

    def launcher(
        self, launches: Sequence[KernelLaunch], outputs: Sequence[Buffer], before: Sequence[str] = ()
    ) -> Launcher:
        """
        Return the launcher that does these launches, in order, after the lines `before` them, and returns the `outputs`
        they fill.
        """
        kernels: dict[str, str] = {}
        body = [*before]
        for each in launches:
            for one in (each, each.otherwise):
                if one is not None:
                    assert kernels.setdefault(one.kernel, one.text) == one.text, f"two kernels are called {one.kernel}"
            body += [*([each.allocation] if each.allocation else []), *each.before, *each.call, *each.after]
        body.append(f"return {', '.join(b.name for b in outputs)}")
        source = "".join(dict.fromkeys(each.head for each in launches)) + self.text(body)
        compiled: list[Compiled] = []
        for each in launches:
            if each.otherwise is None:
                compiled.append(each.compiled)
            else:
                both = (each.compiled, True), (each.otherwise.compiled, False)
                compiled += [replace(one, descriptors=has) for one, has in both]
        return Launcher(self.name, source, kernels, tuple(compiled), tuple(each.work for each in launches))


def torch_launcher(bound: Bound, dtypes: Sequence[str], offsets: Sequence[str] = (), adds: bool = False) -> Launcher:
    """
    Return the launcher of a line in plain PyTorch, without kernels. Arguments are as in `launcher`, but operands may be
    `f64`, too, and `adds` is only for lines for which `can_add` holds.

    If operands have 16 bits, everything but matrix products and reads or writes that only move elements is computed in
    float32, as in Triton's kernels. Raises `UnityError` for a function that has no text in PyTorch.
    """
    function = _Function(bound, dtypes, offsets, adds)
    operands = function.operands
    function.name = f"{function.name}_torch"
    if (float8 := _float8_by_torch(function)) is not None:
        return float8
    is_longer = bound.results[0].dtype == "f32" and can_store_float32(bound, dtypes)
    if (adds or is_longer) and (factors := torch_factors(bound, operands)) is not None:
        total = [function.total] if adds else []
        text = function.text([f"return matrix_product({', '.join([*factors, *total])})"])
        return Launcher(function.name, MATRIX_PRODUCT + text, {}, ())
    products = all(
        is_product_or_convolution(r, bound.extents) or routed(r.expr, bound.extents) is not None for r in bound.results
    )
    half = any(d in ("f16", "bf16") for d in dtypes) and not Analysis(bound).moves_data_only and not products
    if half:
        # The conversions are part of the text, so the name must differ from that of the same line in float32.
        kinds = ["half" if d in ("f16", "bf16") else d for d in dtypes]
        function.name = "_".join([function.name, *(kinds[:1] if len(set(kinds)) == 1 else kinds)])
    inputs = [f"{o}.float()" if half and d in ("f16", "bf16") else o for o, d in zip(operands, dtypes, strict=True)]
    lines, texts = torch_body(bound, inputs, function.starts, function.names)
    if half:
        like = function.like
        texts = [t if r.dtype else f"({t}).to({like}.dtype)" for t, r in zip(texts, bound.results, strict=True)]
    lines.append(f"return {', '.join(texts)}")
    attention = cudnn_attention(bound, dtypes, function.starts)
    if attention is not None:
        lines = [*cudnn_lines(attention, function.variables, function.names), *lines]
    return Launcher(function.name, (HAS_CUDNN if attention else "") + function.text(lines), {}, ())


def _float8_by_torch(function: _Function) -> Launcher | None:
    """Return the launcher of a bare product of two matrices in 8 bits; None for other lines, types and sizes."""
    (result, *more), bound = function.bound.results, function.bound
    of = contraction(result, bound.extents)
    if more or of is None or not of.rounded or result.expr != of.product or of.sizes["b"] > 1:
        return None
    if of.sizes["n"] % 16 or of.sizes["k"] % 16:
        return None  # which `_scaled_mm` asks for
    out = address(result.indices, bound.extents)
    if strides(of.names, bound.extents, out, "mn") != {"m": of.sizes["n"], "n": 1}:
        return None
    factors: list[str] = []
    for tensor, rows, steps in ((of.x, "m", of.x_strides), (of.w, "n", of.w_strides)):
        shape = of.sizes[rows], of.sizes["k"]
        if function.buffers[tensor].dtype not in HALVES or 1 not in (steps[rows], steps["k"]):
            return None
        text = f"{function.variables[tensor]}.reshape"
        factors.append(f"{text}{shape}" if steps["k"] == 1 else f"{text}{shape[::-1]}.T")
    to = f".to({TORCH_DTYPES[result.dtype]})" if result.dtype else ""
    text = function.text([f"return float8_product({', '.join(factors)}).view{bound.result_shape(result)}{to}"])
    return Launcher(function.name, FLOAT8_PRODUCT + text, {}, ())


# --- kernels of whole lines ------------------------------------------------------------------------------------------


def _convolution(function: _Function, line: Bound, form: Convolution) -> Launcher | None:
    """Return the launcher of a convolution; None if element types differ, or its kernel cannot take the strides."""
    (result,) = line.results
    numbers = implicit_gemm(form, result.indices, line.extents)
    dtypes = {*function.dtypes}
    if numbers is None or len(dtypes) != 1 or dtypes & {*NOT_FLOATING}:
        return None
    output = function.output(result)
    return function.launcher([convolution_launch(function.stage(line, result, output), numbers)], [output])


def _attention(function: _Function, line: Bound, form: Attention, by_cudnn: bool) -> Launcher | None:
    """
    Return the launcher of attention or its gradient, `by_cudnn` where that can; None for 64-bit addresses, or sizes its
    kernels cannot take.
    """
    if needs_int64(line):
        return None
    plain = cudnn_attention(function.bound, function.dtypes, function.starts) if by_cudnn else None
    outputs = [function.output(r) for r in line.results]
    place = Scope(line, function.buffers, outputs, function.like, function.name, function.names, function.starts)
    launches = attention_launches(form, place)
    if launches is None:
        return None
    if plain is None:
        return function.launcher(launches, outputs)
    function.name = f"{function.name}_cudnn"
    made = function.launcher(launches, outputs, cudnn_lines(plain, function.variables, function.names))
    return replace(made, source=HAS_CUDNN + made.source)


def _grouped(function: _Function, line: Bound, form: Grouped) -> Launcher | None:
    """Return the launcher of products of rows with weights that integers pick; None for several element types."""
    (result,) = line.results
    read = {function.buffers[a.tensor].dtype for a in (form.of.x, form.of.w)}
    if (result.dtype and not form.of.of_weights) or read != {function.dtype}:
        return None
    output = function.output(result)
    return function.launcher([grouped_launch(function.stage(line, result, output), form)], [output])


def _column_sums(function: _Function, line: Bound, form: ColumnSums) -> Launcher | None:
    """Return the launcher of sums of columns, and of matrices, from the same rows; None if it has no such kernel."""
    line = without_ones(line)
    _check_functions(line.operator, (r.expr for r in line.results))
    outputs = [function.output(r) for r in line.results]
    # A group's digest tells it from others; names of kernels are those of files, which must not be as long as groups.
    name = function.name.replace(_words(function.bound), "column_sums") if AND in line.operator else function.name
    stages = [function.stage(line, r, o, kernel=f"{name}_kernel") for r, o in zip(line.results, outputs, strict=True)]
    launches = column_sum_launches(stages, form)
    return None if launches is None else function.launcher(launches, outputs)


def _rows(function: _Function, line: Bound, form: Moments | RowSums) -> Launcher | None:
    """Return the launcher of moments of rows, or of sums and matrices; None where kernels of results do as much."""
    line = without_ones(line)
    _check_functions(line.operator, (r.expr for r in line.results))
    outputs = [function.output(r) for r in line.results]
    # A group's digest tells it from others, as for sums of columns.
    name = function.name.replace(_words(function.bound), "rows") if AND in line.operator else function.name
    stages = [function.stage(line, r, o, kernel=f"{name}_kernel") for r, o in zip(line.results, outputs, strict=True)]
    launches = moments_launches(stages, form) if isinstance(form, Moments) else row_sum_launches(stages, form)
    return None if launches is None else function.launcher(launches, outputs)


# --- kernels of single results ---------------------------------------------------------------------------------------


def _float8(function: _Function) -> Launcher | None:
    """
    Return the launcher of functions of a product of operands in 8 bits: two launches round them, row by row, before
    the product's. None for other lines, and where operands have no 16 bits.
    """
    line = without_ones(simplified(function.bound, function.starts))
    parts = None if function.bound.has_windows else float8_lines(line)
    if parts is None or any(function.buffers[each.operand].dtype not in HALVES for each in parts.rounded):
        return None
    launches: list[KernelLaunch] = []
    for each, place in zip(parts.rounded, ("rows", "columns"), strict=True):
        outputs = [function.output(r) for r in each.line.results]
        kernel = f"{function.name}_{place}_kernel"
        results = zip(each.line.results, outputs, strict=True)
        stages = [function.stage(each.line, r, o, kernel=kernel) for r, o in results]
        launches.append(rounding_launch(stages, each.is_transposed))
        function.buffers |= dict(zip((r.name for r in each.line.results), outputs, strict=True))
    made, finals = _staged(function, parts.product)
    found = function.launcher([*launches, *made], finals)
    return replace(found, work=found.work[len(launches) :], roundings=len(launches))


def _stages(function: _Function, line: Bound) -> Launcher:
    """Return the launcher of a line that is cut into stages, each computed by the generator of its form."""
    line = replace(line, results=tuple(replace(r, expr=masked(r.expr, line.extents)) for r in line.results))
    line = without_ones(simplified(line, function.starts))
    return function.launcher(*_staged(function, line))


def _staged(function: _Function, line: Bound) -> tuple[list[KernelLaunch], list[Buffer]]:
    """Return the launches that compute the results of a simplified line, as stages, and the buffers they fill."""
    bound, dtypes = function.bound, function.dtypes
    _check_functions(bound.operator, (r.expr for r in line.results))
    results = Results(line, function.buffers, function.names, function.starts)
    for result in line.results:
        results.add(result, function.output(result))
    one = len(results.parts) == 1
    plain = one and not any(d in NOT_FLOATING for d in dtypes) and not bound.has_windows
    family = _family(bound, dtypes) if plain else None
    stages: list[list[Stage]] = []
    for number, (result, output) in enumerate(results.parts):
        kernel = f"{function.name}_kernel" if one else f"{function.name}_{number}_kernel"
        read = {a.tensor: results.buffers[a.tensor] for a in accesses(result.expr)}
        more = {"kernel": kernel, "buffers": read, "family": family, "operator": _words(bound)}
        stage = function.stage(line, result, output, **more)
        _add_stage(stages, stage)
    return [launch for stage, *more in stages for launch in _launches(stage, more)], results.finals


def _add_stage(kernels: list[list[Stage]], stage: Stage) -> None:
    """Add a stage to the last of the kernels that can compute it, too, after all that it reads; else to a new one."""
    for those in reversed(kernels):
        like = with_variables_of(those[0].result, stage.result, stage.extents, stage.starts)
        for one in (stage, *([] if like is None else [replace(stage, result=like)])):
            if all(_share_a_kernel(each, one) for each in those):
                those.append(one)
                return
        if not all(reads_nothing_of(stage, each) for each in those):
            break
    kernels.append([stage])


def _check_functions(operator: str, exprs: Iterable[Expr]) -> None:
    for expr in exprs:
        if isinstance(expr, Call) and expr.function not in KERNEL_FUNCTIONS:
            raise UnityError(f"pcg.{operator}: no kernel has {expr.function}; add it to kernels/triton/expression.py")
        _check_functions(operator, children(expr))


def _family(bound: Bound, dtypes: Sequence[str]) -> str:
    """Return the kernel name shared by lines that differ in shapes only."""
    digest: list[str] = []
    if AND in bound.operator:
        # The names of fused operators do not say which reads the result of which.
        digest = [_digest_of(tdl_text(replace(bound, extents={})))]
    elif _holds_sizes(bound.results[0].expr):
        digest = [_digest_of(tdl_text(bound))]
    return f"{'_'.join([_words(bound), *digest, *_elements(bound, dtypes)])}_kernel"


def _words(bound: Bound) -> str:
    return bound.operator.replace(AND, "_")


def _digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:6]


def _launches(stage: Stage, more: Sequence[Stage]) -> list[KernelLaunch]:
    """Return the launches of a stage, and of `more` that share its kernel, by the generator of their form."""
    match stage.form:
        case WindowWrites():
            return [window_write_launch(stage)]
        case Pointwise() if all(isinstance(each.form, Pointwise) for each in more):
            return [pointwise_launch(stage, more)]
        case Contraction() if (product := stage.product) is not None:
            return [matmul_launch(stage, product, more)]
        case Scatter() as places:
            return scatter_launches(stage, places)
        case _:
            return reduction_launches(stage, more)


def _share_a_kernel(one: Stage, other: Stage) -> bool:
    """Return whether one kernel can compute both: of the same product, or at the same positions."""
    if not reads_nothing_of(other, one) or any(isinstance(s.form, WindowWrites | Scatter) for s in (one, other)):
        return False
    a, b = one.product, other.product
    if a is not None or b is not None:
        return a is not None and b is not None and (a.product, a.names) == (b.product, b.names)
    return fit_one_kernel(one, other) or have_rows_in_common(one, other)

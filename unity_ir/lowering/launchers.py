"""From a bound line to the text of a Python function that computes it, and of the kernels it launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names, needs_int64, operand_shapes
from unity_ir.forms.attention import attention
from unity_ir.forms.compose import AND
from unity_ir.forms.contraction import Contraction, contraction, product_factors
from unity_ir.forms.convolution import convolution, pointwise
from unity_ir.forms.grouped import routed
from unity_ir.forms.rewrite import reductions, simplified, without_ones
from unity_ir.forms.windows import masked
from unity_ir.lowering.pytorch.code import torch_body
from unity_ir.lowering.pytorch.value import TORCH_DTYPES
from unity_ir.lowering.triton.attention import Place, attention_steps
from unity_ir.lowering.triton.convolution import convolution_step, gathered
from unity_ir.lowering.triton.expression import KERNEL_FUNCTIONS, tdl_lines, tdl_text
from unity_ir.lowering.triton.grouped import grouped, grouped_step
from unity_ir.lowering.triton.matmul import matmul_step
from unity_ir.lowering.triton.optimizer import optimizer_launcher
from unity_ir.lowering.triton.pointwise import are_together, pointwise_step, reads_nothing_of
from unity_ir.lowering.triton.reduction import reduction_steps
from unity_ir.lowering.triton.results import Results
from unity_ir.lowering.triton.scatter import scatter_steps, scattered
from unity_ir.lowering.triton.step import POINTERS, Buffer, Compiled, Launcher, Stage, Step
from unity_ir.lowering.triton.tiling import have_rows_in_common
from unity_ir.lowering.triton.window_writes import is_covered, window_write_step, writes_windows
from unity_ir.tdl.analysis import Analysis
from unity_ir.tdl.functions import FUSED
from unity_ir.tdl.syntax import (
    NOT_FLOATING,
    Access,
    Bound,
    Call,
    Cases,
    Const,
    Expr,
    Opaque,
    Reduce,
    Result,
    Window,
    accesses,
    children,
)

__all__ = ["Compiled", "Launcher", "launcher", "optimizer_launcher"]


def launcher(
    bound: Bound, operand_dtypes: Sequence[str], impl: str = "triton", offsets: Sequence[str] = ()
) -> Launcher:
    """
    The launcher of `bound`, whose extents are those of the local piece.

    `operand_dtypes` are `f32`, `f16`, `bf16`, `i64`, `i32` or `bool`, one per operand; results have the type of the
    first operand that holds floating point numbers, unless the line says another. `impl` is `triton` or `torch`.
    `offsets` are the variables used as values whose piece may start elsewhere than at 0: the function takes the global
    index at which each starts after the operands. Raises `UnityError` for what no kernel covers.
    """
    for dtype in (*operand_dtypes, *(r.dtype for r in bound.results if r.dtype)):
        if dtype not in POINTERS:
            raise UnityError(f"pcg.{bound.operator}: no kernel takes {dtype}; use {', '.join(POINTERS)}")
    if impl not in ("torch", "triton"):
        raise UnityError(f"pcg.{bound.operator}: implementation {impl!r} is not known; use triton or torch")
    if impl == "triton" and bound.has_windows and (made := _convolution_launcher(bound, operand_dtypes)) is not None:
        return made
    if impl == "torch" or not is_covered(bound) or any(_is_opaque(r.expr) for r in bound.results):
        return _torch_launcher(bound, operand_dtypes, offsets)
    return _triton_launcher(bound, operand_dtypes, offsets)


def is_product(result: Result, extents: Mapping[str, int]) -> bool:
    """Whether a result is one matrix product and nothing but an activation of it, or one convolution."""
    form = _without_activation(result.expr)
    plain = isinstance(form, Reduce) and contraction(result, extents) is not None
    return plain or is_convolution(result, extents)


def _without_activation(expr: Expr) -> Expr:
    match expr:
        case Call(activation, (Reduce() as form,)) if activation in FUSED:
            return form
        case _:
            return expr


def is_convolution(result: Result, extents: Mapping[str, int]) -> bool:
    """Whether a result is a convolution or one of its gradients; of one tap, too, unless it is a matrix product."""
    if convolution(result.indices, result.expr, extents) is not None:
        return True
    product = contraction(result, extents)
    return (product is None or product.repeated) and pointwise(result.expr, extents) is not None


def _is_opaque(expr: Expr) -> bool:
    return isinstance(expr, Opaque) or any(map(_is_opaque, children(expr)))


# --- names -----------------------------------------------------------------------------------------------------------


def _name(bound: Bound, dtypes: Sequence[str], offsets: Sequence[str]) -> str:
    """
    An identifier that only equal lines share: operator, shapes, activation, element types where they are not all of
    one kind of float.

    Where attributes may have changed the line without changing a shape, a digest of it is added.
    """
    shapes = operand_shapes(bound)
    # `pow` of two scalars is not `pow_scalar` of one.
    parts = [f"{_words(bound)}_of" if bound.operator.endswith("_scalar") else _words(bound)]
    parts += ["x".join(map(str, shapes[p.name])) or "scalar" for p in bound.operands if p.name in shapes]
    first = bound.results[0].expr
    form = _without_activation(first)
    if form != first and isinstance(first, Call):
        parts.append(first.function)
    if AND in bound.operator or not _reads_as_product(form) or len(bound.results) > 1 or offsets or bound.has_windows:
        parts += _digest(bound)
    parts += _elements(bound, dtypes)
    if offsets:
        parts += ["from", *offsets]
    return Names().new("_".join(parts))


def _elements(bound: Bound, dtypes: Sequence[str]) -> list[str]:
    """Element types, where a result has another than the floating operands, or these differ, or are not of 32 bits."""
    own = [r.dtype for r in bound.results if r.dtype]
    floats = dict.fromkeys(d for p, d in zip(bound.operands, dtypes, strict=True) if p.floating)
    if len(floats) > 1:
        return [*dtypes, *own]
    if own:
        return [*dict.fromkeys((*dtypes, *own))]
    return [d for d in floats if d != "f32"]


def _reads_as_product(expr: Expr) -> bool:
    """Whether operator and shapes say all of the expression: a sum of a product of two reads."""
    factors = product_factors(expr) if isinstance(expr, Reduce) else None
    return factors is not None and all(isinstance(f, Access) for f in factors)


def _digest(bound: Bound) -> list[str]:
    """Part of a name: nothing for a line that follows from its operator and shapes alone."""
    # What only moves elements has attributes that say where to.
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
    """Whether constants, positions or reductions make the line more than its operator's functions at some shape."""
    if isinstance(expr, Const):
        return expr.value != 0
    return not isinstance(expr, Access) and (isinstance(expr, Reduce | Cases) or any(map(_holds_sizes, children(expr))))


# --- torch -----------------------------------------------------------------------------------------------------------


def _torch_launcher(bound: Bound, dtypes: Sequence[str], offsets: Sequence[str]) -> Launcher:
    names = Names()
    operands = [names.new(p.name) for p in bound.operands]
    starts = {n: names.new(f"{n}_start") for n in offsets}
    name = f"{_name(bound, dtypes, offsets)}_torch"
    like = _first_float(bound, operands)
    products = all(is_product(r, bound.extents) or routed(r.expr, bound.extents) is not None for r in bound.results)
    half = any(d in ("f16", "bf16") for d in dtypes) and not Analysis(bound).moves_data_only and not products
    if half:
        # What is converted is part of the text: beside another of whole floats it has a name of its own.
        kinds = ["half" if d in ("f16", "bf16") else d for d in dtypes]
        name = "_".join([name, *(kinds[:1] if len(set(kinds)) == 1 else kinds)])
    inputs = [f"{o}.float()" if half and d in ("f16", "bf16") else o for o, d in zip(operands, dtypes, strict=True)]
    lines, texts = torch_body(bound, inputs, starts, names)
    if half:
        texts = [t if r.dtype else f"({t}).to({like}.dtype)" for t, r in zip(texts, bound.results, strict=True)]
    body = [*lines, f"return {', '.join(texts)}"]
    return Launcher(name, _function(name, [*operands, *starts.values()], bound, body), {}, ())


def _first_float(bound: Bound, operands: Sequence[str]) -> str:
    """The operand that gives the results their type and device."""
    floats = [o for p, o in zip(bound.operands, operands, strict=True) if p.floating]
    return (floats or list(operands))[0]


def _function(name: str, parameters: Sequence[str], bound: Bound, body: Sequence[str]) -> str:
    said = tdl_lines(bound)
    if len(said) == 1:
        doc = [f'"""{said[0]}"""']
    else:
        doc = ['"""', *said, '"""']
    lines = [f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in [*doc, *body])]
    return "\n".join(lines) + "\n"


# --- triton ----------------------------------------------------------------------------------------------------------


def _triton_launcher(bound: Bound, dtypes: Sequence[str], offsets: Sequence[str]) -> Launcher:
    names = Names()
    operands = [names.new(p.name) for p in bound.operands]
    starts = {n: names.new(f"{n}_start") for n in offsets}
    name = _name(bound, dtypes, offsets)
    line = simplified(bound, starts)
    made = _attention_launcher(bound, line, dtypes, starts) or _grouped_launcher(bound, line, dtypes, starts)
    if made is not None:
        return made
    line = replace(line, results=tuple(replace(r, expr=masked(r.expr, line.extents)) for r in line.results))
    line = without_ones(simplified(line, starts))
    _check_functions(bound.operator, (r.expr for r in line.results))
    like = _first_float(bound, operands)
    dtype = next((d for p, d in zip(bound.operands, dtypes, strict=True) if p.floating), "f32")
    buffers = {p.name: Buffer(o, d, TORCH_DTYPES[d]) for p, o, d in zip(bound.operands, operands, dtypes, strict=True)}
    results = Results(line, buffers, names, starts)
    for result in line.results:
        own = result.dtype or dtype
        results.add(result, Buffer(names.new(result.name), own, TORCH_DTYPES[own] if result.dtype else f"{like}.dtype"))
    simple = len(results.parts) == 1 and not any(d in NOT_FLOATING for d in dtypes)
    family = _family(bound, dtypes) if simple and not bound.has_windows else None
    stages: list[list[Stage]] = []
    for number, (result, output) in enumerate(results.parts):
        kernel = f"{name}_kernel" if len(results.parts) == 1 else f"{name}_{number}_kernel"
        read = {a.tensor: results.buffers[a.tensor] for a in accesses(result.expr)}
        wide, words = needs_int64(line), _words(bound)
        stage = Stage(result, line.extents, read, output, like, kernel, family, wide, starts, names, words)
        if stages and all(_share_a_kernel(each, stage) for each in stages[-1]):
            stages[-1].append(stage)
        else:
            stages.append([stage])
    steps: list[Step] = []
    for stage, *more in stages:
        steps += _steps(stage, more)
    body: list[str] = []
    for step in steps:
        body += [step.allocation] if step.allocation else []
        body += [*step.before, *step.call]
    body.append(f"return {', '.join(b.name for b in results.finals)}")
    source = _function(name, [*operands, *starts.values()], bound, body)
    return _launcher_of(name, source, steps)


def _launcher_of(name: str, source: str, steps: Sequence[Step]) -> Launcher:
    kernels: dict[str, str] = {}
    for step in steps:
        assert kernels.setdefault(step.kernel, step.text) == step.text, f"two kernels are called {step.kernel}"
    head = "".join(dict.fromkeys(step.head for step in steps))
    return Launcher(name, head + source, kernels, tuple(s.compiled for s in steps), tuple(s.launch for s in steps))


def _convolution_launcher(bound: Bound, dtypes: Sequence[str]) -> Launcher | None:
    """The launcher of a convolution or one of its gradients; None for what has other windows."""
    line = simplified(bound, {})
    if len(line.results) != 1 or len({*dtypes}) != 1 or {*dtypes} & {*NOT_FLOATING}:
        return None
    (result,) = line.results
    found = convolution(result.indices, result.expr, line.extents)
    numbers = None if found is None else gathered(found, result.indices, line.extents)
    if numbers is None:
        return None
    names = Names()
    operands = [names.new(p.name) for p in bound.operands]
    name = _name(bound, dtypes, ())
    like = _first_float(bound, operands)
    buffers = {p.name: Buffer(o, d, TORCH_DTYPES[d]) for p, o, d in zip(bound.operands, operands, dtypes, strict=True)}
    output = Buffer(names.new(result.name), dtypes[0], f"{like}.dtype")
    wide = needs_int64(line)
    stage = Stage(result, line.extents, buffers, output, like, f"{name}_kernel", None, wide, names=names)
    step, after = convolution_step(stage, numbers)
    body = [*([step.allocation] if step.allocation else []), *step.call, *after, f"return {output.name}"]
    source = _function(name, operands, bound, body)
    return _launcher_of(name, source, [step])


def _attention_launcher(bound: Bound, line: Bound, dtypes: Sequence[str], starts: Mapping[str, str]) -> Launcher | None:
    """The launcher of attention or its gradient; None for anything else, and where positions need 64 bits."""
    found = None if line.has_windows or needs_int64(line) else attention(line, starts)
    if found is None:
        return None
    names = Names()
    operands = [names.new(p.name) for p in bound.operands]
    firsts = [names.new(n) for n in starts.values()]
    name, like = _name(bound, dtypes, tuple(starts)), _first_float(bound, operands)
    buffers = {p.name: Buffer(o, d, TORCH_DTYPES[d]) for p, o, d in zip(bound.operands, operands, dtypes, strict=True)}
    dtype = next(d for p, d in zip(bound.operands, dtypes, strict=True) if p.floating)
    outputs = [
        Buffer(names.new(r.name), r.dtype or dtype, TORCH_DTYPES[r.dtype] if r.dtype else f"{like}.dtype")
        for r in line.results
    ]
    place = Place(line, buffers, outputs, like, name, names, dict(zip(starts, firsts, strict=True)))
    steps = attention_steps(found, place)
    if steps is None:
        return None
    body: list[str] = []
    for step in steps:
        body += [*step.before, *([step.allocation] if step.allocation else []), *step.call]
    body.append(f"return {', '.join(b.name for b in outputs)}")
    source = _function(name, [*operands, *firsts], bound, body)
    return _launcher_of(name, source, steps)


def _grouped_launcher(bound: Bound, line: Bound, dtypes: Sequence[str], starts: Mapping[str, str]) -> Launcher | None:
    """The launcher of products of rows with a weight that integers pick for each; None for anything else."""
    if line.has_windows or len(line.results) != 1 or line.results[0].dtype or not {*dtypes} - {*NOT_FLOATING}:
        return None
    names = Names()
    operands = [names.new(p.name) for p in bound.operands]
    firsts = {n: names.new(start) for n, start in starts.items()}
    name, like = _name(bound, dtypes, tuple(starts)), _first_float(bound, operands)
    buffers = {p.name: Buffer(o, d, TORCH_DTYPES[d]) for p, o, d in zip(bound.operands, operands, dtypes, strict=True)}
    (result,) = line.results
    output = Buffer(names.new(result.name), buffers[_first_float(bound, list(buffers))].dtype, f"{like}.dtype")
    wide = needs_int64(line)
    stage = Stage(result, line.extents, buffers, output, like, f"{name}_kernel", None, wide, firsts, names)
    found = grouped(stage)
    if found is None:
        return None
    step = grouped_step(stage, found)
    body = [*([step.allocation] if step.allocation else []), *step.before, *step.call, f"return {output.name}"]
    source = _function(name, [*operands, *firsts.values()], bound, body)
    return Launcher(name, source, {step.kernel: step.text}, (step.compiled,))


def _check_functions(operator: str, exprs: Iterable[Expr]) -> None:
    for expr in exprs:
        if isinstance(expr, Call) and expr.function not in KERNEL_FUNCTIONS:
            raise UnityError(f"pcg.{operator}: no kernel has {expr.function}; add it to kernels/expression.py")
        _check_functions(operator, children(expr))


def _family(bound: Bound, dtypes: Sequence[str]) -> str:
    """The name of the kernel of lines whose shapes alone differ."""
    digest: list[str] = []
    if AND in bound.operator:
        # Which of them reads what is not in the names of operators.
        digest = [_digest_of(tdl_text(replace(bound, extents={})))]
    elif _holds_sizes(bound.results[0].expr):
        digest = [_digest_of(tdl_text(bound))]
    return f"{'_'.join([_words(bound), *digest, *_elements(bound, dtypes)])}_kernel"


def _words(bound: Bound) -> str:
    return bound.operator.replace(AND, "_")


def _digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:6]


def _steps(stage: Stage, more: Sequence[Stage]) -> list[Step]:
    """The kernels of one stage, or of several that share one, by its form."""
    if writes_windows(stage.result):
        return [window_write_step(stage)]
    if not any(reductions(each.expr) for each in (stage, *more)):
        return [pointwise_step(stage, more)]
    product = _product(stage)
    if product is not None:
        return [matmul_step(stage, product, more)]
    places = scattered(stage)
    return reduction_steps(stage, more) if places is None else scatter_steps(stage, places)


def _product(stage: Stage) -> Contraction | None:
    """The product of tensors of one floating type that a stage is made of."""
    product = contraction(stage.result, stage.extents)
    dtypes = {b.dtype for b in stage.buffers.values()}
    return None if len(dtypes) > 1 or dtypes & {*NOT_FLOATING} else product


def _share_a_kernel(one: Stage, other: Stage) -> bool:
    """Whether one kernel computes both: of the same product, or at the same positions."""
    if not reads_nothing_of(other, one) or any(writes_windows(s.result) or scattered(s) for s in (one, other)):
        return False
    a, b = _product(one), _product(other)
    if a is not None or b is not None:
        return a is not None and b is not None and (a.product, a.names) == (b.product, b.names)
    return are_together(one, other) or have_rows_in_common(one, other)

"""Generate kernels without reductions: each program computes a block of consecutive result elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unity_ir.forms.addresses import Address, address, flat_address, power_of_two, runs
from unity_ir.forms.rewrite import reductions
from unity_ir.kernels.triton.expression import Axis
from unity_ir.kernels.triton.launch import KernelBuilder, KernelLaunch, Stage, warps
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import NOT_FLOATING, Cases, Expr, Name, Segments, accesses, children, index_names

BLOCK = 8192
"""Elements per program: the interpreter's time is per tile, whatever its size, and 16 warps hold such a tile."""

SMALLEST_BLOCK = 128
"""Fewest elements per program where the block is divided by the number of branches, each with loads of its own."""

MANY_VECTORS = 3
"""A program has half the elements if a kernel reads at least so many vectors, such as statistics of channels."""


def pointwise_launch(stage: Stage, more: Sequence[Stage] = ()) -> KernelLaunch:
    """
    Return the launch of one kernel that computes `stage`, a result whose expression has no reductions, and `more`
    stages over the same index variables (see `fit_one_kernel`).

    The expression may have any function of elements, broadcasts, permutations, composite dims (several variables in one
    dim), segments (parts of a concatenation), and indices used as values. What several stages read is read once. If the
    result stacks equally large tensors along a new dim, each program computes the same elements of all of them.
    """
    whole = _whole_segments(stage)
    extents = {**stage.extents, **whole}
    stacked = stage.expr.branches[0][0] if isinstance(stage.expr, Cases) and not whole else None
    names = tuple(n for i in stage.result.indices for n in (whole if isinstance(i, Segments) else index_names(i)))
    names = tuple(n for n in names if n != stacked)
    size = prod(extents[n] for n in names)
    # Every branch has addresses and loads of its own, and a stacked one its stores.
    branches = len(stage.expr.branches) * (1 if stacked is None else 2) if isinstance(stage.expr, Cases) else 1
    # Addresses that come from integers of 64 bits take two registers of each element, those of many vectors one each.
    is_much = any(_has_own_integers(each) for each in (stage, *more)) or _vectors((stage, *more)) >= MANY_VECTORS
    less = 2 if is_much else 1
    block = min(power_of_two(size), max(BLOCK // less // power_of_two(branches), SMALLEST_BLOCK))
    threads = warps(block * less)
    kernel = KernelBuilder(stage, extents, more)
    writer = kernel.writer
    flat = stage.family is not None and not stage.wide and all(_is_flat(each, names) for each in (stage, *more))
    bound = kernel.argument("size", size) if flat else str(size)
    width = kernel.constant("BLOCK", block)
    mask = None
    if size > 1:
        index = kernel.names.new("index")
        writer.emit(f"{index} = {kernel.program(0)} * {width} + tl.arange(0, {width})")
        if flat or size % block:
            mask = kernel.names.new("mask")
            writer.emit(f"{mask} = {index} < {bound}")
        writer.axes = [Axis(index, names, mask)]
    out = Address({}) if size == 1 else flat_address(names, extents)
    writer.share([stage.expr, *(each.expr for each in more)])
    if stacked is not None:
        _store_stacked(kernel, stacked)
        return kernel.launch(stage.kernel, (-(-size // block),), threads, kind="elements")
    for number, each in enumerate((stage, *more)):
        value = _cases(kernel, whole) if whole else _plain(kernel, each)
        if each.output.dtype == "bool":
            # Booleans are stored as bytes that must be 0 or 1.
            value = f"({value}) != 0"
        where = out if whole or size == 1 else address(each.result.indices, extents)
        writer.store(kernel.out(number), where, value)
    name = stage.family if flat and stage.family is not None else stage.kernel
    return kernel.launch(name, (-(-size // block),), threads, kind="elements")


def _has_own_integers(stage: Stage) -> bool:
    """Return whether every element of a result reads an integer of 64 bits that no other element reads."""
    variables = {n for i in stage.result.indices for n in index_names(i) if stage.extents[n] > 1}
    read = (a for a in accesses(stage.expr) if stage.buffers[a.tensor].dtype == "i64")
    return any(variables <= free_variables(a) for a in read)


def _vectors(stages: Sequence[Stage]) -> int:
    """Return how many tensors are read that have the innermost variable of the result, but not all."""
    variables = [n for i in stages[0].result.indices for n in index_names(i) if stages[0].extents[n] > 1]
    read = {a: free_variables(a) for each in stages for a in accesses(each.expr)}
    return len({a.tensor for a, own in read.items() if variables and variables[-1] in own and not own >= {*variables}})


def _plain(kernel: KernelBuilder, stage: Stage) -> str:
    writer, expr = kernel.writer, stage.expr
    return (writer.value(expr) if stage.output.dtype in NOT_FLOATING else writer.number(expr)).text


def fit_one_kernel(one: Stage, other: Stage) -> bool:
    """
    Return whether one pointwise kernel can compute both `one` and `other`, results to compute: neither has reductions
    or segments (concatenation), and they have the same index variables. The caller must check that neither reads the
    other's result (`reads_nothing_of`).
    """
    plain = not any(isinstance(each.expr, Cases) or reductions(each.expr) for each in (one, other))
    variables = _variables(one)
    return plain and variables is not None and variables == _variables(other)


def reads_nothing_of(one: Stage, other: Stage) -> bool:
    """Return whether stage `one` (a result to compute) does not read the result of stage `other`."""
    return other.output.name not in {b.name for b in one.buffers.values()}


def _variables(stage: Stage) -> frozenset[str] | None:
    """Return the variables of a result with an extent above 1; None if it has segments."""
    if any(isinstance(i, Segments) for i in stage.result.indices):
        return None
    return frozenset(n for i in stage.result.indices for n in index_names(i) if stage.extents[n] > 1)


def _cases(kernel: KernelBuilder, whole: dict[str, int]) -> str:
    """Return the expression that selects a branch's value by the position along the dim of segments."""
    (variable,) = whole
    writer = kernel.writer
    expr = kernel.stage.expr
    assert isinstance(expr, Cases)
    start = 0
    value = ""
    values: list[tuple[str, int]] = []
    for name, branch in expr.branches:
        end = start + kernel.stage.extents[name]
        position = writer.position(variable)
        if position is not None:
            low = [f"({position} >= {start})"] if start else []
            high = [f"({position} < {end})"] if end < whole[variable] else []
            writer.branch_mask = " & ".join(low + high) or None
        writer.shifts = {name: (variable, start)}
        values.append((writer.value(branch).text, end))
        start = end
    writer.branch_mask, writer.shifts = None, {}
    value = values[-1][0]
    for text, end in reversed(values[:-1]):
        value = f"tl.where({writer.position(variable)} < {end}, {text}, {value})"
    return value


def _store_stacked(kernel: KernelBuilder, variable: str) -> None:
    """Store the values of all branches of the result, each where its position along `variable` is."""
    result, writer = kernel.stage.result, kernel.writer
    assert isinstance(result.expr, Cases)
    where = address(result.indices, kernel.stage.extents)
    strides = dict(where.strides)
    step = strides.pop(variable)
    for number, (_, branch) in enumerate(result.expr.branches):
        writer.store(kernel.out(0), Address(strides, where.offset + number * step), writer.value(branch).text)


def _whole_segments(stage: Stage) -> dict[str, int]:
    """Return a new variable for the result's dim of segments, with its extent; nothing if it has none."""
    for index in stage.result.indices:
        if isinstance(index, Segments):
            name = index.names[0].rstrip("0123456789")
            while name in stage.extents:
                name += "_"
            return {name: sum(stage.extents[n] for n in index.names)}
    return {}


def _is_flat(stage: Stage, names: tuple[str, ...]) -> bool:
    """Return whether all operands are read at the result's own position, so that the text serves all sizes."""
    if _uses_positions(stage.expr):
        return False
    for indices in (stage.result.indices, *(a.indices for a in accesses(stage.expr))):
        where = address(indices, stage.extents)
        found = runs(names, stage.extents, where)
        if len(found) != 1 or found[0].inner != 1 or not found[0].outermost or where.offset:
            return False
    return True


def _uses_positions(expr: Expr) -> bool:
    return isinstance(expr, Cases | Name) or any(map(_uses_positions, children(expr)))

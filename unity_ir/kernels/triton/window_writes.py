"""
Generate kernels of results that are written through windows (transposed convolutions, gradients of poolings): every
element gathers what is written to it.

Element p of `out[2*y + i - 1] = g[y] * w[i]` is a sum over the taps i, of those y for which 2*y + i - 1 is p. Without
atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from math import prod

from unity_ir.forms.addresses import flat_address, power_of_two
from unity_ir.forms.rewrite import reductions
from unity_ir.forms.window_writes import WindowWrite, WindowWrites
from unity_ir.kernels.triton.expression import Axis
from unity_ir.kernels.triton.launch import KernelBuilder, KernelLaunch, Stage, warps
from unity_ir.tdl.syntax import index_names

BLOCK = 2048
"""Elements per program."""


def window_write_launch(stage: Stage) -> KernelLaunch:
    """
    Return the launch of the kernel that computes `stage`, a result that is written through windows (`out[s * i + j]`
    for index variables i, j, so that several elements add up to one, as in the gradient of a pooling).

    The written expression itself must have no reductions (`sum`, `max`).
    """
    assert not reductions(stage.expr)
    assert isinstance(stage.form, WindowWrites)
    writes = stage.form.dims
    places: dict[int, str] = {}
    extents = dict(stage.extents)
    for dim, write in writes.items():
        name = f"place {dim}"
        places[dim] = name
        extents[name] = write.size
    names = tuple(
        n for d, i in enumerate(stage.result.indices) for n in ((places[d],) if d in places else index_names(i))
    )
    size = prod(extents[n] for n in names)
    taps = tuple(name for write in writes.values() for _, name in write.taps)
    count = prod(extents[n] for n in taps)
    block = min(power_of_two(size), BLOCK)
    kernel = KernelBuilder(stage, extents)
    writer = kernel.writer
    width = kernel.constant("BLOCK", block)
    index = kernel.names.new("index")
    mask = None
    if size > 1:
        writer.emit(f"{index} = {kernel.program(0)} * {width} + tl.arange(0, {width})")
        if size % block:
            mask = kernel.names.new("mask")
            writer.emit(f"{mask} = {index} < {size}")
        writer.axes = [Axis(index, names, mask)]
    flat = list(writer.axes)
    positions = {dim: writer.position(name) or "0" for dim, name in places.items()}
    writer.share([stage.expr])
    total = kernel.names.new("total")
    writer.emit(f"{total} = tl.zeros({f'({width},)' if size > 1 else '()'}, tl.float32)")

    def gathered() -> None:
        """Write the statements that add what one tap writes to each element."""
        reached: list[str] = []
        solved: list[Axis] = []
        for dim, write in writes.items():
            solved += _solved(kernel, write, positions[dim], reached)
        here = " & ".join(reached)
        if here:
            written = kernel.names.new("written")
            writer.emit(f"{written} = {here}")
            here = written
        # Loads are masked by whether the tap writes to this element.
        for axis in solved:
            writer.axes.append(Axis(axis.index, axis.variables, here or None))
        value = writer.number(stage.expr).text
        writer.emit(f"{total} += " + (f"tl.where({here}, {value}, 0.0)" if here else value))

    if count > 1:
        tap = kernel.names.new("tap")
        with writer.block(f"for {tap} in range({count}):"):
            writer.axes.append(Axis(tap, taps))
            gathered()
    else:
        gathered()
    writer.axes = flat
    writer.store(KernelBuilder.OUT, flat_address(names, extents), total)
    return kernel.launch(stage.kernel, (-(-size // block),), warps(block))


def _solved(kernel: KernelBuilder, write: WindowWrite, position: str, reached: list[str]) -> list[Axis]:
    """
    Solve `position = stride * variable + taps + offset` for the window's variable; return its axis.

    The conditions for a solution are appended to `reached`.
    """
    writer = kernel.writer
    size = 1 if write.variable is None else writer.extents[write.variable]
    if position == "0" and not write.taps:
        # A dim of one element: whether something is written to it is known.
        step, over = divmod(-write.offset, write.stride)
        reached += [] if not over and 0 <= step < size else ["(tl.program_id(0) < 0)"]
        return [Axis(str(step), (write.variable,))] if write.variable is not None else []
    terms = [(factor, writer.position(name)) for factor, name in write.taps]
    text = position
    for factor, tap in terms:
        text += f" - {tap}" if factor == 1 else f" - {factor} * ({tap})"
    if write.offset:
        text += f" - {write.offset}" if write.offset > 0 else f" + {-write.offset}"
    if text != position:
        far = kernel.names.new("far")
        writer.emit(f"{far} = {text}")
    else:
        far = position
    if write.variable is None:
        reached.append(f"({far} == 0)")
        return []
    step = far
    if write.stride > 1:
        step = kernel.names.new(write.variable)
        writer.emit(f"{step} = {far} // {write.stride}")
        reached.append(f"({far} % {write.stride} == 0)")
    reached.append(f"({far} >= 0)")
    reached.append(f"({far} < {(size - 1) * write.stride + 1})")
    return [Axis(step, (write.variable,))]

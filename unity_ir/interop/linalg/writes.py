"""
Write results through windows, as gradients of convolutions are written: `linalg` has no such map, so that each position
of the result looks for what is written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from unity_ir.interop.linalg.nests import LoopNest
from unity_ir.interop.linalg.tensors import emit
from unity_ir.tdl.syntax import Window


@dataclass(frozen=True)
class WrittenDim:
    """
    A dim of a result that is written through a window. Its positions are a loop of their own, `name`; the window's
    variable with the most positions, `main` with its factor, follows from them; the others, `taps`, are summed over.
    """

    name: str
    window: Window
    main: tuple[int, str] | None
    taps: tuple[str, ...]


def written_dim(name: str, window: Window, extents: Mapping[str, int]) -> WrittenDim:
    """Return how a dim is written; `extents` has the number of positions of each variable of the window."""
    main = max(window.terms, key=lambda term: extents[term[1]], default=None)
    return WrittenDim(name, window, main, tuple(v for _, v in window.terms if main is None or v != main[1]))


def fix_writer(nest: LoopNest, dim: WrittenDim) -> SSAValue:
    """
    Fix the main variable of a window where it writes to this position of the result; return the condition that it does
    so anywhere. Where it does not, the variable is fixed at 0.

    Of a window `2*y + i - 1` at position p and tap i, it is y = (p + 1 - i) / 2, if that is a whole number.
    """
    insert, window = nest.inside, dim.window
    left = emit(insert, arith.SubiOp(nest.position(dim.name), nest.index(window.offset + window.low)))
    for factor, name in window.terms:
        if name in dim.taps:
            step = emit(insert, arith.MuliOp(nest.position(name), nest.index(factor)))
            left = emit(insert, arith.SubiOp(left, step))
    zero = nest.index(0)
    if dim.main is None:
        return emit(insert, arith.CmpiOp(left, zero, "eq"))
    factor, name = dim.main
    there = emit(insert, arith.CmpiOp(left, zero, "sge"))
    if factor > 1:
        rest = emit(insert, arith.RemSIOp(left, nest.index(factor)))
        there = emit(insert, arith.AndIOp(there, emit(insert, arith.CmpiOp(rest, zero, "eq"))))
        left = emit(insert, arith.DivSIOp(left, nest.index(factor)))
    is_inside = emit(insert, arith.CmpiOp(left, nest.index(nest.extents[name]), "slt"))
    there = emit(insert, arith.AndIOp(there, is_inside))
    nest.positions[name] = emit(insert, arith.SelectOp(there, left, zero))
    return there

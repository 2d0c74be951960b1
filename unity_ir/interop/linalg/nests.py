"""One loop nest over index variables of a TDL line: a `linalg.generic` while its body is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import AffineMapAttr, IndexType, IntegerAttr, TensorType
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import GenericOp, IndexOp, MatmulOp, YieldOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap
from xdsl.rewriter import InsertPoint

from unity_ir.interop.linalg.reads import PreparedRead
from unity_ir.interop.linalg.scalars import INT, REDUCERS, Element, ScalarBuilder, constant, neutral
from unity_ir.interop.linalg.tensors import element_of, emit, filled
from unity_ir.tdl.syntax import Var, Window


class LoopNest:
    """
    A `linalg.generic` over index variables: first those of its result's dims, in order, then `reduced` ones.

    Its body is made by `scalars`, of elements (`element`) and positions (`position`); `finish` ends it. Variables may
    be fixed (`fixed`) at positions that are computed, so that they are no loop of it.
    """

    def __init__(self, builder: Builder, extents: Mapping[str, int], names: Sequence[str], reduced: Sequence[str]):
        self.outside, self.extents = builder, extents
        self.names, self.loops = tuple(names), (*names, *reduced)
        self.numbers = {name: number for number, name in enumerate(self.loops)}
        self.block = Block()
        self.inside = Builder(InsertPoint.at_end(self.block))
        self.positions: dict[str, SSAValue] = {}
        """The positions of variables that are fixed, as `index`."""
        self._inputs: dict[tuple[SSAValue, AffineMap], SSAValue] = {}
        self._indices: dict[str, SSAValue] = {}

    def scalars(self, number: Element) -> ScalarBuilder:
        """Return what emits scalar operations in the body, in which numbers have the type `number`."""
        return ScalarBuilder(self.inside, number)

    @contextmanager
    def fixed(self, variable: str, position: SSAValue):
        """Fix a variable at a position, an `index`, while the context is open."""
        before = dict(self.positions)
        self.positions[variable] = position
        try:
            yield
        finally:
            self.positions = before

    def runs_over(self, name: str) -> bool:
        """
        Return whether a variable is a loop, or fixed. Any other is of a dim of size 1, as of an operand that
        broadcasts, and is at position 0.
        """
        return name in self.numbers or name in self.positions

    def position(self, name: str) -> SSAValue:
        """Return the position of a variable, as `index`."""
        if name in self.positions:
            return self.positions[name]
        if name not in self.numbers:
            return self.index(0)
        if name not in self._indices:
            self._indices[name] = emit(self.inside, IndexOp(self.numbers[name]))
        return self._indices[name]

    def number(self, name: str) -> SSAValue:
        """Return the position of a variable as an i64."""
        return emit(self.inside, arith.IndexCastOp(self.position(name), INT))

    def element(self, read: PreparedRead) -> SSAValue:
        """Return the element of an operand at this position: an argument of the body, or a `tensor.extract`."""
        names = {name for dim in read.dims for name in _names(dim)}
        if names.isdisjoint(self.positions):
            results = tuple(self._affine(dim) for dim in read.dims)
            return self._input(read.tensor, AffineMap(len(self.loops), 0, results))
        return emit(
            self.inside, tensor.ExtractOp(read.tensor, [self._at(d) for d in read.dims], element_of(read.tensor))
        )

    def _input(self, value: SSAValue, at: AffineMap) -> SSAValue:
        key = (value, at)
        if key not in self._inputs:
            self._inputs[key] = self.block.insert_arg(element_of(value), len(self._inputs))
            self._inputs[key].name_hint = "in"
        return self._inputs[key]

    def _affine(self, dim: Var | Window) -> AffineExpr:
        if isinstance(dim, Var):
            return self._loop(dim.name)
        found: AffineExpr | None = None
        for factor, name in dim.terms:
            variable = self._loop(name)
            term = variable if factor == 1 else variable * factor
            found = term if found is None else found + term
        assert found is not None, "a window of several variables"
        return found + dim.offset if dim.offset else found

    def _loop(self, name: str) -> AffineExpr:
        return AffineExpr.dimension(self.numbers[name]) if name in self.numbers else AffineExpr.constant(0)

    def _at(self, dim: Var | Window) -> SSAValue:
        """Return a position along a dim, computed in the body."""
        if isinstance(dim, Var):
            return self.position(dim.name)
        found = self.index(dim.offset)
        for factor, name in dim.terms:
            term = emit(self.inside, arith.MuliOp(self.position(name), self.index(factor)))
            found = emit(self.inside, arith.AddiOp(found, term))
        return found

    def index(self, value: int) -> SSAValue:
        """Return a constant of type `index`."""
        return emit(self.inside, arith.ConstantOp(IntegerAttr(value, IndexType())))

    def finish(self, value: SSAValue, reducer: str | None = None) -> SSAValue:
        """
        End the body with the element of the result at each position, or, given a reducer (`sum`, `max`, `min`, `prod`),
        with what it adds up, and insert the operation; return the result.
        """
        element: Any = value.type
        made = TensorType(element, [self.extents[n] for n in self.names])
        if reducer is None:
            out = emit(self.outside, tensor.EmptyOp([], made))
        else:
            out = filled(self.outside, emit(self.outside, constant(neutral(reducer, element), element)), made)
        self._cover_loops()
        identity = AffineMap(len(self.loops), 0, tuple(AffineExpr.dimension(i) for i in range(len(self.names))))
        held = self.block.insert_arg(element, len(self._inputs))
        held.name_hint = "out"
        inputs, maps = [v for v, _ in self._inputs], [m for _, m in self._inputs]
        if reducer == "sum" and self._is_matmul(value, maps):
            return emit(self.outside, MatmulOp(inputs, [out], [made]))
        if reducer is not None:
            scalars = ScalarBuilder(self.inside, element)
            total = scalars.arithmetic(REDUCERS[reducer], held, value)
            assert isinstance(total, SSAValue)
            value = total
        self.inside.insert(YieldOp(value))
        kinds = [IteratorTypeAttr.parallel()] * len(self.names)
        kinds += [IteratorTypeAttr.reduction()] * (len(self.loops) - len(self.names))
        maps_of_all = [AffineMapAttr(m) for m in (*maps, identity)]
        return emit(self.outside, GenericOp(inputs, [out], Region(self.block), maps_of_all, kinds, [made]))

    def _cover_loops(self) -> None:
        """
        Add an operand that says how many positions loops have, for those that no operand is indexed by alone: an empty
        tensor, as pooling has in `linalg`.
        """
        alone = {*self.loops[: len(self.names)]}
        for _, at in self._inputs:
            alone.update(self.loops[e.position] for e in at.results if isinstance(e, AffineDimExpr))
        missing = [name for name in self.loops if name not in alone]
        if missing:
            shape = TensorType(self.block.args[0].type if self.block.args else INT, [self.extents[n] for n in missing])
            empty = emit(self.outside, tensor.EmptyOp([], shape))
            results = tuple(AffineExpr.dimension(self.numbers[n]) for n in missing)
            self._input(empty, AffineMap(len(self.loops), 0, results))

    def _is_matmul(self, value: SSAValue, maps: Sequence[AffineMap]) -> bool:
        """Return whether the body, which sums `value`, is a product of two matrices as `linalg.matmul` has it."""
        if (len(self.names), len(self.loops), len(maps)) != (2, 3, 2) or len(self.block.ops) != 1:
            return False
        m, n, k = (AffineExpr.dimension(i) for i in range(3))
        product = value.owner
        return (
            isinstance(product, arith.MulfOp)
            and [*product.operands] == [*self.block.args[:2]]
            and [maps[0].results, maps[1].results] == [(m, k), (k, n)]
        )


def _names(dim: Var | Window) -> tuple[str, ...]:
    return (dim.name,) if isinstance(dim, Var) else tuple(name for _, name in dim.terms)

"""
The space of terms to enumerate: operators, sizes, and variables. Every size has a value at each of several sets of
sizes, at which terms are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.research.generate.attributes import SizeAt, reads
from unity_ir.rules.research.generate.terms import Type
from unity_ir.tdl.syntax import Pack

PARALLEL = ("partition", "combine", "replicate", "reduce", "pick", "zero_pad")
"""The parallel operators that are generated; fused ones are chains of them."""

BASES = ((2, 3), (3, 5))
"""Half the sizes of dims, at each set of sizes: unequal, so that no shape is square by accident."""

_SHAPES = {
    0: ((),),
    1: (("k",),),
    2: (("n", "k"), ("k", "k")),
    3: ((2, "n", "k"),),
    4: ((2, "n", 5, 4), ("n", "n", 3, 2)),
}
"""Shapes of variables by rank; n and k differ between sets of sizes."""

ARITY = 3
"""Most operands of an operator."""


@dataclass(frozen=True, slots=True)
class Space:
    """
    The space of terms to enumerate: of at most `size` operators, of the names in `operators` and `parallel`, applied to
    `variables` variables of each type. Raises `UnityError` for operators, sizes and degrees that cannot be enumerated.
    """

    operators: tuple[str, ...]
    parallel: tuple[str, ...] = PARALLEL
    size: int = 3
    """Most operators of a term."""
    variables: int = 3
    """Number of variables of each type."""
    degree: int = 2
    """The degree of all parallel operators; it must be 2."""
    seed: int = 0
    """
    The seed of the variables' random values, by which terms are compared, and of the samples at which rules are tested.
    """
    elements: int = 100
    """Most elements of a value at the first set of sizes; two of the largest variables together are always allowed."""

    def __post_init__(self):
        if not self.operators:
            raise UnityError("unity-rules: no operators are given; name one, such as relu")
        for name in self.operators:
            if not isinstance(find_operator(name).tdl, str):
                raise UnityError(f"pcg.{name}: its line depends on sizes, which no proof covers; leave it out")
            if len(find_operator(name).line.parameters) > ARITY:
                raise UnityError(f"pcg.{name}: terms are generated of operators of {ARITY} operands at most")
        for name in self.parallel:
            if name not in PARALLEL:
                raise UnityError(f"pcg.{name}: no parallel operator to generate; known are {', '.join(PARALLEL)}")
        if self.size < 1 or not 1 <= self.variables <= 4 or self.degree != 2:
            raise UnityError("unity-rules: give a size of 1 or more, 1 to 4 variables of each type, and a degree of 2")

    @property
    def inputs(self) -> tuple[Type, ...]:
        """
        The types of the terms' variables: matrices, square matrices, and the other ranks and element types that the
        operators need.
        """
        kinds = dict.fromkeys([(2, "f64"), *(k for name in self.operators for k in _needs(name))])
        found: list[Type] = []
        for rank, dtype in kinds:
            for shape in _SHAPES.get(rank, ()):
                sizes = (tuple({"n": 2 * n, "k": 2 * k}.get(str(s), s) for s in shape) for n, k in BASES)
                found.append(tuple(tensor_type(tuple(int(d) for d in s), dtype) for s in sizes))
        return tuple(found)

    @property
    def most_elements(self) -> int:
        """
        The most elements that the value of a term may have at the first set of sizes; larger terms are not enumerated.
        """
        return max(self.elements, 2 * max(type[0].elements for type in self.inputs))

    @property
    def sizes(self) -> tuple[SizeAt, ...]:
        """
        The sizes to try for one part, where `split` divides a dim: the sizes of the variables' dims, and their halves.
        Each is a tuple of the values that it has, one per set of sizes at which terms are evaluated.
        """
        halves = tuple(zip(*BASES, strict=True))
        return (*(tuple(2 * n for n in base) for base in halves), *halves)

    def arity(self, name: str) -> int:
        """
        Return the number of operands the operator called `name` is applied to: two for an operator that takes any
        number.
        """
        if name in PARALLEL:
            return 1
        parameters = find_operator(name).line.parameters
        return 2 if any(p.variadic for p in parameters) else len(parameters)


def _needs(name: str) -> Iterator[tuple[int, str]]:
    """Yield the ranks and element types of an operator's operands, except for those that take matrices of floats."""
    line = find_operator(name).line
    kinds = {p.name: p.kind for p in line.parameters}
    for result in line.results:
        for access in reads(result.expr):
            dtype = {"int": "i64", "bool": "bool"}.get(kinds[access.tensor], "f64")
            packs = any(isinstance(i, Pack) for i in access.indices)
            if not packs or dtype != "f64":
                yield 1 if packs else len(access.indices), dtype

"""
Searches for counterexamples: evaluates both sides of a substitution (rewrite rule) at small sizes, on inputs where
false rules tend to fail.

Among them are sizes of 1, up to 4 dims of a pack, ids beyond every table, numbers at the limits of element types, ties,
zeros, large and negative values, parameters at 0 and below. A sample where the sides differ refutes the rule, whatever
a proof says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.differentiate import operand_gradients
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.rules.pattern import Bindings, Substitution
from unity_ir.rules.proof.sides import LARGE, converts, typed_samples
from unity_ir.tdl.elements import converted
from unity_ir.tdl.functions import Array

PLAIN, DIRECTED = 5, 7
"""Samples of standard normal numbers, and of others."""

EDGES = (
    255,
    256,
    257,
    2049,
    65504,
    2**24 - 1,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32 + 1,
    2**53 + 1,
    -1,
    -129,
    -(2**31) - 1,
)
"""Integers at which some element type stops holding them."""

TOLERANCE: Mapping[str, float] = {"f64": 1e-7, "f32": 1e-3, "f16": 0.05, "bf16": 0.1}
"""Relative error that rounding explains, by the least precise element type of a sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """
    A sample to test a substitution at: values for its symbols (`bindings`), the results of both sides as values of a
    graph over the input nodes `leaves`, and the numbers in these inputs, by name (`arrays`).
    """

    bindings: Bindings
    leaves: Sequence[Node]
    source: Sequence[Value]
    target: Sequence[Value]
    arrays: Mapping[str, Array]
    plain: bool
    """Values are standard normal, so that nothing overflows."""

    @property
    def where(self) -> str:
        """The values of the rule's symbols at this sample, as text for messages: `k = 2, n = 3`."""
        return ", ".join(f"{k} = {v}" for k, v in sorted(self.bindings.items()))


def _random_samples(rule: Substitution, seed: int) -> Iterator[Sample]:
    """
    Yield samples of a rule: values for its symbols, the graph of both sides, and random numbers in its inputs; the same
    ones for the same `seed`. First come mostly standard normal numbers, then ones with ties, zeros and large numbers.
    Raises `UnityError` if the rule is well typed at no small sizes.
    """
    wide = converts(rule)
    for n, (bindings, (leaves, source, target)) in enumerate(typed_samples(rule, PLAIN + DIRECTED * (1 + wide), seed)):
        random = np.random.Generator(np.random.PCG64(_sequence(seed, n)))
        plain = n < PLAIN and not (wide and n % 2)
        sizes = [s for node in leaves for s in node.types[0].shape] or [1]
        arrays: dict[str, Array] = {}
        with np.errstate(all="ignore"):
            for node in leaves:
                (type,) = node.types
                draw = _floats if type.is_floating else _integers
                arrays[node.name] = converted(draw(random, type.shape, plain, max(sizes), wide), type.dtype)
        yield Sample(bindings, leaves, source, target, arrays, plain)


@lru_cache(maxsize=256)
def _sequence(seed: int, sample: int) -> np.random.SeedSequence:
    """Return what the random numbers of one sample begin with: those of every rule are the same."""
    return np.random.SeedSequence([seed, sample])


def _floats(random: np.random.Generator, shape: tuple[int, ...], plain: bool, size: int, wide: bool) -> Array:
    del size
    normal = random.standard_normal(shape)
    if plain:
        return normal
    match int(random.integers(0, 6 if wide else 5)):
        case 0:
            return random.integers(-2, 3, shape).astype(np.float64)
        case 1:
            return normal * 100
        case 2:
            return normal * (random.random(shape) < 0.5)
        case 3:
            return -np.abs(normal) * 30
        case 4:
            return np.abs(normal) * 30 + 9
        case _:
            return random.choice(EDGES, shape) + normal


def _integers(random: np.random.Generator, shape: tuple[int, ...], plain: bool, size: int, wide: bool) -> Array:
    match 0 if plain else 1 if size >= LARGE else int(random.integers(0, 4 if wide else 3)):
        case 0:
            return random.integers(0, min(size, 3), shape)
        case 1:
            return random.integers(max(0, size - 40), size, shape)
        case 2:
            return random.integers(-2, min(size, 4) + 4, shape)
        case _:
            return random.choice(EDGES, shape)


def refute(rule: Substitution, seed: int = 0) -> str | None:
    """
    Search for a sample at which the two sides of a rule have values that differ by more than rounding; return a
    description of the first one, or None if none is found.

    `seed` is that of the random samples. Raises `UnityError` if the rule is well typed at no small sizes.
    """
    for sample in _random_samples(rule, seed):
        found = _difference(sample, tuple(zip(sample.source, sample.target, strict=True)), sample.arrays)
        if found is not None:
            i, at, left, right = found
            return f"at {sample.where}: result {i} at {at} is {left:.6g} and {right:.6g}"
    return None


def refute_gradients(rule: Substitution, seed: int = 0) -> tuple[str, bool] | None:
    """
    Search for a sample at which the gradients (vector-Jacobian products) of the two sides of a rule differ by more than
    rounding; return (description of the first one, generic), or None if none is found. Where the source's gradient is
    no number, as that of a root below 0, any will do.

    generic is True if the gradients differ at random normal values, too, so that a tie of a maximum is not the reason.
    `seed` is that of the random samples. Raises `UnityError` if the rule is well typed at no small sizes.
    """
    for sample in _random_samples(rule, seed):
        random = np.random.default_rng([seed, 1])
        cotangents = [
            leaf("input", v.type.dual, name=f"g{i}") for i, v in enumerate(sample.source) if v.type.is_floating
        ]
        arrays = dict(sample.arrays)
        for node in cotangents:
            arrays[node.name] = converted(random.standard_normal(node.types[0].shape), node.types[0].dtype)
        results = [c.result for c in cotangents]
        try:
            source, target = (_products(side, results, sample.leaves) for side in (sample.source, sample.target))
        except UnityError:
            continue
        pairs = [(n, source.get(n), target.get(n)) for n in (x.result for x in sample.leaves if x.types[0].is_floating)]
        whole = [(n, a or _zeros(n), b or _zeros(n)) for n, a, b in pairs]
        gradients = [(a, b) for _, a, b in whole]
        found = _difference(sample, gradients, arrays, tuple(cotangents), where_left=True)
        if found is not None:
            i, at, left, right = found
            name = whole[i][0].node.name
            # Between values that are moved a little there are no ties.
            moved = _moved(arrays, random)
            apart = sample.plain or _difference(sample, gradients, moved, tuple(cotangents), True) is not None
            return f"the gradient of {name} at {sample.where} is {left:.6g} and {right:.6g} at {at}", apart
    return None


def _moved(arrays: Mapping[str, Array], random: np.random.Generator) -> dict[str, Array]:
    """Return the arrays with floating point numbers moved by about a hundredth each."""
    noise = {name: 0.01 * random.standard_normal(a.shape) for name, a in arrays.items() if a.dtype.kind == "f"}
    return {n: (a + noise[n] * (1 + np.abs(a))).astype(a.dtype) if n in noise else a for n, a in arrays.items()}


def _zeros(value: Value) -> Value:
    return leaf("constant", value.type.dual, value=0.0).result


def _products(side: Sequence[Value], cotangents: Sequence[Value], leaves: Sequence[Node]) -> dict[Value, Value]:
    """Return the gradients of the leaves of a side, from those of its results."""
    grads: dict[Value, Value] = {}

    def add(value: Value, grad: Value) -> None:
        if value in grads:
            (total,) = find_operator("add")(grads[value], grad)
            assert isinstance(total, Value)
            grad = total
        grads[value] = grad

    for value, grad in zip((v for v in side if v.type.is_floating), cotangents, strict=True):
        add(value, grad)
    for node in reversed(Graph("side", tuple(leaves), tuple(side)).nodes()):
        floating = [v for v in node.results if v.type.is_floating]
        if not node.operands or not any(v in grads for v in floating):
            continue
        found = operand_gradients(node, [grads.get(v) or _zeros(v) for v in floating])
        for operand, grad in zip(node.operands, found, strict=True):
            if grad is not None:
                add(operand, grad)
    return grads


def _difference(
    sample: Sample,
    pairs: Sequence[tuple[Value, Value]],
    arrays: Mapping[str, Array],
    more: tuple[Node, ...] = (),
    where_left: bool = False,
) -> tuple[int, list[int], float, float] | None:
    """
    Return the first pair of values that differ by more than rounding: which, where, and both numbers there. With
    `where_left`, places at which the left value is no number are left out.
    """
    outputs = tuple(v for pair in pairs for v in pair)
    with np.errstate(all="ignore"):
        values = interpret(Graph("sample", (*sample.leaves, *more), outputs), dict(arrays), {})
    found = [(values[a], values[b]) for a, b in pairs]
    if all(a is b or _identical(a, b) for a, b in found):
        return None
    floats = {v.type.dtype for v in values if v.type.is_floating}
    relative = max((TOLERANCE[d] for d in floats), default=0.0)
    finite = [np.abs(a[np.isfinite(a)]) for v, a in values.items() if v.type.is_floating]
    scale = max((float(a.max()) for a in finite if a.size), default=1.0)
    absolute = max(1e-9, scale * relative * (0 if sample.plain else 1e-2) if relative < 1e-6 else scale * relative)
    for i, (a, b) in enumerate(found):
        left, right = (np.asarray(x, dtype=np.float64) for x in (a, b))
        apart = ~np.isclose(left, right, rtol=relative, atol=absolute, equal_nan=True)
        if not sample.plain:
            # What overflows, or divides by zero, is a number in the one order of operations and none in the other.
            apart &= np.isfinite(left) & np.isfinite(right)
        if where_left:
            apart &= ~np.isnan(left)
        if apart.any():
            at = np.unravel_index(int(np.argmax(apart)), apart.shape)
            return i, [int(x) for x in at], float(left[at]), float(right[at])
    return None


def _identical(left: Array, right: Array) -> bool:
    """Return whether two arrays hold the same numbers, or none at the same places."""
    same = left == right
    if left.dtype.kind == "f":
        same |= (left != left) & (right != right)
    return bool(same.all())

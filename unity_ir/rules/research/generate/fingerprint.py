"""
Fingerprints of values: 64 bits over all elements, and random values of variables to take them at. Terms are evaluated
at several sets of sizes (say a = 4, b = 6 and a = 8, b = 9), numbered from 0.
"""

from __future__ import annotations

from functools import cache
from math import prod
from zlib import crc32

import numpy as np
import numpy.typing as npt

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.types import TensorType
from unity_ir.rules.research.generate.field import Batch, P, ResidueLine, mixed
from unity_ir.rules.research.generate.terms import TermStep, TypedTerm

Fingerprints = npt.NDArray[np.uint64]


@cache
def _salt(elements: int) -> Fingerprints:
    return mixed(np.arange(1, elements + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def fingerprints(values: Batch) -> Fingerprints:
    """
    Return a 64-bit fingerprint of each value of a batch [value, ..] of residues modulo 2^31 - 1, as uint64 [value]: the
    sum, modulo 2^64, over its elements of a hash of element and position.
    """
    flat = values.reshape(len(values), -1).astype(np.uint64)
    with np.errstate(over="ignore"):
        words = flat + np.uint64(0x9E3779B97F4A7C15)
        words *= _salt(flat.shape[1])
        words ^= words >> np.uint64(29)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(32)
        return words.sum(axis=1, dtype=np.uint64)


def random_value(name: str, type: TensorType, seed: int, at: int) -> Batch:
    """
    Return the random value of a term's variable at the set of sizes number `at`, as residues modulo 2^31 - 1 in a batch
    of one, [1, *shape]; integers and booleans are 0 or 1.

    `type` is the variable's type at these sizes. The value depends only on `name`, `type`, `seed` and `at`.
    """
    random = np.random.default_rng([seed, at, crc32(name.encode()), prod(type.shape)])
    high = 2 if type.is_integer or type.dtype == "bool" else P
    return random.integers(0, high, size=(1, *type.shape), dtype=np.int64)


@cache
def line(step: TermStep, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], at: int) -> ResidueLine:
    """
    Bind the TDL line (definition) of the compute operator that `step` applies, for evaluation on residues; `shapes` and
    `dtypes` are the operands', and the attributes are those of the step at the set of sizes number `at`.

    Raises `UnityError` where the operands' shapes do not fit.
    """
    operator = find_operator(step.op)
    return ResidueLine(operator.bind(shapes, operator.attributes(dict(step.attributes[at])), dtypes).bound)


class Values:
    """
    Evaluates terms at the set of sizes number `at`, each once. Called with a term, it returns the value, residues
    modulo 2^31 - 1 as an array [1, *shape]; those of variables are random, drawn from `seed`.
    """

    def __init__(self, seed: int, at: int):
        self.seed, self.at = seed, at
        self._known: dict[TypedTerm, Batch] = {}

    def __call__(self, term: TypedTerm) -> Batch:
        found = self._known.get(term)
        if found is None:
            found = self._known[term] = self._compute(term)
        return found

    def _compute(self, term: TypedTerm) -> Batch:
        if term.step is None:
            return random_value(term.name, term.type[self.at], self.seed, self.at)
        operands = [self(o) for o in term.operands]
        if term.step.is_parallel:
            return operands[0]
        types = [o.type[self.at] for o in term.operands]
        apply = line(term.step, tuple(t.shape for t in types), tuple(t.dtype for t in types), self.at)
        return apply(operands)[term.step.result]

    def equal(self, left: TypedTerm, right: TypedTerm) -> bool:
        """
        Return whether two terms have the same type and, on the random tensors of this set of sizes, the same value.
        """
        return left.type[self.at] == right.type[self.at] and np.array_equal(self(left), self(right))

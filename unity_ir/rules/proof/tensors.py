"""
Tensors at symbolic sizes, as functions from positions to forms (sums of monomials); and `pad`, `reshape` and
`broadcast_grad` on them, whose TDL lines depend on concrete sizes and are of no use here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unity_ir.rules.poly import ONE, ZERO, Poly, exact_quotient, product, symbol
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.forms import UNIT, Apply, Constraint, Form, Mono, Read, box, fresh, summed
from unity_ir.tdl.syntax import NOT_FLOATING

ElementPosition: TypeAlias = tuple[Poly, ...]


class Undivided(Exception):
    """
    Raised where a proof needs the quotient and remainder of `position` by `by`, but the position does not show them.
    The proof is then tried again with indices over that size written as `quotient * by + remainder`.
    """

    def __init__(self, position: Poly, by: Poly):
        super().__init__(f"position {position} is not written as a quotient and remainder by {by}")
        self.position, self.by = position, by


@dataclass(frozen=True)
class TensorForm:
    """A tensor of symbolic sizes: its shape, a function from position to element (as a form), and how it is stored."""

    shape: tuple[Poly, ...]
    element: Callable[[ElementPosition], Form]
    dtype: str = "f64"
    """Element type."""
    stored: bool = False
    """Elements are already rounded to the element type; otherwise they are real numbers still to be rounded."""
    held: str = ""
    """A narrower element type that holds all elements, too, since they were cast from it; empty if none is known."""
    gradient: bool = False
    """Computed from the gradient of a result; how its casts round is not part of what is proved."""

    @property
    def floating(self) -> bool:
        """Whether the tensor's elements are floating point numbers, so that they have gradients."""
        return self.dtype not in NOT_FLOATING


def named(name: str, shape: tuple[Poly, ...], dtype: str = "f64") -> TensorForm:
    """
    Make the symbolic tensor of a rule's input, of this shape and element type: its element at i is the unknown
    `name[i]` (`Read`); that of conditions `as bool(name[i])`, which is known to be 0 or 1.
    """

    def element(at: ElementPosition) -> Form:
        value: Form = (Mono(UNIT, (), frozenset(), (Read(name, at),)),)
        return (Mono(UNIT, (), frozenset(), (Apply("as bool", (value,)),)),) if dtype == "bool" else value

    return TensorForm(shape, element, dtype, stored=True)


def zeros(shape: tuple[Poly, ...], dtype: str) -> TensorForm:
    """Make a symbolic tensor of zeros, of this shape and element type."""
    return TensorForm(shape, lambda _: (), dtype, stored=True)


def added(one: TensorForm, other: TensorForm) -> TensorForm:
    """
    Add two symbolic tensors of the same shape, elementwise; the sum has the element type of `one`, and is not yet
    rounded to it.
    """
    return TensorForm(one.shape, lambda at: (*one.element(at), *other.element(at)), one.dtype, gradient=one.gradient)


PADDING = ("dim", "before", "after", "interior")
"""The attributes of `pad`."""


def padded(of: TensorForm, dim: Poly, before: Poly, after: Poly, interior: Poly) -> TensorForm:
    """
    Pad the symbolic tensor `of` along `dim`, a constant, with zeros: `before` many before its elements, `after` many
    after them, and `interior` many between neighbours.

    Element i moves to position `(interior + 1) * i + before`. Raises `Undecided` if `dim` is not a number.
    """
    at = dim.constant
    if at is None:
        raise Undecided("pad: its dim depends on the sizes")
    step, inner = interior + 1, of.shape[at]
    size = before + (inner - 1) * step + 1 + after

    def element(position: ElementPosition) -> Form:
        i = fresh("i")
        place = Constraint(step * symbol(i) + before - position[at], equal=True)
        return summed(of.element((*position[:at], symbol(i), *position[at + 1 :])), (i,), (*box(i, inner), place))

    return TensorForm((*of.shape[:at], size, *of.shape[at + 1 :]), element, of.dtype, of.stored, of.held)


Digits: TypeAlias = dict[tuple[Poly, Poly], tuple[Poly, Poly]]
"""Maps (position, divisor) to (quotient, remainder)."""

Divide: TypeAlias = Callable[[Poly, Poly], tuple[Poly, Poly] | None]
"""Returns (quotient, remainder) of a position by a divisor, or None where they are not known."""


def reshaped(of: TensorForm, shape: Sequence[Poly], digits: Digits, divide: Divide) -> TensorForm:
    """
    Reshape the symbolic tensor `of`: the same elements, in row-major order, in another shape.

    Positions are taken apart by `divide`; how they are composed is added to `digits`. Raises `Undecided` where the
    shapes are not products of the same polynomials.
    """
    groups = _groups(of.shape, shape)

    def element(position: ElementPosition) -> Form:
        where = [ZERO] * len(of.shape)
        for old, new in groups:
            flat = _flat([position[i] for i in new], [shape[i] for i in new], digits)
            for i, at in zip(old, _apart(flat, [of.shape[i] for i in old], divide), strict=True):
                where[i] = at
        return of.element(tuple(where))

    return TensorForm(tuple(shape), element, of.dtype, of.stored, of.held)


def unbroadcast(of: TensorForm, shape: Sequence[Poly]) -> TensorForm:
    """
    Sum the symbolic tensor `of` over the leading dims that `shape` does not have, and over dims that are 1 in `shape`.

    Given [2, 3, 4] to [3, 1], returns out[i, 0] = sum[a, k](of[a, i, k]). Raises `Undecided` where sizes other than 1
    are not the same polynomial.
    """
    missing = len(of.shape) - len(shape)
    spread = [d for d, new in enumerate(shape, missing) if new == ONE != of.shape[d]]
    if any(new not in (ONE, of.shape[d]) for d, new in enumerate(shape, missing)):
        raise Undecided("broadcast_grad: sizes differ and neither is 1")

    def element(position: ElementPosition) -> Form:
        where = {d: at for d, at in enumerate(position, missing) if d not in spread}
        names = {d: fresh("s") for d in (*range(missing), *spread)}
        within = [c for d, name in names.items() for c in box(name, of.shape[d])]
        at = tuple(symbol(names[d]) if d in names else where[d] for d in range(len(of.shape)))
        return summed(of.element(at), tuple(names.values()), within)

    return TensorForm(tuple(shape), element, of.dtype)


def _groups(old: Sequence[Poly], new: Sequence[Poly]) -> list[tuple[list[int], list[int]]]:
    """Return runs of old dims and of new dims that hold as many elements; dims of size 1 are in none."""
    left = [i for i, size in enumerate(old) if size != ONE]
    right = [i for i, size in enumerate(new) if size != ONE]
    found: list[tuple[list[int], list[int]]] = []
    while left or right:
        a, b = left[:1], right[:1]
        del left[:1], right[:1]
        while (p := product(old[i] for i in a)) != (q := product(new[i] for i in b)):
            if left and exact_quotient(q, p) is not None:
                a.append(left.pop(0))
            elif right and exact_quotient(p, q) is not None:
                b.append(right.pop(0))
            else:
                raise Undecided(f"reshape: {p} and {q} are not written with common factors")
        found.append((a, b))
    return found


def _flat(position: Sequence[Poly], sizes: Sequence[Poly], digits: Digits) -> Poly:
    """Return the row-major position in dims of these sizes, and record in `digits` how it is composed."""
    at = position[-1]
    inner = sizes[-1]
    for here, size in zip(position[-2::-1], sizes[-2::-1], strict=True):
        rest, at = at, here * inner + at
        digits[at, inner] = (here, rest)
        inner = inner * size
    return at


def _apart(position: Poly, sizes: Sequence[Poly], divide: Divide) -> list[Poly]:
    """
    Return the positions in dims of these sizes, given the row-major position, taken apart by `divide`.

    Raises `Undivided` where that does not know how.
    """
    if len(sizes) == 1:
        return [position]
    inner = product(sizes[1:])
    found = divide(position, inner)
    if found is None:
        raise Undivided(position, inner)
    quotient, remainder = found
    return [quotient, *_apart(remainder, sizes[1:], divide)]

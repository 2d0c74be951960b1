"""Look at the operators that made a value, for patterns of several."""

from __future__ import annotations

from unity_ir.pcg.node import Value
from unity_ir.pcg.types import ELEMENT_BYTES


def made_by(value: Value, name: str) -> tuple[Value, ...]:
    """Return the operands of the operator whose result a value is, if that graph operator is called `name`; else ()."""
    return value.node.operands if value.node.op == name else ()


def number_of(value: Value, name: str, attribute: str) -> tuple[Value, float] | None:
    """
    Return (first operand, value of the numeric attribute `attribute`) of the operator whose result a value is, if that
    graph operator is called `name`; else None.

    Given `scale(x, by = 2)`, "scale" and "by", returns x and 2.
    """
    return (value.node.operands[0], value.node.attribute(attribute)) if value.node.op == name else None


def factor_of(value: Value) -> tuple[Value, float]:
    """Return (x, factor) such that a value is `factor * x`, through any number of scales and negations."""
    factor = 1.0
    while value.node.op in ("scale", "neg"):
        factor *= value.node.attribute("by") if value.node.op == "scale" else -1.0
        (value,) = value.node.operands
    return value, factor


def uncast(value: Value) -> Value:
    """Return what a value was cast from, by one cast or several; the value itself if it is no cast."""
    while value.node.op == "cast":
        (value,) = value.node.operands
    return value


def unwidened(value: Value) -> Value:
    """Return what a value was cast from, by casts each to a wider element type; the value itself if it is no cast."""
    while value.node.op == "cast":
        (before,) = value.node.operands
        if ELEMENT_BYTES[before.type.dtype] >= ELEMENT_BYTES[value.type.dtype]:
            break
        value = before
    return value


def unshaped(value: Value) -> Value:
    """Return what a value was made of by reshapes and expansions."""
    while value.node.op in ("reshape", "expand"):
        (value,) = value.node.operands
    return value


def undetached(value: Value) -> Value:
    """
    Return what a value was made of by reshapes, expansions and `detach`: for values that the result does not depend on,
    such as the maximum that a softmax takes off.
    """
    while value.node.op in ("reshape", "expand", "detach"):
        (value,) = value.node.operands
    return value


def unbroadcast(value: Value) -> Value:
    """Return the vector [n] of which a value [1, .., 1, n] is a reshape; the value itself if it is none."""
    inner = value
    while inner.node.op == "reshape":
        (inner,) = inner.node.operands
    return inner if len(inner.shape) == 1 and value.shape == (*(1,) * (len(value.shape) - 1), *inner.shape) else value


def fits_rows(value: Value, x: Value) -> bool:
    """
    Return whether a value has one element for each row of `x` and, next to `x`, is broadcast along rows: [.., 1]. One
    of [..] would be broadcast along columns.
    """
    return value.shape == (*x.shape[:-1], 1) or (len(x.shape) == 1 and value.shape == ())


def reduced_last(value: Value, name: str, detached: bool = False) -> Value | None:
    """
    Return the x of which a value [.., 1] or [..] is the reduction over the last dim, by the graph operator called
    `name`; None if it is not one. With `detached`, no gradient need flow through the value.
    """
    inner = undetached(value) if detached else unshaped(value)
    for x in made_by(inner, name):
        is_last = inner.node.attribute("dim") == len(x.shape) - 1 and inner.shape == x.shape[:-1]
        if is_last and value.shape in (inner.shape, (*inner.shape, 1)):
            return x
    return None

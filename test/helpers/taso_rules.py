"""
Collections of rules as others write them, for tests: TASO's are messages of numbers in protobuf's wire format,
FlexFlow's are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unity_ir.rules.research.foreign.protobuf import OPERATORS, PARAMETERS

CONVOLUTION = {"KERNEL_H": 3, "KERNEL_W": 3, "STRIDE_H": 1, "STRIDE_W": 1, "PAD": 0, "ACTI": 0}
"""A convolution of 3 x 3 that keeps the size of images."""


@dataclass(frozen=True)
class Op:
    """An operation: its name after `OP_`, its inputs (below 0 the rule's, else results 0 of operations, or pairs)."""

    type: str
    inputs: tuple[int | tuple[int, int], ...]
    parameters: Mapping[str, int] = field(default_factory=dict[str, int])


def matmul(x: int, y: int, acti: int = 0) -> Op:
    return Op("MATMUL", (x, y), {"ACTI": acti})


def convolution(x: int, w: int, **parameters: int) -> Op:
    return Op("CONV2D", (x, w), {**CONVOLUTION, **parameters})


def pool(kind: str, x: int, **parameters: int) -> Op:
    return Op(f"POOL2D_{kind}", (x,), {**CONVOLUTION, **parameters})


def transpose(x: int) -> Op:
    """The transpose of a matrix."""
    return Op("TRANSPOSE", (x,), {"NUMDIM": 2, "PERM": 2, "OUTSHUFFLE": 1})


def concat(axis: int, dims: int, *x: int) -> Op:
    return Op("CONCAT", x, {"NUM_INPUTS": len(x), "AXIS": axis, "NUMDIM": dims})


def split(axis: int, x: int | tuple[int, int]) -> Op:
    return Op("SPLIT", (x,), {"NUM_OUTPUTS": 2, "AXIS": axis})


def linear(x: int | tuple[int, int], w: int | tuple[int, int], acti: int = 0) -> Op:
    return Op("LINEAR", (x, w), {"ACTI": acti})


def parallel(name: str, dim: int, x: int, degree: int = 2) -> Op:
    return Op(name, (x,), {"PARALLEL_DIM": dim, "PARALLEL_DEGREE": degree})


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A message of fields, each a number and an integer or a message."""
    out = b""
    for number, value in fields:
        out += varint(number << 3 | (2 if isinstance(value, bytes) else 0))
        out += varint(len(value)) + value if isinstance(value, bytes) else varint(value)
    return out


def operation(of: Op) -> bytes:
    inputs = [i if isinstance(i, tuple) else (i, 0) for i in of.inputs]
    parameters = [(PARAMETERS.index(f"PM_{key}"), value) for key, value in of.parameters.items()]
    return message(
        (1, OPERATORS.index(f"OP_{of.type}")),
        *((2, message((1, i), (2, j))) for i, j in inputs),
        *((3, message((1, key), (2, value))) for key, value in parameters),
    )


def rule(source: Sequence[Op], target: Sequence[Op], *outputs: tuple[int, int, int, int]) -> bytes:
    """A rule; `outputs` are (operation, result) of the source, then of the target: by default each side's last."""
    mapped = outputs or ((len(source) - 1, 0, len(target) - 1, 0),)
    return message(
        *((1, operation(op)) for op in source),
        *((2, operation(op)) for op in target),
        *((3, message((1, a), (2, c), (3, b), (4, d))) for a, b, c, d in mapped),
    )


def collection(*rules: bytes) -> bytes:
    return message(*((1, of) for of in rules))


def json_rule(name: str, source: Sequence[Op], target: Sequence[Op], *outputs: tuple[int, int, int, int]) -> Any:
    """A rule as the object of FlexFlow's JSON; `outputs` as in `rule`."""

    def side(ops: Sequence[Op]) -> list[Any]:
        return [
            {
                "type": f"OP_{op.type}",
                "input": [dict(zip(("opId", "tsId"), i if isinstance(i, tuple) else (i, 0))) for i in op.inputs],
                "para": [{"key": f"PM_{key}", "value": value} for key, value in op.parameters.items()],
            }
            for op in ops
        ]

    keys = ("srcOpId", "srcTsId", "dstOpId", "dstTsId")
    mapped = outputs or ((len(source) - 1, 0, len(target) - 1, 0),)
    return {
        "name": name,
        "srcOp": side(source),
        "dstOp": side(target),
        "mappedOutput": [dict(zip(keys, of)) for of in mapped],
    }

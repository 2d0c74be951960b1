"""
TASO's collection of rules as its protobuf file has it: messages of numbers, which are read as JSON's objects are.

    RuleCollection {rule = 1: Rule ..}             Rule {srcOp = 1: Operator .., dstOp = 2: .., mappedOutput = 3: ..}
    Operator {type = 1, input = 2: Tensor .., para = 3: Parameter ..}
    Tensor {opId = 1, tsId = 2}                    Parameter {key = 1, value = 2}
    MapOutput {srcOpId = 1, dstOpId = 2, srcTsId = 3, dstTsId = 4}

The wire format: a field is a varint, its number times 8 and its kind, then a varint (kind 0) or a length and as many
bytes (kind 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unity_ir.errors import UnityError

MESSAGES: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "RuleCollection": {1: ("rule", "Rule")},
    "Rule": {1: ("srcOp", "Operator"), 2: ("dstOp", "Operator"), 3: ("mappedOutput", "MapOutput")},
    "Operator": {1: ("type", "int"), 2: ("input", "Tensor"), 3: ("para", "Parameter")},
    "Tensor": {1: ("opId", "int"), 2: ("tsId", "int")},
    "Parameter": {1: ("key", "int"), 2: ("value", "int")},
    "MapOutput": {1: ("srcOpId", "int"), 2: ("dstOpId", "int"), 3: ("srcTsId", "int"), 4: ("dstTsId", "int")},
}
"""By message and number of a field, its name and kind: one integer, or any number of messages."""

OPERATORS = (
    *("OP_INPUT", "OP_WEIGHT", "OP_ANY", "OP_CONV2D", "OP_DROPOUT", "OP_LINEAR", "OP_POOL2D_MAX", "OP_POOL2D_AVG"),
    *("OP_RELU", "OP_SIGMOID", "OP_TANH", "OP_BATCHNORM", "OP_CONCAT", "OP_SPLIT", "OP_RESHAPE", "OP_TRANSPOSE"),
    *("OP_EW_ADD", "OP_EW_MUL", "OP_MATMUL", "OP_MUL", "OP_ENLARGE", "OP_MERGE_GCONV", "OP_CONSTANT_IMM"),
    *("OP_CONSTANT_ICONV", "OP_CONSTANT_ONE", "OP_CONSTANT_POOL"),
)
"""TASO's operators by number."""

PARAMETERS = (
    *("PM_OP_TYPE", "PM_NUM_INPUTS", "PM_NUM_OUTPUTS", "PM_GROUP", "PM_KERNEL_H", "PM_KERNEL_W", "PM_STRIDE_H"),
    *("PM_STRIDE_W", "PM_PAD", "PM_ACTI", "PM_NUMDIM", "PM_AXIS", "PM_PERM", "PM_OUTSHUFFLE", "PM_MERGE_GCONV_COUNT"),
)
"""TASO's parameters of operators by number."""

VARINT, BYTES = 0, 2
"""Kinds of fields."""

LONGEST = 10
"""Bytes that a varint has at most, 7 bits in each; a negative number has all."""


def collection(where: str, data: bytes) -> dict[str, Any]:
    """
    Decode a collection of rules, the bytes of TASO's protobuf file, to the objects that a JSON file of it would have: a
    dict with the rules under the key `rule`, named `rule_0`, `rule_1`, .. Operators and parameters with a number that
    TASO does not define are named by it, such as `OP_99`.

    `where` begins the messages of errors. Raises `UnityError` (one line) where the bytes are no such message.
    """
    found = _message(where, data, 0, len(data), "RuleCollection")
    for at, rule in enumerate(found["rule"]):
        rule["name"] = f"rule_{at}"
        for operator in (*rule["srcOp"], *rule["dstOp"]):
            _name(operator, "type", OPERATORS, "OP")
            for parameter in operator["para"]:
                _name(parameter, "key", PARAMETERS, "PM")
    return found


def _name(of: dict[str, Any], key: str, names: tuple[str, ...], prefix: str) -> None:
    if key in of:
        at = of[key]
        of[key] = names[at] if 0 <= at < len(names) else f"{prefix}_{at}"


def _message(where: str, data: bytes, at: int, end: int, kind: str) -> dict[str, Any]:
    """Return the message of bytes `at` to `end` by the names of its fields."""
    fields = MESSAGES[kind]
    found: dict[str, Any] = {name: [] for name, of in fields.values() if of != "int"}
    for tag, begin, value in _fields(where, data, at, end):
        name, of = fields.get(tag >> 3, ("", ""))
        if not name or tag & 7 != (VARINT if of == "int" else BYTES):
            raise UnityError(f"{where}: is not TASO's protobuf: field {tag >> 3} of {kind} at byte {begin}")
        if of == "int":
            found[name] = value
        else:
            found[name].append(_message(where, data, begin, begin + value, of))
    return found


def _fields(where: str, data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number and kind, where the value begins, the number or how many bytes it has) of each field."""
    while at < end:
        tag, at = _varint(where, data, at, end)
        value, after = _varint(where, data, at, end)
        if tag & 7 == BYTES:
            at, after = after, after + value
            if not 0 <= value <= end - at:
                raise UnityError(f"{where}: is not TASO's protobuf: {value} bytes at byte {at} of {end}")
        yield tag, at, value
        at = after


def _varint(where: str, data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a signed number of 64 bits, and where it ends."""
    value = 0
    for i, byte in enumerate(data[at : min(at + LONGEST, end)]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            value &= 2**64 - 1
            return value - (value >> 63 << 64), at + i + 1
    raise UnityError(f"{where}: is not TASO's protobuf: a number without an end at byte {at}")

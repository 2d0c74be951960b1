"""
Write messages of Chakra's schema (`schema/protobuf/et_def.proto` of mlcommons/chakra, package ChakraProtoMsg) in
protobuf's wire format: a few kinds of fields, for which a library is not worth a dependency.

A file of a trace is a sequence of messages, each behind its length as a varint: one GlobalMetadata, then a Node for
each node (`encodeMessage` in Chakra's `protolib.py`; `ProtobufUtils::readMessage` in its feeder).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

VERSION = "1.0.0"
"""The version in the metadata of traces, as Chakra's own generator writes it."""


class NodeType(IntEnum):
    """The types of nodes that are written, by their numbers in the schema (enum NodeType)."""

    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


COLLECTIVE_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "count_rows": 2,
    "send_rows": 6,
    "return_rows": 6,
}
"""The numbers of collectives in the schema (enum CollectiveCommType); of rows, as if all ranks had an even share."""

VALUE_FIELDS = {"int32": 7, "int64": 9, "uint64": 13, "bool": 27, "string": 29}
"""The numbers of an AttributeProto's fields by the type of its value."""

_VARINT, _BYTES = 0, 2
"""Wire types."""


class TraceAttribute(NamedTuple):
    """An attribute of a node, or of the metadata: its name, the type of its value (`VALUE_FIELDS`), the value."""

    name: str
    type: str
    value: int | str


@dataclass(frozen=True, slots=True)
class TraceNode:
    """
    A node of one rank's trace. It starts once the nodes whose ids are in `ctrl_deps` (issued before it) and `data_deps`
    (make what it reads) have ended. `micros` is its duration in whole microseconds.
    """

    id: int
    name: str
    type: NodeType
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    micros: int
    attributes: tuple[TraceAttribute, ...]


def encoded_node(node: TraceNode) -> bytes:
    """Return a node as a message of the schema (Node) behind its length."""
    fields = (
        _number(1, node.id),
        _text(2, node.name),
        _number(3, node.type),
        _packed(4, node.ctrl_deps),
        _packed(5, node.data_deps),
        _number(7, node.micros),
        *(_nested(10, _attribute(each)) for each in node.attributes),
    )
    return _behind_length(b"".join(fields))


def encoded_metadata(attributes: Iterable[TraceAttribute]) -> bytes:
    """Return the first message of a trace (GlobalMetadata) behind its length."""
    return _behind_length(_text(1, VERSION) + b"".join(_nested(2, _attribute(each)) for each in attributes))


def varint(number: int) -> bytes:
    """Return a whole number of at least 0 as a varint, 7 bits to a byte, the lowest first: 300 is `ac 02`."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _attribute(attribute: TraceAttribute) -> bytes:
    # A value is one of several (oneof), so that 0 is written, too.
    field, value = VALUE_FIELDS[attribute.type], attribute.value
    if isinstance(value, str):
        return _text(1, attribute.name) + _nested(field, value.encode())
    return _text(1, attribute.name) + _key(field, _VARINT) + varint(value)


def _key(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    """Return a field with a number; one that is 0, as it is where the field is left out, is not written."""
    return _key(field, _VARINT) + varint(value) if value else b""


def _text(field: int, value: str) -> bytes:
    return _nested(field, value.encode()) if value else b""


def _packed(field: int, values: Iterable[int]) -> bytes:
    data = b"".join(map(varint, values))
    return _nested(field, data) if data else b""


def _nested(field: int, data: bytes) -> bytes:
    return _key(field, _BYTES) + _behind_length(data)


def _behind_length(data: bytes) -> bytes:
    return varint(len(data)) + data

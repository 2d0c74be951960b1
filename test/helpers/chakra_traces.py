"""
Read Chakra execution traces and run them: an own reader of the wire format, and a simulator of streams.

Numbers of fields are those of `schema/protobuf/et_def.proto` in mlcommons/chakra.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
VALUES = {7: "int32_val", 9: "int64_val", 13: "uint64_val", 27: "bool_val", 29: "string_val"}

Fields = list[tuple[int, int | bytes]]


@dataclass(frozen=True)
class ReadNode:
    """A node as it is in a file; `kinds` has the field of each attribute's value."""

    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    micros: int
    attributes: Mapping[str, int | str]
    kinds: Mapping[str, str]

    @property
    def deps(self) -> tuple[int, ...]:
        return (*self.ctrl_deps, *self.data_deps)

    def number(self, name: str) -> int:
        value = self.attributes[name]
        assert isinstance(value, int)
        return value


def read(data: bytes) -> tuple[Fields, list[ReadNode]]:
    """The fields of the metadata, and the nodes."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        size, at = _varint(data, at)
        assert at + size <= len(data)
        found.append(data[at : at + size])
        at += size
    return list(_fields(found[0])), [_node(each) for each in found[1:]]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        assert key & 7 in (0, 2)
        value, at = _varint(data, at)
        if key & 7 == 2:
            assert at + value <= len(data)
            yield key >> 3, data[at : at + value]
            at += value
        else:
            yield key >> 3, value


def _node(data: bytes) -> ReadNode:
    numbers: dict[int, int] = {}
    name, deps = "", {4: (), 5: ()}
    attributes: dict[str, int | str] = {}
    kinds: dict[str, str] = {}
    for field, value in _fields(data):
        if isinstance(value, int):
            numbers[field] = value
        elif field == 2:
            name = value.decode()
        elif field in deps:
            deps[field] = tuple(_packed(value))
        else:
            assert field == 10
            (one, title), (kind, given) = _fields(value)
            assert one == 1
            assert isinstance(title, bytes)
            attributes[title.decode()] = given if isinstance(given, int) else given.decode()
            kinds[title.decode()] = VALUES[kind]
    assert numbers.keys() <= {1, 3, 7}
    return ReadNode(numbers.get(1, 0), name, numbers[3], deps[4], deps[5], numbers.get(7, 0), attributes, kinds)


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def play(ranks: Sequence[Sequence[ReadNode]], one_at_a_time: bool = False) -> dict[tuple[int, int], int]:
    """
    When each node, by rank and id, ends, in picoseconds: kernels one after the other, collectives once all ranks of the
    group have come to them, receives with their sends. With `one_at_a_time`, a rank has one collective, send or receive
    under way, and starts the free node of the least id first, as ASTRA-sim does (which lets receives be beside others
    by now). Nodes that wait for ever are absent.
    """
    waits = [{n.id: len(set(n.deps)) for n in nodes} for nodes in ranks]
    readers: list[dict[int, list[int]]] = [defaultdict(list) for _ in ranks]
    of = [{n.id: n for n in nodes} for nodes in ranks]
    for rank, nodes in enumerate(ranks):
        for n in nodes:
            for d in set(n.deps):
                readers[rank][d].append(n.id)
    free = [sorted(i for i, count in each.items() if not count) for each in waits]
    busy: list[set[str]] = [set() for _ in ranks]
    calls: dict[tuple[str, int], int] = defaultdict(int)
    joined: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    size = _group_sizes(ranks)
    sent: dict[tuple[int, int, int], int] = {}
    posted: dict[tuple[int, int, int], tuple[int, int]] = {}
    ends: dict[tuple[int, int], int] = {}
    events: list[tuple[int, int, int]] = []

    def start(now: int, rank: int, node: ReadNode) -> None:
        took = now + node.number("duration_ps")
        if node.type == COLLECTIVE:
            group = str(node.attributes["pg_name"])
            key = group, calls[group, rank]  # the n-th call of a rank in a group is that of the others
            calls[group, rank] += 1
            joined[key].append((rank, node.id))
            if len(joined[key]) == size[group]:
                for member in joined[key]:
                    heapq.heappush(events, (took, *member))
            return
        if node.type == COMPUTE:
            heapq.heappush(events, (took, rank, node.id))
            return
        pair = node.number("comm_src"), node.number("comm_dst"), node.number("comm_tag")
        if node.type == SEND:
            heapq.heappush(events, (took, rank, node.id))
            sent[pair] = took
            if pair in posted:
                heapq.heappush(events, (took, *posted[pair]))
        else:
            posted[pair] = rank, node.id
            if pair in sent:
                heapq.heappush(events, (max(now, sent[pair]), rank, node.id))

    def stream(node: ReadNode) -> str:
        if node.type == COMPUTE:
            return "compute"
        return "communication" if one_at_a_time else ""

    def begin(now: int, rank: int) -> None:
        for i in list(free[rank]):
            on = stream(of[rank][i])
            if on not in busy[rank]:
                free[rank].remove(i)
                busy[rank] |= {on} - {""}
                start(now, rank, of[rank][i])

    for rank in range(len(ranks)):
        begin(0, rank)
    while events:
        now, rank, i = heapq.heappop(events)
        assert (rank, i) not in ends
        ends[rank, i] = now
        busy[rank].discard(stream(of[rank][i]))
        for reader in readers[rank][i]:
            waits[rank][reader] -= 1
            if not waits[rank][reader]:
                free[rank] = sorted((*free[rank], reader))
        if not events or events[0][:2] != (now, rank):
            begin(now, rank)
    return ends


def _group_sizes(ranks: Sequence[Sequence[ReadNode]]) -> Mapping[str, int]:
    """How many ranks call collectives of each group."""
    members: dict[str, set[int]] = defaultdict(set)
    for rank, nodes in enumerate(ranks):
        for n in nodes:
            if n.type == COLLECTIVE:
                members[str(n.attributes["pg_name"])].add(rank)
    return {group: len(found) for group, found in members.items()}


def received(kind: int, size: int, count: int) -> int:
    """The bytes that all ranks of a group of `count` receive in a collective of `comm_size` `size`, done as a ring."""
    # ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER; of an all-gather the size is that of a rank's piece.
    return {0: 2 * size * (count - 1), 2: size * (count - 1) * count, 6: size * (count - 1), 7: size * (count - 1)}[
        kind
    ]

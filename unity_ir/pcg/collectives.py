"""
Declare every move between devices: one row per collective, read by planner, types, cost, search, lowering and profiles.

A row says between which roles of mesh axes a collective leads, how many elements its groups receive, which function of
the emitted runtime performs it, and of which two parallel operators it is the fusion (Unity, section 3.3). What stays
elsewhere, by the row's name: the algorithms of NCCL and their messages (`machine.collectives`, `machine.transfers`),
the cuts that bound them (`machine.bounds`), and the runtime's functions (`lowering/runtime/collectives.py`,
`lowering/runtime/halos.py`).

To add a collective, add a row; `test/unit/pcg/test_collectives.py` names each place that then lacks something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from unity_ir.errors import UnityError

RoleKind = Literal["shard", "partial", "replicate", "pinned"]
"""The kinds of roles that planning tells apart: `replicate` stands for COPY and REPEAT, `shard` for any dim."""

Members = Literal["all", "root", "neighbours", "counted", "none"]
"""
The members of a group that exchange messages: `all` with all others; `root`, one with each other one (or one with one);
`neighbours` along a dim or a ring; `counted`, those for which data say so; or `none`, each device by itself.
"""

Ends = tuple[RoleKind, RoleKind]
"""The roles of the moving axes before and after."""


@dataclass(frozen=True, slots=True)
class RuntimeCall:
    """
    A call of the emitted program's runtime: `function(ctx, x, *arguments, axes)`; `arguments` has the names of the
    arguments.

    `source` and `target` are roles as the runtime takes them: the number of a sharded dim; for pinned axes, the rank in
    the group that holds the value; None for other roles. `held` is the shape and dtype of the piece, for ranks that
    hold none. Halo exchanges have `dim`, `low` and `high`, moves of rows what `plan.instructions.RowMove` says.
    """

    function: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """
    A collective, or a step on each device by itself, that changes the roles of mesh axes (what the devices along an
    axis hold: shards of a dim, addends, replicas): a row of the table `COLLECTIVES`.

    `received(n, elements)` gives the elements that all n devices of a group receive together when a ring carries them,
    for pieces of `elements` before the move (for halos: borders of a device between two others). It is None if no link
    is crossed.
    """

    name: str
    calls: Mapping[Ends, RuntimeCall | None]
    """The runtime call for each pair of roles the collective leads between; None where there is nothing to do."""
    members: Members
    received: Callable[[int, int], int] | None
    profiled: tuple[int | None, int | None] | None
    """
    The dims of a matrix that are sharded before and after the move that `unity-profile` measures (None: no dim is);
    None for collectives that profiles do not hold, which the formulas of `machine` price in every case.
    """
    reduces: bool = False
    """Whether values of several devices are added up."""
    cuts: bool = False
    """Whether devices send parts of their pieces along the dim `target`; if it is not dim 0, they lie apart."""
    joins: bool = False
    """Whether a device joins pieces that it receives along the dim `source`; if it is not dim 0, they lie apart."""
    order: int = 99
    """
    Its place where a reshard is priced as one collective per pair of roles: lower ones first, those that shrink the
    pieces.
    """
    fuses: tuple[tuple[str, str | None], ...] = ()
    """
    The chain of two parallel operators that it fuses, each with the attribute that holds its dim (None: it has none):
    `(("combine", "dim"), ("partition", "to"))` is combine dim `dim`, then partition dim `to`.
    """

    @property
    def attributes(self) -> tuple[str, ...]:
        """
        The names of the attributes of the parallel operator that stands for this collective in a graph, in written
        order: those that hold a dim, then `by`, the degree. ("dim", "to", "by") for all_to_all, after which shards of
        dim `dim` are shards of dim `to`; ("by",) for all_reduce.
        """
        return (*(dim for _, dim in self.fuses if dim is not None), "by")

    def profiled_call(self) -> tuple[RuntimeCall, tuple[int, ...]]:
        """
        Return (call, dims), what `unity-profile` runs on a matrix to measure this collective: the function of the
        emitted program's runtime, and the dims to pass to it after the matrix, such as `(0,)` for all_gather, which
        joins shards of dim 0, and `(0, 1)` for all_to_all.

        Raises `UnityError` for a collective that profiles do not hold.
        """
        if self.profiled is None:
            raise UnityError(f"unity-profile: {self.name} is not measured; profiles hold {', '.join(PROFILED)}")
        sharded = tuple(dim is not None for dim in self.profiled)
        for ends, call in self.calls.items():
            if call is not None and tuple(end == "shard" for end in ends) == sharded:
                return call, tuple(dim for dim in self.profiled if dim is not None)
        raise UnityError(
            f"pcg/collectives.py: no roles of {self.name} fit the dims it is profiled with, {self.profiled}"
        )

    @property
    def crosses_links(self) -> bool:
        """Whether the collective sends anything to other devices."""
        return self.members != "none"

    @property
    def is_free(self) -> bool:
        """
        Whether the collective does nothing at run time: it only renames roles of mesh axes (COPY to REPEAT, say), so
        that nothing is computed, copied or sent.
        """
        return not any(self.calls.values())


def _between(
    sources: Iterable[RoleKind], targets: Iterable[RoleKind], call: RuntimeCall | None
) -> dict[Ends, RuntimeCall | None]:
    targets = tuple(targets)
    return {(source, target): call for source in sources for target in targets}


_BY_EVERYONE = (
    Collective(
        "all_reduce",
        _between(["partial"], ["replicate"], RuntimeCall("all_reduce")),
        "all",
        lambda n, elements: 2 * elements * (n - 1),
        profiled=(None, None),
        reduces=True,
        order=8,
        fuses=(("reduce", None), ("replicate", None)),
    ),
    Collective(
        "all_gather",
        _between(["shard"], ["replicate"], RuntimeCall("all_gather", ("source",))),
        "all",
        lambda n, elements: elements * (n - 1) * n,
        profiled=(0, None),
        joins=True,
        fuses=(("combine", "dim"), ("replicate", None)),
    ),
    Collective(
        "reduce_scatter",
        _between(["partial"], ["shard"], RuntimeCall("reduce_scatter", ("target",))),
        "all",
        lambda n, elements: elements * (n - 1),
        profiled=(None, 0),
        reduces=True,
        cuts=True,
        order=2,
        fuses=(("reduce", None), ("partition", "dim")),
    ),
    Collective(
        "all_to_all",
        _between(["shard"], ["shard"], RuntimeCall("all_to_all", ("source", "target"))),
        "all",
        lambda n, elements: elements * (n - 1),
        profiled=(0, 1),
        cuts=True,
        joins=True,
        order=3,
        fuses=(("combine", "dim"), ("partition", "to")),
    ),
)

_ON_EACH_DEVICE = (
    # Each device keeps its part.
    Collective(
        "slice",
        _between(["replicate"], ["shard"], RuntimeCall("keep_part", ("target",))),
        "none",
        None,
        profiled=(None, 1),
        order=0,
    ),
    # A device's own part stays, the rest of its addend is zero.
    Collective(
        "zero_pad",
        {
            **_between(["replicate", "shard"], ["partial"], RuntimeCall("zero_pad", ("source",))),
            **_between(["pinned"], ["partial"], RuntimeCall("zero_elsewhere", ("source", "held"))),
        },
        "none",
        None,
        profiled=(1, None),
        order=5,
    ),
    # Between COPY and REPEAT, and where all but the pinned devices forget their copies.
    Collective("retype", _between(["replicate"], ["replicate", "pinned"], None), "none", None, profiled=None),
)

_BY_ONE = (
    Collective(
        "broadcast",
        _between(["pinned"], ["replicate"], RuntimeCall("broadcast", ("source", "held"))),
        "root",
        lambda n, elements: elements * (n - 1),
        profiled=None,
    ),
    Collective(
        "scatter",
        _between(["pinned"], ["shard"], RuntimeCall("scatter", ("target", "source", "held"))),
        "root",
        lambda n, elements: elements * (n - 1) // n,
        profiled=None,
        cuts=True,
        order=1,
    ),
    Collective(
        "gather",
        _between(["shard"], ["pinned"], RuntimeCall("gather", ("source", "target"))),
        "root",
        lambda n, elements: elements * (n - 1),
        profiled=None,
        joins=True,
        order=7,
    ),
    Collective(
        "reduce",
        _between(["partial"], ["pinned"], RuntimeCall("reduce", ("target",))),
        "root",
        lambda n, elements: elements * (n - 1),
        profiled=None,
        reduces=True,
        order=6,
    ),
    Collective(
        "send",
        _between(["pinned"], ["pinned"], RuntimeCall("send", ("source", "target", "held"))),
        "root",
        lambda n, elements: elements,
        profiled=None,
        order=4,
    ),
)

_BY_NEIGHBOURS = tuple(
    Collective(
        name,
        _between(["shard"], ["shard"], RuntimeCall(name, ("dim", "low", "high"))),
        "neighbours",
        lambda n, border: border * (n - 1),
        profiled=None,
        reduces=name == "halo_reduce",
    )
    for name in ("halo", "halo_reduce")
)
"""
The collectives that operators with windows ask for, not the planner: the axes keep the dim they divide. `halo` copies
to each device the border its neighbours hold, `halo_reduce` adds the border's gradient to them.
"""

_AROUND = (
    Collective(
        "ring_shift",
        _between(["shard"], ["shard"], RuntimeCall("ring_shift")),
        "neighbours",
        lambda n, elements: elements * n,
        profiled=None,
    ),
)
"""Every device hands its whole piece on to the next of a ring: what attention around a ring asks for (`plan.rings`)."""

_COUNTED = (
    Collective(
        "count_rows",
        _between(["shard"], ["shard"], RuntimeCall("count_rows", ("experts", "rows", "layer"))),
        "counted",
        lambda n, elements: elements * (n - 1) * n,
        profiled=None,
    ),
    Collective(
        "send_rows",
        _between(["shard"], ["replicate"], RuntimeCall("send_rows", ("counts", "rows"))),
        "counted",
        lambda n, elements: elements * (n - 1),
        profiled=None,
    ),
    Collective(
        "return_rows",
        _between(["replicate"], ["shard"], RuntimeCall("return_rows", ("counts",))),
        "counted",
        lambda n, elements: elements * (n - 1),
        profiled=None,
    ),
)
"""
What the rows of experts ask for, whose sizes are data (`plan.routes`): `count_rows` tells all devices how many rows go
from each to each, `send_rows` sends them there, and `return_rows` back.
"""

COLLECTIVES: Mapping[str, Collective] = {
    row.name: row for row in (*_BY_EVERYONE, *_ON_EACH_DEVICE, *_BY_ONE, *_BY_NEIGHBOURS, *_AROUND, *_COUNTED)
}
"""Every row by name."""


def names_by_members(*members: Members) -> tuple[str, ...]:
    """
    Return the names of all collectives in which the devices of a group exchange messages in one of the given ways:
    "all" (each with all others), "root" (one device with each other one), "neighbours" (along a dim), "counted" (as
    data say) or "none" (each device by itself).

    Given "root", returns ("broadcast", "scatter", "gather", "reduce", "send").
    """
    return tuple(name for name, row in COLLECTIVES.items() if row.members in members)


AMONG_ALL = names_by_members("all")
FROM_ONE = names_by_members("root")
HALO_EXCHANGES = tuple(row.name for row in _BY_NEIGHBOURS)
BETWEEN_DEVICES = names_by_members("all", "root", "neighbours", "counted")
"""The collectives that cross links."""

ON_DEVICE = tuple(name for name, row in COLLECTIVES.items() if not row.crosses_links and not row.is_free)
"""The moves that copy inside a device's memory. They are priced by the bytes after them, all others by those before."""

PROFILED = tuple(name for name, row in COLLECTIVES.items() if row.profiled is not None)
"""The moves that `unity-profile` measures, in this order."""

FREE = tuple(name for name, row in COLLECTIVES.items() if row.is_free)
PLANNED = names_by_members("all", "root", "none")
"""The kinds of moves between layouts, which the reshard planner chooses from."""

KIND_BETWEEN: Mapping[Ends, str] = {ends: name for name in PLANNED for ends in COLLECTIVES[name].calls}
"""The collective for each pair of roles. Given ("partial", "shard") returns "reduce_scatter"."""

FUSED = tuple(row for row in COLLECTIVES.values() if row.fuses)
"""The collectives that parallel operators of the graph fuse into."""


def fusion_of(first: str, second: str) -> Collective | None:
    """
    Return the collective that fuses two parallel operators, `first` then `second`: given "reduce" and "partition",
    reduce_scatter; None if there is none.
    """
    return next((row for row in FUSED if tuple(op for op, _ in row.fuses) == (first, second)), None)

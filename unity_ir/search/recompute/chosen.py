"""
Which operators of a plan are recomputed, for each kind of recompute (docs/search.md, "Recompute").

A layer's input is a checkpoint: what is recomputed starts there, so that one layer at a time is held (`pcg.layers`).
What follows the last layer is not recomputed: its backward comes first, and would hold all of it again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod
from typing import Literal, get_args

from unity_ir.cost.keeps import Keeps
from unity_ir.cost.plan import PlanCost
from unity_ir.errors import UnityError
from unity_ir.ops import savings
from unity_ir.pcg.collectives import FREE
from unity_ir.pcg.graph import Graph, erase_with
from unity_ir.pcg.layers import Part, layers, parts
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.recompute import with_recompute
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.baselines.attention import score_products
from unity_ir.search.layouts.limits import limits
from unity_ir.search.recompute.min_cut import SavedValues, recomputed_at_price
from unity_ir.tdl.counts import has_contractions

Kind = Literal["none", "attention", "block", "all", "auto"]

KINDS: tuple[str, ...] = get_args(Kind)
"""
The kinds of recompute that users may ask for: `none`; `attention` (what takes no matrix product, convolution or fused
attention, and the scores of an attention of several operators); `block` (layers that repeat, from their inputs); `all`
(from checkpoints between groups of operators); `auto` (as little as makes the plan fit).
"""

ANY_PRICE = 1.0
"""Seconds per byte at which every value is recomputed that can be: a device holds far fewer bytes than a step takes
seconds."""


def check_kind(kind: str) -> None:
    """
    Raise `UnityError` unless the text `kind` names a kind of recompute (`KINDS`): `none`, `attention`, `block`, `all`
    or `auto`.
    """
    if kind not in KINDS:
        raise UnityError(f"search: recompute is {kind!a}; it is {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def in_blocks(plan: Graph) -> Graph:
    """
    Return a placed forward graph in which the backward recomputes every layer from the layer's input. Raises
    `UnityError` if the graph has no layers that repeat.
    """
    serial, serials = erase_with(plan)
    found = layers(serial).layers
    if not found:
        raise UnityError("recompute: block keeps each layer's input, but the graph has no layers that repeat; use all")
    return _from_ends(plan, serials, found)


def in_groups(plan: Graph) -> Graph:
    """
    Return a placed forward graph in which the backward recomputes the operators of each group (`groups`) from the value
    that the group before ends with, which is saved. The last group is not recomputed: what its backward reads is saved.
    """
    serial, serials = erase_with(plan)
    return _from_ends(plan, serials, groups(serial)[:-1])


def groups(serial: Graph) -> tuple[Part, ...]:
    """
    Divide a serial graph into contiguous groups of operators for recompute from checkpoints (Chen et al., 2016). A
    group ends only where a single value is all that later operators read of earlier ones: that value is the checkpoint.

    Groups have about equal bytes saved for the backward. Their number is that with which all checkpoints, and what the
    largest group saves, are the fewest bytes together.
    """
    every, keeps = parts(serial), Keeps(serial)
    sizes = [sum(_bytes(v) for n in part.nodes for v in n.results if v in keeps.values) for part in every]
    best: tuple[float, tuple[Part, ...]] = inf, every
    for count in range(1, len(every) + 1):
        found: list[Part] = []
        held: list[int] = []
        for part, size in zip(every, sizes, strict=True):
            # A part begins the next group once those before hold their share.
            if not found or sum(held) * count >= len(found) * sum(sizes):
                found.append(part)
                held.append(size)
            else:
                found[-1] = found[-1].joined(part)
                held[-1] += size
        total = max(held, default=0) + sum(_bytes(part.end) for part in found if part.end is not None)
        if total < best[0]:
            best = total, tuple(found)
    return best[1]


def _bytes(value: Value) -> int:
    return prod(value.shape) * ELEMENT_BYTES[value.dtype]


def _from_ends(plan: Graph, serials: Mapping[Node, Node], every: Sequence[Part]) -> Graph:
    """Return the plan with all of some parts recomputed from what the parts before them end with."""
    ends = {part.end.node for part in every if part.end is not None}
    again = {n for part in every for n in part.nodes} - ends
    # What a part begins with is kept where it was made: brought to its readers again.
    begin = {v.node for part in every for n in part.nodes for v in n.operands} - again
    last = every[-1].end if every else None
    begin -= set() if last is None else {last.node}
    return _marked(plan, serials, again, {n for n in begin if n.is_compute})


def _marked(plan: Graph, serials: Mapping[Node, Node], again: Iterable[Node], moved: Iterable[Node] = ()) -> Graph:
    """
    Return the plan with recompute of compute nodes of the serial graph, as far as the backward reads what they make;
    what the nodes in `moved` make, or weights there, is moved again.
    """
    wanted, begin = set(again), set(moved)
    read: set[Value] = set()
    keeps = Keeps(erase_with(plan)[0])
    for serial in dict.fromkeys(reversed(list(serials.values()))):
        if serial in wanted and not (read | keeps.values).isdisjoint(serial.results):
            read.update(serial.operands)
        elif serial in wanted:
            wanted.discard(serial)
    return with_recompute(
        plan,
        {n for n, serial in serials.items() if serial in wanted},
        {n for n, serial in serials.items() if serial in begin},
    )


@dataclass(frozen=True)
class Recomputable:
    """
    What a placed plan may recompute: the operators of each layer, with their seconds and bytes on a device. What is
    before the first layer counts as a layer, too. Weights that are moved to a layer's operators from where they are
    stored may be among its operators: to recompute one is to move it again.
    """

    plan: Graph
    serials: Mapping[Node, Node]
    """The node of the serial graph for each of the plan."""
    nodes: tuple[tuple[Node, ...], ...]
    """The operators of each layer, in the serial graph."""
    layers: tuple[SavedValues, ...]
    """Seconds and bytes of these operators, in the same order."""

    @staticmethod
    def of(
        priced: PlanCost,
        plan: Graph,
        with_products: bool,
        in_groups: bool = False,
        with_weights: bool = False,
        given: Sequence[Part] | None = None,
    ) -> Recomputable:
        """
        Return what the placed forward graph `plan`, with the cost `priced`, may recompute. Its layers are those that
        repeat or, if there are none or with `in_groups`, groups of operators (`groups`). If `given` is not None, it has
        the layers: contiguous runs of operators of the plan's serial graph.

        Without `with_products`, no contraction (matrix product, convolution, attention) is recomputed, except for
        products of queries and keys before a softmax that is an operator of its own. With `with_weights`, weights that
        are moved to their readers count as operators, too.
        """
        serial, serials = erase_with(plan)
        every = given
        if every is None:
            found = layers(serial)
            is_in_layers = found.layers and not in_groups
            every = (*_as_one(found.before), *found.layers) if is_in_layers else groups(serial)[:-1]
        seconds, bytes = _costs(priced, serials)
        if not with_products:
            seconds |= {n: inf for n in _products(serial)}
        moved = _moved_weights(priced, serials) if with_weights else {}
        keeps, saving = Keeps(serial), {saving.forward for saving in savings() if saving.reads_result}
        nodes: list[tuple[Node, ...]] = []
        saved: list[SavedValues] = []
        for part in every:
            inside = tuple(n for n in part.nodes if part.end is None or n is not part.end.node)
            number = {node: i for i, node in enumerate(inside)}
            read = dict.fromkeys(v.node for n in inside for v in n.operands if v in keeps.values)
            own = tuple(n for n in read if n in moved)
            nodes.append((*inside, *own))
            saved.append(
                SavedValues(
                    (*(seconds[n] for n in inside), *(moved[n][0] for n in own)),
                    (*(bytes[n] for n in inside), *(moved[n][1] for n in own)),
                    (*(n.op in saving or not keeps.values.isdisjoint(n.results) for n in inside), *(True for _ in own)),
                    (*(_numbers(n, number) for n in inside), *(() for _ in own)),
                )
            )
            moved = {n: of for n, of in moved.items() if n not in read}
        return Recomputable(plan, serials, tuple(nodes), tuple(saved))

    def at(self, price: float) -> tuple[frozenset[int], ...]:
        """
        Return which operators to recompute at a price of a byte, in seconds per byte that a device keeps: for each
        layer, indices among its operators (`nodes[layer]`). They make seconds of recompute + `price` * bytes kept the
        least.
        """
        return tuple(recomputed_at_price(layer, price) for layer in self.layers)

    def bytes(self, again: Sequence[frozenset[int]]) -> float:
        """
        Return the bytes that a device keeps for the backward in all layers together if the operators `again` are
        recomputed: for each layer, indices among its operators (`nodes[layer]`).
        """
        pairs = zip(self.layers, again, strict=True)
        return sum(layer.bytes[i] for layer, these in pairs for i in layer.saved(these)[0])

    def seconds(self, again: Sequence[frozenset[int]]) -> float:
        """
        Return the seconds that recomputing the operators `again` takes in all layers together: for each layer, indices
        among its operators (`nodes[layer]`).
        """
        return sum(layer.seconds[i] for layer, these in zip(self.layers, again, strict=True) for i in these)

    def price(self, most: float) -> float | None:
        """
        Return the least price of a byte, in seconds per byte, at which what `at(price)` leaves saved is at most `most`
        bytes on a device, in all layers together; to one part in a million. It is 0 if that few are kept without
        recompute, None if no price makes it so few.
        """
        if self.bytes(tuple(frozenset[int]() for _ in self.layers)) <= most:
            return 0.0
        if self.bytes(self.at(ANY_PRICE)) > most:
            return None
        cheap, dear = 1e-18, ANY_PRICE
        while dear / cheap > 1 + 1e-6:
            price = (cheap * dear) ** 0.5
            if self.bytes(self.at(price)) <= most:
                dear = price
            else:
                cheap = price
        return dear

    def with_least_time(self, most: float) -> tuple[frozenset[int], ...] | None:
        """
        Return which operators to recompute so that a device keeps at most `most` bytes in all layers together, in the
        least time found: for each layer, indices among its operators (`nodes[layer]`). Return None if it cannot keep
        that few. Of two neighbouring prices of a byte, the first layers have the choice (`at`) at the higher one, the
        others that at the lower one.
        """
        price = self.price(most)
        if price is None:
            return None
        if price == 0:
            return tuple(frozenset[int]() for _ in self.layers)
        low, high = self.at(price / (1 + 1e-6)), self.at(price)
        for count in range(len(self.layers)):
            mixed = (*high[:count], *low[count:])
            if self.bytes(mixed) <= most:
                return mixed
        return high

    def marked(self, again: Sequence[frozenset[int]]) -> Graph:
        """
        Return the plan in which the operators `again` are recomputed, as far as the backward needs their results: for
        each layer, indices among its operators (`nodes[layer]`).
        """
        found = {nodes[i] for nodes, these in zip(self.nodes, again, strict=True) for i in these}
        weights = {n for n in found if n.is_leaf}
        return _marked(self.plan, self.serials, found - weights, weights)


def _numbers(node: Node, number: Mapping[Node, int]) -> tuple[int, ...]:
    """Return the numbers of the operators whose results a node reads, each once."""
    return tuple(dict.fromkeys(number[v.node] for v in node.operands if v.node in number))


def _moved_weights(priced: PlanCost, serials: Mapping[Node, Node]) -> dict[Node, tuple[float, float]]:
    """
    Return (seconds that count, bytes brought) of each weight of the serial graph that is moved to its readers and kept
    there for the backward.
    """
    found: dict[Node, tuple[float, float]] = {}
    for reshard in priced.reshards:
        leaf = reshard.value.node
        if leaf.op == "weight" and not reshard.again and any(move.kind not in FREE for move in reshard.forward):
            waited = priced.machine.moves_time(reshard.forward_moves)
            brought = reshard.forward[-1].elements_after * ELEMENT_BYTES[reshard.value.dtype]
            seconds, bytes = found.get(serials[leaf], (0.0, 0.0))
            found[serials[leaf]] = seconds + waited * limits().waited_gathers, bytes + brought
    return found


def _as_one(parts: Sequence[Part]) -> Sequence[Part]:
    """Return several parts in a row as one part, none as none."""
    return () if not parts else (reduce(Part.joined, parts),)


def _costs(priced: PlanCost, serials: Mapping[Node, Node]) -> tuple[dict[Node, float], dict[Node, float]]:
    """
    Return (seconds of the forward, bytes on a device) of every operator of the serial graph: with the moves of its
    results to where they are read, and what those bring there.
    """
    seconds: dict[Node, float] = {}
    bytes: dict[Node, float] = {}
    for each in priced.operators:
        seconds[serials[each.node]] = each.forward
        bytes[serials[each.node]] = each.made_bytes
    for reshard in priced.reshards:
        maker = reshard.value.node
        while maker.is_parallel:
            maker = maker.operands[0].node
        if maker.is_compute:
            seconds[serials[maker]] += priced.machine.moves_time(reshard.forward_moves)
            is_brought = not reshard.stays_divided or reshard.rows > 0
            if is_brought and any(move.kind not in FREE for move in reshard.forward):
                bytes[serials[maker]] += reshard.brought * ELEMENT_BYTES[reshard.value.dtype]
    return seconds, bytes


def _products(serial: Graph) -> set[Node]:
    """Return the operators with FLOPs of contractions, but for the scores of a softmax that is an operator."""
    scores = score_products(serial)
    nodes = (n for n in serial.nodes() if n.is_compute)
    return {n for n in nodes if n not in scores and has_contractions(n.analysis.bound)}

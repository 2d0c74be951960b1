"""
Bound the seconds of an operator's kernel from below, whatever is fused with it, on S of a machine's devices.

What fusion cannot remove (`plan.groups` sees to these):

- A contraction (matrix product, convolution, attention) is a kernel of its own, with pointwise operators after it at
  most: it reads its operands from memory.
- A reduction or gather is in a kernel without contraction. Pointwise operators, and other reductions, may be fused with
  it if they read its results, make its operands, or, beside a sum of columns, read the same tensor. So it reads some
  set of tensors from which its operands are made, somewhere between them and what contractions and leaves made; and it
  writes some set that is made of its results, somewhere between them and what contractions and updates read.

    t = matmul(x, w);  s = add(t, b);  y = norm(s)  ->  norm's kernel reads s or t, whichever is smaller
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf, prod

from unity_ir.cost.time import rounding_bytes, rounding_seconds
from unity_ir.cost.work import computes_in, kind_of, mask_of_operator
from unity_ir.forms.column_sums import is_column_sum
from unity_ir.forms.float8 import rounding_reads
from unity_ir.forms.kinds import CONTRACTIONS
from unity_ir.machine.device import Device
from unity_ir.ops import operator, savings
from unity_ir.ops.operator import Attributes, Shapes
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import prime_factors
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.saved_softmax import attributes_of_variant
from unity_ir.tdl.counts import rounds, terms
from unity_ir.tdl.divisibility import Analysis

ROWS = ("reduction", "gather")
"""Kinds of operators (`forms.kinds`) that are in no kernel of a contraction, and in no pointwise one either."""


@dataclass(frozen=True, slots=True)
class Term:
    """
    The least bytes that a kernel reads or writes for one tensor, and the extents of the index variables whose division
    among devices makes each device's piece smaller.
    """

    bytes: float
    extents: tuple[int, ...] | None
    """Extents of the index variables whose division shards it; None: any division does."""

    def on(self, devices: int) -> float:
        """Return the least bytes of one device's piece of the tensor if `devices` devices share the work."""
        return self.bytes / (devices if self.extents is None else most_parts(self.extents, devices))


@dataclass(frozen=True, slots=True)
class Operand:
    """
    A tensor that a kernel must read or write. Fusion may leave the tensor itself out of memory: then the kernel reads
    what it is made from, or writes what is made of it. So the least bytes are those of the tensor (`own`), or of the
    smallest set of other tensors that can stand in for it (`beyond`).
    """

    own: Term
    beyond: float
    """Bytes of the smallest set of tensors that can stand in for it; infinite where it is in memory in any case."""

    def on(self, devices: int) -> float:
        """
        Return the least bytes that each device reads or writes for this tensor, or for the tensors that stand in for
        it, if `devices` devices share the work.
        """
        return min(self.own.on(devices), self.beyond / devices)


@dataclass(frozen=True, slots=True)
class Floor:
    """
    The least work of one operator's kernel: FLOPs, and bytes read and written, summed over the devices that share it.
    """

    flops: float
    peak: float
    """FLOP/s."""
    extents: tuple[int, ...]
    """Extents of the index variables that can be divided among devices."""
    forced: tuple[Operand, ...]
    """Tensors that the kernel reads or writes in any case, so that their bytes add up."""
    either: tuple[tuple[Operand, ...], ...]
    """
    Groups of operands or results, of each of which only the largest counts. Where the kernel begins further up, other
    tensors stand in for an operand, and the same ones may stand in for two.
    """
    kinds: tuple[str, ...]
    """The kinds (`forms.kinds`) that its kernel may be priced as."""
    rounded: tuple[tuple[Operand, int], ...] = ()
    """Both operands, if kernels before it round them to 8 bits, and how often these read each of them."""

    def seconds(self, devices: int, device: Device) -> float:
        """
        Return the least seconds that the kernel takes on each of `devices` devices of kind `device` that share it.
        """
        flops = self.flops / most_parts(self.extents, devices)
        moved = sum(o.on(devices) for o in self.forced)
        moved += sum(max((o.on(devices) for o in those), default=0.0) for those in self.either)
        if not self.rounded:
            return least_seconds(device, flops, moved, self.peak, self.kinds)
        operands, reads = zip(*((o.on(devices), times) for o, times in self.rounded), strict=True)
        rounded, less = rounding_bytes(operands, reads)
        alone = least_seconds(device, flops, moved - less, self.peak, self.kinds)
        # Measured seconds are those of the product with what comes before it.
        return alone if device.profile is not None else alone + rounding_seconds(rounded, device)


@lru_cache(maxsize=65536)
def most_parts(extents: tuple[int, ...], devices: int) -> int:
    """
    Return the most parts, a divisor of `devices`, into which work over index variables of these extents can be divided:
    given (6, 5) and 8 devices returns 2, as only 6 can be divided, and once.
    """
    found = 1
    for prime in set(primes := prime_factors(devices)):
        fits = sum(prime_factors(extent).count(prime) for extent in extents)
        found *= prime ** min(primes.count(prime), fits)
    return found


def least_seconds(device: Device, flops: float, bytes: float, peak: float, kinds: Sequence[str]) -> float:
    """
    Return a lower bound in seconds on a kernel of at least `flops` FLOPs and `bytes` bytes read and written; `peak` is
    in FLOP/s. Its time may be estimated as that of any of the `kinds` of kernels (`forms.kinds`), so the bound is the
    least over these. For a device with measured kernels (a profile) it uses only `peak` and the memory bandwidth
    (roofline).
    """
    if device.profile is not None:
        return max(flops / peak, bytes / device.memory_bandwidth)
    found = inf
    for kind in kinds:
        curve = device.curve(kind)
        if curve is None:
            work = max(flops / peak, bytes / device.memory_bandwidth)
            found = min(found, device.launch + work / device.efficiency)
            continue
        # More takes longer unless efficiency grows faster than size; then the curve without its growth is below it.
        powers = (curve.compute_power, curve.memory_power)
        compute, memory = (power if power <= 1 else 0.0 for power in powers)
        curve = replace(curve, compute_power=compute, memory_power=memory)
        found = min(found, float(curve.seconds(flops, bytes, peak, device.memory_bandwidth)))
    return found


class Floors:
    """
    Computes the floors (`Floor`, lower bounds on work) of the operators of a serial training step with its backward, on
    a kind of device; each is computed once. `devices` is the number of devices of the whole machine.
    """

    def __init__(self, step: Graph, device: Device, devices: int):
        self.nodes = [n for n in step.nodes() if n.is_compute]
        self.device = device
        self.devices = devices
        self.kinds = {n: kind_of(n) for n in self.nodes}
        self.flops = {n: least_flops(n) for n in self.nodes}
        self.users = step.users()
        self.kept = {*step.outputs, *(u.grad for u in step.updates)}
        self._sources: dict[Value, float] = {}
        self._sinks: dict[tuple[Value, bool], float] = {}
        self._cuts()
        self._bits = {node: 1 << number for number, node in enumerate(self.nodes)}
        self._beyond: dict[Node, int] = {}
        self._find_beyond()
        self.joined: dict[Node, Node] = {}
        for node in self.nodes:
            if not self.is_contraction(node):
                for value in node.operands:
                    for other in (value.node, *self._beside(node, value)):
                        if other in self.kinds and not self.is_contraction(other):
                            self.joined[_root(self.joined, other)] = _root(self.joined, node)
        roots = (_root(self.joined, n) for n in self.nodes if self.is_rows(n))
        self.components = {root: number for number, root in enumerate(dict.fromkeys(roots))}

    def _beside(self, node: Node, value: Value) -> Iterator[Node]:
        """
        Yield the nodes before `node` that may be in its kernel because both read a value: one sums its columns, or the
        first makes what is summed so, and no contraction is between them.
        """
        for other, _ in self.users[value]:
            if other is node:
                return
            if not self._beyond[node] & self._bits[other] and (
                self._sums(node)
                or self._sums(other)
                or any(self._sums(n) for v in other.results for n in self._read(v))
            ):
                yield other

    def _read(self, value: Value) -> Iterator[Node]:
        return (node for node, _ in self.users.get(value, ()))

    def _sums(self, node: Node) -> bool:
        """Return whether a node sums columns."""
        return self.kinds.get(node) == "reduction" and all(map(is_column_sum, node.analysis.bound.results))

    def _find_beyond(self) -> None:
        """Find the nodes on which each depends through a contraction, as bits."""
        before: dict[Node, int] = {}
        for node in self.nodes:
            all_before = beyond = 0
            for maker in (v.node for v in node.operands if v.node in self._bits):
                all_before |= before[maker] | self._bits[maker]
                beyond |= before[maker] if self.is_contraction(maker) else self._beyond[maker]
            before[node], self._beyond[node] = all_before, beyond

    def is_contraction(self, node: Node) -> bool:
        """
        Return whether an operator of the step is a contraction (matrix product, convolution, attention). A kernel has
        at most one.
        """
        return self.kinds[node] in CONTRACTIONS

    def is_rows(self, node: Node) -> bool:
        """
        Return whether an operator of the step is a reduction or a gather (the kinds `ROWS`), which is never fused with
        a contraction.
        """
        return self.kinds[node] in ROWS

    @cached_property
    def peak(self) -> float:
        """
        FLOP/s of the device for the fastest element type of any operator of the step. It is used for all operators but
        contractions: all FLOPs of a group of fused operators are priced at the element type of its heaviest member
        (`cost.kernels`), which may be any.
        """
        return max((self._own_peak(n) for n in self.nodes if self.flops[n]), default=1.0)

    @cached_property
    def _heaviest_beside(self) -> tuple[tuple[float, float], ...]:
        """The (peak, FLOPs) of operators that are no contractions, the heaviest of each peak."""
        found: dict[float, float] = {}
        for node in self.nodes:
            if not self.is_contraction(node) and self.flops[node]:
                peak = self._own_peak(node)
                found[peak] = max(found.get(peak, 0.0), self.flops[node])
        return tuple(found.items())

    def _own_peak(self, node: Node) -> float:
        return self.device.peak(computes_in(tuple(v.type.dtype for v in node.operands), node.analysis))

    def _peak_of_contraction(self, node: Node) -> float:
        own, least = self._own_peak(node), self.flops[node] / self.devices
        return max((own, *(peak for peak, flops in self._heaviest_beside if flops > least)))

    def component(self, node: Node) -> int:
        """
        Return the number, from 0, of the component of the graph that has `node`: a reduction, a gather, or a pointwise
        operator connected to one. Contractions are in no component. Two other operators are in the same one if one
        reads the other's result, or if they may be fused because they read the same tensor and one sums its columns; so
        a kernel without contraction has operators of one component only.
        """
        return self.components[_root(self.joined, node)]

    def arithmetic(self, node: Node) -> tuple[float, float]:
        """
        Return (FLOPs, FLOP/s) of an operator of the step: its least FLOPs, summed over devices, and the highest speed
        at which its kernel may be priced.
        """
        return self.flops[node], self._peak_of_contraction(node) if self.is_contraction(node) else self.peak

    def floor(self, node: Node) -> Floor:
        """
        Return the floor of `node`, a contraction, a reduction or a gather of the step. Other operators have none, since
        they may be fused into others' kernels.
        """
        analysis = node.analysis
        extents = _extents(analysis, analysis.splittable)
        results = [
            Operand(self._term(v, analysis, analysis.result_dims[i]), self._sinks[v, self.is_contraction(node)])
            for i, v in enumerate(node.results)
            if v in self.users or v in self.kept
        ]
        operands: dict[Value, Operand] = {}
        for parameter, value in zip(analysis.bound.operands, node.operands, strict=True):
            term = self._term(value, analysis, analysis.operand_dims.get(parameter.name))
            beyond = self._source(value)
            if self.is_contraction(node) and value.node.op != "constant":
                beyond = inf
            if value in operands:
                # It is one tensor, in the smaller of two pieces.
                term = min(term, operands[value].own, key=lambda t: t.on(self.devices))
            operands[value] = Operand(term, beyond)
        if self.is_contraction(node):
            forced = (*operands.values(), *(r for r in results if r.beyond == inf))
            either = (tuple(r for r in results if r.beyond < inf),)
            dtypes = [v.type.dtype for v in node.operands]
            reads = rounding_reads(analysis.bound.results) if rounds(analysis.bound, dtypes) else ()
            return Floor(
                self.flops[node],
                self._peak_of_contraction(node),
                extents,
                forced,
                either,
                (self.kinds[node],),
                tuple((operands[v], times) for v, times in zip(node.operands, reads, strict=True)) if reads else (),
            )
        return Floor(self.flops[node], self.peak, extents, (), (tuple(operands.values()), tuple(results)), ROWS)

    def _term(self, value: Value, analysis: Analysis, dims: Iterable[str | None] | None) -> Term:
        known = None if dims is None else _extents(analysis, (d for d in dims if d is not None))
        return Term(_bytes(value), known)

    def _cuts(self) -> None:
        """Find the least cut beyond every value, towards what it is made of and what is made of it."""
        for node in self.nodes:
            made = inf
            if not self.is_contraction(node):
                made = max((min(_bytes(v), self._source(v)) for v in node.operands), default=0.0)
            self._sources.update(dict.fromkeys(node.results, made))
        for node in reversed(self.nodes):
            for value in node.results:
                for pointwise in (False, True):
                    self._sinks[value, pointwise] = self._sink(value, pointwise)

    def _source(self, value: Value) -> float:
        """Return the least bytes of a cut through what a value is made of; infinite beyond contractions and leaves."""
        return self._sources.get(value, 0.0 if value.node.op == "constant" else inf)

    def _sink(self, value: Value, pointwise: bool) -> float:
        """
        Return the least bytes of a cut through what is made of a value by operators other than contractions; if
        `pointwise`, other than contractions, reductions and gathers.
        """
        if value in self.kept:
            return inf
        found = 0.0
        for user, _ in self.users.get(value, ()):
            if self.is_contraction(user) or (pointwise and self.is_rows(user)):
                return inf
            found = max(found, *(min(_bytes(v), self._sinks[v, pointwise]) for v in user.results))
        return found


def _root(joined: dict[Node, Node], node: Node) -> Node:
    """Return the representative of a node's component (union-find with path halving)."""
    while (above := joined.get(node, node)) is not node:
        joined[node] = joined.get(above, above)
        node = joined[node]
    return node


def least_flops(node: Node) -> float:
    """
    Return a lower bound on the FLOPs of a serial compute node, summed over the devices that share it.

    Subexpressions that may be equal on some piece count once. A backward may have a variant that reads what its forward
    saved (`ops.savings`); of the two, the one with fewer FLOPs counts.
    """
    shapes, dtypes = tuple(v.shape for v in node.operands), tuple(v.dtype for v in node.operands)
    return _least_flops(node.op, shapes, node.attributes, dtypes)


@lru_cache(maxsize=65536)
def _least_flops(name: str, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...]) -> float:
    bound = operator(name).bind(shapes, attributes, dtypes).bound
    most: dict[object, float] = {}
    picked = 0
    for term in terms(bound):
        most[term.form] = max(most.get(term.form, 0.0), term.each * prod(bound.extents[n] for n in term.over))
        picked += 1 if term.picked else 0
    # Pieces of gathered work are rounded down.
    mask = mask_of_operator(name, shapes, attributes, dtypes)
    seen = 1.0 if mask is None else mask.seen(bound.extents)
    found = max(sum(most.values()) * seen - picked, 0.0)
    saving = {s.backward: s for s in savings()}.get(name)
    if saving is None:
        return found
    own = attributes_of_variant(saving.saving, attributes)
    made = operator(saving.saving).bind(shapes[1:], own, dtypes[1:]).bound
    read = made.results[not saving.reads_result :]
    saved = tuple((made.result_shape(r), r.dtype or dtypes[1]) for r in read)
    return min(
        found,
        _least_flops(
            saving.saved,
            (*shapes, *(shape for shape, _ in saved)),
            attributes_of_variant(saving.saved, attributes),
            (*dtypes, *(dtype for _, dtype in saved)),
        ),
    )


def _extents(analysis: Analysis, variables: Iterable[str]) -> tuple[int, ...]:
    known = {*analysis.splittable}
    return tuple(analysis.bound.extents[v] for v in dict.fromkeys(variables) if v in known)


def _bytes(value: Value) -> float:
    return value.type.elements * ELEMENT_BYTES[value.type.dtype]

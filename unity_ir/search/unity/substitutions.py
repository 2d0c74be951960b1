"""
Generate candidates by substitutions (Unity, sections 4 and 5.1).

A candidate PCG is a serial graph and the degrees of its operators. Its parallel operators follow from these: between
neighbours sharded alike, a combine and the partition after it have cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.rules.derivation import RuleApplication
from unity_ir.rules.rule import Rule
from unity_ir.search.unity.device_shares import Degrees, divisible, divisors, roles, task_count
from unity_ir.search.unity.machine_mapping import Subgraph


@dataclass(frozen=True, eq=False)
class CandidatePCG:
    """A PCG (a serial graph and the degrees of its operators), and the algebraic rewrites that led to it."""

    piece: Subgraph
    degrees: Mapping[Node, Degrees]
    steps: tuple[RuleApplication, ...] = ()

    @cached_property
    def key(self) -> object:
        """The key by which candidates are told apart: equal for equal PCGs, whatever rewrites led to them."""
        return self.piece.graph.outputs, tuple(self.degrees.get(n, ()) for n in self.piece.flow.nodes)


@dataclass(frozen=True, eq=False)
class Substitutions:
    """
    The substitutions for a number of devices: algebraic rules, and each operator sharded along each index variable.
    """

    rules: Sequence[Rule]
    devices: int
    _ways: dict[tuple[Node, Degrees], tuple[Degrees, ...]] = field(
        default_factory=dict[tuple[Node, Degrees], tuple[Degrees, ...]]
    )

    def of(self, candidate: CandidatePCG) -> Iterator[CandidatePCG]:
        """
        Yield every candidate that one substitution makes of `candidate`. An algebraic rule is applied at one place, or
        everywhere. Or one operator gets other degrees: once alone, and once with the degrees of the operators after it
        changed to follow.
        """
        yield from self._algebraic(candidate)
        for node in candidate.piece.flow.nodes:
            for degrees in self.degrees(node, candidate.degrees.get(node, ())):
                alone = {**candidate.degrees, node: degrees}
                yield CandidatePCG(candidate.piece, alone, candidate.steps)
                onwards = self._onwards(candidate.piece, node, alone)
                if len(onwards) > 1:
                    yield CandidatePCG(candidate.piece, {**alone, **onwards}, candidate.steps)

    def degrees(self, node: Node, now: Degrees) -> tuple[Degrees, ...]:
        """
        Return every set of degrees that a parallelization rule may give an operator instead of its current ones, `now`:
        one role gets another degree, the others keep theirs or, where that does not fit, lose them. All are tuples of
        (role, degree) pairs; a role is an index variable to divide, or a set of operands in partial sums.
        """
        if (node, now) not in self._ways:
            self._ways[node, now] = tuple(self._degrees(node, now))
        return self._ways[node, now]

    def _degrees(self, node: Node, now: Degrees) -> Iterator[Degrees]:
        """
        Yield degrees with another degree for one variable: op -> combine(op(partition)), and back.

        Where the new degree does not fit with the others, only the new one remains.
        """
        known, tried = roles(node), {now}
        for role in known:
            for degree in divisors(self.devices):
                for others in (dict(now), {}):
                    new = {**others, role: degree}
                    degrees = tuple((r, new[r]) for r in known if new.get(r, 1) > 1)
                    if self.devices % task_count(degrees) == 0 and divisible(node, degrees):
                        if degrees not in tried:
                            yield degrees
                        tried.add(degrees)
                        break

    def _onwards(self, piece: Subgraph, node: Node, degrees: Mapping[Node, Degrees]) -> dict[Node, Degrees]:
        """
        Return new degrees of an operator and of the operators after it that follow its sharding.

        The operators end where partial sums are reduced. Between them, combine and partition cancel:

            matmul; relu; matmul  ->  partition; matmul; relu; matmul; reduce
        """
        found = {node: degrees[node]}
        dims = {v: dim_degrees(v, degrees[node]) for v in node.results}
        for user in piece.flow.nodes[piece.flow.place[node] + 1 :]:
            flowing = {v: dims[v] for v in user.operands if v in dims and max(dims[v], default=1) > 1}
            if not flowing:
                continue
            found[user] = follow(user, flowing, self.devices)
            if found[user]:
                dims.update({v: dim_degrees(v, found[user]) for v in user.results})
            else:
                del found[user]
        return found

    def _algebraic(self, candidate: CandidatePCG) -> Iterator[CandidatePCG]:
        piece = candidate.piece
        for rule in self.rules:
            at, after = rule.everywhere(piece.graph)
            if sum(map(len, at)) > 1:
                steps = [RuleApplication(rule.name, ", ".join(places)) for places in at]
                yield self._rewritten(candidate, after, steps)
        for rule in self.rules:
            for place, after in rule.applications(piece.graph):
                yield self._rewritten(candidate, after, [RuleApplication(rule.name, place)])

    def _rewritten(self, candidate: CandidatePCG, after: Graph, steps: Sequence[RuleApplication]) -> CandidatePCG:
        """
        Return the rewritten candidate.

        Remaining operators keep their degrees; new ones take those of a replaced operator of the same name, or else
        follow their operands.
        """
        piece = candidate.piece
        same = corresponding(piece.graph, after)
        kept = {new: candidate.degrees.get(old, ()) for new, old in same.items()}
        old = set(same.values())
        gone = [n for n in piece.flow.nodes if n not in old]
        rewritten = Subgraph(after, piece.entry, piece.entries, piece.exits)
        given = dict(kept)
        for node in rewritten.flow.nodes:
            if node in given:
                continue
            alike = (candidate.degrees.get(g, ()) for g in gone if g.op == node.op)
            given[node] = next((d for d in alike if divisible(node, d)), self._following(node, given))
        return CandidatePCG(rewritten, given, (*candidate.steps, *steps))

    def _following(self, node: Node, given: Mapping[Node, Degrees]) -> Degrees:
        dims = {v: dim_degrees(v, given[v.node]) for v in node.operands if v.node in given}
        return follow(node, dims, self.devices)

    def alike(self, piece: Subgraph, dims: Mapping[Value, Sequence[int]]) -> CandidatePCG:
        """
        Return the candidate for `piece` in which operators follow the sharding of some given values, so that neighbours
        are sharded alike: in graph order, each operator takes the degrees of its operands' dims (`follow`).

        `dims` has the given values, each with the degree of each of its dims; a value that is neither given nor made by
        an operator is not sharded. Single substitutions would lead to the same candidate, with one operator per round.
        """
        known: dict[Value, Sequence[int]] = dict(dims)
        degrees: dict[Node, Degrees] = {}
        for node in piece.flow.nodes:
            degrees[node] = follow(node, {v: known[v] for v in node.operands if v in known}, self.devices)
            known.update({v: dim_degrees(v, degrees[node]) for v in node.results})
        return CandidatePCG(piece, degrees)


def dim_degrees(value: Value, degrees: Degrees) -> Sequence[int]:
    """
    Return the degree of each dim of `value`, [dim], if the operator that computes it has these degrees: (role, degree)
    pairs, where a role is an index variable to divide, or a set of operands in partial sums, which shards no dim.
    """
    by = {role: d for role, d in degrees if isinstance(role, str)}
    return [by.get(v, 1) if v is not None else 1 for v in value.node.analysis.result_dims[value.index]]


def follow(node: Node, dims: Mapping[Value, Sequence[int]], devices_of: int) -> Degrees:
    """
    Return the degrees of an operator that is sharded as its operands are, as (index variable, degree) pairs: each index
    variable has the degree of the operands' dims it runs along. Where operands disagree, the first decides.

    `dims` has, for each sharded operand, the degree of each of its dims; `devices_of` is the number of devices of the
    machine. Returns () where the degrees do not divide sizes or devices.
    """
    analysis, known = node.analysis, roles(node)
    wanted: dict[str, int] = {}
    for parameter, value in zip(analysis.bound.operands, node.operands, strict=True):
        for variable, degree in zip(analysis.operand_dims[parameter.name], dims.get(value, ()), strict=False):
            if variable is not None and degree > 1:
                wanted.setdefault(variable, degree)
    degrees = tuple((r, wanted[r]) for r in known if isinstance(r, str) and r in wanted)
    fits = devices_of % task_count(degrees) == 0 and divisible(node, degrees)
    return degrees if fits else ()


def corresponding(before: Graph, after: Graph) -> dict[Node, Node]:
    """
    Return, for each operator of the graph `after` a rewrite that was in the graph `before` it, that operator of
    `before`. It is the same node or, where the rewrite replaced its operands, the one of the same kind and attributes
    that is reached from the same output by the same operand indices. Operators that the rewrite made are left out.
    """
    found: dict[Node, Node] = {}
    existed = {n for n in before.nodes() if n.is_compute}
    stack = [(a.node, b.node) for a, b in zip(after.outputs, before.outputs, strict=True)]
    for node in after.nodes():
        if node in existed:
            found[node] = node
    seen: set[tuple[Node, Node]] = set()
    while stack:
        new, old = stack.pop()
        if new is old or (new, old) in seen or not new.is_compute:
            continue
        seen.add((new, old))
        if (new.op, new.attributes, len(new.operands)) == (old.op, old.attributes, len(old.operands)):
            found.setdefault(new, old)
            stack.extend((a.node, b.node) for a, b in zip(new.operands, old.operands, strict=True))
    return found

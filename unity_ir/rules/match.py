"""
Finds the places where the source pattern of a rewrite rule (substitution) matches a graph.

A pattern is laid over the graph from the operator that makes its first result: an operation's operands lead to the
node's operands; results that are not reached so, to the users of values already found. Sizes and attributes are solved
for last, since the names of operators rule out most places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.node import Node, Value
from unity_ir.rules.check import attribute_defaults, free
from unity_ir.rules.pattern import AttrExpr, Bindings, Input, Operation, ResultOf, Substitution, Term, build
from unity_ir.rules.poly import Poly
from unity_ir.rules.solve import solve
from unity_ir.tdl.counts import flops
from unity_ir.tdl.syntax import AttrValue

COMMUTATIVE = ("add", "mul", "maximum", "minimum")
"""Operators whose two operands match in either order."""


class OpIndex:
    """
    Indexes a graph for matching: `nodes` in topological order, `number` (a node's position in it), `by_op` (nodes by
    operator name, without leaves), and `users` (the users of each value, each with the operand's position). Make one
    per graph, for all rules.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = graph.nodes()
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.roots = frozenset(graph.roots)
        self.by_op: dict[str, list[Node]] = {}
        self.users: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            if not node.is_leaf:
                self.by_op.setdefault(node.op, []).append(node)
            for i, operand in enumerate(node.operands):
                self.users.setdefault(operand, []).append((node, i))

    def reference(self, node: Node) -> str:
        """
        Return the text by which derivations (recorded rule applications) refer to `node`: its operator and its number,
        from 0, among the graph's nodes in topological order, such as `matmul#3`.
        """
        return f"{node.op}#{self.number[node]}"

    def depends(self, value: Value, nodes: set[Node]) -> bool:
        """
        Return whether `value` is a result of one of `nodes` (at least one node), or is computed from such a result.
        """
        least = min(self.number[n] for n in nodes)
        seen: set[Node] = set()
        stack = [value.node]
        while stack:
            node = stack.pop()
            # Nodes are numbered operands first.
            if node in seen or self.number[node] < least:
                continue
            if node in nodes:
                return True
            seen.add(node)
            stack += [v.node for v in node.operands]
        return False


@dataclass(frozen=True, eq=False)
class Match:
    """
    One way to apply a substitution to a graph: the matched operators, and the new values that would replace theirs.
    """

    rule: Substitution
    index: OpIndex
    at: Node
    """The operator that makes the first value to be replaced."""
    inputs: Mapping[str, Value]
    """Values of the graph by the names of the rule's inputs."""
    bindings: Bindings
    """Values of the rule's symbols, packs and attribute parameters, by name."""
    replaced: Mapping[Value, Value]
    """Maps values of the graph to the new values that may replace them."""
    nodes: frozenset[Node] = field(default=frozenset())
    """The operators matched by the source pattern."""

    @property
    def reference(self) -> str:
        """
        The text by which derivations refer to `at`, the operator that makes the first replaced value: `matmul#3` for a
        matmul that is node 3 of the graph in topological order, from 0.
        """
        return self.index.reference(self.at)

    @cached_property
    def kept(self) -> tuple[Node, ...]:
        """
        The matched operators that stay in the graph after the replacement, since a result that is not replaced is an
        output of the graph or has a user that stays.
        """
        kept: set[Node] = set()
        for node in sorted(self.nodes, key=lambda n: -self.index.number[n]):
            for value in node.results:
                users = (u for u, _ in self.index.users.get(value, ()))
                read = value in self.index.roots or any(u not in self.nodes or u in kept for u in users)
                if read and value not in self.replaced:
                    kept.add(node)
        return tuple(sorted(kept, key=lambda n: self.index.number[n]))

    @cached_property
    def repeats_work(self) -> bool:
        """
        Whether applying the match would compute something twice.

        It would if matched operators stay in the graph, as others use their results, and the new operators do more work
        (FLOPs and elements written) than the removed ones. An example is `relu(matmul(x, w)) -> matmul(x, w) {act}`
        where others use the product, too.
        """
        if not self.kept:
            return False
        new = topological(self.replaced.values(), first=self.index.nodes)[len(self.index.nodes) :]
        return sum(map(_work, new)) > sum(map(_work, self.nodes.difference(self.kept)))


def _work(node: Node) -> int:
    """Return the floating point operations of a node plus the elements it writes; 0 for a parallel operator."""
    return 0 if node.is_parallel else flops(node.analysis.bound) + sum(t.elements for t in node.types)


@dataclass(frozen=True, slots=True)
class _Found:
    """A partial match: nodes by id of their operation, values by name of their input."""

    nodes: Mapping[int, Node]
    values: Mapping[str, Value]


class _Plan:
    """Parts of a rule's match that do not depend on the graph; see `_plan`."""

    def __init__(self, rule: Substitution):
        self.rule = rule
        self.operations = rule.operations(rule.source)
        self.roots = [t for t in rule.source if isinstance(t, ResultOf)]
        self.first = self.roots[0].operation
        used = [*rule.source, *(t for o in self.operations for t in o.operands)]
        self.results = Counter[int]()
        """The least number of results of each operation, by its `id`."""
        for term in used:
            if isinstance(term, ResultOf):
                self.results[id(term.operation)] = max(self.results[id(term.operation)], term.index + 1)
        self.attributes = {id(o): {**attribute_defaults(o.op), **dict(o.attributes)} for o in self.operations}
        self.constants = {id(o): _constants(self.attributes[id(o)]) for o in self.operations}
        self.ops = frozenset(o.op for o in self.operations)
        self.free = frozenset(free(rule))
        self.several = len({id(t.operation) for t in self.roots}) > 1


def _constants(attributes: Mapping[str, AttrExpr]) -> tuple[tuple[str, AttrValue], ...]:
    """Return the attributes whose values the pattern fixes."""
    found: list[tuple[str, AttrValue]] = []
    for name, value in attributes.items():
        match value:
            case Poly():
                if value.constant is not None:
                    found.append((name, value.constant))
            case float() | str():
                found.append((name, value))
            case _:
                pass
    return tuple(found)


@lru_cache(maxsize=4096)
def _plan(rule: Substitution) -> _Plan:
    return _Plan(rule)


def matches(
    rule: Substitution, index: OpIndex, given: Bindings | None = None, at: Node | None = None
) -> Iterator[Match]:
    """
    Yield all matches of a substitution in the graph of `index`, in the order of nodes; with `at`, those at that node
    only.

    `given` has values by name for the symbols that no match determines (`check.free`); without them there is no match.
    A match is skipped if its replacement would have other types, or would depend on a replaced value. Of matches that
    differ only in the order of the replaced values, or whose new values are the same, only the first is yielded.
    """
    plan, given = _plan(rule), given or {}
    if not plan.ops <= index.by_op.keys() or not plan.free <= given.keys():
        return
    orders: dict[frozenset[Value], tuple[Value, ...]] = {}
    seen: set[tuple[tuple[Value, Value], ...]] = set()
    for node in index.by_op[plan.first.op] if at is None else (at,):
        for found in _assign(plan, index, plan.first, node, _Found({}, {}), []):
            roots = tuple(found.nodes[id(t.operation)].value(t.index) for t in plan.roots)
            if len(set(roots)) < len(roots) or orders.setdefault(frozenset(roots), roots) != roots:
                continue
            match = _match(plan, index, node, found, roots, given)
            if match is not None and (made := tuple(match.replaced.items())) not in seen:
                seen.add(made)
                yield match


def _match(
    plan: _Plan, index: OpIndex, at: Node, found: _Found, roots: Sequence[Value], given: Bindings
) -> Match | None:
    """Return the match of a pattern laid over a graph, if its sizes, types and order are right."""
    attributes = [
        (plan.attributes[id(o)][name], value)
        for o in plan.operations
        for name, value in found.nodes[id(o)].attributes
        if name in plan.attributes[id(o)]
    ]
    types = [(i, found.values[i.name].type) for i in plan.rule.inputs]
    bindings = solve(types, attributes, plan.rule.conditions, given)
    if bindings is None:
        return None
    nodes = {v.node for v in roots}
    if plan.several and any(index.depends(v, nodes) for v in found.values.values()):
        return None
    try:
        made = build(plan.rule.target, found.values, bindings)
    except UnityError:
        return None
    if any(old.type != new.type for old, new in zip(roots, made, strict=True)) or tuple(made) == tuple(roots):
        return None
    replaced = dict(zip(roots, made, strict=True))
    return Match(plan.rule, index, at, found.values, bindings, replaced, frozenset(found.nodes.values()))


def _assign(
    plan: _Plan, index: OpIndex, operation: Operation, node: Node, found: _Found, todo: list[tuple[Term, Value]]
) -> Iterator[_Found]:
    """Yield every way to match the rest of the pattern, with `operation` at `node`."""
    if node.op != operation.op or len(node.operands) != len(operation.operands):
        return
    if len(node.types) < plan.results[id(operation)]:
        return
    constants = plan.constants[id(operation)]
    if constants:
        attributes = dict(node.attributes)
        if any(attributes[name] != value for name, value in constants):
            return
    after = _Found({**found.nodes, id(operation): node}, found.values)
    orders = [node.operands]
    if node.op in COMMUTATIVE and node.operands[0] != node.operands[1]:
        orders.append(node.operands[::-1])
    for operands in orders:
        yield from _lay(plan, index, after, [*zip(operation.operands, operands, strict=True), *todo])


def _lay(plan: _Plan, index: OpIndex, found: _Found, todo: list[tuple[Term, Value]]) -> Iterator[_Found]:
    """Yield every way to match the terms in `todo` with the values given for them, and then the rest of the pattern."""
    values = found.values
    for i, (term, value) in enumerate(todo):
        if isinstance(term, Input):
            if values.get(term.name, value) != value:
                return
            if term.name not in values:
                values = {**values, term.name: value}
        elif value.index != term.index:
            return
        elif (node := found.nodes.get(id(term.operation))) is not None:
            if node is not value.node:
                return
        else:
            yield from _assign(plan, index, term.operation, value.node, replace(found, values=values), todo[i + 1 :])
            return
    found = replace(found, values=values)
    left = [o for o in plan.operations if id(o) not in found.nodes]
    if not left:
        yield found
        return
    operation, nodes = _next(plan, index, found, left)
    for node in nodes:
        yield from _assign(plan, index, operation, node, found, [])


def _next(plan: _Plan, index: OpIndex, found: _Found, left: Sequence[Operation]) -> tuple[Operation, Sequence[Node]]:
    """
    Return an operation that is not matched yet, and the nodes it may be at: users of a value already found, if
    possible.
    """
    for operation in left:
        for slot, term in enumerate(operation.operands):
            value = _value(found, term)
            if value is not None:
                users = index.users.get(value, ())
                either = operation.op in COMMUTATIVE
                return operation, list(
                    dict.fromkeys(n for n, s in users if n.op == operation.op and (either or s == slot))
                )
    # The last one is a root of its own.
    return left[-1], index.by_op[left[-1].op]


def _value(found: _Found, term: Term) -> Value | None:
    if isinstance(term, Input):
        return found.values.get(term.name)
    node = found.nodes.get(id(term.operation))
    return None if node is None else node.value(term.index)

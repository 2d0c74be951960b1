"""
Put the tokens of a forward graph in striped order (`ops.striped`), so that contiguous pieces of the sequence have about
as many scores that a causal mask leaves (Brandon et al., 2023, "Striped Attention").

What has the sequence is followed from the queries and keys of causal attention through the index variables of all
operators. Inputs and weights along it are put in striped order once; attention and rotary embedding become those that
know this order, results other than scalars are put back. What else depends on the order of tokens, such as labels that
are moved by one token, is computed before they change their order, so it may not read what attention makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unity_ir.errors import UnityError
from unity_ir.forms.rewrite import simplified
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, apply, rebuild
from unity_ir.tdl.syntax import (
    Call,
    Composite,
    Expr,
    Name,
    Opaque,
    Var,
    WrittenIndex,
    accesses,
    children,
    index_names,
)

LARGEST_BLOCK = 128
"""
Tokens of a block, at most: more are no faster to compute, whose tiles have 64, and leave the last stripe more than the
average, by one part in the number of rounds.
"""
KERNEL_TILE = 64
"""Tokens of a tile of attention's kernels in 16 bits: where a block has fewer, they compute what the mask hides."""

STRIPED = {"attention": "attention_striped", "rotary": "rotary_striped"}
"""Operators that depend on the order of tokens, and those that compute the same of tokens in striped order."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of `length` tokens along a dim of a value, or along an index variable, `inner` positions apart."""

    inner: int
    length: int


def block_of(length: int, stripes: int) -> int:
    """
    Return the number of tokens in a block of a sequence of `length` tokens in striped order: of the powers of two up to
    `LARGEST_BLOCK` that fit the largest with 8 rounds or more; else, for short sequences, with 2.

    Raises `UnityError` where the stripes do not divide the sequence.
    """
    if stripes < 1 or length % stripes:
        raise UnityError(f"stripes: {stripes} do not divide a sequence of {length} tokens; use a divisor of it")
    each, block = length // stripes, LARGEST_BLOCK
    while block > 1 and (each % block or each < (8 if block > KERNEL_TILE else 2) * block):
        block //= 2
    return block


def striped(graph: Graph, stripes: int, block: int | None = None) -> Graph:
    """
    Return a serial forward graph that computes the same as `graph` from tokens in striped order, of `stripes` stripes
    and blocks of `block` tokens (None: `block_of`). Inputs, weights and results keep their order.

    Raises `UnityError`, a message of one line, for a graph without causal attention, for one in which what attention
    makes is read by an operator that depends on the order of tokens in another way, and where stripes of whole blocks
    do not divide the sequence.
    """
    causal = [n for n in graph.nodes() if n.is_compute and _is_causal(n)]
    if graph.updates or not causal:
        raise UnityError(
            "stripes: they balance causal attention of a forward graph, which this one lacks; leave them out"
        )
    lengths = {v.shape[2] for n in causal for v in n.operands[:2]}
    if len(lengths) > 1:
        seen = " and ".join(map(str, sorted(lengths)))
        raise UnityError(
            f"stripes: causal attention has sequences of {seen} tokens; only those of one length are striped"
        )
    (length,) = lengths
    block = block_of(length, stripes) if block is None else block
    if stripes < 1 or block < 1 or length % (stripes * block):
        raise UnityError(
            f"stripes: {stripes} of blocks of {block} do not divide a sequence of {length} tokens; use others"
        )
    tracer = _Tracer(graph, causal)
    natural, found = tracer.in_natural_order(), tracer.sequences
    order = {"stripes": stripes, "block": block}

    def moved(value: Value, by: Value, op: str) -> Value:
        for dim, sequence in sorted(found.get(value, {}).items()):
            if sequence.inner != 1 or sequence.length != value.shape[dim]:
                raise UnityError(
                    f"stripes: a dim of {value.shape[dim]} has more than the {length} tokens of a sequence, in "
                    f"{_described(value)}; reshape it in the model, or leave stripes out"
                )
            by = apply(op, [by], {"dim": dim, **order}).result
        return by

    new: dict[Value, Value] = {}

    def read(value: Value) -> Value:
        if value in new:
            return new[value]
        return value if value.node.op == "constant" else moved(value, value, "stripe")

    for node in graph.nodes():
        if node.is_leaf or node in natural:
            continue
        operands = tuple(map(read, node.operands))
        if _follows_order(node, found):
            kept = {name: of for name, of in node.attributes if name != "causal"}
            whole = {**kept, **order, "rounds": length // (stripes * block)}
            results = apply(STRIPED[node.op], operands, whole).results
        else:
            results = rebuild(node, operands, node.view).results
        new.update(zip(node.results, results, strict=True))
    return replace(graph, outputs=tuple(moved(v, new[v], "unstripe") if v in new else v for v in graph.outputs))


def causal_degree(graph: Graph) -> tuple[int, int]:
    """
    Return (pieces, tokens): into how many pieces a parallel graph divides the queries of its causal attention along the
    sequence, at most, and how many tokens that has; (1, 0) for a graph without causal attention in natural order.
    """
    found = (1, 0)
    for node in graph.nodes():
        if node.op == "attention" and node.attribute("causal"):
            found = max(found, (pieces_of_queries(node), node.operands[0].shape[2]))
    return found


def pieces_of_queries(attention: Node) -> int:
    """Return into how many pieces a parallel attention divides its queries along the sequence."""
    variable = attention.analysis.operand_dims["q"][2]
    return 1 if variable is None else attention.configuration_in_space.degree(variable)


def sequence_variables(graph: Graph) -> Mapping[Node, str]:
    """
    Return, for each compute node of a forward graph with a sequence of attention, the index variable along which its
    tokens run and can be divided: of attention the queries'. Nodes without one are left out.
    """
    attention = [n for n in graph.nodes() if n.op.startswith("attention")]
    found: dict[Node, str] = {}
    for node, variables in _Tracer(graph, attention).variables.items():
        dims = [*node.analysis.result_dims[0], *node.analysis.splittable]
        variable = next((v for v in dims if v in variables and v in node.analysis.splittable), None)
        if variable is not None:
            found[node] = variable
    return found


def _is_causal(node: Node) -> bool:
    if not node.op.startswith("attention") or not dict(node.attributes).get("causal"):
        return False
    if node.op not in STRIPED:
        raise UnityError(f"stripes: pcg.{node.op} has no form for tokens in striped order; leave stripes out")
    return True


def _described(value: Value) -> str:
    return f"{value.node.op} {value.node.name}" if value.node.is_leaf else f"a result of pcg.{value.node.op}"


_Found = Mapping[Value, Mapping[int, _Sequence]]
"""The sequence along dims of values, by the dim."""


def _follows_order(node: Node, found: _Found) -> bool:
    """Return whether an operator that depends on the order of tokens has the sequence, and computes in its order."""
    return _is_causal(node) or (
        node.op == "rotary" and len(node.operands[0].shape) - 2 in found.get(node.operands[0], {})
    )


class _Tracer:
    """
    Finds the dims of a graph's values (`sequences`), and the index variables of its operators (`variables`), along
    which tokens of some of its operators of attention run.
    """

    def __init__(self, graph: Graph, attention: Sequence[Node]):
        self.sequences: dict[Value, dict[int, _Sequence]] = {}
        self.variables: dict[Node, dict[str, _Sequence]] = {}
        self._cutting = set[Node]()
        """Operators that cut or join sequences."""
        for node in attention:
            for value in node.operands[:3]:
                self.sequences.setdefault(value, {})[2] = _Sequence(1, value.shape[2])
        users = graph.users()
        # Before and after striped order, tokens are as they were given.
        nodes = [n for n in graph.nodes() if n.is_compute and n.op not in ("stripe", "unstripe")]
        known, waiting = set(nodes), dict.fromkeys(nodes)
        while waiting:
            node = next(iter(waiting))
            del waiting[node]
            for value in self._follow(node):
                again = [value.node, *(user for user, _ in users.get(value, ()))]
                waiting.update(dict.fromkeys(n for n in again if n in known and n is not node))

    def in_natural_order(self) -> set[Node]:
        """
        Return the operators that must compute in natural order: those that depend on the order of tokens and have no
        form for another, and all that these read. Raises `UnityError` if one of these would have to have it.
        """
        found = set[Node]()
        for node, variables in self.variables.items():
            depends = node in self._cutting or self._by_position(node, variables)
            if not depends or _follows_order(node, self.sequences):
                continue
            stack = [node]
            while stack:
                before = stack.pop()
                if before in found:
                    continue
                if _follows_order(before, self.sequences):
                    raise UnityError(
                        f"stripes: pcg.{node.op}, after pcg.{before.op}, depends on the order of tokens; leave stripes "
                        "out"
                    )
                found.add(before)
                stack += [v.node for v in before.operands if v.node.is_compute]
        return found

    def _follow(self, node: Node) -> list[Value]:
        """Find the sequences of a node's index variables, and of all dims that these run along; return what is new."""
        extents, variables = node.analysis.bound.extents, dict[str, _Sequence]()
        for value, dim, index in _dims(node):
            sequence = self.sequences.get(value, {}).get(dim)
            if sequence is None:
                continue
            apart = 1
            for name in reversed(_plain(index)):
                end = apart * extents[name]
                if sequence.inner >= apart and sequence.inner * sequence.length <= end:
                    variables[name] = _Sequence(sequence.inner // apart, sequence.length)
                    break
                apart = end
            else:
                self._cutting.add(node)
        self.variables[node] = variables
        changed: list[Value] = []
        for value, dim, index in _dims(node):
            apart = 1
            for name in reversed(_plain(index)):
                if (own := variables.get(name)) is not None:
                    of = self.sequences.setdefault(value, {})
                    sequence = _Sequence(own.inner * apart, own.length)
                    if of.setdefault(dim, sequence) != sequence:
                        self._cutting.add(node)
                    changed += [value] if of[dim] is sequence else []
                apart *= extents[name]
        return changed

    def _by_position(self, node: Node, variables: Mapping[str, _Sequence]) -> bool:
        """Return whether an operator computes with the positions of the tokens along these index variables."""
        if not variables:
            return False
        line = simplified(node.analysis.bound, {})
        found = {n for r in line.results for n in _by_position(r.expr)}
        found.update(n for _, _, index in _dims(node) if not _plain(index) for n in index_names(index))
        return not found.isdisjoint(variables)


def _dims(node: Node) -> Iterator[tuple[Value, int, WrittenIndex]]:
    """Yield each dim of each operand and result with its index in an operator's line."""
    bound = node.analysis.bound
    operands = dict(zip((p.name for p in bound.operands), node.operands, strict=True))
    for result, value in zip(bound.results, node.results, strict=True):
        for read in accesses(result.expr):
            for dim, index in enumerate(read.indices):
                yield operands[read.tensor], dim, index
        for dim, index in enumerate(result.indices):
            yield value, dim, index


def _plain(index: WrittenIndex) -> tuple[str, ...]:
    """Return the index variables, outermost first, of which a dim has each position once; none of a window's."""
    return index_names(index) if isinstance(index, Var | Composite) else ()


def _by_position(expr: Expr) -> Iterator[str]:
    """
    Yield the index variables whose positions an expression computes with, or that a function without formula runs over.
    Where random numbers are drawn, any position will do.
    """
    match expr:
        case Name(name):
            yield name
        case Call("philox"):
            return
        case Opaque():
            yield from (n for i in (*expr.outputs, *expr.inputs) for n in index_names(i))
            yield from _by_position(expr.body)
        case _:
            for child in children(expr):
                yield from _by_position(child)

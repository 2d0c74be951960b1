"""Tabulate an operator: every configuration, the layouts it needs and makes, and its seconds forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.budget import spend
from unity_ir.cost.halos import exchanges
from unity_ir.cost.routes import EXPERTS, ProductRows, exchanged_seconds, row_counts, row_sends
from unity_ir.cost.table import addition_seconds, distinct, seconds, template
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node
from unity_ir.pcg.sharding import COPY, REPEAT, GridRole
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.layouts.axes import Counts, Floats, Ints, degrees_of, role_counts, role_degrees
from unity_ir.search.layouts.exchanged import EXCHANGED, made_role, needed_role
from unity_ir.search.layouts.space import LayoutSpace, Spaces


@dataclass(frozen=True)
class OperatorTable:
    """
    All configurations of one operator, a row each: its sharding, the layouts it needs and makes, its seconds and bytes.
    """

    roles: tuple[GridRole, ...]
    """The role of each column of `counts`."""
    counts: Counts
    """[row, group, role]: 1 for the role of each group of axes."""
    operands: tuple[Ints, ...]
    """Per operand, the layout number [row] that each row needs, in the operand's layout space."""
    results: tuple[Ints, ...]
    """Per result, the layout number [row] that each row makes, in the result's layout space."""
    seconds: Floats
    """Seconds [row] of the kernels, forward and backward, and of the exchanges of halos."""
    again: Floats
    """Seconds [row] of the forward kernels: to recompute the results."""
    made: tuple[Floats, ...]
    """Bytes [row] of each result on a device."""
    halos: Floats
    """Bytes [row] on a device of operands with their halos, which are separate buffers."""

    def __len__(self) -> int:
        return len(self.seconds)

    def bytes(self, kept: Sequence[bool]) -> Floats:
        """
        Return the bytes on a device of the results that are saved for the backward, for each configuration: [row].

        `kept` says for each result whether it is saved.
        """
        return sum((m for m, k in zip(self.made, kept, strict=True) if k), np.zeros(len(self)))


def operator_table(
    node: Node, needs: tuple[bool, ...], spaces: Spaces, rows: ProductRows | None = None
) -> OperatorTable:
    """
    Return the table of the configurations of a serial compute node (every way to shard its work) on a machine. Left out
    are those whose degrees do not divide sizes, and those slower than another that needs and makes the same layouts.

    `needs` says for each operand whether the backward computes its gradient; `spaces` has the machine and its layouts.
    With `rows`, of a product of rows of experts, rows may be exchanged over axes that divide the experts, whose role is
    then `EXCHANGED`. Raises `OutOfBudget` if the work budget in force has ended.
    """
    # However large a table is, time may be up before it is made.
    spend(0)
    analysis = node.analysis
    barred = frozenset[str]() if spaces.hybrids else _summed(node)
    variables = tuple(v for v in _divisible(node) if v not in barred)
    carriers = analysis.carriers if spaces.hybrids else ()
    exchanged = (EXCHANGED,) if rows is not None and EXPERTS in variables else ()
    roles: tuple[GridRole, ...] = (*variables, COPY, REPEAT, *carriers, *exchanged)
    counts = role_counts(spaces.groups, len(roles))
    degrees = _variable_degrees(roles, role_degrees(spaces.groups, len(roles)))
    extents = np.array([analysis.bound.extents[v] for v in variables], dtype=np.int64)
    fits = np.all(extents % degrees == 0, axis=1)
    if exchanged:
        fits &= _may_exchange(node, roles, counts)
    counts, degrees = counts[fits], degrees[fits]
    needed: list[Ints] = []
    for i, value in enumerate(node.operands):
        space = spaces.of_value(value)
        needed.append(space.find(_project(counts, [needed_role(analysis, i, what) for what in roles], space)))
    made: list[Ints] = []
    for i, type in enumerate(node.types):
        space = spaces.of(type.shape, type.dtype)
        made.append(space.find(_project(counts, [made_role(analysis, i, what) for what in roles], space)))
    ok = np.all([numbers >= 0 for numbers in (*needed, *made)], axis=0)
    needed, made = [n[ok] for n in needed], [m[ok] for m in made]
    counts, divided = counts[ok], degrees[ok]
    both, forward = seconds(node, needs, variables, divided, _same(node, needed), spaces.machine.device)
    if rows is not None and exchanged:
        some = np.flatnonzero(np.any(counts[:, :, -1] > 0, axis=1))
        both[some], forward[some] = _exchanged(node, needs, rows, variables, divided[some], counts[some], spaces)
    return _undominated(
        OperatorTable(
            roles,
            counts,
            tuple(needed),
            tuple(made),
            both + _halo_seconds(node, needs, variables, counts[:, :, : len(variables)], spaces),
            forward,
            tuple(spaces.of(t.shape, t.dtype).bytes[m] for t, m in zip(node.types, made, strict=True)),
            _halo_bytes(node, variables, divided, needed, spaces),
        )
    )


def _variable_degrees(roles: Sequence[GridRole], of_roles: Ints) -> Ints:
    """
    Return the degree of each index variable, [row, variable], those of experts whose rows are exchanged included, given
    the degree of each role, [row, role].
    """
    degrees = of_roles[:, : roles.index(COPY)]
    if roles[-1] is EXCHANGED:
        degrees = degrees.copy()
        degrees[:, roles.index(EXPERTS)] *= of_roles[:, -1]
    return degrees


def _may_exchange(node: Node, roles: Sequence[GridRole], counts: Counts) -> npt.NDArray[np.bool_]:
    """
    Return which rows exchange nothing, or may exchange all of a product's rows: other axes divide nothing but rows,
    along the first dim, and are outer ones, so that the tokens of devices that exchange rows are contiguous.
    """
    first = node.analysis.result_dims[0][0]
    others = [i for i, what in enumerate(roles[:-1]) if what not in (first, COPY, REPEAT)]
    exchanges = counts[:, :, -1] > 0
    is_after = np.cumsum(exchanges, axis=1) - exchanges > 0
    wrong = np.any(counts[:, :, others] > 0, axis=(1, 2))
    if first in roles:
        wrong |= np.any(is_after & (counts[:, :, roles.index(first)] > 0), axis=1)
    return np.logical_not(np.any(exchanges, axis=1) & wrong)


def _exchanged(
    node: Node,
    needs: tuple[bool, ...],
    rows: ProductRows,
    variables: tuple[str, ...],
    degrees: Ints,
    counts: Counts,
    spaces: Spaces,
) -> tuple[Floats, Floats]:
    """
    Return (seconds, seconds of the forward's product), [row], of a product whose rows are exchanged, what it counts of
    their moves included; infinite where its kernels are not known.
    """
    found = exchanged_seconds(node, needs, rows, variables, degrees, spaces.exchange_rows, spaces.machine)
    if found is None:
        return np.full(len(degrees), np.inf), np.full(len(degrees), np.inf)
    ways = degrees[:, variables.index(EXPERTS)]
    live = row_counts(node, variables, degrees, spaces.exchange_rows).live
    at, alike = distinct(np.hstack([counts[:, :, -1], live[:, None]]).astype(np.int64))
    moved = np.zeros(len(at))
    for i, row in enumerate(at.tolist()):
        sizes = _level_sizes(counts[row, :, -1], spaces)
        moved[i] = sum(
            send.share
            * spaces.machine.move_seconds(send.kind, sizes, send.elements, send.elements, ELEMENT_BYTES[send.dtype])
            for send in row_sends(node, needs, rows, int(ways[row]), int(live[row]))
        )
    return found.forward + found.backward + moved[alike], found.product


def addition_seconds_of(table: OperatorTable, node: Node, operand: int, spaces: Spaces) -> tuple[Floats, Floats]:
    """
    Return, as two arrays [row], by how many seconds the matrix product that makes a weight's gradient takes longer if
    it adds the gradient to the sum over earlier micro-batches (`cost.table.addition_seconds`): those for storing the
    gradient in the element type of the sum, such as float32, and those for also reading the sum, which the first
    micro-batch need not.

    `node` reads the weight as its operand number `operand`; `table` has the node's configurations, a row each.
    """
    variables = tuple(map(str, table.roles[: table.roles.index(COPY)]))
    degrees = _variable_degrees(table.roles, degrees_of(table.counts, spaces.groups))
    elements = spaces.of_value(node.operands[operand]).elements[table.operands[operand]].astype(np.int64)
    return addition_seconds(node, operand, variables, degrees, elements, spaces.machine.device)


def cache_kernel_templates(graph: Graph) -> None:
    """
    Compute and cache how the FLOPs and bytes of each operator of a serial graph depend on how it is sharded
    (`cost.table.template`); `operator_table` then finds them, for any machine. Called before processes fork, so that
    they share the cache.
    """
    with_gradient = nodes_with_gradient(graph)
    for node in graph.nodes():
        if node.is_compute:
            needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
            same = tuple(map(node.operands.index, node.operands))
            template(node, needs, _divisible(node), same)


def _divisible(node: Node) -> tuple[str, ...]:
    return tuple(v for v in node.analysis.splittable if node.analysis.bound.extents[v] > 1)


def _summed(node: Node) -> frozenset[str]:
    """Return the index variables of an operator's weight matrices that are summed over."""
    analysis = node.analysis
    made = {v for dims in analysis.result_dims for v in dims}
    matrices = [
        analysis.operand_dims[p.name]
        for p, value in zip(analysis.bound.operands, node.operands, strict=True)
        if value.node.op == "weight" and len(value.shape) > 1
    ]
    return frozenset(v for dims in matrices for v in dims if v is not None and v not in made)


def _same(node: Node, needed: Sequence[Ints]) -> Ints:
    """Return, per row and operand, the first operand with the same value in the same layout."""
    same = np.tile(np.arange(len(needed)), (len(needed[0]), 1))
    for i, value in enumerate(node.operands):
        for j in reversed(range(i)):
            if node.operands[j] == value:
                same[:, i] = np.where(needed[i] == needed[j], j, same[:, i])
    return same


def _project(counts: Counts, roles: Sequence[int], space: LayoutSpace) -> Counts:
    """Return counts of a tensor's roles, given counts of grid roles and the tensor role of each."""
    out = np.zeros((len(counts), counts.shape[1], space.roles), dtype=np.int8)
    for column, role in enumerate(roles):
        out[:, :, space.role(role)] += counts[:, :, column]
    return out


def _halo_seconds(
    node: Node, needs: tuple[bool, ...], variables: tuple[str, ...], counts: Counts, spaces: Spaces
) -> Floats:
    """
    Return seconds [row] of the halo exchanges, forward and, for gradients, backward; `counts` is [row, group,
    variable].
    """
    out = np.zeros(len(counts))
    analysis = node.analysis
    if not analysis.operand_halos or not spaces.groups:
        return out
    # Nothing is exchanged where no dim with a halo is divided, and how much depends on the dims of its operand only.
    dims = {parameter: analysis.operand_dims[parameter] for parameter in analysis.operand_halos}
    haloed = {
        v
        for parameter, halos in analysis.operand_halos.items()
        for v, halo in zip(dims[parameter], halos, strict=False)
        if sum(halo)
    }
    matter = [i for i, v in enumerate(variables) if any(v in of for of in dims.values())]
    some = np.flatnonzero(np.any(counts[:, :, [i for i, v in enumerate(variables) if v in haloed]], axis=(1, 2)))
    if not len(some):
        return out
    counts = counts[some][:, :, matter]
    first, inverse = distinct(counts.reshape(len(counts), -1).astype(np.int64))
    each: list[float] = []
    for row in counts[first]:
        sizes = {variables[v]: _level_sizes(row[:, i], spaces) for i, v in enumerate(matter)}
        degrees = {v: prod(of_levels.values()) for v, of_levels in sizes.items()}
        each.append(
            sum(
                (1 + needs[e.operand])
                * spaces.machine.move_seconds(
                    "halo", sizes[e.variable], e.border, 0, ELEMENT_BYTES[node.operands[e.operand].type.dtype]
                )
                for e in exchanges(node, degrees)
            )
        )
    out[some] = np.array(each)[inverse]
    return out


def _halo_bytes(
    node: Node, variables: tuple[str, ...], degrees: Ints, needed: Sequence[Ints], spaces: Spaces
) -> Floats:
    """Return bytes [row] of the operands whose halos are exchanged."""
    total = np.zeros(len(degrees))
    halos = node.analysis.operand_halos
    if halos:
        matter = [i for i, v in enumerate(variables) if any(v in node.analysis.operand_dims[p] for p in halos)]
        first, inverse = distinct(degrees[:, matter])
        rows = degrees[first].tolist()
        exchanged = [{e.operand for e in exchanges(node, dict(zip(variables, row, strict=True)))} for row in rows]
        for i, value in enumerate(node.operands):
            has = np.array([i in operands for operands in exchanged])[inverse]
            total += has * spaces.of(value.type.shape, value.type.dtype).bytes[needed[i]]
    return total


def _level_sizes(counts: Counts, spaces: Spaces) -> dict[int, int]:
    """Return the devices along each level that the chosen groups make."""
    sizes: dict[int, int] = {}
    for group, count in zip(spaces.groups, counts.tolist(), strict=True):
        for level, size in group.levels:
            sizes[level] = sizes.get(level, 1) * size**count
    return sizes


def _undominated(table: OperatorTable) -> OperatorTable:
    """Return the fastest of the rows that need and make the same layouts."""
    _, which = distinct(np.stack([*table.operands, *table.results], axis=1))
    order = np.lexsort((table.seconds, which))
    first = np.ones(len(order), dtype=bool)
    first[1:] = which[order[1:]] != which[order[:-1]]
    keep = np.sort(order[first])
    return OperatorTable(
        table.roles,
        table.counts[keep],
        tuple(o[keep] for o in table.operands),
        tuple(r[keep] for r in table.results),
        table.seconds[keep],
        table.again[keep],
        tuple(m[keep] for m in table.made),
        table.halos[keep],
    )

"""
Make the plan of a published recipe from its degrees: data, tensor and sequence parallelism, ZeRO and hybrid sharding.

    dp      samples are divided over the outer mesh axes
    zero    1 to 3: weights rest in shards over `dp`, and gradients are reduce-scattered (Rajbhandari et al., 2020). 1
            and 2 gather weights once per step and keep them for the backward. In a step of one micro-batch, ZeRO-1,
            ZeRO-2 and FSDP with `reshard_after_forward=False` are one plan: nothing is accumulated, so none keeps a
            gradient whole. 3 gathers them for the forward, and again for the backward, as FSDP does by default
    shards  ZeRO among this many neighbouring devices only, gradients all-reduced among such groups (HSDP)
    tp      over the innermost mesh axes: of transformers and perceptrons, products by columns, then by rows, heads,
            and the vocabulary of embedding and loss (Shoeybi et al., 2019); of recommenders, tables by columns
            (Mudigere et al., 2021), of networks with convolutions, dense layers by columns (Krizhevsky, 2014), and
            samples in all else
    sp      between tensor-parallel regions activations are divided along the sequence, also over `tp` (Korthikanti et
            al., 2022)
    cp      over the mesh axes before those of `tp`: all activations are divided along the sequence, and attention
            gathers keys and values (context parallelism; Dubey et al., 2024, section 3.3.2). Weights are sharded over
            these devices, too, with `zero`. With `stripes` tokens are in striped order, so that all devices have about
            as many scores under a causal mask (`pcg.striped`)
    ep      experts are divided over the innermost devices of `dp`, which exchange tokens before and after (Lepikhin et
            al., 2020). Where experts have no capacity, these devices gather all of their tokens; with `exchange` they
            send each only to the devices of its experts (`plan.routes`), as many as may come, or `imbalance` times an
            even share at most

Sizes that degrees do not divide are left whole, as a vocabulary that is not padded; samples and heads have to divide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.ops.slots import EXPERT_MATMUL
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, GridRole, Layout, Mesh, is_shard, place
from unity_ir.pcg.striped import sequence_variables, striped
from unity_ir.plan.routes import OF_ROWS
from unity_ir.search.baselines.attention import has_sequence
from unity_ir.search.baselines.batch_dims import batch_dims
from unity_ir.search.baselines.follow import Choose, Rest, Settle, Store, follow, reduced, settled_along
from unity_ir.search.baselines.operands import (
    column_variable,
    is_recurrent,
    is_weight,
    row_variable,
    table_operand,
    weight_operands,
)
from unity_ir.search.baselines.rewrites import split_products, vocabulary_parallel_loss

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO."""


@dataclass(frozen=True, slots=True)
class Axes:
    """
    The numbers of the mesh axes that divide samples (`data`, the outer ones), that divide the sequence (`context`, the
    next), that divide weights and activations (`tensor`, the inner ones), that ZeRO shards stored weights over
    (`sharded`, of those in `data` and `context`), and that divide experts (`experts`, the innermost of `data`).
    """

    data: range
    tensor: range
    sharded: range
    experts: range = range(0)
    again: bool = False
    """Whether weights are gathered again for the backward (ZeRO-3), not kept from the forward."""
    context: range = range(0)


@dataclass(frozen=True, slots=True)
class Degrees:
    """
    How much of each kind of parallelism a plan by recipe has (a plan by hand, made from these numbers alone): the
    degrees of data parallelism (`dp`), tensor parallelism (`tp`), ZeRO (stage `zero`, among `shards` devices), expert
    parallelism (`ep`) and context parallelism (`cp`), whether activations are sharded along the sequence (`sp`),
    whether tokens are in striped order (`stripes`), whether keys and values go around a ring (`ring`) rather than being
    gathered, and whether rows of experts without a capacity are exchanged (`exchange`), at most `imbalance` times an
    even share for a device. Raises `UnityError` for values that contradict each other.

    By default `dp` is what `tp` and `cp` leave of the machine, and `shards` all of `dp` times `cp`.
    """

    dp: int | None = None
    tp: int = 1
    zero: int = 0
    shards: int | None = None
    sp: bool = False
    ep: int = 1
    cp: int = 1
    stripes: bool = False
    ring: bool = False
    exchange: bool = False
    imbalance: float | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "shards", "ep", "cp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UnityError(f"degrees: {name} is {value}; a degree is 1 or more")
        if self.zero not in STAGES:
            raise UnityError(f"degrees: zero is {self.zero}; it is {', '.join(map(str, STAGES[:-1]))} or {STAGES[-1]}")
        if self.shards is not None and self.zero == 0:
            raise UnityError(f"degrees: shards={self.shards} is among how many devices ZeRO divides; add zero=2")
        if self.sp and self.tp == 1:
            raise UnityError("degrees: sp=true divides activations over the devices of tp; add tp=2 or more")
        if self.stripes and self.cp == 1:
            raise UnityError("degrees: stripes=true balances causal attention over the devices of cp; add cp=2 or more")
        if self.ring and self.cp == 1:
            raise UnityError("degrees: ring=true hands keys and values on over the devices of cp; add cp=2 or more")
        if self.exchange and self.ep == 1:
            raise UnityError("degrees: exchange=true exchanges rows among the devices of ep; add ep=2 or more")
        if self.exchange and self.tp * self.cp > 1:
            raise UnityError("degrees: exchange=true exchanges rows that dp and ep alone divide; leave tp and cp out")
        if self.imbalance is not None and not self.exchange:
            raise UnityError(
                f"degrees: imbalance={self.imbalance} bounds the rows that are exchanged; add exchange=true"
            )
        if self.imbalance is not None and not 1 <= self.imbalance < inf:
            raise UnityError(f"degrees: imbalance is {self.imbalance}; it is a number of 1 or more")

    @property
    def exchange_rows(self) -> float:
        """`Graph.exchange_rows` of the plan."""
        return (self.imbalance or inf) if self.exchange else 0.0

    def on(self, machine: Machine) -> Axes:
        """
        Return which axes of the machine's mesh shard tensors, samples and stored weights under these degrees. The
        innermost axes, of `tp` devices in all, shard tensors, the next, of `cp` devices, the sequence, and the others
        samples. With ZeRO, the innermost of all but the first, of `shards` devices in all (by default all of them),
        shard stored weights, too; and the innermost of those of samples, of `ep` devices in all, experts.

        Raises `UnityError` where no innermost axes have exactly these many devices, or `dp` times `cp` times `tp` is
        not all devices.
        """
        sizes, end = machine.mesh.sizes, len(machine.mesh.sizes)
        tensor = _innermost(sizes, end, "tp", self.tp, machine)
        context = _innermost(sizes, tensor, "cp", self.cp, machine)
        dp = prod(sizes[:context])
        if self.dp not in (None, dp):
            cp = f" times cp={self.cp}" if self.cp > 1 else ""
            raise UnityError(
                f"degrees: dp={self.dp}{cp} times tp={self.tp} is {self.dp * self.cp * self.tp} devices, but "
                f"{machine.name} has {machine.devices}; use dp={dp}"
            )
        sharded = 0 if self.shards is None else _innermost(sizes, tensor, "shards", self.shards, machine)
        zero = range(sharded, tensor) if self.zero else range(0)
        experts = range(_innermost(sizes, context, "ep", self.ep, machine), context)
        again, divided = self.zero == 3, range(context, tensor)
        return Axes(range(context), range(tensor, end), zero, experts, again, divided)


def _innermost(sizes: tuple[int, ...], end: int, name: str, degree: int, machine: Machine) -> int:
    """Return the first of the mesh axes before `end` from which on their product is `degree`."""
    known = {prod(sizes[i:end]): i for i in reversed(range(end + 1))}
    if degree not in known:
        *some, last = map(str, sorted(known))
        raise UnityError(
            f"degrees: {name}={degree} is no product of the innermost mesh axes of {machine.name}, "
            f"{' x '.join(map(str, sizes[:end])) or 1}; use {', '.join(some) + ' or ' if some else ''}{last}"
        )
    return known[degree]


def recipe(graph: Graph, machine: Machine, degrees: Degrees, name: str = "degrees") -> Graph:
    """
    Return the parallel graph of a serial forward graph with these degrees of data, tensor, sequence, context and expert
    parallelism and ZeRO on a machine.

    With `tp` above 1, a transformer is rewritten first: fused query-key-value products into separate ones, and the loss
    so that the vocabulary can be sharded (`rewrites`). Raises `UnityError` where the degrees do not fit the machine or
    the model; `name` begins the message about a batch that does not divide.
    """
    plan = _recipe(graph, machine, degrees, name)
    return replace(plan, ring_attention=degrees.ring, exchange_rows=degrees.exchange_rows)


def _recipe(graph: Graph, machine: Machine, degrees: Degrees, name: str) -> Graph:
    axes, mesh = degrees.on(machine), machine.mesh
    tensor = range(0) if degrees.tp == 1 else axes.tensor
    transformer = _is_transformer(graph)
    if tensor and is_recurrent(graph):
        raise UnityError(f"degrees: tp={degrees.tp} divides no recurrent network; use tp=1, or --search=expert")
    divided = axes.data if transformer else range(len(mesh.sizes))
    _check_samples(graph, mesh, divided, name)
    if degrees.ep > 1:
        _check_experts(graph, degrees)
    if degrees.cp > 1 and not any(n.op.startswith("attention") for n in graph.nodes()):
        raise UnityError(
            "degrees: cp divides the sequence of attention operators, which this graph lacks; leave it out"
        )
    _check_sequences(graph, degrees.cp)
    if degrees.stripes:
        graph = striped(graph, degrees.cp)
    if not tensor:
        rest, store = inputs(graph, mesh, divided), stored(mesh, axes.sharded)
        choose, settle = _exchanged(mesh, axes.experts, _along_context(graph, axes, _followed), reduced)
        return follow(graph, mesh, choose, rest, settle, store, again=axes.again)
    if degrees.sp and not has_sequence(graph):
        raise UnityError("degrees: sp=true divides the sequence of attention, which this graph lacks; leave it out")
    if transformer:
        plan = megatron_plan(megatron_form(graph, degrees.tp), mesh, axes, degrees.sp)
        _check_heads(plan, mesh, tensor, degrees.tp)
        return plan
    return _hybrid(graph, mesh, axes)


def _is_transformer(graph: Graph) -> bool:
    """
    Return whether tensor parallelism of this graph is to be Megatron-LM's: if it has attention; or, without
    convolutions, if it has no embedding lookups (such as a perceptron).
    """
    nodes = graph.nodes()
    if has_sequence(graph):
        return True
    if any(n.op.startswith("conv") for n in nodes):
        return False
    return all(table_operand(n) is None for n in nodes)


def _check_samples(graph: Graph, mesh: Mesh, axes: range, name: str) -> None:
    devices = prod(mesh.sizes[i] for i in axes)
    batches = batch_dims(graph)
    for node in graph.inputs:
        dim = batches.get(node.result)
        if dim is not None and node.types[0].shape[dim] % devices:
            raise UnityError(
                f"{name}: input {node.name} has batch {node.types[0].shape[dim]}, which {devices} devices do not "
                f"divide; use another batch or number of devices, or --search"
            )


def _check_sequences(graph: Graph, cp: int) -> None:
    lengths = {n.results[0].shape[2] for n in graph.nodes() if n.op.startswith("attention")}
    for length in sorted(lengths):
        if length % cp:
            raise UnityError(f"degrees: cp={cp} does not divide a sequence of {length} tokens; use a divisor of it")


def _check_heads(plan: Graph, mesh: Mesh, tensor: range, tp: int) -> None:
    placement = place(plan, mesh)
    for node, assignment in placement.assignments.items():
        if node.op.startswith("attention") and not all(isinstance(assignment[axis], str) for axis in tensor):
            heads = sorted({v.shape[1] for v in node.operands if len(v.shape) > 1})
            said = " and ".join(map(str, heads))
            if all(count % tp == 0 for count in heads):
                raise UnityError(
                    f"degrees: tp={tp} leaves {said} heads of {node.op} whole, since no products of their own, with"
                    f" biases and adapters, make its queries, keys and values; use tp=1, or --search"
                )
            raise UnityError(f"degrees: tp={tp} does not divide {said} heads of attention; use a divisor of them")


def expert_degrees(graph: Graph, machine: Machine, products: Collection[str] = (EXPERT_MATMUL.name,)) -> list[int]:
    """
    Return the degrees above 1 of expert parallelism without tensor parallelism that a serial graph and a machine allow,
    in ascending order: none for a graph without experts that compute by these `products`, by default those of experts
    with a capacity.
    """
    sizes, counts = machine.mesh.sizes, _expert_counts(graph, products)
    degrees = [prod(sizes[first:]) for first in reversed(range(len(sizes)))]
    return [ep for ep in degrees if counts and all(count % ep == 0 for count in counts)]


def _expert_counts(graph: Graph, products: Collection[str]) -> set[int]:
    """Return the numbers of experts of the layers that have such products."""
    return {n.operands[1].shape[0] for n in graph.nodes() if n.op in products}


def _check_experts(graph: Graph, degrees: Degrees) -> None:
    ep, dropless = degrees.ep, _expert_counts(graph, OF_ROWS)
    counts = _expert_counts(graph, (EXPERT_MATMUL.name,)) | dropless
    if not counts:
        raise UnityError(
            f"degrees: ep={ep} divides experts that take some tokens each, which this graph lacks; leave it out, or "
            "give a mixture of the zoo dispatch=sparse"
        )
    if degrees.exchange and not dropless:
        raise UnityError(
            "degrees: exchange=true exchanges rows of experts without a capacity, which this graph lacks; leave it "
            "out, as those with one exchange their slots"
        )
    for count in counts:
        if count % ep:
            raise UnityError(f"degrees: ep={ep} does not divide {count} experts; use a divisor of them")


# --- mixtures of experts


def _exchanged(mesh: Mesh, axes: range, choose: Choose, settle: Settle) -> tuple[Choose, Settle]:
    """
    Return the rules `choose` and `settle` of `follow`, changed so that the slots of experts (`ops/slots.py`) are
    divided over the mesh axes with the numbers in `axes` in place of the groups of tokens, from where tokens are put
    into slots to where they are read from them. Of experts without a capacity, each product is divided so, and what it
    makes is reduced to where the rows were.
    """

    def chosen(node: Node, axis: int, followed: str | None) -> GridRole | None:
        if axis in axes and node.op == "from_slots":
            return node.analysis.result_dims[0][0]
        if axis in axes and node.op in OF_ROWS:
            return "v"
        return choose(node, axis, followed)

    def settled(value: Value, made: Layout) -> Layout:
        if value.node.op in OF_ROWS:
            return settle(value, tuple(0 if axis in axes and role == SUM else role for axis, role in enumerate(made)))
        layout = settle(value, made)
        if value.node.op != "to_slots":
            return layout
        slots, groups = 0, 1
        left = value.shape[slots] // prod(mesh.sizes[a] for a, role in enumerate(layout) if role == slots)
        # Where there are fewer groups than devices, some have the same; each then takes a part of their slots.
        moved = [axis for axis in axes if layout[axis] in (groups, REPEAT)]
        if left % prod(mesh.sizes[axis] for axis in moved):
            return layout
        return tuple(slots if axis in moved else role for axis, role in enumerate(layout))

    return chosen, settled


# --- leaves


def inputs(graph: Graph, mesh: Mesh, axes: range) -> Rest:
    """
    Return a rule `rest` for `follow` (a function from a leaf to the layout in which it is stored) that shards inputs
    along their samples (`batch_dims`) over the mesh axes with the numbers in `axes`, leaving out axes whose sizes do
    not divide them. For all other leaves it returns None, which leaves them to `follow`.
    """
    dims = batch_dims(graph)

    def rest(value: Value) -> Layout | None:
        dim = dims.get(value)
        if value.node.op != "input" or dim is None:
            return None
        layout, left = [REPEAT] * len(mesh.sizes), value.type.shape[dim]
        for axis in axes:
            if left % mesh.sizes[axis] == 0:
                layout[axis], left = dim, left // mesh.sizes[axis]
        return tuple(layout)

    return rest


def stored(mesh: Mesh, axes: range) -> Store:
    """
    Return a rule `store` for `follow`, as ZeRO needs it: a function from a weight, and the layout in which its first
    reader needs it, to the layout in which it is stored. It shards the weight over those mesh axes, of the numbers in
    `axes`, along which the reader needs it whole.

    All these axes shard one dim, the first that no other axis shards and that they divide together, so that one call
    gathers it. If there is none, each axis shards the first such dim that it divides; if that fails, the weight is
    replicated along it.
    """

    def store(value: Value, used: Layout) -> Layout:
        free = [axis for axis in axes if not is_shard(used[axis])]
        dims = [dim for dim in range(len(value.shape)) if dim not in used]
        whole = prod(mesh.sizes[axis] for axis in free)
        one = next((dim for dim in dims if value.shape[dim] % whole == 0), None)
        layout, left = list(used), list(value.shape)
        for axis in free:
            size = mesh.sizes[axis]
            dim = one if one is not None else next((d for d in dims if left[d] % size == 0), None)
            if dim is not None:
                layout[axis], left[dim] = dim, left[dim] // size
        return tuple(layout)

    return store


def _followed(node: Node, axis: int, followed: str | None) -> GridRole | None:
    del node, axis
    return followed


# --- Megatron-LM


def megatron_form(graph: Graph, tp: int) -> Graph:
    """
    Return the serial graph rewritten so that `tp` devices can shard the heads of fused query-key-value products, and
    the classes of a cross-entropy (`rewrites.split_products`, `rewrites.vocabulary_parallel_loss`).
    """
    return vocabulary_parallel_loss(split_products(graph), tp)


def megatron_plan(graph: Graph, mesh: Mesh, axes: Axes, sp: bool) -> Graph:
    """
    Return Megatron-LM's plan of a serial graph: matrix products are sharded over `axes.tensor`, by rows where their
    operand is sharded by columns, else by columns; samples over `axes.data`, and stored weights over `axes.sharded`
    (ZeRO).

    With `sp` (sequence parallelism), results between such tensor-parallel regions are sharded along the sequence over
    the same axes: what enters a region is all-gathered, what leaves it is reduce-scattered.
    """
    dense, with_gradient, tensor = weight_operands(graph), nodes_with_gradient(graph), axes.tensor

    def choose(node: Node, axis: int, followed: str | None) -> GridRole | None:
        if all(map(is_weight, node.operands)) and node.operands:
            # A split weight: its parts are gathered, and their gradients summed, as those of a weight are.
            return _undivided(node) if axis in tensor else COPY
        if axis not in tensor:
            return None
        matrix = dense[node]
        if matrix is not None:
            by_rows = followed is not None and followed == row_variable(node, matrix)
            return followed if by_rows and not _is_of_low_rank(node, dense) else column_variable(node, matrix)
        ids = table_operand(node)
        if ids is not None and followed is None:
            tp = prod(mesh.sizes[i] for i in tensor)
            row = row_variable(node, ids)
            return row if row is None or node.analysis.bound.extents[row] % tp == 0 else _along_sequence(node, sp)
        if followed is None and node in with_gradient:
            return _along_sequence(node, sp)
        return None

    rest, store = inputs(graph, mesh, axes.data), stored(mesh, axes.sharded)
    rules = _exchanged(mesh, axes.experts, _along_context(graph, axes, choose), _between(mesh, axes, sp))
    return follow(graph, mesh, rules[0], rest, rules[1], store, again=axes.again)


def _is_of_low_rank(node: Node, dense: Mapping[Node, int | None]) -> bool:
    """
    Return whether a product reads another that has fewer columns than either of the two has rows and columns beside, as
    an adapter does (LoRA). By rows, all its columns would be summed; by columns, only its few rows are gathered.
    """

    def sizes(product: Node, matrix: int) -> tuple[int, int]:
        extents = product.analysis.bound.extents
        rows, columns = row_variable(product, matrix), column_variable(product, matrix)
        return (1 if rows is None else extents[rows]), (1 if columns is None else extents[columns])

    matrix = dense[node]
    if matrix is None or len(node.operands) != 2:
        return False
    read = node.operands[1 - matrix].node
    while read.op in ("cast", "scale", "dropout"):
        read = read.operands[0].node
    inner = dense[read]
    if inner is None:
        return False
    rank, columns = sizes(node, matrix)
    return rank < min(columns, sizes(read, inner)[0])


def _undivided(node: Node) -> str | None:
    """Return the variable of the first dim along which a weight is not split: its rows, if that is along columns."""
    analysis = node.analysis
    dims = analysis.operand_dims[analysis.bound.operands[0].name]
    return next((variable for variable in dims if variable is not None), None)


def _along_sequence(node: Node, sp: bool) -> str | None:
    """Return the variable of the sequence in an operator on activations [samples, sequence, features]."""
    shape = node.results[0].shape
    return node.analysis.result_dims[0][1] if sp and len(shape) == 3 else None


def _between(mesh: Mesh, axes: Axes, sp: bool) -> Settle:
    """Return a rule by which partial sums are all-reduced or, with `sp`, reduce-scattered along the sequence."""

    def settle(value: Value, made: Layout) -> Layout:
        whole = [REPEAT if r in (SUM, COPY) else r for r in made]
        summed = [axis for axis in axes.tensor if made[axis] == SUM]
        if not sp or not summed or not value.shape:
            return tuple(whole)
        size = prod(mesh.sizes[axis] for axis in summed)
        # The sequence is what is neither samples nor features (of which the loss has none); where tokens are one dim,
        # that.
        features = any(map(is_weight, value.node.operands))
        of_tensor = {made[axis] for axis in axes.tensor}
        dims = [*(d for d in range(1, len(value.shape) - features) if d not in of_tensor), 0]
        outer = {d: prod(n for n, role in zip(mesh.sizes, made, strict=True) if role == d) for d in dims}
        dim = next((d for d in dims if value.shape[d] % (size * outer[d]) == 0), None)
        for axis in summed:
            whole[axis] = REPEAT if dim is None else dim
        return tuple(whole)

    return settle


def _along_context(graph: Graph, axes: Axes, choose: Choose) -> Choose:
    """
    Return the rule `choose` of `follow`, changed so that `axes.context` divide the sequence in all operators that have
    it.
    """
    if not axes.context:
        return choose
    variables = sequence_variables(graph)

    def chosen(node: Node, axis: int, followed: str | None) -> GridRole | None:
        return variables.get(node) if axis in axes.context else choose(node, axis, followed)

    return chosen


# --- recommenders, and networks with convolutions


def _hybrid(graph: Graph, mesh: Mesh, axes: Axes) -> Graph:
    """
    Return the plan that divides tables, or else dense layers, by columns over `axes.tensor`, and samples in all else.
    """
    dense = weight_operands(graph)
    tables = {n: i for n in graph.nodes() if (i := table_operand(n)) is not None}
    tp = prod(mesh.sizes[i] for i in axes.tensor)

    def choose(node: Node, axis: int, followed: str | None) -> GridRole | None:
        operand = tables.get(node) if tables else dense[node]
        if operand is None or axis not in axes.tensor:
            return followed
        column = column_variable(node, operand)
        fits = column is not None and node.analysis.bound.extents[column] % tp == 0
        return column if fits else row_variable(node, operand) if tables else followed

    every = range(len(mesh.sizes))
    sharded = range(axes.sharded.start, len(mesh.sizes)) if axes.sharded else axes.sharded
    rest, store = inputs(graph, mesh, every), stored(mesh, sharded)
    return follow(graph, mesh, choose, rest, settled_along(0, mesh), store, again=axes.again)

"""
The compact graph: immutable, hash-consed nodes that search, rules and costs work on.

Equal nodes are one object, so comparing subgraphs is `is`, a shared subexpression costs once, and a rewrite rebuilds
only what lies after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary, ref

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes, Operator, Tensor
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import ELEMENT_BYTES, InTime, TensorType, divided_type
from unity_ir.pcg.view import View
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parallel import (
    WHOLE,
    Configuration,
    Degrees,
    configurations_in_time,
    infer_configuration,
    result_degrees,
    without_time,
)
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue, Bound

LEAVES = ("input", "weight", "constant")
"""Operators without operands: the arguments of a step, its parameters, and a number as a tensor."""

_NOT_COMPUTED = frozenset((*LEAVES, *PARALLEL_OPERATORS))


class Node:
    """
    One operator applied to values, or a leaf (input, weight or constant). Make one with `leaf`, `apply` or `parallel`,
    never directly: equal nodes are one object.
    """

    __slots__ = (
        "__weakref__",
        "_form",
        "_values",
        "attributes",
        "op",
        "operands",
        "types",
        "view",
    )

    op: str
    operands: tuple[Value, ...]
    attributes: Attributes
    """(name, value) pairs, sorted by name."""
    types: tuple[TensorType, ...]
    """The parallel type of each result."""
    view: View | None
    """The machine view: on which devices its tasks run. None leaves that to `pcg.sharding.place`."""
    _values: list[Callable[[], Value | None]]
    """A weak reference to each result: a strong one would keep the node until cycles are collected."""

    def __init__(
        self,
        op: str,
        operands: tuple[Value, ...],
        attributes: Attributes,
        types: tuple[TensorType, ...],
        view: View | None,
    ):
        self.op, self.operands, self.attributes, self.types, self.view = op, operands, attributes, types, view
        self._values = [_nothing] * len(types)

    @property
    def results(self) -> tuple[Value, ...]:
        """The results, in order."""
        # Searches ask millions of times, mostly nodes of one result that is alive.
        if len(self._values) == 1:
            return (self._values[0]() or self.value(0),)
        return tuple([self.value(i) for i in range(len(self.types))])

    @property
    def result(self) -> Value:
        """The result of a node that has only one."""
        assert len(self.types) == 1, f"{self.op} has {len(self.types)} results"
        return self.value(0)

    def value(self, index: int) -> Value:
        """Return result number `index`: the same object as long as anything refers to it."""
        found = self._values[index]()
        if found is None:
            found = object.__new__(Value)
            found.node, found.index, found.type = self, index, self.types[index]
            self._values[index] = ref(found)
        return found

    @property
    def is_leaf(self) -> bool:
        """Whether the node is an input, a weight or a constant."""
        return self.op in LEAVES

    @property
    def is_parallel(self) -> bool:
        """
        Whether the node is a parallel operator (`partition`, `replicate`, `all_reduce`, ..), which changes the pieces
        that a value is divided into, and never the value.
        """
        return self.op in PARALLEL_OPERATORS

    @property
    def is_compute(self) -> bool:
        """
        Whether the node is an operator that computes (`matmul`, `relu`, ..), defined by a line of TDL, the tensor
        description language: neither a leaf nor a parallel operator.
        """
        return self.op not in _NOT_COMPUTED

    @property
    def name(self) -> str:
        """The name of an input or weight (its attribute `name`); other nodes have none: raises `KeyError`."""
        return str(dict(self.attributes)["name"])

    @property
    def master(self) -> str:
        """
        The element type in which a leaf is stored: for a bf16 weight with an f32 master, f32, in which it is also
        updated; else that of its type.
        """
        return str(dict(self.attributes).get("master", self.types[0].dtype))

    @property
    def is_trained(self) -> bool:
        """Whether the node is a weight that a step updates: one that is not frozen."""
        return self.op == "weight" and "frozen" not in dict(self.attributes)

    @property
    def operator(self) -> Operator:
        """The definition of a compute node's operator: its TDL line, and the function that builds its gradient."""
        return find_operator(self.op)

    def attribute(self, name: str) -> Any:
        """Return the value of the attribute called `name`. Raises `KeyError` if the node does not have it."""
        return dict(self.attributes)[name]

    @property
    def form(self) -> Form:
        """The form that all nodes share which differ from this one in the values they read alone: see `Form`."""
        try:
            return self._form
        except AttributeError:
            operands = self.operands
            same = tuple([operands.index(v) for v in operands])
            key = self.op, self.attributes, tuple([v.type for v in operands]), same, self.types, self.view
            form = _forms.get(key)
            if form is None:
                form = _forms[key] = Form(same)
            self._form: Form = form
            return form

    @property
    def analysis(self) -> Analysis:
        """
        The ways in which a compute node can be divided: which index variables of its TDL line can be sharded, and which
        operands can be in partial sums. The line is bound to the operands' global shapes. Only for compute nodes.
        """
        form = self.form
        if form.analysis is None:
            shapes, dtypes = (tuple(v.shape for v in self.operands), tuple(v.dtype for v in self.operands))
            form.analysis = self.operator.bind(shapes, self.attributes, dtypes)
        return form.analysis

    @property
    def configuration(self) -> Configuration:
        """
        How the work of a compute node is divided into tasks: the number of parts of each index variable, and the
        numbers of copies and of partial sums. It follows from the operands' types. Micro-batches count as tasks: a
        variable that 4 micro-batches and 2 devices divide has 8 parts.
        """
        form = self.form
        if form.configuration is None:
            form.configuration = _configuration(self.analysis, tuple([v.type for v in self.operands]))
        return form.configuration

    @property
    def micro_batches(self) -> int:
        """How many times a step runs the node: 1, or the number of micro-batches."""
        return self.types[0].micro_batches

    @property
    def configuration_in_time(self) -> Configuration:
        """
        How micro-batches divide the work of a compute node: as `configuration`, but with numbers that count
        micro-batches alone, not devices; all are 1 for a node that a step runs once. Raises `UnityError` if the
        operator cannot be divided as its operands are.
        """
        return _in_time(self.analysis, self.configuration, [v.type for v in self.operands], self.types[0].time)

    @property
    def configuration_in_space(self) -> Configuration:
        """
        How devices divide the work of a compute node within one micro-batch: as `configuration`, but with numbers that
        count devices alone, not micro-batches.
        """
        if self.micro_batches == 1:
            return self.configuration
        return without_time(self.configuration, self.configuration_in_time)

    def __repr__(self) -> str:
        return f"<{self.op} {', '.join(map(str, self.types))}>"


@lru_cache(maxsize=65536)
def _configuration(analysis: Analysis, operands: tuple[TensorType, ...]) -> Configuration:
    return infer_configuration(analysis, [t.parts for t in operands])


class Form:
    """
    What nodes have in common that differ in nothing but the values they read: operator, attributes, types, view, and
    which operands are one value. As in a model of equal layers most nodes are alike, what depends on these alone is
    found once for all.
    """

    __slots__ = ("__weakref__", "analysis", "configuration", "facts", "repeats", "view_fits")

    repeats: tuple[int, ...]
    """Per operand, the index of the first one that is the same value."""
    analysis: Analysis | None
    """`Node.analysis`, once it was asked for."""
    configuration: Configuration | None
    """`Node.configuration`, once it was asked for."""
    view_fits: bool
    """Whether `check_view` found that the view fits the task grid."""
    facts: dict[object, Any]
    """
    What else was found, which must follow from the form and the key alone. It is kept as long as some node of the form.
    """

    def __init__(self, repeats: tuple[int, ...]):
        self.repeats, self.analysis, self.configuration, self.view_fits = repeats, None, None, False
        self.facts = {}


class Value:
    """
    A value of a graph: result number `index` of `node`. Get it from `Node.value` or `Node.results`, never make one:
    equal values are one object.
    """

    __slots__ = ("__weakref__", "index", "node", "type")

    node: Node
    index: int
    type: TensorType
    """The parallel type: shape, element type, and the pieces that the value is divided into."""

    def __repr__(self) -> str:
        return f"<result {self.index} of {self.node}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.type.shape

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degree of each dim: the number of shards that it is cut into, 1 for a whole dim."""
        return self.type.degrees

    @property
    def dtype(self) -> str:
        """The element type."""
        return self.type.dtype

    def build(
        self, operator: Operator, operands: Sequence[Tensor], attributes: Mapping[str, AttrValue]
    ) -> tuple[Tensor, ...]:
        """
        Return the results of `operator`, applied to values of the graph with these attributes. This implements
        `ops.operator.Tensor.build`, by which the functions of `ops` and gradient rules make nodes; the value that it is
        called on does not matter.
        """
        values: list[Value] = []
        for operand in operands:
            assert isinstance(operand, Value)
            values.append(operand)
        return apply(operator.name, values, attributes).results


def _nothing() -> None:
    """Return None, as a reference to a value that is not there does."""


_interned: WeakValueDictionary[Any, Node] = WeakValueDictionary()
_forms: WeakValueDictionary[Any, Form] = WeakValueDictionary()


def _make(
    op: str, operands: tuple[Value, ...], attributes: Attributes, types: tuple[TensorType, ...], view: View | None
) -> Node:
    key = (op, operands, attributes, types, view)
    node = _interned.get(key)
    if node is None:
        node = Node(*key)
        _interned[key] = node
    return node


def node_of(op: str, operands: tuple[Value, ...], attributes: Attributes, types: tuple[TensorType, ...]) -> Node:
    """
    Return the node without a view that has these attributes and types, which must be those that `apply` would give it:
    nothing is checked. For nodes of which one that is alike (`Form`) was made with `apply`.
    """
    return _make(op, operands, attributes, types, None)


def leaf(op: str, type: TensorType, view: View | None = None, **attributes: AttrValue) -> Node:
    """
    Return a leaf node: an `input` or `weight` (`op`), which needs the attribute `name`, or a `constant`, which needs
    the attribute `value`, a number.

    A weight of `type` bf16 with the attribute `master="f32"`, say, is stored and updated in f32, and read as bf16. One
    with the attribute `frozen=1` is not trained: it has no gradient and no update, and so no master, either. Raises
    `UnityError` for a leaf that lacks its name or value, for a master whose type is not longer than `type`, and for one
    that is frozen and has a master, or is no weight.
    """
    if "frozen" in attributes and (op != "weight" or "master" in attributes):
        raise UnityError(f"pcg.{op}: it is frozen, which only a weight without a master can be")
    if (master := attributes.get("master")) is not None:
        longer = master not in NOT_FLOATING and ELEMENT_BYTES.get(str(master), 0) > ELEMENT_BYTES[type.dtype]
        if op != "weight" or not type.is_floating or not longer:
            raise UnityError(f"pcg.{op}: {type.dtype} has no master in {master}; a weight's is of a longer float type")
    if op == "constant":
        value = attributes.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnityError(f"pcg.constant: its value is {value!r}; it must be a number")
        if type.is_floating:
            # 1 and 1.0 are equal: which of them a node has must not depend on which came first.
            attributes["value"] = float(value)
    elif not (isinstance(name := attributes.get("name"), str) and name):
        raise UnityError(f"pcg.{op}: its name is {name!r}; give it one")
    return _make(op, (), tuple(sorted(attributes.items())), (type,), view)


def apply(
    op: str,
    operands: Sequence[Value],
    attributes: Mapping[str, AttrValue] | None = None,
    view: View | None = None,
    time: InTime | None = None,
) -> Node:
    """
    Return the node that applies the compute operator called `op` to values. Its result types follow from the operator's
    TDL line.

    `attributes` that are left out have their defaults; with a `view` of None, `pcg.sharding.place` chooses the devices.
    `time` says which pieces of the first result are in time where operands leave that open (`infer_types`). Equal nodes
    are one object. Raises `UnityError` (operator, rule, fix) if shapes, attributes, element types, degrees or the view
    do not fit.
    """
    operator = find_operator(op)
    return _apply(operator, tuple(operands), operator.attributes(attributes or {}), view, time)


def _apply(
    operator: Operator, operands: tuple[Value, ...], attributes: Attributes, view: View | None, time: InTime | None
) -> Node:
    types = infer_types(operator, tuple(v.type for v in operands), attributes, time)
    node = _make(operator.name, operands, attributes, types, view)
    if view is not None:
        check_view(node)
    return node


def infer_types(
    operator: Operator, operands: tuple[TensorType, ...], attributes: Attributes, time: InTime | None = None
) -> tuple[TensorType, ...]:
    """
    Return the result types of a compute operator, one per result, given its operands' types: shapes, element types and
    the pieces that results are divided into. `attributes` must have the defaults filled in. Memoised.

    A dim that no operand has may be divided over devices or in time: `expand` of `[], copy = 4:t2` along a dim of
    degree 2 is `[8:2], copy = 2:t2` or `[8:2:t2], copy = 2`. `time` is the division in time of the first result that
    is meant; if there is none such, or with None, new dims are not divided in time unless that alone fits.

    Raises `UnityError` (operator, rule, fix) if shapes, attributes, element types or degrees do not fit.
    """
    found = _types_or_message(operator, operands, attributes, None)
    if isinstance(found, str):
        raise UnityError(found)
    if time is None or found[0].time in (time, None):
        return found
    found = _types_or_message(operator, operands, attributes, time)
    assert not isinstance(found, str)
    return found


@lru_cache(maxsize=65536)
def _types_or_message(
    operator: Operator, operands: tuple[TensorType, ...], attributes: Attributes, time: InTime | None
) -> tuple[TensorType, ...] | str:
    """Return the result types, or the error's message: rules and layouts are tried on types that do not fit, too."""
    try:
        return _infer_types(operator, operands, attributes, time)
    except UnityError as error:
        return str(error)


def _infer_types(
    operator: Operator, operands: tuple[TensorType, ...], attributes: Attributes, time: InTime | None
) -> tuple[TensorType, ...]:
    analysis = operator.bind(tuple(t.shape for t in operands), attributes, tuple(t.dtype for t in operands))
    bound = analysis.bound
    dtype = _check_elements(operator, bound, operands)
    try:
        configuration = infer_configuration(analysis, [t.parts for t in operands])
    except UnityError as error:
        if all(t.time is None for t in operands):
            raise
        said = str(error).partition("; insert ")[0]
        raise UnityError(f"{said}; of what is in time, pcg.accumulate adds up addends after the loop") from error
    times = result_degrees(analysis, _in_time(analysis, configuration, operands, time))
    return tuple(
        divided_type(shape, result.dtype or dtype, d, time=_time_of(in_time))
        for result, shape, d, in_time in zip(
            bound.results, bound.result_shapes, result_degrees(analysis, configuration), times, strict=True
        )
    )


def _in_time(
    analysis: Analysis, total: Configuration, operands: Sequence[TensorType], time: InTime | None
) -> Configuration:
    """
    Return how an operator's tasks are divided over micro-batches: of several ways, that in which its first result is in
    time as `time` says, or else the first. Raises `UnityError` if some operands are in time and others are not, or if
    the operator cannot be divided as they are.
    """
    found = {t.micro_batches for t in operands}
    if found == {1} or not found:
        return WHOLE
    name = analysis.bound.operator
    if len(found) > 1:
        seen = ", ".join(f"{p.name}: {t.micro_batches}" for p, t in zip(analysis.bound.operands, operands, strict=True))
        raise UnityError(
            f"pcg.{name}: micro-batches of its operands differ ({seen}); a value that every micro-batch reads is made "
            "so by pcg.reuse, one that is made in each is done with after pcg.accumulate or pcg.batch"
        )
    try:
        ways = configurations_in_time(analysis, total, [t.parts_in_time for t in operands], *found)
    except UnityError as error:
        said = str(error).partition("; insert ")[0]
        raise UnityError(f"{said}, within the loop over micro-batches; that cannot be divided in time") from error
    if len(ways) == 1:
        return ways[0]
    return next((way for way in ways if _time_of(result_degrees(analysis, way)[0]) == time), ways[0])


def _time_of(degrees: Degrees) -> InTime | None:
    """Return the division in time of a value that is divided as `degrees` says, in time alone."""
    if degrees.sum > 1:
        return InTime("sum", degrees.sum)
    if degrees.copy > 1:
        return InTime("copy", degrees.copy)
    return next((InTime(dim, d) for dim, d in enumerate(degrees.dims) if d > 1), None)


_KINDS = {"float": "floating point", "int": "integers (i64)", "bool": "bool"}


def _check_elements(operator: Operator, bound: Bound, operands: tuple[TensorType, ...]) -> str:
    """Return the element type of the floating operands, which results have unless they declare their own."""
    alike = {p.name: p.kind == "any" for p in operator.line.parameters}
    dtypes: dict[str, str] = {}
    for parameter, type in zip(bound.operands, operands, strict=True):
        kind = "float" if type.is_floating else "bool" if type.dtype == "bool" else "int"
        if parameter.kind != kind:
            raise UnityError(
                f"pcg.{operator.name}: {parameter.name} is {type.dtype}, expected {_KINDS[parameter.kind]}; cast it"
            )
        if parameter.floating or alike.get(parameter.name):
            dtypes[parameter.name] = type.dtype
    if len(set(dtypes.values())) > 1:
        seen = ", ".join(f"{n} is {d}" for n, d in dtypes.items())
        raise UnityError(f"pcg.{operator.name}: element types differ: {seen}; cast one")
    return next(iter(dtypes.values()), "")


def parallel(op: str, operand: Value, view: View | None = None, **attributes: int) -> Node:
    """
    Return the node that applies the parallel operator called `op` (`partition`, `reduce`, ..) to a value: its result is
    the same value, divided into other pieces.

    `attributes` are the operator's own, such as `dim=0, by=2` of partition or `by=4` of replicate; `view` is the
    machine view of the result. Raises `UnityError` if they do not fit the operand's type, or if the view does not fit
    the result.
    """
    rule = PARALLEL_OPERATORS[op]
    type = rule.type(operand.type, attributes)
    node = _make(op, (operand,), tuple(sorted(attributes.items())), (type,), view)
    if view is not None:
        check_view(node)
    return node


def grid(node: Node) -> tuple[int, ...]:
    """
    Return the shape of a node's task grid, without axes of size 1. Each cell of the grid is one task, a device's share
    of the node's work within one micro-batch; each task runs on a device of its own.

    The axes are, in order, the index variables of the operator's TDL line (for a leaf or parallel operator, the dims of
    the result), then copies, then partial sums: one axis for each set of operands that can be in partial sums together.
    """
    if node.is_compute:
        c = node.configuration_in_space
        sums = (c.sums.get(carriers, 1) for carriers in node.analysis.carriers)
        degrees = (*(c.degree(v) for v in node.analysis.bound.extents), c.copy, *sums)
    else:
        parts = node.types[0].parts_in_space
        degrees = (*parts.dims, parts.copy, parts.sum)
    return tuple(d for d in degrees if d > 1)


def check_view(node: Node) -> None:
    """
    Check the machine view of a node. Raises `UnityError` if its axes do not have the sizes of the node's task grid
    (`grid`), or if it gives one device two tasks.
    """
    view = node.view
    assert view is not None
    if node.form.view_fits:
        return
    if view.degrees != grid(node):
        raise UnityError(
            f"pcg.{node.op}: its view has degrees {list(view.degrees)}, but its task grid is {list(grid(node))}"
        )
    if view.start < 0 or not view.is_injective:
        raise UnityError(f"pcg.{node.op}: its view gives one device two tasks: {view}")
    node.form.view_fits = True


def divide(node: Node, operands: Sequence[Value], configuration: Configuration, view: View | None = None) -> Node:
    """
    Return a compute node of a serial graph in sharded form: its operator, applied to the parallel values `operands`.
    They must already be sharded as `configuration` (the degree of each index variable) says.

    Attributes stay, with one exception: an operator whose result has dims that no operand has (`expand`) lists their
    degrees in an attribute, and gets those of `configuration`. `view` is the machine view of the new node (None: none).
    Raises `UnityError` if types or view do not fit.
    """
    operator = node.operator
    shapes = tuple(v.type.shape for v in node.operands)
    attributes = operator.divided(shapes, node.attributes, configuration.degrees)
    return _apply(operator, tuple(operands), attributes, view, node.types[0].time)


def rebuild(node: Node, operands: Sequence[Value], view: View | None = None) -> Node:
    """
    Return a node with the same operator and attributes on other operands. It has the view that is given here, not that
    of `node` (None: none). Result types are inferred anew if the operands' types differ from those before. A leaf has
    no operands, and keeps its type.

    Raises `UnityError` if operands or view do not fit.
    """
    if not node.is_leaf and all(v.type == old.type for v, old in zip(operands, node.operands, strict=True)):
        built = _make(node.op, tuple(operands), node.attributes, node.types, view)
        if view is not None:
            check_view(built)
        return built
    if node.is_leaf:
        return _make(node.op, (), node.attributes, node.types, view)
    if node.is_parallel:
        return parallel(node.op, operands[0], view, **{k: int(v) for k, v in node.attributes if isinstance(v, int)})
    return _apply(node.operator, tuple(operands), node.attributes, view, node.types[0].time)


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step on one weight: `weight` is the result of the weight's leaf, `grad` the weight's gradient."""

    weight: Value
    grad: Value


@dataclass(frozen=True, slots=True)
class Pipeline:
    """
    How a step whose operators are in stages is run: `order` names the pipeline schedule (`plan.pipeline.catalogue`),
    `ranks` is the number of equal parts of the machine, each of which has `chunks` stages.
    """

    order: str
    ranks: int
    chunks: int = 1


OFFLOADS = ("none", "state", "activations", "all")
"""
What of a step may rest in the memory of the host: nothing, the optimizer's state, what the forward saves for the
backward, or both.
"""


def optimizer_of_step(graph: Graph, optimizer: Optimizer | None = None) -> Optimizer:
    """
    Return the optimizer that a graph names, or else `optimizer` (None: the default one), with its state at the host if
    that is what the graph says. Raises `UnityError` if it keeps none then.
    """
    found = graph.optimizer or optimizer or Optimizer()
    return found.offloaded if graph.offloads_state else found


@dataclass(frozen=True)
class Graph:
    """
    A computation graph (forward, or a whole training step): inputs in order, outputs in order, and the updates of
    weights. A forward graph has no updates.

    Its weights are the leaves `weight` that its outputs and updates depend on. With `loss_pieces` above 1, a step makes
    its loss in so many pieces of the tokens, one after the other (`pcg.loss_part`). With a `pipeline`, its operators
    are in stages (`pcg.stages`). With `ring_attention`, the keys and values that attention gathers along a sequence go
    around a ring instead, wherever they can (`plan.rings`). `offload` says what rests in the memory of the host:
    nothing (`none`), the optimizer's state (`state`), what the forward saves for the backward (`activations`), or both
    (`all`). Of what is saved, `staying` bytes stay on each device beside a window (`plan.host_values`). With
    `exchange_rows` above 0, devices that divide experts without a capacity exchange the rows that go to these, wherever
    they can, instead of gathering all (`plan.routes`): at most so many times an even share to a device, as many as may
    come with `inf`. Gathers of weights, and sums of their gradients, of fewer than `bucket` bytes share calls
    (`plan.schedule`; 0: `BUCKET_BYTES`).
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Value, ...]
    updates: tuple[Update, ...] = ()
    optimizer: Optimizer | None = None
    loss_pieces: int = 1
    pipeline: Pipeline | None = None
    ring_attention: bool = False
    offload: str = "none"
    staying: int = 0
    exchange_rows: float = 0.0
    bucket: int = 0

    @property
    def offloads_state(self) -> bool:
        """Whether the optimizer's state rests in the memory of the host."""
        return self.offload in ("state", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether values that the forward saves for the backward are in the memory of the host meanwhile."""
        return self.offload in ("activations", "all")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.inputs, self.outputs, self.updates, *self._how))

    @property
    def _how(self) -> tuple[object, ...]:
        """The fields that say how the step is run, in order: all from `optimizer` on."""
        return tuple(getattr(self, field.name) for field in fields(self)[4:])

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that the graph computes: its outputs, then the weight and the gradient of each update."""
        return (*self.outputs, *(v for u in self.updates for v in (u.weight, u.grad)))

    def nodes(self) -> list[Node]:
        """Return every node in an order that has operands before users, and begins with the inputs."""
        return [*self._nodes]

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(topological(self.roots, first=self.inputs))

    def weights(self) -> list[Node]:
        """Return the weight leaves, frozen ones as well, ordered as in `nodes`."""
        return [n for n in self.nodes() if n.op == "weight"]

    def __reduce__(self) -> tuple[Callable[..., Graph], tuple[object, ...]]:
        """
        Pickle node by node, operands first, so that deep graphs do not recurse, and equal nodes are one object again.
        """
        number = {node: i for i, node in enumerate(self.nodes())}

        def place(value: Value) -> tuple[int, int]:
            return number[value.node], value.index

        nodes = [(n.op, [place(v) for v in n.operands], n.attributes, n.types, n.view) for n in number]
        updates = [(place(u.weight), place(u.grad)) for u in self.updates]
        ends = [number[n] for n in self.inputs], [place(v) for v in self.outputs], updates
        return _unpickled, (self.name, nodes, *ends, self._how)

    def users(self) -> Mapping[Value, Sequence[tuple[Node, int]]]:
        """
        Return the uses of each value: the (node, operand index) pairs that read it, in graph order. Outputs and updates
        are no uses; a value without uses is not a key.
        """
        return self._users

    @cached_property
    def _users(self) -> Mapping[Value, Sequence[tuple[Node, int]]]:
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self._nodes:
            for i, operand in enumerate(node.operands):
                found.setdefault(operand, []).append((node, i))
        return found


_Place = tuple[int, int]
"""A value: the number of its node, and which of its results."""


def _unpickled(
    name: str,
    nodes: Iterable[tuple[str, list[_Place], Attributes, tuple[TensorType, ...], View | None]],
    inputs: Iterable[int],
    outputs: Iterable[_Place],
    updates: Iterable[tuple[_Place, _Place]],
    how: tuple[Any, ...],
) -> Graph:
    made: list[Node] = []
    for op, operands, attributes, types, view in nodes:
        made.append(_make(op, tuple([made[n].value(i) for n, i in operands]), attributes, types, view))

    def at(place: _Place) -> Value:
        return made[place[0]].value(place[1])

    steps = tuple(Update(at(weight), at(grad)) for weight, grad in updates)
    leaves = tuple(made[n] for n in inputs)
    return Graph(name, leaves, tuple(map(at, outputs)), steps, *how)


def topological(roots: Iterable[Value], first: Iterable[Node] = ()) -> list[Node]:
    """
    Return every node that the values `roots` depend on, operands before users. The order is deterministic, and begins
    with the nodes `first` (a graph's inputs, say), whether `roots` depend on them or not.
    """
    order: dict[Node, None] = dict.fromkeys(first)
    for root in roots:
        stack: list[tuple[Node, Iterator[Value]]] = []
        if root.node not in order:
            stack.append((root.node, iter(root.node.operands)))
        while stack:
            node, pending = stack[-1]
            for value in pending:
                if value.node not in order:
                    stack.append((value.node, iter(value.node.operands)))
                    break
            else:
                order[node] = None
                stack.pop()
    return list(order)


def rewrite(graph: Graph, replace_node: Callable[[Node, tuple[Value, ...]], Sequence[Value]]) -> Graph:
    """
    Return a graph rebuilt node by node, operands first. `replace_node(node, new operands)` is called for each node,
    leaves included, and returns the values that replace the node's results, one for each. Name, optimizer, pipeline,
    loss pieces, ring attention, offload and the exchange of rows stay.
    """
    new: dict[Value, Value] = {}
    for node in graph.nodes():
        results = replace_node(node, tuple(new[v] for v in node.operands))
        new.update(zip(node.results, results, strict=True))
    updates = tuple(Update(new[u.weight], new[u.grad]) for u in graph.updates)
    inputs = tuple(new[n.result].node for n in graph.inputs)
    return replace(graph, inputs=inputs, outputs=tuple(new[v] for v in graph.outputs), updates=updates)


def erase(graph: Graph) -> Graph:
    """
    Return the serial graph of a parallel one: without parallel operators and machine views, every value in one piece,
    the loss in one piece, no stages, nothing at the host, nothing exchanged.

    Two well-typed graphs of the same inputs and outputs compute the same values if their erasures are equal.
    """
    return erase_with(graph)[0]


def _undivided(node: Node, operands: tuple[Value, ...]) -> Node:
    """Return a compute node on serial operands."""
    key = _undivided, *[v.type for v in operands]
    facts = node.form.facts
    if key not in facts:
        made = divide(node, operands, Configuration())
        facts[key] = made.attributes, made.types
        return made
    attributes, types = facts[key]
    return _make(node.op, operands, attributes, types, None)


def erase_with(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """
    Return (serial graph, nodes): the graph as `erase` makes it, and a mapping from each leaf and compute node of the
    parallel graph to its node in the serial one.
    """
    found: dict[Node, Node] = {}

    def serial(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.is_parallel:
            return operands
        if node.is_leaf:
            found[node] = leaf(node.op, node.types[0].serial, None, **dict(node.attributes))
        else:
            found[node] = _undivided(node, operands)
        return found[node].results

    made = rewrite(graph, serial)
    made = replace(
        made, loss_pieces=1, pipeline=None, ring_attention=False, offload="none", staying=0, exchange_rows=0.0, bucket=0
    )
    return made, found

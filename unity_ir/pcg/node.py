"""
The nodes and values of the compact graph: immutable and hash-consed.

Equal nodes are one object, so comparing subgraphs is `is`, a shared subexpression costs once, and a rewrite rebuilds
only what lies after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary, ref

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes, Operator, Tensor
from unity_ir.pcg.infer_types import divided_in_time, infer_types
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import ELEMENT_BYTES, InTime, TensorType
from unity_ir.pcg.view import View
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parallel import (
    Configuration,
    infer_configuration,
    without_time,
)
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue

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
        return divided_in_time(self.analysis, self.configuration, [v.type for v in self.operands], self.types[0].time)

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


def node_of(
    op: str,
    operands: tuple[Value, ...],
    attributes: Attributes,
    types: tuple[TensorType, ...],
    view: View | None = None,
) -> Node:
    """
    Return the node that has these attributes and types, which must be those that `apply` would give it, and this view:
    nothing is checked. For nodes of which one that is alike (`Form`) was made with `apply`.
    """
    key = (op, operands, attributes, types, view)
    node = _interned.get(key)
    if node is None:
        node = Node(*key)
        _interned[key] = node
    return node


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
    return node_of(op, (), tuple(sorted(attributes.items())), (type,), view)


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
    node = node_of(operator.name, operands, attributes, types, view)
    if view is not None:
        check_view(node)
    return node


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
    node = node_of(op, (operand,), tuple(sorted(attributes.items())), (type,), view)
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
        built = node_of(node.op, tuple(operands), node.attributes, node.types, view)
        if view is not None:
            check_view(built)
        return built
    if node.is_leaf:
        return node_of(node.op, (), node.attributes, node.types, view)
    if node.is_parallel:
        return parallel(node.op, operands[0], view, **{k: int(v) for k, v in node.attributes if isinstance(v, int)})
    return _apply(node.operator, tuple(operands), node.attributes, view, node.types[0].time)

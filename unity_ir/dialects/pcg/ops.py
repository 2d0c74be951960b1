"""
Define the base of all pcg operations, and those that are no operators: leaves (inputs, weights, constants) and weight
updates. "The core" is the compiler's own graph (`unity_ir.pcg`), which does without xDSL.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from xdsl.dialects.builtin import FloatAttr, StringAttr, UnitAttr, f64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.printer import Printer
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.machine import ViewAttr
from unity_ir.dialects.names import NAME_CONSTRAINT, check_name, name_text, parse_name
from unity_ir.dialects.pcg.attributes import CONSTRAINTS, float_text, print_dictionary, to_attribute, to_value
from unity_ir.dialects.pcg.types import PcgTensorType, pcg_tensor
from unity_ir.errors import UnityError
from unity_ir.ops.optimizers import OPTIMIZERS
from unity_ir.pcg.node import Node, check_view, leaf
from unity_ir.pcg.optimizer import Optimizer, groups_text, optimizer_of
from unity_ir.pcg.types import TensorType
from unity_ir.pcg.view import View


@contextmanager
def as_parse_error(parser: Parser, position: int) -> Generator[None]:
    """Turn a `UnityError` raised in the `with` statement into a `ParseError` at character `position` of the text."""
    try:
        yield
    except UnityError as error:
        parser.raise_error(str(error), position)


@contextmanager
def as_verify_error() -> Generator[None]:
    """Turn a `UnityError` raised in the `with` statement into a `VerifyException`."""
    try:
        yield
    except UnityError as error:
        raise VerifyException(str(error)) from error


def core_type(value: SSAValue) -> TensorType:
    """
    Return the type of an SSA value, which must be a `!pcg.tensor`, as the compiler's own `TensorType` (`pcg.types`).
    Raises `UnityError` for another type.
    """
    if not isinstance(value.type, PcgTensorType):
        raise UnityError(f"pcg: a value of type {value.type}; only !pcg.tensor values are allowed here")
    return value.type.data


def _parse_tensor_type(parser: Parser) -> PcgTensorType:
    """Parse a type. Raises `ParseError` if it is no `!pcg.tensor`."""
    position = parser.pos
    type = parser.parse_type()
    if not isinstance(type, PcgTensorType):
        parser.raise_error(f"expected a !pcg.tensor type, got {type}", position)
    return type


def parse_tensor_types(parser: Parser) -> list[PcgTensorType]:
    """Parse one or more types, `type, ...`. Raises `ParseError` for one that is no `!pcg.tensor`."""
    return parser.parse_comma_separated_list(parser.Delimiter.NONE, lambda: _parse_tensor_type(parser))


def parse_typed_operands(parser: Parser, operands: Sequence[UnresolvedOperand]) -> list[SSAValue]:
    """Parse `: type, ...`, a type for each of `operands`; return the resolved operands. Raises `ParseError`."""
    position = parser.pos
    parser.parse_punctuation(":")
    types = parse_tensor_types(parser)
    if len(operands) != len(types):
        parser.raise_error(f"{len(operands)} operands, but {len(types)} types", position)
    return list(parser.resolve_operands(operands, types, position))


def parse_view(parser: Parser) -> dict[str, Attribute]:
    """
    Parse an optional machine view, `on #machine.view<...>`; return `{"view": view}`, the property to set, or {} if
    there is none. Raises `ParseError`.
    """
    if parser.parse_optional_keyword("on") is None:
        return {}
    position = parser.pos
    view = parser.parse_attribute()
    if not isinstance(view, ViewAttr):
        parser.raise_error(f"expected a #machine.view after `on`, got {view}", position)
    return {"view": view}


def split_attributes(attributes: dict[str, Attribute]) -> tuple[dict[str, Attribute], dict[str, Attribute]]:
    """
    Split attributes by name into (those of the operator itself, those of other dialects, whose names contain a dot).
    """
    own = {name: attribute for name, attribute in attributes.items() if "." not in name}
    return own, {name: attribute for name, attribute in attributes.items() if "." in name}


class PcgOp(IRDLOperation, ABC):
    """Base of all operations of the pcg dialect."""

    def verify_attributes(self) -> None:
        """
        Raise `UnityError` if an attribute that is no property of the operation has a name without a dot: it belongs to
        no dialect, and the custom syntax would not read it back.
        """
        if own := next((name for name in self.attributes if "." not in name), None):
            raise UnityError(f"{self.name}: unknown attribute {own}; remove it, or write it as a property")


class NodeOp(PcgOp, ABC):
    """Base of operations that compute or provide values (operators and leaves), which are the nodes of a `Graph`."""

    view = opt_prop_def(ViewAttr)
    """The devices it runs on; absent before the search."""

    traits = traits_def(Pure())

    @property
    def core_view(self) -> View | None:
        """
        The operation's machine view (the devices that it runs on) as the compiler's own `View` (`pcg.view`); None if it
        has none, as before a search.
        """
        return None if self.view is None else self.view.data

    def print_view(self, printer: Printer) -> None:
        """Print ` on #machine.view<...>`, if the operation has a machine view; else nothing."""
        if self.view is not None:
            printer.print_string(" on ")
            printer.print_attribute(self.view)


class LeafOp(NodeOp, ABC):
    """
    Base of inputs, weights and constants: operations without operands, whose result type is written, not inferred.
    """

    result = result_def(PcgTensorType)

    def node(self) -> Node:
        """
        Return the leaf as a node of the compiler's own graph (`pcg.graph`). Raises `UnityError` where its name, value,
        type or view is invalid.
        """
        raise NotImplementedError

    def verify_(self) -> None:
        """
        Raise `VerifyException` where the leaf's name, value, type or view is invalid, and for an attribute that belongs
        to no dialect (its name has no dot).
        """
        with as_verify_error():
            self.verify_attributes()
            self.node()

    def print_rest(self, printer: Printer) -> None:
        """Print the end that every leaf's text has: attributes, machine view and type."""
        print_dictionary(printer, self.attributes)
        self.print_view(printer)
        printer.print_string(" : ")
        printer.print_attribute(self.result.type)

    @classmethod
    def parse_rest(cls, parser: Parser, properties: dict[str, Attribute], position: int) -> LeafOp:
        """
        Parse the end that every leaf's text has: attributes, machine view and type. Return the operation with these and
        with `properties` (by name, which the caller has parsed).

        `position` is the character of the text at which errors of the operation are reported. Raises `ParseError`.
        """
        attributes = parser.parse_optional_attr_dict()
        properties |= parse_view(parser)
        parser.parse_punctuation(":")
        op = cls.create(properties=properties, attributes=attributes, result_types=[_parse_tensor_type(parser)])
        with as_parse_error(parser, position):
            op.verify_attributes()
            op.node()
        return op


def _checked_leaf(op: str, type: TensorType, view: View | None, **attributes: str | float) -> Node:
    """
    Return a leaf node of the core: `op` is `input`, `weight` or `constant`, and `attributes` are such as `name` or
    `value`. Raises `UnityError` where it or its view is invalid.
    """
    node = leaf(op, type, view, **attributes)
    if view is not None:
        check_view(node)
    return node


@irdl_op_definition
class WeightOp(LeafOp):
    """
    `%w = pcg.weight "fc1.weight" : !pcg.tensor<...>`: a parameter, by its full name.

    `pcg.weight "fc1.weight" master f32 : !pcg.tensor<[8, 8], bf16, grad = f32>` is stored and updated in f32 (its
    master), and read as bf16: each device casts its resting piece before it is moved, so that moves carry bf16.
    `pcg.weight "fc1.weight" frozen : !pcg.tensor<[8, 8], bf16>` is not trained: it has no gradient and no update.
    """

    name = "pcg.weight"

    weight_name = prop_def(NAME_CONSTRAINT, prop_name="name")
    master = opt_prop_def(StringAttr)
    frozen = opt_prop_def(UnitAttr)

    @property
    def text(self) -> str:
        """The full name of the parameter. Raises `UnityError` if it is not UTF-8 text."""
        return name_text(self.name, self.weight_name)

    def node(self) -> Node:
        """
        Return the weight as a node of the compiler's own graph (`pcg.graph`). Raises `UnityError` where its name, type
        or view is invalid.
        """
        check_name(self.name, self.text)
        own: dict[str, str | float] = {} if self.master is None else {"master": self.master.data}
        own |= {} if self.frozen is None else {"frozen": 1}
        return _checked_leaf("weight", core_type(self.result), self.core_view, name=self.text, **own)

    @classmethod
    def parse(cls, parser: Parser) -> LeafOp:
        """Parse what follows `pcg.weight`: the name, attributes, view and type. Raises `ParseError`."""
        position = parser.pos
        own: dict[str, Attribute] = {"name": parse_name(parser)}
        if parser.parse_optional_keyword("master") is not None:
            own["master"] = StringAttr(parser.parse_identifier())
        if parser.parse_optional_keyword("frozen") is not None:
            own["frozen"] = UnitAttr()
        return cls.parse_rest(parser, own, position)

    def print(self, printer: Printer) -> None:
        """Print what follows `pcg.weight`, as `parse` reads it."""
        printer.print_string(" ")
        printer.print_string_literal(self.text)
        if self.master is not None:
            printer.print_string(f" master {self.master.data}")
        if self.frozen is not None:
            printer.print_string(" frozen")
        self.print_rest(printer)

    def verify_(self) -> None:
        """
        Raise `VerifyException` for an invalid weight, and if weights of one name in its block differ in type, view,
        master, or in whether they are frozen.
        """
        super().verify_()
        # The first weight of a block speaks for all, so that verifying a block takes linear time.
        if self.parent is not None and not any(isinstance(op, WeightOp) for op in _before(self)):
            with as_verify_error():
                check_weights(op for op in self.parent.ops if isinstance(op, WeightOp))


def _before(op: Operation) -> Generator[Operation]:
    while (previous := op.prev_op) is not None:
        yield previous
        op = previous


def check_weights(ops: Iterable[WeightOp]) -> None:
    """
    Raise `UnityError` if two weights of one name differ in their type, machine view, the element type they are stored
    in (`master`), or in whether they are frozen.
    """
    seen: dict[str, WeightOp] = {}
    for op in ops:
        other = seen.setdefault(op.text, op)
        alike = ("types", other.result.type, op.result.type), ("views", other.view, op.view)
        for what, one, two in (*alike, ("masters", other.master, op.master)):
            if one != two:
                raise UnityError(
                    f"pcg.weight: {op.text!a} has two {what}, {one or 'none'} and {two or 'none'}; rename one"
                )
        if other.frozen != op.frozen:
            raise UnityError(f"pcg.weight: {op.text!a} is frozen in one place and trained in another; rename one")


@irdl_op_definition
class ConstantOp(LeafOp):
    """`%c = pcg.constant 1.0 : !pcg.tensor<...>`: a tensor that is one number everywhere."""

    name = "pcg.constant"

    value = prop_def(FloatAttr.constr(f64))

    def node(self) -> Node:
        """
        Return the constant as a node of the compiler's own graph (`pcg.graph`). Raises `UnityError` where its value,
        type or view is invalid.
        """
        value = self.value.value.data
        if not math.isfinite(value):
            raise UnityError(f"pcg.constant: {value} is not a finite number")
        return _checked_leaf("constant", core_type(self.result), self.core_view, value=value)

    @classmethod
    def parse(cls, parser: Parser) -> LeafOp:
        """Parse what follows `pcg.constant`: the number, attributes, view and type. Raises `ParseError`."""
        position = parser.pos
        value = parser.parse_number()
        with as_parse_error(parser, position):
            return cls.parse_rest(parser, {"value": to_attribute("float", value)}, position)

    def print(self, printer: Printer) -> None:
        """Print what follows `pcg.constant`, as `parse` reads it."""
        printer.print_string(f" {float_text(self.value.value.data)}")
        self.print_rest(printer)


@irdl_op_definition
class UpdateOp(PcgOp):
    """
    `pcg.update %w, %g {optimizer = "sgd", lr = 0.1} : type, type`: one step of the optimizer, which updates a weight by
    its gradient.

    Without attributes, the optimizer is not decided.
    """

    name = "pcg.update"

    weight = operand_def(PcgTensorType)
    grad = operand_def(PcgTensorType)

    optimizer = opt_prop_def(StringAttr)
    lr = opt_prop_def(CONSTRAINTS["float"])
    beta1 = opt_prop_def(CONSTRAINTS["float"])
    beta2 = opt_prop_def(CONSTRAINTS["float"])
    eps = opt_prop_def(CONSTRAINTS["float"])
    weight_decay = opt_prop_def(CONSTRAINTS["float"])
    momentum = opt_prop_def(CONSTRAINTS["float"])
    clip = opt_prop_def(CONSTRAINTS["float"])
    ema = opt_prop_def(CONSTRAINTS["float"])
    groups = opt_prop_def(StringAttr)

    def __init__(self, weight: SSAValue, grad: SSAValue, optimizer: Optimizer | None):
        super().__init__(operands=[weight, grad], properties={**optimizer_attributes(optimizer)})

    @property
    def core_optimizer(self) -> Optimizer | None:
        """
        The optimizer with its hyperparameters, as the compiler's own `Optimizer`; None if the operation names none.

        Raises `UnityError` if it is unknown, or a hyperparameter is out of range.
        """
        return to_optimizer(self.name, self.properties)

    def verify_(self) -> None:
        """
        Raise `VerifyException` where operands or optimizer do not fit (`check`), and for an attribute that belongs to
        no dialect (its name has no dot).
        """
        with as_verify_error():
            self.verify_attributes()
            self.check()

    def check(self) -> None:
        """
        Raise `UnityError` unless the operands are a weight and a gradient of its sizes, in the element type in which
        the weight is stored, and the optimizer is valid.
        """
        weight, grad = core_type(self.weight), core_type(self.grad)
        if not isinstance(self.weight.owner, WeightOp):
            raise UnityError("pcg.update: its first operand is no pcg.weight; only weights are updated")
        stored = weight.dtype if self.weight.owner.master is None else self.weight.owner.master.data
        if (weight.shape, stored) != (grad.shape, grad.dtype):
            of = "" if stored == weight.dtype else f", stored in {stored}"
            raise UnityError(
                f"pcg.update: the gradient {grad} does not have the sizes and element type of {weight}{of}"
            )
        _ = self.core_optimizer

    @classmethod
    def parse(cls, parser: Parser) -> UpdateOp:
        """Parse what follows `pcg.update`: `%w, %g {optimizer = .., ..} : type, type`. Raises `ParseError`."""
        position = parser.pos
        operands = [parser.parse_unresolved_operand()]
        parser.parse_punctuation(",")
        operands.append(parser.parse_unresolved_operand())
        own, other = split_attributes(parser.parse_optional_attr_dict())
        values = parse_typed_operands(parser, operands)
        with as_parse_error(parser, position):
            properties = optimizer_attributes(to_optimizer(cls.name, own))
        return cls.create(operands=values, properties=properties, attributes=other)

    def print(self, printer: Printer) -> None:
        """Print what follows `pcg.update`, as `parse` reads it."""
        printer.print_string(" ")
        printer.print_list(self.operands, printer.print_operand)
        print_dictionary(printer, {**self.properties, **self.attributes})
        printer.print_string(" : ")
        printer.print_list(self.operand_types, printer.print_attribute)


def optimizer_attributes(optimizer: Optimizer | None) -> dict[str, Attribute]:
    """
    Return an optimizer as the attributes, by name, of the `pcg.update` operation that updates a weight by it; {} for
    None.

    Given `Optimizer("sgd", lr=0.1)`, returns `{optimizer = "sgd", lr = 0.1}`. Raises `UnityError` for an unknown
    optimizer.
    """
    if optimizer is None:
        return {}
    if optimizer.name not in OPTIMIZERS:
        raise UnityError(f"pcg.update: unknown optimizer {optimizer.name}; known are {', '.join(OPTIMIZERS)}")
    clip = {"clip": optimizer.clip} if optimizer.clip else {}
    groups = {"groups": StringAttr(groups_text(optimizer.groups))} if optimizer.groups else {}
    numbers = {name: to_attribute("float", value) for name, value in {**optimizer.settings, **clip}.items()}
    return {"optimizer": StringAttr(optimizer.name), **numbers, **groups}


def to_optimizer(where: str, attributes: Mapping[str, Attribute]) -> Optimizer | None:
    """
    Return the optimizer that the attributes of a `pcg.update` operation describe, with defaults for hyperparameters
    that are left out; None if there are no attributes.

    Raises `UnityError`, in a message that begins with `where`, for unknown optimizers and hyperparameters.
    """
    values = {name: to_value(where, name, attribute) for name, attribute in attributes.items()}
    name = values.pop("optimizer", None)
    if name is None:
        if values:
            raise UnityError(f'{where}: {", ".join(values)} without an optimizer; add optimizer = "sgd" or "adam"')
        return None
    return optimizer_of(where, str(name), values)


def input_node(where: str, name: str, type: TensorType, view: View | None) -> Node:
    """
    Return an input node of the compiler's own graph (`pcg.graph`) for a function's argument, with this name, type and
    machine view.

    Raises `UnityError`, in a message that begins with `where` (the function), for an invalid name or view.
    """
    check_name(where, name)
    return _checked_leaf("input", type, view, name=name)


def tensor_types(types: Sequence[TensorType]) -> list[PcgTensorType]:
    """Return the compiler's own tensor types (`pcg.types`) as xDSL types (`!pcg.tensor`), in order."""
    return [pcg_tensor(t) for t in types]

"""
Define the base classes of operators as xDSL operations: of parallel operators (partition, replicate, reduce, ...),
which change how a value is divided into pieces, and of compute operators (matmul, relu, ...). `generated` has a class
for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import operand_def, result_def, var_operand_def, var_result_def
from xdsl.parser import Parser
from xdsl.printer import Printer

from unity_ir.dialects.machine import ViewAttr
from unity_ir.dialects.pcg.attributes import print_dictionary, to_attribute, to_value
from unity_ir.dialects.pcg.ops import (
    NodeOp,
    as_parse_error,
    as_verify_error,
    core_type,
    parse_tensor_types,
    parse_typed_operands,
    parse_view,
    split_attributes,
    tensor_types,
)
from unity_ir.dialects.pcg.types import PcgTensorType
from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.ops.operator import Attributes, Operator
from unity_ir.pcg.node import apply, leaf, parallel
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.pcg.types import InTime, TensorType
from unity_ir.pcg.view import View
from unity_ir.tdl.syntax import AttrValue


@lru_cache(maxsize=16384)
def infer_types(
    op: str,
    operands: tuple[TensorType, ...],
    attributes: Attributes,
    view: View | None,
    time: InTime | None = None,
) -> list[PcgTensorType]:
    """
    Return the result types of the operator named `op`, parallel or compute, for operands of these types; check that its
    machine view (the devices that it runs on) fits, unless `view` is None. `time` says which pieces of the first result
    are in time where operands leave that open.

    Raises `UnityError` where the operator does not apply, or its view does not fit. The result is cached: do not change
    the list.
    """
    values = [leaf("input", type, name=f"x{i}").result for i, type in enumerate(operands)]
    if op in PARALLEL_OPERATORS:
        node = parallel(op, values[0], view, **{name: v for name, v in attributes if isinstance(v, int)})
    else:
        node = apply(op, values, dict(attributes), view, time)
    return tensor_types(node.types)


class OperatorOp(NodeOp, ABC):
    """Base of the operators: operations whose result types follow from their operands and attributes."""

    @classmethod
    def operator_name(cls) -> str:
        """Return the operator's name in the compiler's own graph, which is the operation's name without `pcg.`."""
        return cls.name.removeprefix("pcg.")

    @property
    @abstractmethod
    def values(self) -> dict[str, AttrValue]:
        """
        The operator's attributes by name, as plain Python values. Raises `UnityError` for attributes of other types.
        """

    @classmethod
    def make(
        cls,
        operands: Sequence[SSAValue],
        values: dict[str, AttrValue],
        view: ViewAttr | None = None,
        attributes: dict[str, Attribute] | None = None,
        time: InTime | None = None,
    ) -> OperatorOp:
        """
        Return a new operation of this class. `operands` are its operands, and `values` the operator's attributes by
        name; the result types are inferred.

        `view` is its machine view, the devices that it runs on (None: not decided); `attributes` are attributes of
        other dialects, whose names contain a dot. `time` says which pieces of the first result are in time where
        operands leave that open. Raises `UnityError` where operands, values or view do not fit.
        """
        values = cls.checked(values)
        types, given = tuple(core_type(v) for v in operands), tuple(sorted(values.items()))
        results = infer_types(cls.operator_name(), types, given, None if view is None else view.data, time)
        properties = {name: to_attribute(cls.kinds()[name], value) for name, value in values.items()}
        if view is not None:
            properties["view"] = view
        return cls.create(operands=operands, properties=properties, attributes=attributes or {}, result_types=results)

    @classmethod
    @abstractmethod
    def kinds(cls) -> dict[str, str]:
        """Return the kind of each of the operator's attributes (`int`, `ints`, `float`, `name` or `dtype`) by name."""

    @classmethod
    def checked(cls, values: dict[str, AttrValue]) -> dict[str, AttrValue]:
        """
        Return the operator's attributes `values`, by name, with defaults filled in. In this class they are returned as
        they are: parallel operators have no defaults, and their attributes are checked when the types are inferred.
        """
        return values

    def verify_(self) -> None:
        """
        Raise `VerifyException` unless attributes and machine view fit, and the result types are those inferred from the
        operands.
        """
        with as_verify_error():
            self.verify_attributes()
            self.check_results(self.result_types)

    def inferred(self, time: InTime | None) -> list[PcgTensorType]:
        """Return the result types that follow from the operands, with `time` as in `make`. Raises `UnityError`."""
        types, attributes = tuple(core_type(v) for v in self.operands), tuple(sorted(self.checked(self.values).items()))
        return infer_types(self.operator_name(), types, attributes, self.core_view, time)

    def check_results(self, given: Sequence[Attribute]) -> None:
        """Raise `UnityError` unless types given for the results are those inferred from the operands."""
        expected = self.inferred(given[0].data.time if given and isinstance(given[0], PcgTensorType) else None)
        if expected != list(given):
            inferred, written = (", ".join(map(str, types)) for types in (expected, given))
            raise UnityError(f"{self.name}: the result type is {inferred}, not {written}; correct it")


class ParallelOp(OperatorOp, ABC):
    """Base of the parallel operators: `pcg.partition %x, dim 0 by 2 on #machine.view<...> : type`."""

    operand = operand_def(PcgTensorType)
    result = result_def(PcgTensorType)

    @property
    def values(self) -> dict[str, AttrValue]:
        """The operator's attributes by name, all of them integers: the same as `degrees`."""
        return {**self.degrees}

    @property
    def degrees(self) -> dict[str, int]:
        """
        The operator's integer attributes by name: `by`, the degree (number of pieces), and, for operators on one dim,
        `dim`. Attributes that are missing or no integers are left out.
        """
        # One that is missing is told by the verifier, whose message prints the operation.
        values = {name: self.properties.get(name) for name in self.kinds()}
        return {name: v.value.data for name, v in values.items() if isinstance(v, IntegerAttr)}

    @classmethod
    def kinds(cls) -> dict[str, str]:
        """Return the kind of each of the operator's attributes by name: `int` for all."""
        return dict.fromkeys(PARALLEL_OPERATORS[cls.operator_name()].attributes, "int")

    @classmethod
    def parse(cls, parser: Parser) -> OperatorOp:
        """
        Parse what follows the operation's name: `%x, dim 0 by 2 {..} on #machine.view<..> : type`. Raises `ParseError`.
        """
        position = parser.pos
        operand = parser.parse_unresolved_operand()
        values: dict[str, AttrValue] = {}
        for name in cls.kinds():
            if name == "dim":
                parser.parse_punctuation(",")
            parser.parse_keyword(name)
            values[name] = parser.parse_integer(allow_boolean=False)
        attributes = parser.parse_optional_attr_dict()
        view = parse_view(parser).get("view")
        operands = parse_typed_operands(parser, [operand])
        with as_parse_error(parser, position):
            op = cls.make(operands, values, view if isinstance(view, ViewAttr) else None, attributes)
            op.verify_attributes()
        return op

    def print(self, printer: Printer) -> None:
        """Print what follows the operation's name, as `parse` reads it."""
        printer.print_string(" ")
        printer.print_operand(self.operand)
        for name, value in self.degrees.items():
            printer.print_string(f", {name} {value}" if name == "dim" else f" {name} {value}")
        print_dictionary(printer, self.attributes)
        self.print_view(printer)
        printer.print_string(" : ")
        printer.print_attribute(self.operand.type)


class ComputeOp(OperatorOp, ABC):
    """
    Base of the compute operators: `pcg.matmul %x, %w {act = "relu"} on #machine.view<...> : type, type`. Types of
    results may follow, `-> type`; they are printed where the operands leave open what of a result is in time.
    """

    arguments = var_operand_def(PcgTensorType)
    outputs = var_result_def(PcgTensorType)

    @classmethod
    def operator(cls) -> Operator:
        """Return the definition of the operator, with its name, attributes and gradient."""
        return operators()[cls.operator_name()]

    @property
    def values(self) -> dict[str, AttrValue]:
        """The operator's attributes by name, as plain Python values."""
        return {name: to_value(self.name, name, self.properties[name]) for name in self.kinds()}

    @classmethod
    def kinds(cls) -> dict[str, str]:
        """Return the kind of each of the operator's attributes (`int`, `ints`, `float`, `name` or `dtype`) by name."""
        return {a.name: a.kind for a in cls.operator().line.attributes}

    @classmethod
    def checked(cls, values: dict[str, AttrValue]) -> dict[str, AttrValue]:
        """
        Return the operator's attributes `values`, by name, with defaults filled in. Raises `UnityError` for values that
        do not fit.
        """
        return dict(cls.operator().attributes(values))

    @classmethod
    def parse(cls, parser: Parser) -> OperatorOp:
        """
        Parse what follows the operation's name: `%x, %w {..} on #machine.view<..> : type, type -> type`, of which the
        last part may be left out. Raises `ParseError`.
        """
        position = parser.pos
        operands = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_unresolved_operand)
        own, other = split_attributes(parser.parse_optional_attr_dict())
        view = parse_view(parser).get("view")
        arguments = parse_typed_operands(parser, operands)
        results = parse_tensor_types(parser) if parser.parse_optional_punctuation("->") else []
        with as_parse_error(parser, position):
            values = {name: to_value(cls.name, name, attribute) for name, attribute in own.items()}
            time = results[0].data.time if results else None
            op = cls.make(arguments, values, view if isinstance(view, ViewAttr) else None, other, time)
            if results:
                op.check_results(results)
            return op

    def print(self, printer: Printer) -> None:
        """
        Print what follows the operation's name, as `parse` reads it; attributes that have their default value are left
        out.
        """
        printer.print_string(" ")
        printer.print_list(self.operands, printer.print_operand)
        defaults = {a.name: a.default for a in self.operator().line.attributes}
        written = {name: self.properties[name] for name, value in self.values.items() if value != defaults[name]}
        print_dictionary(printer, written | self.attributes)
        self.print_view(printer)
        printer.print_string(" : ")
        printer.print_list(self.operand_types, printer.print_attribute)
        if not self._follow_from_operands():
            printer.print_string(" -> ")
            printer.print_list(self.result_types, printer.print_attribute)

    def _follow_from_operands(self) -> bool:
        """
        Return whether the result types follow from the operands alone; False in time also for an operation that is
        wrong, which is printed in messages.
        """
        results = list(self.result_types)
        if not any(isinstance(t, PcgTensorType) and t.data.time for t in results):
            return True
        try:
            return results == self.inferred(None)
        except UnityError:
            return False

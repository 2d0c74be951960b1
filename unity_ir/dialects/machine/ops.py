"""
Operations that name a machine (the cluster a plan is made for) or describe its parts: kinds of devices, levels such as
nodes, links, protocols.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, ModuleOp, StringAttr, f64
from xdsl.ir import Attribute, Block, Region
from xdsl.irdl import (
    BaseAttr,
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    opt_region_def,
    prop_def,
    traits_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import HasParent, NoTerminator
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.machine.tables import (
    float_text,
    from_attribute,
    parse_table,
    print_value,
    to_attribute,
)
from unity_ir.dialects.names import NAME_CONSTRAINT, check_name, name_text, parse_name
from unity_ir.errors import UnityError


@irdl_op_definition
class MachineOp(IRDLOperation):
    """
    The machine that the module's plan is for: named only, as for `--machine`, or named and described in full.

    `machine.machine "summit:4"`, or `machine.machine "mine" { machine.device ... machine.level ... machine.link ... }`.
    """

    name = "machine.machine"

    machine = prop_def(NAME_CONSTRAINT, prop_name="name")
    overhead = opt_prop_def(FloatAttr)
    """Seconds before the first byte of any collective; not used if there are protocols."""
    described = opt_region_def("single_block")
    traits = traits_def(NoTerminator())

    def __init__(self, machine: str, tables: Mapping[str, Any] | None = None):
        properties: dict[str, Attribute] = {"name": StringAttr(machine)}
        if tables is not None and "overhead" in tables:
            properties["overhead"] = FloatAttr(float(tables["overhead"]), f64)
        super().__init__(properties=properties, regions=[[] if tables is None else [_region(tables)]])

    @property
    def text(self) -> str:
        """The machine's name. Raises `UnityError` if it is not UTF-8 text."""
        return name_text(self.name, self.machine)

    @property
    def tables(self) -> dict[str, Any] | None:
        """
        The description as nested dicts and lists by key (`levels`, `links`, ...), as `unity_ir.machine.machine_from`
        takes it; None if there is only a name.

        Raises `UnityError` for operations in the region that do not describe a machine (are no `PartOp`).
        """
        if self.described is None:
            return None
        out: dict[str, Any] = {} if self.overhead is None else {"overhead": self.overhead.value.data}
        for op in self.described.block.ops:
            if not isinstance(op, PartOp):
                raise UnityError(f"machine.machine: {op.name} in a machine; only parts of a machine are allowed")
            op.add_to(out)
        # One device needs neither.
        return out if "links" in out else {"levels": [], **out}

    @classmethod
    def parse(cls, parser: Parser) -> MachineOp:
        """
        Parse what follows `machine.machine`: the name, `overhead`, attributes, and the region with the description.
        Raises `ParseError`.
        """
        name = parse_name(parser).data
        overhead = parser.parse_number() if parser.parse_optional_keyword("overhead") else None
        attributes = parser.parse_optional_attr_dict_with_keyword()
        region = parser.parse_optional_region()
        op = cls(name)
        if overhead is not None:
            op.overhead = FloatAttr(float(overhead), f64)
        if region is not None:
            if not region.blocks:
                region.add_block(Block())
            op.add_region(region)
        op.attributes = {} if attributes is None else dict(attributes.data)
        return op

    def print(self, printer: Printer) -> None:
        """Print what follows `machine.machine`, as `parse` reads it."""
        printer.print_string(" ")
        printer.print_string_literal(self.text)
        if self.overhead is not None:
            printer.print_string(f" overhead {float_text(self.overhead.value.data)}")
        printer.print_op_attributes(self.attributes, print_keyword=True)
        if self.described is not None:
            printer.print_string(" ")
            printer.print_region(self.described, print_empty_block=False)

    def verify_(self) -> None:
        """
        Raise `VerifyException` if the module has another machine, if this one is not directly in the module, or if its
        description (when it has one) is impossible.
        """
        from unity_ir.machine import machine_from

        module = self.parent_op()
        if module is not None and not isinstance(module, ModuleOp):
            raise VerifyException(f"machine.machine: is inside {module.name}; move it to the module")
        block = self.parent
        if block is not None and any(isinstance(op, MachineOp) and op is not self for op in block.ops):
            raise VerifyException("machine.machine: the module has two machines; remove one")
        if self.described is not None:
            # xDSL may look at this operation before it has looked at its parts.
            for part in self.described.block.ops:
                part.verify(verify_nested_ops=False)
        elif self.overhead is not None:
            raise VerifyException("machine.machine: overhead of a machine that is only named; machine-expand it first")
        try:
            check_name(self.name, self.text)
            if (tables := self.tables) is not None:
                machine_from(self.text, tables)
        except UnityError as error:
            raise VerifyException(str(error)) from error


class PartOp(IRDLOperation, ABC):
    """
    Base of the operations in the region of a `machine.machine`, each of which describes one thing in the machine: a
    kind of device, a level, a protocol or a link. What it says is a table of fields, such as `{size = 4}`.
    """

    traits = traits_def(HasParent(MachineOp))
    fields = prop_def(BaseAttr(DictionaryAttr))

    LIST: ClassVar[str]
    """The key of a description under which parts of this kind are listed."""

    @property
    def table(self) -> dict[str, Any]:
        """The operation's fields by name, as Python values: `{"size": 4}`."""
        return from_attribute(self.fields)

    def add_to(self, tables: dict[str, Any]) -> None:
        """
        Append the operation's fields to a machine's description `tables` (as in `MachineOp.tables`), in place, in the
        list for operations of its kind, such as `tables["levels"]`.
        """
        tables.setdefault(self.LIST, []).append(self.table)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """
        Return an operation of this class with the fields `table`, by name: numbers, strings, lists and tables of these.
        """
        return cls.create(properties={"fields": to_attribute(table)})


class NamedOp(PartOp, ABC):
    """
    Base of the operations that describe something in a machine that has a name, as all but links have: the name is
    written before the fields.
    """

    part = prop_def(NAME_CONSTRAINT, prop_name="name")

    @property
    def text(self) -> str:
        """The name of the described thing, such as `nodes` for a level. Raises `UnityError` if it is not UTF-8 text."""
        return name_text(self.name, self.part)

    @property
    def table(self) -> dict[str, Any]:
        """
        The operation's fields by name, as Python values, with `name` first: `{"name": "nodes", "size": 4}`. Raises
        `UnityError` if `name` is written as a field, too.
        """
        fields = from_attribute(self.fields)
        if "name" in fields:
            raise UnityError(f"{self.name}: {self.text} has a field name as well; remove it")
        return {"name": self.text, **fields}

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """
        Return an operation of this class, given its fields by name, `name` among them: `{"name": "nodes", "size": 4}`.
        """
        fields = {key: value for key, value in table.items() if key != "name"}
        return cls.create(properties={"name": StringAttr(table["name"]), "fields": to_attribute(fields)})

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        """
        Parse what follows the operation's own name, as in `machine.level "nodes" {size = 4}`: a name as a string, a
        table of fields, and attributes.
        """
        name = parse_name(parser)
        op = cls.create(properties={"name": name, "fields": to_attribute(parse_table(parser))})
        op.attributes = parser.parse_optional_attr_dict()
        return op

    def print(self, printer: Printer) -> None:
        """Print the name and the fields, as `parse` reads them."""
        printer.print_string(" ")
        printer.print_string_literal(self.text)
        printer.print_string(" ")
        print_value(printer, from_attribute(self.fields))
        printer.print_op_attributes(self.attributes)


@irdl_op_definition
class DeviceOp(NamedOp):
    """
    `machine.device "chip" {flops = {f32 = 1.0e12}, memory_bandwidth = 1.0e11, ...}`: a kind of device. Rates are in
    FLOP/s (by element type) and bytes per second, memory in bytes.
    """

    name = "machine.device"
    LIST: ClassVar[str] = "devices"


@irdl_op_definition
class LevelOp(NamedOp):
    """
    `machine.level "nodes" {size = 4, link = "switch", bandwidth = 2.5e10, latency = 2.7e-6}`: a level of the machine,
    such as nodes or the devices of a node, in bytes per second and seconds; the outermost level comes first.
    """

    name = "machine.level"
    LIST: ClassVar[str] = "levels"


@irdl_op_definition
class ProtocolOp(NamedOp):
    """
    `machine.protocol "LL" {ring = 6.6e-06, tree = 6.8e-06, ring_bandwidth = 0.5, tree_bandwidth = 0.24}`: a message
    protocol of collectives (NCCL's), with seconds before the first byte and the share of links' bandwidth, per
    algorithm.
    """

    name = "machine.protocol"
    LIST: ClassVar[str] = "protocols"

    def add_to(self, tables: dict[str, Any]) -> None:
        """
        Add the protocol's fields, by its name, to the `protocols` of a machine's description `tables`, in place. Raises
        `UnityError` if there is one of that name.
        """
        known: dict[str, Any] = tables.setdefault(self.LIST, {})
        if self.text in known:
            raise UnityError(f"machine.protocol: there are two of the name {self.text}; remove one")
        known[self.text] = from_attribute(self.fields)


@irdl_op_definition
class LinkOp(PartOp):
    """
    `machine.link 0, "hub" {bandwidth = 1.0e10, latency = 1.0e-06}`: a link between two vertices, each a device's number
    or the name of a hub or switch, in bytes per second and seconds.
    """

    name = "machine.link"
    LIST: ClassVar[str] = "links"
    between = prop_def(BaseAttr(ArrayAttr))

    @property
    def table(self) -> dict[str, Any]:
        """The link's fields by name, with `between`, its two vertices, first."""
        return {"between": from_attribute(self.between), **from_attribute(self.fields)}

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """
        Return the operation of a link, given its fields by name; `between` is its two vertices: device numbers or
        names.
        """
        fields = {key: value for key, value in table.items() if key != "between"}
        return cls.create(properties={"between": to_attribute(table["between"]), "fields": to_attribute(fields)})

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        """
        Parse the two vertices that the link joins (device numbers or names), its table of fields, and attributes.
        Raises `ParseError`.
        """

        def vertex() -> int | str:
            number = parser.parse_optional_integer()
            return parser.parse_str_literal() if number is None else number

        first = vertex()
        parser.parse_punctuation(",")
        ends = [first, vertex()]
        op = cls.of({"between": ends, **parse_table(parser)})
        op.attributes = parser.parse_optional_attr_dict()
        return op

    def print(self, printer: Printer) -> None:
        """Print the two vertices and the fields, as `parse` reads them."""
        printer.print_string(" ")
        printer.print_list(from_attribute(self.between), lambda end: print_value(printer, end))
        printer.print_string(" ")
        print_value(printer, from_attribute(self.fields))
        printer.print_op_attributes(self.attributes)


def _region(tables: Mapping[str, Any]) -> Region:
    """Return the region with the parts of a description."""
    devices = tables["devices"] if "devices" in tables else [tables["device"]]
    parts: list[PartOp] = [ProtocolOp.of({"name": n, **t}) for n, t in tables.get("protocols", {}).items()]
    parts += [DeviceOp.of(t) for t in devices]
    parts += [LevelOp.of(t) for t in tables.get("levels", [])]
    parts += [LinkOp.of(t) for t in tables.get("links", [])]
    return Region(Block(parts))

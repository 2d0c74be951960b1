"""The machine dialect: which cluster a plan is for, and where on it an operator's tasks run."""

from __future__ import annotations

import re
from math import prod

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Data, Dialect
from xdsl.irdl import IRDLOperation, irdl_attr_definition, irdl_op_definition, prop_def
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.names import NAME_CONSTRAINT, check_name, name_text, parse_name
from unity_ir.errors import UnityError
from unity_ir.pcg.view import Axis, View

MAX_TASKS = 2**20
"""A view lists its devices one by one, so a larger one is a typing error or an attack."""

_NUMBER = r"\d{1,18}"
_PAIR = rf"{_NUMBER}\s*@\s*{_NUMBER}"
_AXIS = rf"\[\s*(?:{_PAIR}\s*(?:,\s*{_PAIR}\s*)*)?\]"
_VIEW = re.compile(
    rf"\s*(?P<start>{_NUMBER})\s*(?P<axes>(?:,\s*{_AXIS}\s*)*)(?:,\s*repeat\s*(?P<repeat>{_AXIS})\s*)?", re.ASCII
)


@irdl_attr_definition
class ViewAttr(Data[View]):
    """`#machine.view<0, [4 @ 6, 2 @ 3], [3 @ 1], repeat [2 @ 1]>`: see `unity_ir.pcg.view`."""

    name = "machine.view"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> View:
        # MLIR has no token for `@` alone, so the body is read from the text, and the lexer sent on to its end.
        text, start = parser.lexer.input.content, parser.pos
        end = text.find(">", start)
        if text[start : start + 1] != "<" or end < 0:
            parser.raise_error("machine.view: expected `<start, [factor @ stride, ...], ..., repeat [...]>`")
        view = _VIEW.fullmatch(text, start + 1, end)
        if view is None:
            parser.raise_error(
                "machine.view: expected `start, [factor @ stride, ...], ..., repeat [...]`, "
                f"got `{' '.join(text[start + 1 : end].split())}`",
                start,
            )
        parser.lexer.pos = end
        parser.parse_punctuation("<")
        parser.parse_punctuation(">")
        found = View(
            int(view["start"]),
            tuple(_axis(axis) for axis in re.findall(_AXIS, view["axes"], re.ASCII)),
            _axis(view["repeat"] or ""),
        )
        try:
            check_size(found)
        except UnityError as error:
            parser.raise_error(str(error), start, end)
        return found

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(str(self.data).removeprefix("#machine.view"))

    def verify(self) -> None:
        try:
            check_size(self.data)
        except UnityError as error:
            raise VerifyException(str(error)) from error


def _axis(text: str) -> Axis:
    """Given `[4 @ 6, 2 @ 3]`, returns `((4, 6), (2, 3))`."""
    numbers = [int(n) for n in re.findall(_NUMBER, text, re.ASCII)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def check_size(view: View) -> None:
    """Raises `UnityError` for factors below 1, negative devices and strides, and more tasks than any cluster takes."""
    pairs = [pair for axis in (*view.axes, view.repeat) for pair in axis]
    if view.start < 0 or any(factor < 1 or stride < 0 for factor, stride in pairs):
        raise UnityError(f"machine.view: {view} has a negative device or stride, or a factor below 1")
    if (tasks := prod(factor for factor, _ in pairs)) > MAX_TASKS:
        raise UnityError(f"machine.view: {tasks} tasks; a view has at most {MAX_TASKS}")


@irdl_op_definition
class MachineOp(IRDLOperation):
    """`machine.machine "summit:4"`: the machine the module's plan is for, as `--machine` names it."""

    name = "machine.machine"

    machine = prop_def(NAME_CONSTRAINT, prop_name="name")

    def __init__(self, machine: str):
        super().__init__(properties={"name": StringAttr(machine)})

    @property
    def text(self) -> str:
        return name_text(self.name, self.machine)

    @classmethod
    def parse(cls, parser: Parser) -> MachineOp:
        op = cls(parse_name(parser).data)
        op.attributes = parser.parse_optional_attr_dict()
        return op

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        printer.print_string_literal(self.text)
        printer.print_op_attributes(self.attributes)

    def verify_(self) -> None:
        try:
            check_name(self.name, self.text)
        except UnityError as error:
            raise VerifyException(str(error)) from error
        module = self.parent_op()
        if module is not None and not isinstance(module, ModuleOp):
            raise VerifyException(f"machine.machine: is inside {module.name}; move it to the module")
        block = self.parent
        if block is not None and any(isinstance(op, MachineOp) and op is not self for op in block.ops):
            raise VerifyException("machine.machine: the module has two machines; remove one")


def machine_name(module: ModuleOp) -> str | None:
    """The machine the module's plan is for, if it says so."""
    return next((op.text for op in module.ops if isinstance(op, MachineOp)), None)


def set_machine(module: ModuleOp, name: str) -> None:
    """Record the machine a plan is for, in place of another one."""
    for op in list(module.ops):
        if isinstance(op, MachineOp):
            op.detach()
            op.erase()
    block = module.body.block
    if block.first_op is None:
        block.add_op(MachineOp(name))
    else:
        block.insert_op_before(MachineOp(name), block.first_op)


MACHINE = Dialect("machine", [MachineOp], [ViewAttr])

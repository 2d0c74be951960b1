"""Machine views as attributes: where on a machine an operator's tasks (its work on one piece each) run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import ClassVar, cast

from xdsl.ir import Attribute, Data
from xdsl.irdl import AttrConstraint, irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.parameters import (
    ARRAY,
    INTEGER,
    ParameterPrinter,
    check_count,
    from_numbers,
    integer,
    pairs,
    parse_more,
    print_parameters,
    to_numbers,
)
from unity_ir.errors import UnityError
from unity_ir.pcg.view import View, ViewAxis

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
    """
    `#machine.view<0, [4 @ 6, 2 @ 3], [3 @ 1], repeat [2 @ 1]>`: the devices that an operator's tasks run on: the first
    device, per axis of the task grid a list of `factor @ stride` (in device numbers), and the devices that repeat each
    task. See `unity_ir.pcg.view`.
    """

    name = "machine.view"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {"axes": ARRAY, "start": INTEGER, "repeat": ARRAY}
    """Parameters in the spelling for IRDL (`dialects.parameters`): `#machine.view<[[[4, 6], [2, 3]]], 0, []>`."""

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> View:
        """
        Parse the parameter of the attribute, the text in angle brackets, and return the machine view that it describes.
        Raises `ParseError` for other text, and for a view whose numbers are impossible (`check_size`).
        """
        # MLIR has no token for `@` alone, so the body is read from the text, and the lexer sent on to its end.
        text, start = parser.lexer.input.content, parser.pos
        end = text.find(">", start)
        if text[start : start + 1] != "<" or end < 0:
            parser.raise_error("machine.view: expected `<start, [factor @ stride, ...], ..., repeat [...]>`")
        if text[start + 1 : end].lstrip().startswith("["):
            return _parse_parameters(parser)
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
        """Print the view in angle brackets, as `parse_parameter` reads it."""
        if isinstance(printer, ParameterPrinter):
            view = self.data
            print_parameters(printer, [to_numbers(view.axes), to_numbers(view.start), to_numbers(view.repeat)])
            return
        printer.print_string(str(self.data).removeprefix("#machine.view"))

    def verify(self) -> None:
        """Raise `VerifyException` for a view whose numbers are impossible (`check_size`)."""
        try:
            check_size(self.data)
        except UnityError as error:
            raise VerifyException(str(error)) from error


def _parse_parameters(parser: AttrParser) -> View:
    """Parse a view spelled by parameters, in angle brackets. Raises `ParseError`."""
    start = parser.pos
    with parser.in_angle_brackets():
        parameters = [parser.parse_attribute(), *parse_more(parser)]
    try:
        found = _from_parameters(parameters)
        check_size(found)
    except UnityError as error:
        parser.raise_error(str(error), start)
    return found


def _from_parameters(parameters: Sequence[Attribute]) -> View:
    where = "machine.view"
    check_count(where, parameters, ViewAttr.PARAMETERS)
    axes, start, repeat = parameters
    found = cast("tuple[tuple[tuple[int, ...], ...], ...]", from_numbers(where, axes, 3))
    if any(len(pair) != 2 for axis in found for pair in axis):
        raise UnityError(f"{where}: the parameter {axes} must be lists of pairs, factor and stride")
    return View(integer(where, start), cast("tuple[ViewAxis, ...]", found), pairs(where, repeat))


def _axis(text: str) -> ViewAxis:
    """Given `[4 @ 6, 2 @ 3]`, returns `((4, 6), (2, 3))`."""
    numbers = [int(n) for n in re.findall(_NUMBER, text, re.ASCII)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def check_size(view: View) -> None:
    """
    Check the numbers of a machine view, whose axes are (factor, stride) pairs.

    Raises `UnityError` for a factor below 1, a negative stride or first device, and factors whose product, the number
    of tasks, is more than 2^20 (`MAX_TASKS`).
    """
    pairs = [pair for axis in (*view.axes, view.repeat) for pair in axis]
    if view.start < 0 or any(factor < 1 or stride < 0 for factor, stride in pairs):
        raise UnityError(f"machine.view: {view} has a negative device or stride, or a factor below 1")
    if (tasks := prod(factor for factor, _ in pairs)) > MAX_TASKS:
        raise UnityError(f"machine.view: {tasks} tasks; a view has at most {MAX_TASKS}")

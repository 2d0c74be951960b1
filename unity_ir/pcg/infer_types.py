"""Infer the types of a compute operator's results: shapes, element types, and the pieces they are divided into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Attributes, Operator
from unity_ir.pcg.types import InTime, TensorType, divided_type
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parallel import (
    WHOLE,
    Configuration,
    Degrees,
    configurations_in_time,
    infer_configuration,
    result_degrees,
)
from unity_ir.tdl.syntax import Bound


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
    times = result_degrees(analysis, divided_in_time(analysis, configuration, operands, time))
    return tuple(
        divided_type(shape, result.dtype or dtype, d, time=_time_of(in_time))
        for result, shape, d, in_time in zip(
            bound.results, bound.result_shapes, result_degrees(analysis, configuration), times, strict=True
        )
    )


def divided_in_time(
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

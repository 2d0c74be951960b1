"""
Substitutions as JSON, for files that programs read.

Operations of a side are listed operands first; a term is the name of an input, or `"3.0"`: result 0 of operation 3.
"""

from __future__ import annotations

from typing import Any

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import (
    Attribute,
    Condition,
    Input,
    Operation,
    Pack,
    Parameter,
    Result,
    Size,
    Substitution,
    Term,
)
from unity_ir.rules.poly import Poly, parse


def to_json(rule: Substitution) -> dict[str, Any]:
    """A substitution as what `json.dump` writes."""
    return {
        "name": rule.name,
        "inputs": [_input(i) for i in rule.inputs],
        "source": _side(rule, rule.source),
        "target": _side(rule, rule.target),
        "conditions": [str(c.poly) for c in rule.conditions],
        "exact": rule.exact,
    }


def from_json(data: dict[str, Any]) -> Substitution:
    """The substitution `to_json` was given. Raises `UnityError` for anything else."""
    try:
        inputs = {i["name"]: _read_input(i) for i in data["inputs"]}
        source, target = (_read_side(data[side], inputs) for side in ("source", "target"))
        conditions = tuple(Condition(parse(c)) for c in data["conditions"])
        return Substitution(data["name"], tuple(inputs.values()), source, target, conditions, data["exact"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UnityError(f"rules: not a rule as JSON: {type(error).__name__} {error}") from error


def _input(of: Input) -> dict[str, Any]:
    return {
        "name": of.name,
        "shape": [f"{s.name}.." if isinstance(s, Pack) else str(s) for s in of.shape],
        "degrees": [str(d) for d in of.degrees],
        "sum": str(of.sum),
        "copy": str(of.copy),
        "integer": of.integer,
    }


def _read_input(data: dict[str, Any]) -> Input:
    def size(text: str) -> Size:
        return Pack(text.removesuffix("..")) if text.endswith("..") else parse(text)

    shape, degrees = tuple(map(size, data["shape"])), tuple(map(parse, data["degrees"]))
    return Input(data["name"], shape, degrees, parse(data["sum"]), parse(data["copy"]), bool(data["integer"]))


def _side(rule: Substitution, side: tuple[Term, ...]) -> dict[str, Any]:
    operations = rule.operations(side)
    numbers = {id(o): i for i, o in enumerate(operations)}

    def name(term: Term) -> str:
        return term.name if isinstance(term, Input) else f"{numbers[id(term.operation)]}.{term.index}"

    return {
        "operations": [
            {"op": o.op, "operands": list(map(name, o.operands)), "attributes": {n: _value(v) for n, v in o.attributes}}
            for o in operations
        ],
        "results": list(map(name, side)),
    }


def _read_side(data: dict[str, Any], inputs: dict[str, Input]) -> tuple[Term, ...]:
    operations: list[Operation] = []

    def term(text: str) -> Term:
        if text in inputs:
            return inputs[text]
        number, _, result = text.partition(".")
        return Result(operations[int(number)], int(result))

    for o in data["operations"]:
        attributes = tuple(sorted((n, _read_value(v)) for n, v in o["attributes"].items()))
        operations.append(Operation(o["op"], tuple(map(term, o["operands"])), attributes))
    return tuple(map(term, data["results"]))


def _value(value: Attribute) -> Any:
    """Polynomials as text, a list of them as a list; everything else says what it is."""
    match value:
        case Poly():
            return str(value)
        case tuple():
            return [str(p) for p in value]
        case Parameter(name):
            return {"parameter": name}
        case str():
            return {"name": value}
        case _:
            return value


def _read_value(value: Any) -> Attribute:
    match value:
        case str():
            return parse(value)
        case [*entries]:
            return tuple(parse(str(e)) for e in entries)
        case {"parameter": str(name)}:
            return Parameter(name)
        case {"name": str(name)}:
            return name
        case _:
            return float(value)

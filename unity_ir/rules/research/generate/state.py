"""The state of a run of the rule generator in a file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.rules.research.generate.terms import Terms, TermStep, Type, TypedTerm
from unity_ir.tdl.syntax import AttrValue

VERSION = 2


def load(path: Path | None, of: dict[str, Any]) -> dict[str, Any]:
    """
    Read the state of a run of the rule generator from the file at `path`: what it has found so far, by name (`pairs`,
    `rules`, `counts`, ..), as data of JSON. Empty where there is no file, or `path` is None.

    `of` has the parameters of the run, by name. Raises `UnityError` for the state of a run with other parameters, and
    for a file that is no state.
    """
    if path is None or not path.exists():
        return {}
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known, stages = (data["version"], data["of"]), dict[str, Any](data["stages"])
        if data["sha256"] != _digest(stages):
            raise ValueError("changed since it was written")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnityError(f"{path}: no state of a run; name another file, or remove it") from error
    if known != (VERSION, json.loads(json.dumps(of))):
        raise UnityError(f"{path}: the state of a run with other parameters; name another file, or remove it")
    return stages


def save(path: Path | None, of: dict[str, Any], stages: dict[str, Any]) -> None:
    """
    Write the state of a run of the rule generator to a file, atomically; do nothing if `path` is None.

    `of` has the parameters of the run, `stages` what it has found so far, both by name, as data for JSON.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        json.dumps({"version": VERSION, "of": of, "stages": stages, "sha256": _digest(stages)}), encoding="utf-8"
    )
    os.replace(partial, path)


def _digest(stages: dict[str, Any]) -> str:
    """Return a hash of the stages, by which a file that was changed is recognised."""
    return sha256(json.dumps(stages).encode()).hexdigest()


def pack_terms(groups: Sequence[Sequence[TypedTerm]]) -> dict[str, Any]:
    """
    Convert groups of terms to a dict for JSON. It has the lists `types`, `steps` (operators with attributes), `terms`,
    and `groups`. A term refers to its type, step and operands by their numbers in these lists, a group to its terms.
    """
    types: dict[Type, int] = {}
    steps: dict[TermStep, int] = {}
    numbers: dict[TypedTerm, int] = {}
    rows: list[list[int]] = []

    def number(term: TypedTerm) -> int:
        if term not in numbers:
            if term.step is None:
                row = [-1, term.index, types.setdefault(term.type, len(types))]
            else:
                row = [steps.setdefault(term.step, len(steps)), *map(number, term.operands)]
            numbers[term] = len(rows)
            rows.append(row)
        return numbers[term]

    packed = [[number(t) for t in group] for group in groups]
    return {
        "types": [[[t.shape, t.dtype, t.degrees, t.sum, t.copy] for t in type] for type in types],
        "steps": [[s.op, s.attributes, s.result] for s in steps],
        "terms": rows,
        "groups": packed,
    }


def unpack_terms(data: dict[str, Any], terms: Terms) -> list[tuple[TypedTerm, ...]]:
    """
    Convert data of `pack_terms` back to groups of terms, which are made by `terms`.

    Raises `UnityError` where a term is not well typed.
    """
    types: list[Type] = [tuple(map(_type, own)) for own in data["types"]]
    steps = [_step(*row) for row in data["steps"]]
    made: list[TypedTerm] = []
    row: list[int]
    for row in data["terms"]:
        if row[0] < 0:
            made.append(terms.variable(row[1], types[row[2]]))
            continue
        term = terms.make(steps[row[0]], [made[i] for i in row[1:]])
        if term is None:
            raise UnityError("unity-rules: the state does not fit the operators; remove it")
        made.append(term)
    groups: list[list[int]] = data["groups"]
    return [tuple(made[i] for i in group) for group in groups]


def _type(row: tuple[list[int], str, list[int], int, int]) -> TensorType:
    shape, dtype, degrees, sum, copy = row
    return tensor_type(tuple(shape), dtype, tuple(degrees), sum, copy)


def _step(op: str, attributes: list[list[tuple[str, Any]]], result: int) -> TermStep:
    return TermStep(op, tuple(tuple((name, _value(v)) for name, v in own) for own in attributes), result)


def _value(value: Any) -> AttrValue:
    """Return an attribute's value read from JSON, with tuples for lists."""
    match value:
        case [*entries]:
            return tuple(int(str(e)) for e in entries)
        case _:
            return value

"""
Reading collections of rewrite rules: the protobuf that TASO writes and the JSON of FlexFlow, checked, with errors of
one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from unity_ir.errors import UnityError
from unity_ir.rules.research.foreign import protobuf


@dataclass(frozen=True, slots=True)
class ForeignOp:
    """
    One operation on a side of another system's rule.

    `inputs` are (operation, result) pairs of indices; an operation below 0 stands for an input of the rule.
    `parameters` has the file's integers by key, such as `PM_AXIS`.
    """

    type: str
    inputs: tuple[tuple[int, int], ...]
    parameters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ForeignRule:
    """
    A rule of another system, as its file has it; `outputs` pair each (operation, result) of the source with the one of
    the target that replaces it.
    """

    name: str
    source: tuple[ForeignOp, ...]
    target: tuple[ForeignOp, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def read_rules(path: Path | str) -> list[ForeignRule]:
    """
    Return the rules of a collection in a file: TASO's protobuf if its name ends with `.pb`, else JSON. Raises
    `UnityError` (one line) where the file is no collection.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UnityError(f"rules {path}: cannot be read: {error.strerror}") from None
    found = protobuf.collection(f"rules {path}", data) if Path(path).suffix == ".pb" else _json(f"rules {path}", data)
    rules = _list(f"rules {path}", found, "rule")
    return [_rule(f"rules {path}: rule {i}", r) for i, r in enumerate(rules)]


def _json(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeError:
        raise UnityError(f"{where}: cannot be read: not UTF-8, and no protobuf, which is named .pb") from None
    except (ValueError, RecursionError) as error:
        raise UnityError(f"{where}: is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `ValueError` for a key given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))!a} is given twice")
    return found


def _list(where: str, of: Any, key: str) -> list[Any]:
    value = _get(where, of, key)
    if not isinstance(value, list):
        raise UnityError(f"{where}: {key!a} is no list")
    return cast("list[Any]", value)


def _get(where: str, of: Any, key: str) -> Any:
    if not isinstance(of, dict):
        raise UnityError(f"{where}: expected an object with {key!a}, got {json.dumps(of)[:40]}")
    if key not in of:
        raise UnityError(f"{where}: has no {key!a}")
    return cast("dict[str, Any]", of)[key]


def _int(where: str, of: Any, key: str) -> int:
    value = _get(where, of, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnityError(f"{where}: {key!a} is no integer")
    return value


def _text(where: str, of: Any, key: str) -> str:
    value = _get(where, of, key)
    if not isinstance(value, str):
        raise UnityError(f"{where}: {key!a} is no text")
    return value


def _rule(where: str, of: Any) -> ForeignRule:
    name = _text(where, of, "name")
    source, target = (tuple(_side(where, of, key)) for key in ("srcOp", "dstOp"))
    outputs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for mapped in _list(where, of, "mappedOutput"):
        left, right = (
            (_int(where, mapped, f"{side}OpId"), _int(where, mapped, f"{side}TsId")) for side in ("src", "dst")
        )
        for (op, _), side, key in ((left, source, "srcOpId"), (right, target, "dstOpId")):
            if not 0 <= op < len(side):
                raise UnityError(f"{where}: {key!a} is {op}, but the side has operations 0..{len(side) - 1}")
        outputs.append((left, right))
    if not outputs:
        raise UnityError(f"{where}: maps no output")
    return ForeignRule(name, source, target, tuple(outputs))


def _side(where: str, of: Any, key: str) -> Iterator[ForeignOp]:
    for at, op in enumerate(_list(where, of, key)):
        here = f"{where}: {key} {at}"
        inputs = tuple((_int(here, i, "opId"), _int(here, i, "tsId")) for i in _list(here, op, "input"))
        if any(i >= at for i, _ in inputs):
            raise UnityError(f"{here}: reads operation {max(i for i, _ in inputs)}, which does not come before it")
        parameters = {_text(here, p, "key"): _int(here, p, "value") for p in _list(here, op, "para")}
        yield ForeignOp(_text(here, op, "type"), inputs, parameters)

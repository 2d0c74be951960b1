"""Record in a function attribute that a graph was imported: the names of its tables and of tied weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute

from unity_ir.dialects.names import name_text
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.origin import Origin

IMPORTED = "pcg.imported"
"""`{tables = ["constant.0"], names = [["head.weight", "table.weight"]]}` of an imported function."""


def origin_attribute(origin: Origin) -> DictionaryAttr:
    """
    Return an imported model's origin as the attribute `pcg.imported`: a dictionary with `tables`, the names of constant
    inputs that come with the weights, and `names`, pairs [key in the state dict, weight or table that it is]; empty
    ones are left out.
    """
    tables = ArrayAttr(StringAttr(name) for name in origin.tables)
    names = ArrayAttr(ArrayAttr([StringAttr(key), StringAttr(of)]) for key, of in origin.names.items())
    return DictionaryAttr({key: value for key, value in (("tables", tables), ("names", names)) if value.data})


def origin_of(func: FuncOp, graph: Graph) -> Origin | None:
    """
    Return the origin of an imported function from its attribute `pcg.imported`: names of tables (constant inputs) and
    of tied weights, without those that its graph `graph` no longer has.

    Returns None if the function was not imported. Raises `UnityError` for an attribute of another form.
    """
    attribute = func.attributes.get(IMPORTED)
    if attribute is None:
        return None
    where = f"@{func.sym_name.data}: {IMPORTED}"
    if not isinstance(attribute, DictionaryAttr) or attribute.data.keys() - {"tables", "names"}:
        raise UnityError(f"{where} is {attribute}; it must be a dictionary of tables and names")
    inputs = {node.name for node in graph.inputs}
    known = inputs | {node.name for node in graph.weights()}
    tables = [name_text(where, one) for one in _array(where, attribute.data.get("tables"))]
    pairs = [
        [name_text(where, one) for one in _array(where, pair)] for pair in _array(where, attribute.data.get("names"))
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise UnityError(f"{where}: names are pairs of a key and the weight or table that it is")
    weights = known - inputs
    names = {key: of for key, of in pairs if of in known}
    _check(where, [key for key, _ in pairs], weights)
    return Origin(tuple(dict.fromkeys(t for t in tables if t in inputs)), names)


def _check(where: str, keys: list[str], weights: Collection[str]) -> None:
    """Raise `UnityError` for a key that is given twice, or that is a weight's name."""
    for key in keys:
        if keys.count(key) > 1 or key in weights:
            raise UnityError(f"{where}: {key!a} is the key of two tensors; leave one out")


def _array(where: str, attribute: Attribute | None) -> tuple[Attribute, ...]:
    if attribute is None:
        return ()
    if not isinstance(attribute, ArrayAttr):
        raise UnityError(f"{where}: {attribute} must be an array")
    return tuple(cast("ArrayAttr[Attribute]", attribute))

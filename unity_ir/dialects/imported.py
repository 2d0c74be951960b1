"""Record in a function attribute that a graph was imported: the names of its tables and of tied weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, IntegerAttr, StringAttr, i64
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute

from unity_ir.dialects.names import name_text
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.origin import Origin

IMPORTED = "pcg.imported"
"""`{tables = ["constant.0"], names = [["head.weight", "table.weight"]], counters = [["bn.seen", 1]]}` of an import."""


def origin_attribute(origin: Origin) -> DictionaryAttr:
    """
    Return what an imported model's graph does not say of its state dict (`origin`) as the dictionary attribute
    `pcg.imported`, without empty entries.

    Its entries are `tables`, the names of inputs whose values come with the model; `names`, pairs [key in the state
    dict, name of the weight or table that it is]; and `counters`, pairs [name of an integer in the state dict, number
    that a step adds to it].
    """
    tables = ArrayAttr(StringAttr(name) for name in origin.tables)
    names = ArrayAttr(ArrayAttr([StringAttr(key), StringAttr(of)]) for key, of in origin.names.items())
    counters = ArrayAttr(ArrayAttr([StringAttr(n), IntegerAttr(by, i64)]) for n, by in origin.counters.items())
    parts = (("tables", tables), ("names", names), ("counters", counters))
    return DictionaryAttr({key: value for key, value in parts if value.data})


def origin_of(func: FuncOp, graph: Graph) -> Origin | None:
    """
    Read the attribute `pcg.imported` of an imported function, which `origin_attribute` made; None if the function has
    none.

    The result has the names of its tables (inputs whose values come with the model), the further keys of weights,
    tables and counters in the state dict, and the counters. Tables and weights that `graph`, the function's graph, no
    longer has are left out. Raises `UnityError` for an attribute of another form.
    """
    attribute = func.attributes.get(IMPORTED)
    if attribute is None:
        return None
    where = f"@{func.sym_name.data}: {IMPORTED}"
    if not isinstance(attribute, DictionaryAttr) or attribute.data.keys() - {"tables", "names", "counters"}:
        raise UnityError(f"{where} is {attribute}; it must be a dictionary of tables, names and counters")
    inputs = {node.name for node in graph.inputs}
    known = inputs | {node.name for node in graph.weights()}
    tables = [name_text(where, one) for one in _array(where, attribute.data.get("tables"))]
    pairs = [
        [name_text(where, one) for one in _array(where, pair)] for pair in _array(where, attribute.data.get("names"))
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise UnityError(f"{where}: names are pairs of a key and the weight or table that it is")
    counters = dict(_counter(where, pair) for pair in _array(where, attribute.data.get("counters")))
    weights = known - inputs
    names = {key: of for key, of in pairs if of in known or of in counters}
    _check(where, [key for key, _ in pairs], weights)
    return Origin(tuple(dict.fromkeys(t for t in tables if t in inputs)), names, counters)


def _check(where: str, keys: list[str], weights: Collection[str]) -> None:
    """Raise `UnityError` for a key that is given twice, or that is a weight's name."""
    for key in keys:
        if keys.count(key) > 1 or key in weights:
            raise UnityError(f"{where}: {key!a} is the key of two tensors; leave one out")


def _counter(where: str, attribute: Attribute) -> tuple[str, int]:
    """Return a counter's name and what a step adds to it. Raises `UnityError` for another attribute."""
    match _array(where, attribute):
        case name, IntegerAttr(value=number) if number.data >= 0:
            return name_text(where, name), number.data
        case _:
            raise UnityError(f"{where}: counters are pairs of a name and a number from 0, not {attribute}")


def _array(where: str, attribute: Attribute | None) -> tuple[Attribute, ...]:
    if attribute is None:
        return ()
    if not isinstance(attribute, ArrayAttr):
        raise UnityError(f"{where}: {attribute} must be an array")
    return tuple(cast("ArrayAttr[Attribute]", attribute))

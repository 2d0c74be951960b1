"""
Generate an xDSL operation class for each operator.

A parallel operator's class follows from its entry in `PARALLEL_OPERATORS`, a compute operator's from its TDL line in
`unity_ir.ops`. Nothing here depends on a particular operator.
"""

from __future__ import annotations

from abc import ABC
from typing import TypeVar, cast

from xdsl.interfaces import HasCanonicalizationPatternsInterface
from xdsl.irdl import irdl_op_definition, prop_def
from xdsl.pattern_rewriter import RewritePattern

from unity_ir.dialects.pcg.attributes import CONSTRAINTS, to_attribute
from unity_ir.dialects.pcg.fold import PATTERNS
from unity_ir.dialects.pcg.operators import ComputeOp, OperatorOp, ParallelOp
from unity_ir.ops import operators
from unity_ir.ops.operator import Operator
from unity_ir.pcg.node import LEAVES
from unity_ir.pcg.parallel import PARALLEL_OPERATORS, ParallelOperator
from unity_ir.tdl.syntax import AttrValue

OpT = TypeVar("OpT", bound=OperatorOp)


def _generate(base: type[OpT], name: str, doc: str, properties: dict[str, tuple[str, AttrValue | None]]) -> type[OpT]:
    """
    Return the class of the operator `name`, with a property for each attribute, given as (kind, default).

    An attribute's Python accessor is `attr_` and its name, so that no name can shadow a method.
    """
    if name in (*LEAVES, "update") or "view" in properties:
        raise ValueError(f"operator {name}: its name, or the name of an attribute, has another meaning in the dialect")
    fields: dict[str, object] = {"__module__": __name__, "__doc__": doc, "name": f"pcg.{name}"}
    for attribute, (kind, default) in properties.items():
        value = None if default is None else to_attribute(kind, default)
        fields[f"attr_{attribute}"] = prop_def(CONSTRAINTS[kind], value, prop_name=attribute)
    class_name = "".join(part.capitalize() for part in name.split("_")) + "Op"
    return irdl_op_definition(cast(type[OpT], type(class_name, (base,), fields)))


class _Folded(ParallelOp, HasCanonicalizationPatternsInterface, ABC):
    """Base of the parallel operators, with the folds of `canonicalize`."""

    @classmethod
    def get_canonicalization_patterns(cls) -> tuple[RewritePattern, ...]:
        return PATTERNS


def _parallel_class(rule: ParallelOperator) -> type[ParallelOp]:
    doc = f"See `PARALLEL_OPERATORS[{rule.name!r}]`."
    return _generate(_Folded, rule.name, doc, {a: ("int", None) for a in rule.attributes})


def _compute_class(operator: Operator) -> type[ComputeOp]:
    properties = {a.name: (a.kind, a.default) for a in operator.declared}
    return _generate(ComputeOp, operator.name, f"`{operator.text}`", properties)


PARALLEL_OPS: dict[str, type[ParallelOp]] = {name: _parallel_class(rule) for name, rule in PARALLEL_OPERATORS.items()}
"""Class of every parallel operator."""

COMPUTE_OPS: dict[str, type[ComputeOp]] = {name: _compute_class(operator) for name, operator in operators().items()}
"""Class of every compute operator."""

"""The subst dialect: substitutions as xDSL operations. `unity_ir.rules.parse` defines the syntax of a rule."""

from xdsl.ir import Dialect

from unity_ir.dialects.subst.attributes import ParameterAttr, PolyAttr
from unity_ir.dialects.subst.ops import ApplyOp, RuleOp, YieldOp, from_rule, to_rule
from unity_ir.dialects.subst.types import SubstTensorType, SubstValueType

SUBST = Dialect("subst", [RuleOp, ApplyOp, YieldOp], [SubstTensorType, SubstValueType, PolyAttr, ParameterAttr])

__all__ = ["SUBST", "ApplyOp", "RuleOp", "SubstTensorType", "SubstValueType", "YieldOp", "from_rule", "to_rule"]

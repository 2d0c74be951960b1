"""Which operators have kernels, and which operands have no gradient."""

from unity_ir.ops import operators

WITHOUT_GRADIENT = {
    **dict.fromkeys(("detach", "floor", "sign", "batch_mean"), (0,)),
    "batch_stats": (1,),
    "batch_norm": (3,),
}
"""Floating point operands whose gradient is zero everywhere, or is kept back."""

LOWERED = list(operators())

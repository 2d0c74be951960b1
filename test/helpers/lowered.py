"""Which operators have kernels, and which operands have no gradient."""

from unity_ir.ops import operators

WINDOWS = "no kernel reads or writes windows yet, so it cannot be lowered"

OPAQUE = "no kernel for opaque functions yet, so it cannot be lowered"

NO_KERNEL = {
    **{
        name: WINDOWS
        for name in (
            *("avg_pool2d", "avg_pool2d_grad", "max_pool2d", "max_pool2d_grad"),
            *("conv2d", "conv2d_data_grad", "conv2d_weight_grad"),
            "pad",
        )
    },
    "topk": OPAQUE,
}
"""Operators that cannot be lowered at some shapes, and why."""

WITHOUT_GRADIENT = {
    **dict.fromkeys(("detach", "floor", "sign", "batch_mean"), (0,)),
    "batch_stats": (1,),
    "batch_norm": (3,),
}
"""Floating point operands whose gradient is zero everywhere, or is kept back."""

LOWERED = [name for name in operators() if name not in NO_KERNEL]

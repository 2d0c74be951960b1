"""Which operators have kernels."""

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

LOWERED = [name for name in operators() if name not in NO_KERNEL]

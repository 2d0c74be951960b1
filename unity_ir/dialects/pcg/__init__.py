"""The pcg dialect: parallel computation graphs as text, and as xDSL operations."""

from xdsl.ir import Dialect

from unity_ir.dialects.pcg.generated import COMPUTE_OPS, PARALLEL_OPS
from unity_ir.dialects.pcg.operators import ComputeOp, ParallelOp
from unity_ir.dialects.pcg.ops import ConstantOp, UpdateOp, WeightOp
from unity_ir.dialects.pcg.types import PcgTensorType, pcg_tensor

PCG = Dialect(
    "pcg",
    [WeightOp, ConstantOp, UpdateOp, *PARALLEL_OPS.values(), *COMPUTE_OPS.values()],
    [PcgTensorType],
)

__all__ = [
    "COMPUTE_OPS",
    "PARALLEL_OPS",
    "PCG",
    "ComputeOp",
    "ConstantOp",
    "ParallelOp",
    "PcgTensorType",
    "UpdateOp",
    "WeightOp",
    "pcg_tensor",
]

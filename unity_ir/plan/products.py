"""Choose between Triton and PyTorch (cuBLAS) for matrix products that were not measured."""

from __future__ import annotations

from collections.abc import Iterable

from unity_ir.errors import UnityError
from unity_ir.forms.contraction import Contraction, contraction
from unity_ir.kernels.launchers import can_store_float32, launcher
from unity_ir.plan.local_operator import LocalOperator
from unity_ir.tdl.syntax import Reduce

CUBLAS = 730e12
"""Operations per second of cuBLAS on an H100: the median of 16 products of BERT, GPT-2 and Llama-3 8B in bf16."""
CUBLAS_UNALIGNED = 260e12
"""
The same where rows of an operand or of the result do not start at multiples of 16 bytes, or where what is summed is no
multiple of 8 elements in memory.
"""
CUBLAS_ODD = 510e12
"""The same where rows are aligned, and the rows or columns of the product no multiple of 8 elements in memory."""
BANDWIDTH = 3.0e12
"""Bytes per second of a copy on an H100."""
LAUNCH = 3e-6
"""Seconds that a kernel more takes."""


def product_implementation(operator: LocalOperator) -> str:
    """
    Return the faster implementation, by estimate, of a matrix product or of a fused group that begins with one:
    `triton` (one kernel) or `torch` (cuBLAS; in a group, with another kernel for the rest). It decides for the option
    `auto` (`PlanOptions.matmul`).

    Measured on an H100 80GB with PyTorch 2.11 and Triton 3.6 (bf16, TFLOP/s); Triton's kernels load tiles by tensor
    descriptors (TMA) or by pointers:

    | product (m x n x k) | cuBLAS | Triton, descriptors | Triton, pointers |
    |---|---|---|---|
    | 16384 x 4096 x 1024 | 721 | 659 | 558 |
    | 16384 x 1024 x 4096 | 770 | 694 | 620 |
    | 4096 x 14336 x 4096 | 778 | 670 | 523 |
    | 8192 x 8192 x 8192 | 709 | 697 | 539 |
    | 1024 x 1024 x 16384 | 630 | 227 | 384 |
    | 16384 x 30522 x 1024 | 257 | 596 | 526 |
    | 8192 x 50257 x 768 | 96 | 526 | 470 |
    | 30522 x 1024 x 16384 | 268 | - | 155 |
    | 30522 x 1024 x 16384, padded rows | 493 | 683 | - |
    | 16384 x 1024 x 30522, padded rows | 267 | 712 | - |
    | 768 x 8192 x 50257, padded rows | 131 | - | - |

    Where rows are aligned (begin at multiples of 16 bytes), cuBLAS is some 7 % faster, more where there are few tiles.
    In a group, Triton saves that the product is written and read again: 4 bytes per element, against the 2 * k
    operations that compute it. With descriptors that is worth it up to k of about 6,000, with pointers up to 1,500,
    with the small tiles of a long epilogue up to 500. Where only the result's rows are unaligned, as for the logits of
    BERT and GPT-2, Triton is at least twice as fast even without a group. It is faster, too, for both gradients of the
    last layer of these models, whose rows are padded (`padded_rows`) but whose sizes are no multiples of 8. Float32
    products, exact in Triton, stay there: they were not measured.
    """
    line = operator.line
    found = [contraction(r, line.extents) for r in line.results]
    products = [of for of in found if of is not None]
    try:
        work = launcher(line, operator.dtypes, "triton", operator.divided).work
    except UnityError:
        return "torch"
    if len(products) < len(found) or len(work) != 1 or not work[0].seconds:
        return "triton"
    (of, *_) = products
    if of.rounded:
        return "triton"  # whose kernels round; PyTorch has one for each step of it
    sizes = of.sizes
    elements = sizes["b"] * sizes["m"] * sizes["n"]
    rate = _rate(of, [shape[-1] for shape in line.result_shapes])
    others = 2 * 2 * elements / BANDWIDTH + LAUNCH
    is_bare = all(isinstance(r.expr, Reduce) for r in line.results)
    is_bare = is_bare and (not operator.fused or can_store_float32(line, operator.dtypes))
    by_torch = 2 * elements * sizes["k"] / rate + (0.0 if is_bare else others)
    return "triton" if work[0].seconds < by_torch else "torch"


def _rate(of: Contraction, rows: Iterable[int]) -> float:
    """Return cuBLAS's operations per second of a product whose results have rows of so many elements."""
    strides = [(d, step) for own in (of.x_strides, of.w_strides) for d, step in own.items()]
    inner = {d for d, step in strides if step == 1}
    steps = (step for _, step in strides if step != 1)
    if any(size % 8 for size in (*steps, *rows)) or ("k" in inner and of.sizes["k"] % 8):
        return CUBLAS_UNALIGNED
    return CUBLAS_ODD if any(of.sizes[d] % 8 for d in inner) else CUBLAS

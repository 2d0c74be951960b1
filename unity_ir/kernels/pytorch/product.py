"""Multiply matrices by PyTorch's BLAS: with results in float32, added to an earlier result, or rounded to 8 bits."""

from unity_ir.forms.float8 import LARGEST, TINY

MATRIX_PRODUCT = '''\
def matrix_product(a, b, total=None):
    """
    Return a @ b, in float32 if elements have 16 bits, for 2-d tensors of one type; added to `total` in place unless it
    is None.
    """
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        product = torch.mm(a.float(), b.float())
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


'''
"""Text of a program: the function that such products call."""

FLOAT8_PRODUCT = '''\
def rows_in_float8(x):
    """Return the rows of a matrix in 8 bits, and their scales in float32 [rows, 1], with which they fill the type."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=TINY) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def float8_product(a, b):
    """Return a @ b.T for 2-d tensors of 16 bits, of which each row is rounded to 8 bits by a scale of its own."""
    if a.dtype == torch.float64:
        return a @ b.T
    (a8, a_scale), (b8, b_scale) = rows_in_float8(a), rows_in_float8(b)
    return torch._scaled_mm(
        a8, b8.T, scale_a=a_scale, scale_b=b_scale.T, out_dtype=a.dtype, use_fast_accum=a.is_cuda
    )


'''.replace("TINY", str(TINY)).replace("LARGEST", str(LARGEST))
"""Text of a program: the functions that products of rounded operands call."""

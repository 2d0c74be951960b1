"""Multiply matrices by PyTorch's BLAS, 16-bit elements with results in float32, and add to an earlier result."""

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

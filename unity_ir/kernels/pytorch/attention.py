"""
Write plain attention as calls of cuDNN's, forward and backward, for GPUs of NVIDIA from sm_80 on. What computes it
elsewhere, or where the order of sums must not depend on timing, is written after them.

They are the operators to which `scaled_dot_product_attention` leads, called by themselves since an emitted program has
backwards of its own. cuDNN's are the fastest of PyTorch's on an H100 (docs/lowering.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.forms.addresses import Names, operand_shapes
from unity_ir.forms.plain_attention import PlainAttention, plain_attention
from unity_ir.tdl.syntax import Bound

_WIDEST = 128
_NARROWEST = 72
"""Width of heads from which on cuDNN's is faster than our kernels, measured on an H100 (docs/lowering.md)."""


def cudnn_attention(bound: Bound, dtypes: Sequence[str], starts: Mapping[str, str]) -> PlainAttention | None:
    """
    Match a bound TDL line, with operands of these element types, as attention that cuDNN computes, or its gradients:
    softmax of scaled scores, causal or not, times values, without dropout or bias; in 16 bits, of two positions or
    more, with heads of at most 128 features, a multiple of 8. Return the match, None for any other line.

    `starts` has, for each index variable along which this rank's piece does not start at 0, the name of the Python
    variable with the global index at which it starts.
    """
    kinds = dict(zip((p.name for p in bound.operands), dtypes, strict=True))
    if not {*kinds.values()} & {"f16", "bf16"} or (of := plain_attention(bound, starts)) is None:
        return None
    shapes, wide = operand_shapes(bound), [n for n in (of.q, of.k, of.v, of.y, of.out) if n is not None]
    widths = {shapes[n][3] for n in wide}
    (width, *more) = widths
    if more or width % 8 or width > _WIDEST or min(of.length, of.keys) < 2:
        return None
    same = len({kinds[n] for n in wide}) == 1 and kinds[of.q] in ("f16", "bf16")
    sums = "f32" if of.logsum is None else kinds[of.logsum]
    saved = not of.saves or bound.results[1].dtype == "f32"
    return of if same and saved and sums == "f32" else None


def cudnn_is_faster(bound: Bound, of: PlainAttention) -> bool:
    """
    Return whether cuDNN computes the line `bound`, matched as `of`, faster than our kernels: whether its heads have 72
    features (`_NARROWEST`) or more.

    On an H100 (forward and backward together), cuDNN takes 5% longer or more than ours on heads of 64. On heads of 128
    it takes 12% less at 4,096 positions, and 17% less or more at 8,192. (At 8,192 ours were measured only in a version
    that copies tiles by tensor descriptors, which they do not use now.)
    """
    return operand_shapes(bound)[of.q][3] >= _NARROWEST


HAS_CUDNN = """\
def has_cudnn(x):
    \"""Return whether cuDNN computes attention of a tensor: on a GPU of NVIDIA, where any order of sums will do.\"""
    if not x.is_cuda or torch.version.hip or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


"""
"""Text of a program that the lines of `cudnn_lines` call."""


def cudnn_lines(of: PlainAttention, variables: Mapping[str, str], names: Names) -> list[str]:
    """
    Return the first lines of a Python function's body, which compute the line matched as `of` by cuDNN and return its
    results, if the operands are on a GPU that has cuDNN's attention (`has_cudnn`). Elsewhere they do nothing: the
    caller writes lines after them that compute it otherwise.

    `variables` has the Python variable of each operand; `names` gives new ones. The program must have the text
    `HAS_CUDNN`, which defines `has_cudnn`.
    """
    q, k, v = (variables[n] for n in (of.q, of.k, of.v))
    call, options = "torch.ops.aten._scaled_dot_product_cudnn_attention", f"{of.causal}, scale={of.scale!r}"
    head, found = f"if has_cudnn({q}):", names.new("found")
    if of.y is None or of.out is None or of.logsum is None:
        line = f"    {found} = {call}({q}, {k}, {v}, None, {of.saves}, 0.0, {options})"
        return [head, line, f"    return {found}[0], {found}[1][..., 0]" if of.saves else f"    return {found}[0]"]
    y, out, logsum = (variables[n] for n in (of.y, of.out, of.logsum))
    # The state of random numbers, which are not drawn.
    state = names.new("state")
    given = f"{state}, {state}, None, None, None, {of.length}, {of.keys}, 0.0, {options}"
    return [
        head,
        f"    {state} = torch.zeros((), dtype=torch.int64, device={q}.device)",
        f"    {found} = {call}_backward(",
        f"        {y}, {q}, {k}, {v}, {out}, {logsum}[..., None], {given}",
        "    )",
        f"    return {', '.join(f'{found}[{n}]' for n in of.order)}",
    ]

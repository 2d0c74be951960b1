"""
Generate kernels of convolutions and their two gradients: matrix products whose operands are gathered as they are read
(implicit GEMM: Chetlur et al., cuDNN, 2014).

| form | rows | columns | summed |
|---|---|---|---|
| forward | batch, outer | own | shared, inner |
| data | batch, positions written | shared | own, inner |
| weight | own | shared, inner | batch, outer |

The names are those of `forms.convolution`; the groups are the second axis of the grid. The last name of an entry is
the fastest; where channels (shared or own) are neighbours in memory, they are that in place of taps (inner). The sum
for a weight's gradient is long, so programs compute partial sums, which PyTorch adds up: no atomics, so that results do
not depend on timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from unity_ir.forms.addresses import power_of_two
from unity_ir.forms.implicit_gemm import ImplicitGemm
from unity_ir.kernels.triton.launch import Argument, Buffer, KernelLaunch, Scalar, Stage, new_tensor

_HEAD = '''\
# Precision of float32 products, as in matrix products.
CONVOLUTION_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
CONVOLUTION_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def {name}(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
{parameters}\
):
    """{doc}"""
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    steps = tl.arange(0, BLOCK_K)
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        group = group.to(tl.int64)
        steps = steps.to(tl.int64)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
'''
_DOT = """\
        if CONVOLUTION_INTERPRETED:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        product = tl.dot(a, b, product, input_precision=CONVOLUTION_PRECISION)
"""


def _tap(k: str, indent: str) -> str:
    """Return the lines that take the position `k` among a kernel's channels and taps apart."""
    lines = (
        "if CHANNELS_LAST:",
        f"    channel = {k} % CHANNELS",
        f"    i = {k} // CHANNELS // INNER_1",
        f"    j = {k} // CHANNELS % INNER_1",
        "else:",
        f"    channel = {k} // (INNER_0 * INNER_1)",
        f"    i = {k} // INNER_1 % INNER_0",
        f"    j = {k} % INNER_1",
    )
    return "".join(f"{indent}{line}\n" for line in lines)


_TAP = f"""\
        k = start + steps
        k_inside = k < K
{_tap("k", "        ")}\
"""

_FORWARD = f"""\
    batch = m // (OUTER_0 * OUTER_1)
    y = m // OUTER_1 % OUTER_0
    z = m % OUTER_1
    first_row = y * STRIDE_0 + FIRST_0
    first_column = z * STRIDE_1 + FIRST_1
    a_ptr += (batch * a_batch)[:, None] + group * a_group
    b_ptr += (n * b_own)[None, :] + group * b_group
    for start in range(0, K, BLOCK_K):
{_TAP}\
        row = first_row[:, None] + (i * DILATION_0)[None, :]
        column = first_column[:, None] + (j * DILATION_1)[None, :]
        inside = (row >= 0) & (row < SIZE_0) & (column >= 0) & (column < SIZE_1)
        at = (channel * a_shared)[None, :] + row * a_0 + column * a_1
        a = tl.load(a_ptr + at, mask=m_inside & k_inside[None, :] & inside, other=0.0)
        at = channel * b_shared + i * b_0 + j * b_1
        b = tl.load(b_ptr + at[:, None], mask=k_inside[:, None] & n_inside, other=0.0)
{_DOT}\
    to = (batch * out_batch + y * out_0 + z * out_1)[:, None] + (n * out_own)[None, :] + group * out_group
    tl.store(out_ptr + to, product, mask=m_inside & n_inside)
"""

_DATA = f"""\
    batch = m // (SIZE_0 * SIZE_1)
    row = m // SIZE_1 % SIZE_0
    column = m % SIZE_1
    a_ptr += (batch * a_batch)[:, None] + group * a_group
    b_ptr += (n * b_shared)[None, :] + group * b_group
    for start in range(0, K, BLOCK_K):
{_TAP}\
        down = (row - FIRST_0)[:, None] - (i * DILATION_0)[None, :]
        right = (column - FIRST_1)[:, None] - (j * DILATION_1)[None, :]
        y = down // STRIDE_0
        z = right // STRIDE_1
        inside = (down >= 0) & (y < OUTER_0) & (right >= 0) & (z < OUTER_1)
        inside = inside & (y * STRIDE_0 == down) & (z * STRIDE_1 == right)
        at = (channel * a_own)[None, :] + y * a_0 + z * a_1
        a = tl.load(a_ptr + at, mask=m_inside & k_inside[None, :] & inside, other=0.0)
        at = channel * b_own + i * b_0 + j * b_1
        b = tl.load(b_ptr + at[:, None], mask=k_inside[:, None] & n_inside, other=0.0)
{_DOT}\
    to = (batch * out_batch + row * out_0 + column * out_1)[:, None] + (n * out_shared)[None, :] + group * out_group
    tl.store(out_ptr + to, product, mask=m_inside & n_inside)
"""

_WEIGHT = f"""\
{_tap("n", "    ")}\
    a_ptr += (m * a_own)[:, None] + group * a_group
    b_ptr += (channel * b_shared)[None, :] + group * b_group
    begin = tl.program_id(2) * PART
    for start in range(begin, tl.minimum(begin + PART, K), BLOCK_K):
        k = start + steps
        k_inside = k < K
        batch = k // (OUTER_0 * OUTER_1)
        y = k // OUTER_1 % OUTER_0
        z = k % OUTER_1
        at = batch * a_batch + y * a_0 + z * a_1
        a = tl.load(a_ptr + at[None, :], mask=m_inside & k_inside[None, :], other=0.0)
        row = (y * STRIDE_0 + FIRST_0)[:, None] + (i * DILATION_0)[None, :]
        column = (z * STRIDE_1 + FIRST_1)[:, None] + (j * DILATION_1)[None, :]
        inside = (row >= 0) & (row < SIZE_0) & (column >= 0) & (column < SIZE_1)
        at = (batch * b_batch)[:, None] + row * b_0 + column * b_1
        b = tl.load(b_ptr + at, mask=k_inside[:, None] & n_inside & inside, other=0.0)
{_DOT}\
    to = (m * out_own)[:, None] + (channel * out_shared + i * out_0 + j * out_1)[None, :] + group * out_group
    out_ptr += tl.program_id(2) * ELEMENTS
    tl.store(out_ptr + to, product, mask=m_inside & n_inside)
"""

_BODIES: Mapping[str, tuple[str, str, str]] = {
    "forward": ("convolution_kernel", _FORWARD, "out[n, o, y, z] = sum[c, i, j](a[n, c, y i, z j] * b[o, c, i, j])"),
    "data": ("convolution_data_kernel", _DATA, "out[n, c, y i, z j] = sum[o](a[n, o, y, z] * b[o, c, i, j])"),
    "weight": (
        "convolution_weight_kernel",
        _WEIGHT,
        "out[o, c, i, j] = sum[n, y, z](a[n, o, y, z] * b[n, c, y i, z j])",
    ),
}

PROGRAMS = 256
"""Programs that keep a GPU busy: the sum for a weight's gradient is cut into as many parts as come near that."""


def convolution_launch(stage: Stage, of: ImplicitGemm) -> KernelLaunch:
    """
    Return the launch of the kernel of a convolution or one of its gradients, matched as `of`. `stage` is the result to
    compute: its expression, and the buffers it reads and fills.

    A weight's gradient may be computed as partial sums by several programs; the launch then has lines of code after it,
    in which PyTorch adds them up.
    """
    m, n, k = of.sizes
    form = of.of.form
    image, other = stage.buffers[of.of.image.tensor], stage.buffers[of.of.other.tensor]
    a, b = (other, image) if form == "weight" else (image, other)
    block_m, block_n, block_k, warps, stages = blocks(m, n, k, form, a.dtype)
    tiles = -(-m // block_m) * -(-n // block_n)
    # Channels that are neighbours in memory are neighbours in the sum, or in its columns, too.
    is_last = of.strides["b_shared" if form == "weight" else f"a_{'shared' if form == 'forward' else 'own'}"] == 1
    constants: dict[str, Scalar] = {**of.geometry, "CHANNELS": of.channels, "CHANNELS_LAST": is_last}
    grid: tuple[int, ...] = (tiles, of.groups)
    output, allocation, after = stage.output, stage.allocation, tuple[str, ...]()
    if form == "weight":
        parts = max(1, min(PROGRAMS // (tiles * of.groups), -(-k // (8 * block_k))))
        part = -(-k // (parts * block_k)) * block_k
        parts = -(-k // part)
        constants |= {"PART": part, "ELEMENTS": prod(stage.shape)}
        grid = (tiles, of.groups, parts)
        if parts > 1:
            output = Buffer(stage.names.new("parts"), "f32", "torch.float32")
            allocation = new_tensor(output, (parts, *stage.shape), stage.device)
            after = (f"{stage.output.name} = {output.name}.sum(0).to({stage.output.torch_dtype})",)
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "WIDE": stage.wide}
    arguments = {
        "a_ptr": a.argument,
        "b_ptr": b.argument,
        "out_ptr": output.argument,
        **{name: Argument.integer(value) for name, value in zip("MNK", (m, n, k), strict=True)},
        **{name: Argument.integer(value) for name, value in of.strides.items()},
    }
    name, body, doc = _BODIES[form]
    parameters = "".join(f"    {name},\n" for name in of.strides)
    parameters += "".join(f"    {name}: tl.constexpr,\n" for name in constants)
    text = _HEAD.format(name=name, parameters=parameters, doc=doc) + body
    expects = () if a.dtype == "f32" else ("mma",)
    return KernelLaunch(name, text, grid, arguments, constants, warps, stages, allocation, expects=expects, after=after)


def blocks(m: int, n: int, k: int, form: str, dtype: str) -> tuple[int, int, int, int, int]:
    """
    Return (rows, columns, summed elements, warps, pipeline stages) for a convolution's kernel, which computes an m x n
    x k matrix product: first the tile that one program computes, then its launch options.

    `form` says what is computed: `forward` (the convolution), `data` (the gradient of its image) or `weight` (the
    gradient of its weight). `dtype` is the operands' element type. Tiles are smaller than those of matrix products,
    since addresses take registers, and smallest in float32, whose exact products keep whole rows of both factors in
    registers.
    """
    exact = dtype == "f32"
    block_m = min(64, max(16, power_of_two(m)))
    block_n = min(32 if exact and form == "weight" else 64, max(16, power_of_two(n)))
    if not exact and block_m == block_n == 64:
        # A100's assembler spills some bytes with half the warps.
        return block_m, block_n, min(64, max(16, power_of_two(k))), 8, 3
    # With few columns, the gradient by the image keeps more addresses than products in registers.
    warps = 8 if exact and form == "data" and block_n == 32 else 4
    return block_m, block_n, min(16 if exact else 32, max(16, power_of_two(k))), warps, 3

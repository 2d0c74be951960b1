"""
Convolutions and their two gradients as matrix products whose operands are gathered as they are read (implicit GEMM).

| form | rows | columns | summed |
|---|---|---|---|
| forward | batch, outer | own | shared, inner |
| data | batch, positions written | shared | own, inner |
| weight | own | shared, inner | batch, outer |

The names are those of `forms.convolution`; the groups are the second axis of the grid. What is summed for a weight
is long, so it is cut into parts, each with a result of its own, which PyTorch adds up: no atomics, so that results do
not depend on timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import address, power_of_two
from unity_ir.forms.contraction import one_stride
from unity_ir.forms.convolution import Convolution
from unity_ir.forms.windows import reach
from unity_ir.lowering.triton.step import Argument, Buffer, Scalar, Stage, Step
from unity_ir.tdl.syntax import Access, Window, index_extent

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
_TAP = """\
        k = start + steps
        k_inside = k < K
        channel = k // (INNER_0 * INNER_1)
        i = k // INNER_1 % INNER_0
        j = k % INNER_1
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
    channel = n // (INNER_0 * INNER_1)
    i = n // INNER_1 % INNER_0
    j = n % INNER_1
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
_DIMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("batch", "group", "shared"), ("own", "group", "shared"), ("batch", "group", "own")),
    "data": (("batch", "group", "own"), ("own", "group", "shared"), ("batch", "group", "shared")),
    "weight": (("batch", "group", "own"), ("batch", "group", "shared"), ("own", "group", "shared")),
}
"""Of each form, what beside the windows' dims a, b and the result are indexed by."""
_SIDES: Mapping[str, tuple[str, str, str]] = {
    "forward": ("window", "inner", "outer"),
    "data": ("outer", "inner", "window"),
    "weight": ("outer", "window", "inner"),
}
"""And what their other two dims are."""

PROGRAMS = 256
"""Programs that keep a GPU busy: as many parts as come near that."""


@dataclass(frozen=True)
class Gathered:
    """The numbers of one kernel: sizes of the product, strides by parameter, and the windows."""

    of: Convolution
    sizes: tuple[int, int, int]
    strides: Mapping[str, int]
    geometry: Mapping[str, Scalar]
    groups: int


def gathered(of: Convolution, result: Sequence[object], extents: Mapping[str, int]) -> Gathered | None:
    """The kernel's numbers; None where a group of variables has no one stride, or there are three windows."""
    if len(of.slidings) > 2:
        return None
    image, other = Access(of.image.tensor, of.image.indices), Access(of.other.tensor, of.other.indices)
    a, b = (other, image) if of.form == "weight" else (image, other)
    names = {"batch": of.batch, "group": of.groups, "shared": of.shared, "own": of.own}
    strides: dict[str, int] = {}
    for prefix, indices, dims, side in zip(
        ("a", "b", "out"), (a.indices, b.indices, tuple(result)), _DIMS[of.form], _SIDES[of.form], strict=True
    ):
        where = address(indices, extents)  # pyright: ignore[reportArgumentType]
        for dim in dims:
            stride = one_stride([n for n in names[dim] if extents[n] > 1], extents, where)
            if stride is None:
                return None
            strides[f"{prefix}_{dim}"] = stride
        raw = _dim_strides(indices, extents)
        for k, s in enumerate(of.slidings):
            name = {"inner": s.inner, "outer": s.outer}.get(side)
            strides[f"{prefix}_{k}"] = raw[s.window] if name is None else where.strides.get(name, 0)
        for k in range(len(of.slidings), 2):
            strides[f"{prefix}_{k}"] = 0
    geometry: dict[str, Scalar] = {}
    for k in range(2):
        s = of.slidings[k] if k < len(of.slidings) else None
        values = {"OUTER": 1, "INNER": 1, "SIZE": 1, "STRIDE": 1, "DILATION": 1, "FIRST": 0}
        if s is not None:
            values = {
                "OUTER": extents[s.outer] if s.outer else 1,
                "INNER": extents[s.inner] if s.inner else 1,
                "SIZE": s.window.size,
                "STRIDE": s.stride,
                "DILATION": s.dilation,
                "FIRST": reach(s.window, extents)[0],
            }
        geometry |= {f"{name}_{k}": value for name, value in values.items()}
    batch, groups, shared, own = (prod(extents[n] for n in some) for some in names.values())
    outer, inner, size = (prod(int(geometry[f"{what}_{k}"]) for k in range(2)) for what in ("OUTER", "INNER", "SIZE"))
    sizes = {
        "forward": (batch * outer, own, shared * inner),
        "data": (batch * size, shared, own * inner),
        "weight": (own, shared * inner, batch * outer),
    }[of.form]
    return Gathered(of, sizes, strides, geometry, groups)


def _dim_strides(indices: Sequence[object], extents: Mapping[str, int]) -> dict[Window, int]:
    """The elements between neighbours along each dim that is indexed by a window."""
    found: dict[Window, int] = {}
    stride = 1
    for index in reversed(indices):
        if isinstance(index, Window):
            found[index] = stride
        stride *= index_extent(index, extents)  # pyright: ignore[reportArgumentType]
    return found


def convolution_step(stage: Stage, of: Gathered) -> tuple[Step, tuple[str, ...]]:
    """The launch of the kernel, and the lines after it that add up its parts."""
    m, n, k = of.sizes
    form = of.of.form
    image, other = stage.buffers[of.of.image.tensor], stage.buffers[of.of.other.tensor]
    a, b = (other, image) if form == "weight" else (image, other)
    block_m, block_n, block_k, warps, stages = blocks(m, n, k, form, a.dtype)
    tiles = -(-m // block_m) * -(-n // block_n)
    constants: dict[str, Scalar] = {**of.geometry}
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
            shape = (parts, *stage.shape)
            allocation = f"{output.name} = torch.empty({shape}, dtype=torch.float32, device={stage.device}.device)"
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
    return Step(name, text, grid, arguments, constants, warps, stages, allocation, expects=expects), after


def blocks(m: int, n: int, k: int, form: str, dtype: str) -> tuple[int, int, int, int, int]:
    """
    Tile sizes, warps and pipeline stages. Tiles are smaller than those of matrix products, as addresses take registers,
    and those of float32, whose exact products hold whole rows of both factors, the smallest.
    """
    exact = dtype == "f32"
    block_m = min(64, max(16, power_of_two(m)))
    block_n = min(32 if exact and form == "weight" else 64, max(16, power_of_two(n)))
    # Of few columns, a gradient by the image holds more addresses than products.
    warps = 8 if exact and form == "data" and block_n == 32 else 4
    return block_m, block_n, min(16 if exact else 32, max(16, power_of_two(k))), warps, 3

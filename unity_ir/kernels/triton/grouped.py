"""
Generate kernels of ragged grouped products: rows times the one weight that integers pick for each, as in a mixture of
experts, and the weights' gradient.

Lines before the launch sort the rows by their weights (as `scatter` sorts positions); rows are read and written where
they are, through that order. Since only the device knows how many rows a weight has, a launch has as many tiles as
there could be, and each tile looks up which weight's rows it has. No rows are moved, no two programs add to one
element, and the host does not wait for the device.
"""

from __future__ import annotations

from dataclasses import replace

from unity_ir.forms.addresses import power_of_two
from unity_ir.forms.grouped import Grouped
from unity_ir.kernels.triton.launch import Argument, KernelLaunch, Scalar, Stage
from unity_ir.kernels.triton.matmul import blocks, expects
from unity_ir.kernels.triton.scatter import Sorted

_HEAD = '''\
# Precision of float32 products, as in matrix products.
ROUTED_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
ROUTED_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def {name}(
    x_ptr,
    w_ptr,
    order_ptr,
    begins_ptr,
    out_ptr,
    {sizes},
    {strides},
{constants}\
):
    """{doc}"""
'''
_DOT = """\
        if ROUTED_INTERPRETED:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        product = tl.dot(x, w, product, input_precision=ROUTED_PRECISION)
"""

_ROWS = f"""\
    columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // columns
    n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    # Groups of rows: of a weight before the first, of each, of one behind the last; of each as many tiles as it fills.
    group = tl.arange(0, GROUPS)
    begins = tl.load(begins_ptr + group - 1, mask=(group > 0) & (group <= WEIGHTS + 1), other=0).to(tl.int32)
    ends = tl.load(begins_ptr + group, mask=group <= WEIGHTS, other=M).to(tl.int32)
    ends = tl.where(group <= WEIGHTS + 1, ends, 0)
    tiles = tl.cdiv(ends - begins, BLOCK_M)
    behind = tl.cumsum(tiles, 0)
    own = tl.sum((behind <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(group == own, begins + (tile - behind + tiles) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(group == own, ends, 0), 0)
    row = begin + tl.arange(0, BLOCK_M)
    m_inside = row < end
    m = tl.load(order_ptr + row, mask=m_inside, other=0)
    weight = tl.maximum(tl.minimum(own, WEIGHTS) - 1, 0)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        n = n.to(tl.int64)
        k = k.to(tl.int64)
        weight = weight.to(tl.int64)
    else:
        m = m.to(tl.int32)
    m_inside = m_inside[:, None]
    n_inside = (n < N)[None, :]
    x_ptr += m[:, None] * x_m + k[None, :] * x_k
    w_ptr += weight * w_b + k[:, None] * w_k + n[None, :] * w_n
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, tl.where((own > 0) & (own <= WEIGHTS), K, 0), BLOCK_K):
        k_inside = k < K - start
        x = tl.load(x_ptr, mask=m_inside & k_inside[None, :], other=0.0)
        w = tl.load(w_ptr, mask=k_inside[:, None] & n_inside, other=0.0)
{_DOT}\
        x_ptr += BLOCK_K * x_k
        w_ptr += BLOCK_K * w_k
    tl.store(out_ptr + m[:, None] * out_m + n[None, :] * out_n, product, mask=m_inside & n_inside)
"""

_WEIGHTS = f"""\
    columns = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.program_id(1)
    begin = tl.load(begins_ptr + weight).to(tl.int32)
    end = tl.load(begins_ptr + weight + 1).to(tl.int32)
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        weight = weight.to(tl.int64)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    x_ptr += m[:, None] * x_m
    w_ptr += n[None, :] * w_n
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        k_inside = row < end
        k = tl.load(order_ptr + row, mask=k_inside, other=0)
        if not WIDE:
            k = k.to(tl.int32)
        x = tl.load(x_ptr + k[None, :] * x_k, mask=m_inside & k_inside[None, :], other=0.0)
        w = tl.load(w_ptr + k[:, None] * w_k, mask=k_inside[:, None] & n_inside, other=0.0)
{_DOT}\
    to = out_ptr + weight * out_b + m[:, None] * out_m + n[None, :] * out_n
    tl.store(to, product, mask=m_inside & n_inside)
"""


def grouped_launch(stage: Stage, of: Grouped) -> KernelLaunch:
    """
    Return the launch of the kernel of a grouped product, matched as `of`: each row times the one of several weights
    whose number an integer operand gives for it, as in a mixture of experts, or the weights' gradient. `stage` is the
    result to compute: its expression, and the buffers it reads and fills.

    The launch has lines of code before it that sort the rows by their weights.
    """
    sizes = of.sizes
    x, w = stage.buffers[of.of.x.tensor], stage.buffers[of.of.w.tensor]
    made = Sorted.of(stage)
    read = [of.strides["x"], of.strides["w"]]
    half = x.dtype != "f32" and all(s % 8 == 0 or s in (0, 1) for own in read for s in own.values())
    # The tile is chosen for an equal share of the rows for every weight.
    share = "k" if of.of.of_weights else "m"
    fair = {**sizes, share: -(-sizes[share] // sizes["b"])}
    block_m, block_n, block_k, warps, stages = blocks(fair, half, x.dtype == "f32")
    columns = -(-sizes["n"] // block_n)
    constants: dict[str, Scalar] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "WIDE": stage.wide}
    if of.of.of_weights:
        name, body = "routed_weight_kernel", _WEIGHTS
        doc = "out[b, m, n] = sum(x[m, k] * w[k, n]), over the rows k that go to b."
        used = "MN"
        grid: tuple[int, ...] = (-(-sizes["m"] // block_m) * columns, sizes["b"])
    else:
        name, body = "routed_kernel", _ROWS
        doc = "out[m, n] = sum[k](x[m, k] * w[b, k, n]), where m goes to b; 0 where it goes to none of them."
        used = "MNK"
        groups = min(sizes["b"] + 2, sizes["m"])
        # Every group but one may end with a tile of one row.
        grid = (((sizes["m"] - groups) // block_m + groups) * columns,)
        constants = {"WEIGHTS": sizes["b"], "GROUPS": power_of_two(sizes["b"] + 2), **constants}
    integers = {size: sizes[size.lower()] for size in used}
    strides = {f"{tensor}_{dim}": stride for tensor, own in of.strides.items() for dim, stride in own.items()}
    text = (
        _HEAD.format(
            name=name,
            sizes=",\n    ".join(integers),
            strides=",\n    ".join(strides),
            constants="".join(f"    {c}: tl.constexpr,\n" for c in constants),
            doc=doc,
        )
        + body
    )
    arguments = {
        "x_ptr": x.argument,
        "w_ptr": w.argument,
        "order_ptr": Argument(made.order, "*i64"),
        "begins_ptr": Argument(made.begins, "*i64"),
        "out_ptr": stage.output.argument,
        **{name: Argument.integer(value) for name, value in (integers | strides).items()},
    }
    launch = KernelLaunch(
        name, text, grid, arguments, constants, warps, stages, stage.allocation, expects=expects(sizes, read, x.dtype)
    )
    # What is stored of the weights' gradient may be cast, as nothing else follows in its kernel.
    kind = "grouped" if of.of.of_weights else ""
    return replace(launch, kind=kind, before=made.lines(stage, of.of.variable, of.of.at))

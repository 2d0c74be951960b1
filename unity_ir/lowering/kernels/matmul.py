"""Contractions of two operands: one tiled kernel for all of them, at any strides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.lowering.kernels.layout import Address, address, power_of_two, runs
from unity_ir.lowering.kernels.step import Argument, Stage, Step
from unity_ir.tdl.functions import FUSED
from unity_ir.tdl.syntax import Access, Binary, Call, Expr, Reduce, Result, index_names

SMALLEST = 16
"""Rows and columns of a product that is worth a program of its own: those of a matrix instruction."""
MOST_BATCHES = 65535
"""Programs along the second axis of a grid."""

_TEXT = '''\
# Precision of float32 products: "tf32" is several times faster on tensor cores and keeps 10 bits of fractions.
INPUT_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def {name}(
    x_ptr,
    w_ptr,
    out_ptr,
    M,
    N,
    K,
    x_m,
    x_k,
    w_k,
    w_n,
    out_m,
    out_n,
{parameters}\
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[m, n] = activation(sum[k](x[m, k] * w[k, n])), with the stride of every dim."""
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside = (m < M)[:, None]
    n_inside = (n < N)[None, :]
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
{offsets}\
    x_ptr += m[:, None] * x_m + k[None, :] * x_k
    w_ptr += k[:, None] * w_k + n[None, :] * w_n
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k_inside = k < K - start
        x = tl.load(x_ptr, mask=m_inside & k_inside[None, :], other=0.0)
        w = tl.load(w_ptr, mask=k_inside[:, None] & n_inside, other=0.0)
        if INTERPRETED:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        product = tl.dot(x, w, product, input_precision=INPUT_PRECISION)
        x_ptr += BLOCK_K * x_k
        w_ptr += BLOCK_K * w_k
    if ACTIVATION == "relu":
        product = tl.where(product < 0.0, 0.0, product)
    if ACTIVATION == "gelu":
        product = 0.5 * product * (1.0 + tl.erf(product * 0.7071067811865476))
    tl.store(out_ptr + m[:, None] * out_m + n[None, :] * out_n, product, mask=m_inside & n_inside)
'''

_BATCH_PARAMETERS = "    x_b,\n    w_b,\n    out_b,\n"
_BATCH_OFFSETS = """\
    b = tl.program_id(1)
    if WIDE:
        b = b.to(tl.int64)
    x_ptr += b * x_b
    w_ptr += b * w_b
    out_ptr += b * out_b
"""


@dataclass(frozen=True, slots=True)
class Contraction:
    """`out[b, m, n] = activation(sum[k](x[b, m, k] * w[b, k, n]))`, with a stride for each."""

    x: str
    w: str
    activation: str
    sizes: Mapping[str, int]
    """Of `b`, `m`, `n` and `k`."""
    x_strides: Mapping[str, int]
    w_strides: Mapping[str, int]
    out_strides: Mapping[str, int]
    repeated: bool = False
    """One of the operands is the same in every product of the batch."""


def contraction(result: Result, extents: Mapping[str, int]) -> Contraction | None:
    """
    A result as one matrix product, or a batch of them; None if it is none, or its strides do not fit.

    Each of `m` (variables of the first operand and the result), `n`, `k` (reduced) and `b` (of all three) may be
    several variables, as long as they are one run of memory wherever they occur. Where they are not, the outermost of
    `m` or `n` may be a batch, of products with the same other operand (images times the weight of a 1 x 1 convolution).
    """
    match result.expr:
        case Call(activation, (Reduce("sum") as reduce,)) if activation in FUSED:
            pass
        case Reduce("sum") as reduce:
            activation = "none"
        case _:
            return None
    match reduce.body:
        case Binary("*", Access() as left, Access() as right):
            pass
        case _:
            return None
    x, w, out = (address(i, extents) for i in (left.indices, right.indices, result.indices))
    if x.offset or w.offset:
        return None
    results = [n for i in result.indices for n in index_names(i) if extents[n] > 1]
    reduced = [n for n in reduce.names if extents[n] > 1]
    groups: dict[str, list[str]] = {"b": [], "m": [], "n": [], "k": sorted(reduced, key=lambda n: -x.strides.get(n, 0))}
    for name in results:
        if name not in x.strides and name not in w.strides:
            return None
        groups["n" if name not in x.strides else "m" if name not in w.strides else "b"].append(name)
    if not groups["m"] or not groups["n"] or not reduced:
        return None
    if any(n not in x.strides or n not in w.strides for n in reduced):
        return None
    for way in _ways(groups, extents):
        strides = _strides(way, extents, x, w, out)
        if strides is not None:
            sizes = {d: prod(extents[n] for n in names) for d, names in way.items()}
            return Contraction(left.tensor, right.tensor, activation, sizes, *strides, repeated=way is not groups)
    return None


def _ways(groups: Mapping[str, list[str]], extents: Mapping[str, int]) -> Iterator[Mapping[str, list[str]]]:
    """The variables as they are, and then with the outermost of rows or columns as a batch."""
    yield groups
    if groups["b"]:
        return
    for dim in "mn":
        names = groups[dim]
        for count in range(1, len(names)):
            way = {**groups, "b": names[:count], dim: names[count:]}
            sizes = {d: prod(extents[n] for n in names) for d, names in way.items()}
            if min(sizes["m"], sizes["n"]) >= SMALLEST and sizes["b"] <= MOST_BATCHES:
                yield way


def _strides(
    groups: Mapping[str, list[str]], extents: Mapping[str, int], x: Address, w: Address, out: Address
) -> list[dict[str, int]] | None:
    """The stride of every group in the operands and the result; None where one has several."""
    strides: list[dict[str, int]] = []
    for where, dims in ((x, "bmk"), (w, "bkn"), (out, "bmn")):
        found: dict[str, int] = {}
        for dim in dims:
            names = groups[dim]
            stride = one_stride(names, extents, where) if any(n in where.strides for n in names) else 0
            if stride is None:
                return None
            found[dim] = stride
        strides.append(found)
    return strides


def product_factors(expr: Expr) -> tuple[Expr, Expr] | None:
    """The factors of a sum of a product, with or without an activation; None for anything else."""
    match expr:
        case Call(activation, (Reduce() as reduce,)) if activation in FUSED:
            return product_factors(reduce)
        case Reduce("sum", _, Binary("*", left, right)):
            return left, right
        case _:
            return None


def with_factors(result: Result, factors: Sequence[Expr]) -> Result:
    """The same sum of a product of other factors."""

    def changed(expr: Expr) -> Expr:
        match expr:
            case Call(activation, (reduce,)):
                return Call(activation, (changed(reduce),))
            case Reduce(reducer, indices, _):
                left, right = factors
                return Reduce(reducer, indices, Binary("*", left, right))
            case _:
                raise TypeError(f"{expr} is no sum of a product")

    return Result(result.name, result.indices, changed(result.expr))


def one_stride(names: Sequence[str], extents: Mapping[str, int], where: Address) -> int | None:
    """The one stride of a group of variables; None if it takes several."""
    if not names:
        return 0
    found = runs(names, extents, where)
    return found[0].stride if len(found) == 1 and len(found[0].names) == len(names) else None


def matmul_step(stage: Stage, of: Contraction) -> Step:
    """The launch of the matmul kernel that computes a contraction."""
    x, w = stage.buffers[of.x], stage.buffers[of.w]
    sizes = of.sizes
    # Copies to shared memory run beside the arithmetic if they are of 16 bytes, or of one float32.
    strides = [*of.x_strides.values(), *of.w_strides.values()]
    half = x.dtype != "f32" and all(s % 8 == 0 or s == 1 for s in strides)
    block_m, block_n, block_k, warps, stages = _blocks(sizes["m"], sizes["n"], sizes["k"], half, x.dtype == "f32")
    batched = sizes["b"] > 1
    name = "batched_matmul_kernel" if batched else "matmul_kernel"
    integers = {
        "M": sizes["m"],
        "N": sizes["n"],
        "K": sizes["k"],
        **{f"x_{d}": of.x_strides[d] for d in "mk"},
        **{f"w_{d}": of.w_strides[d] for d in "kn"},
        **{f"out_{d}": of.out_strides[d] for d in "mn"},
    }
    if batched:
        integers |= {"x_b": of.x_strides["b"], "w_b": of.w_strides["b"], "out_b": of.out_strides["b"]}
    arguments = {
        "x_ptr": x.argument,
        "w_ptr": w.argument,
        "out_ptr": stage.output.argument,
        **{name: Argument.integer(value) for name, value in integers.items()},
    }
    tiles = -(-sizes["m"] // block_m) * -(-sizes["n"] // block_n)
    text = _TEXT.format(
        name=name,
        parameters=_BATCH_PARAMETERS if batched else "",
        offsets=_BATCH_OFFSETS if batched else "",
    )
    return Step(
        name,
        text,
        (tiles, sizes["b"]) if batched else (tiles,),
        arguments,
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "ACTIVATION": of.activation,
            "WIDE": stage.wide,
        },
        warps,
        stages,
        stage.allocation,
        expects=_expects(of, x.dtype),
    )


def _expects(of: Contraction, dtype: str) -> tuple[str, ...]:
    """
    What the compiler makes of operands of this type: tensor cores multiply 16 bits, float32 is exact; copies run aside
    where they are of one float32, or where neighbours in memory exist or are left out 16 at a time.
    """
    if dtype == "f32":
        return ("pipelined",)
    dims = [(d, s) for strides in (of.x_strides, of.w_strides) for d, s in strides.items() if d != "b" or s]
    wide = all((of.sizes[d] if s == 1 else s) % 16 == 0 for d, s in dims)
    return ("mma", "pipelined") if wide else ("mma",)


def _blocks(m: int, n: int, k: int, half: bool, exact: bool) -> tuple[int, int, int, int, int]:
    """
    Tile sizes, warps and pipeline stages for a product of these sizes; larger tiles for aligned operands of 16 bits,
    more warps, and less of `n` and `k` at once, for `exact` products of float32, whose threads hold whole rows of both
    factors.

    Large tiles read the operands the fewest times, and the interpreter's time is per tile. They are checked to fit
    registers and shared memory on sm_80, sm_90 and gfx942 (test/unit/lowering/test_aot.py).
    """
    block_m = min(128 if half else 64, max(16, power_of_two(m)))
    # A row of few threads would hold too much of a wide tile.
    block_n = min(64 if block_m <= 32 or exact else 128, max(16, power_of_two(n)))
    block_k = 16 if exact else min(64 if half else 32, max(16, power_of_two(k)))
    warps = 4 if block_m * block_n < (1024 if exact else 4096) else 8
    return block_m, block_n, block_k, warps, 3

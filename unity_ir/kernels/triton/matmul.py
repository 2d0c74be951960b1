"""Generate matrix products: one tiled kernel for all contractions of two operands, any strides, with an epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from textwrap import indent

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names, power_of_two
from unity_ir.forms.contraction import Contraction
from unity_ir.kernels.triton.epilogue import ADDED, BLOCK, Epilogue
from unity_ir.kernels.triton.launch import Argument, KernelLaunch, Stage
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.functions import FUSED
from unity_ir.tdl.syntax import Call

_HEAD = '''\
# Precision of float32 products: "tf32" is several times faster on tensor cores and keeps 10 bits of fractions.
INPUT_PRECISION = tl.constexpr("ieee")
# The interpreter multiplies the bit patterns of bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def corner(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr):
    """The first row and column of a tile; the last FULL ones are moved inside, and compute some elements once more."""
    # As many tiles, one below the other, are computed at a time, so that they find the columns of w in the cache.
    GROUP: tl.constexpr = 8
    columns = tl.cdiv(N, BLOCK_N)
    group = number // (GROUP * columns) * GROUP
    place = number % (GROUP * columns)
    rows = min(tl.cdiv(M, BLOCK_M) - group, GROUP)
    m = (group + place % rows) * BLOCK_M
    n = place // rows * BLOCK_N
    if FULL:
        m = min(m, M - BLOCK_M)
        n = min(n, N - BLOCK_N)
    return m, n


'''
_TEXT = (
    _HEAD
    + '''\
@triton.jit
def tile(
    x_ptr, w_ptr, M, N, K, x_m, x_k, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr,
):
    """
    This program's tile of sum[k](x[m, k] * w[k, n]), with the stride of every dim; its rows and columns, and which of
    them are inside: all if the tile is FULL.
    """
    m, n = corner(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, FULL)
    m += tl.arange(0, BLOCK_M)
    n += tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # The compiler leaves out masks that are always true.
    m_inside = (FULL | (m < M))[:, None]
    n_inside = (FULL | (n < N))[None, :]
    if WIDE:
        m = m.to(tl.int64)
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    x_ptr += m[:, None] * x_m + k[None, :] * x_k
    w_ptr += k[:, None] * w_k + n[None, :] * w_n
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k_inside = FULL | (k < K - start)
        x = tl.load(x_ptr, mask=m_inside & k_inside[None, :], other=0.0)
        w = tl.load(w_ptr, mask=k_inside[:, None] & n_inside, other=0.0)
        if INTERPRETED:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        product = tl.dot(x, w, product, input_precision=INPUT_PRECISION)
        x_ptr += BLOCK_K * x_k
        w_ptr += BLOCK_K * w_k
    return product, m, n, m_inside, n_inside


@triton.jit
def {name}(
    {pointers},
    {integers},
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr,
):
    """{result}[m, n] = sum[k](x[m, k] * w[k, n]), with the stride of every dim{more}."""
{offsets}\
    product, m, n, m_inside, n_inside = tile(
        x_ptr, w_ptr, M, N, K, x_m, x_k, w_k, w_n, BLOCK_M, BLOCK_N, BLOCK_K, FULL, WIDE
    )
{epilogue}
'''
)
_LARGE_TEXT = (
    _HEAD
    + '''\
@triton.jit
def {name}(
    {pointers},
    {integers},
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    X_COLUMNS: tl.constexpr, W_COLUMNS: tl.constexpr, SEVERAL: tl.constexpr, WIDE: tl.constexpr,
):
    """
    {result}[m, n] = sum[k](x[m, k] * w[k, n]){more}.

    Elements of a row of each operand, or of one of its COLUMNS, are consecutive in memory. If programs compute SEVERAL
    tiles each, they copy operands of the next while they store one. A tile's halves are stored one after the other, in
    the same registers.
    """
{offsets}\
    if X_COLUMNS:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [K, M], [x_k, 1], [BLOCK_K, BLOCK_M])
    else:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_m, 1], [BLOCK_M, BLOCK_K])
    if W_COLUMNS:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [N, K], [w_n, 1], [BLOCK_N, BLOCK_K])
    else:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [K, N], [w_k, 1], [BLOCK_K, BLOCK_N])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=SEVERAL):
        first_m, first_n = corner(number, M, {end}, BLOCK_M, BLOCK_N, True)
        whole = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if X_COLUMNS:
                x = x_tiles.load([k, first_m]).T
            else:
                x = x_tiles.load([first_m, k])
            if W_COLUMNS:
                w = w_tiles.load([first_n, k]).T
            else:
                w = w_tiles.load([k, first_n])
            if INTERPRETED:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            whole = tl.dot(x, w, whole)
        left, right = tl.split(tl.permute(tl.reshape(whole, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        m = first_m + tl.arange(0, BLOCK_M)
        for half in tl.static_range(2):
            n = first_n + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            # The compiler leaves out masks that are always true.
            m_inside = tl.full((BLOCK_M, 1), True, tl.int1)
            n_inside = {inside}
            if WIDE:
                m = m.to(tl.int64)
                n = n.to(tl.int64)
            if half == 0:
                product = left
            else:
                product = right
{epilogue}
'''
)
_BATCH_OFFSETS = """\
    b = tl.program_id(1)
    if WIDE:
        b = b.to(tl.int64)
    x_ptr += b * x_b
    w_ptr += b * w_b
"""
LIGHT = 16
"""Most work of an epilogue (`Epilogue.work`) with which square tiles fit registers; more keeps intermediate values."""
_TAKEN = (
    *("corner", "first_m", "first_n", "half", "k", "left", "number", "right", "tiles", "whole", "x_tiles", "w_tiles"),
    *("X_COLUMNS", "W_COLUMNS", "SEVERAL", ADDED),
    *("b", "m", "n", "m_inside", "n_inside", "product", "tile", "x", "w"),
    *("x_ptr", "w_ptr", "M", "N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K", "FULL", "WIDE", "INPUT_PRECISION"),
    *("INTERPRETED", "x_b", "x_m", "x_k", "w_b", "w_k", "w_n"),
)
"""Identifiers that the text uses itself."""


def matmul_launch(stage: Stage, of: Contraction, more: Sequence[Stage] = ()) -> KernelLaunch:
    """
    Return the launch of the matrix product kernel for `stage`, a result to compute whose expression is a function of
    the product `of`, such as its sum with a bias.

    The kernel also computes the results of `more` stages, functions of the same product. Raises `UnityError` if the
    stage has a `total`, a tensor to add the result to, and tiles overlap: those elements would be added twice.
    """
    x, w = stage.buffers[of.x], stage.buffers[of.w]
    sizes = of.sizes
    # Copies to shared memory are asynchronous if they are of 16 bytes, or of one float32.
    strides = [*of.x_strides.values(), *of.w_strides.values()]
    # Tiles of 8-bit elements have twice as many summed ones, which are as many bytes.
    packed = 2 if x.dtype == FLOAT8 else 1
    half = x.dtype != "f32" and all(s % (8 * packed) == 0 or s == 1 for s in strides)
    epilogue = Epilogue(of, (stage, *more), Names(_TAKEN))
    exact = x.dtype == "f32"
    wanted = expects(sizes, (of.x_strides, of.w_strides), x.dtype)
    batched = sizes["b"] > 1
    if "pipelined" in wanted and half:
        tile = tile_of(sizes, epilogue.work)
    else:
        tile = Tile(*blocks(sizes, half, exact, epilogue.work > LIGHT), speed=0.5)
    if "pipelined" not in wanted:
        # Elements on their way to shared memory then go through registers.
        tile = replace(tile, k=min(tile.k, 32), speed=0.3)
    tile = tile.of_bytes(packed, sizes)
    full = sizes["m"] >= tile.m and sizes["n"] >= tile.n and sizes["k"] % tile.k == 0
    integers = {
        "M": sizes["m"],
        "N": sizes["n"],
        "K": sizes["k"],
        **{f"x_{d}": of.x_strides[d] for d in "mk"},
        **{f"w_{d}": of.w_strides[d] for d in "kn"},
    }
    if batched:
        integers |= {"x_b": of.x_strides["b"], "w_b": of.w_strides["b"]}
    pointers = {"x_ptr": x.argument, "w_ptr": w.argument, **epilogue.pointer_arguments}
    numbers = {name: Argument.integer(value) for name, value in integers.items()} | epilogue.integer_arguments
    form = _form(stage, of) if epilogue.serves_all_shapes and not more and not stage.total else None
    parameters = [*numbers]
    if stage.total:
        numbers[ADDED] = Argument(f"{stage.total} is not None", "constexpr")
        parameters.append(f"{ADDED}: tl.constexpr")
    fields = {
        "pointers": ", ".join(pointers),
        "integers": ", ".join(parameters),
        "result": "out" if form == "" else "product",
        "more": "" if form == "" else ", and what is made of it",
        "offsets": _BATCH_OFFSETS if batched else "",
        "epilogue": "\n".join(epilogue.lines),
    }

    def named(text: str, fields: Mapping[str, str], prefix: str, form: str | None) -> tuple[str, str]:
        """Return the kernel's name, of which `form` is a part unless it is None, and its text."""
        if form is None:
            digest = sha256(text.format(name="", **fields).encode()).hexdigest()[:6]
            name = f"{stage.operator}_{digest}_kernel"
        else:
            name = f"{prefix}matmul{form}_kernel"
        return name, text.format(name=name, **fields)

    copied = descriptor_tile(sizes, tile, epilogue.work) if takes_descriptors(of, x.dtype) else None
    largest = LARGEST.of_bytes(packed, sizes)
    if copied is not None:
        copied = copied.of_bytes(packed, sizes)
    # Operands of a batch may be where no descriptor reaches them.
    short = ("short",) if not exact and is_large(sizes) and (copied or not batched) else ()
    if stage.total and any(each.overlaps(sizes) for each in ((tile,) if full else ()) + ((copied,) if copied else ())):
        raise UnityError(f"pcg.{stage.operator}: tiles of a product overlap, so it cannot be added to a tensor")
    # AMD's compiler spills where several results have rows that are not aligned.
    on_amd = {"num_warps": 2 * tile.warps} if more and sizes["n"] % 16 and tile.m * tile.n >= 128 * 128 else {}
    launch = KernelLaunch(
        *named(_TEXT, fields, "batched_" * batched, form),
        (tile.count(sizes), sizes["b"]) if batched else (tile.count(sizes),),
        pointers | numbers,
        {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "FULL": full, "WIDE": stage.wide},
        tile.warps,
        tile.stages,
        stage.allocation,
        tuple(each.allocation for each in more),
        (*wanted, *short),
        "product",
        options_name="" if on_amd else f"{'FULL_' * full}TILE_{tile.name}{'_WIDE' * stage.wide}",
        on_amd=on_amd,
        seconds=0.0 if exact else seconds(tile, sizes) / packed,
        tiles=max(tile.count(sizes) * sizes["b"], sizes["m"] * sizes["n"] * sizes["b"] // 64**2),
    )
    if copied is None:
        return launch
    columns = {"X_COLUMNS": of.x_strides["m"] == 1, "W_COLUMNS": of.w_strides["k"] == 1}
    # Results pass through shared memory on their way out.
    is_wide = copied == largest and any(each.output.dtype == "f32" for each in (stage, *more))
    stages = copied.stages - is_wide
    letters = "".join("T" if turned else "N" for turned in columns.values())
    aligned = Epilogue(of, (stage, *more), Names(_TAKEN), beyond=True)
    fields |= {
        "epilogue": indent("\n".join(aligned.lines), " " * 8),
        # With padded rows the last tile begins at an aligned address, too, and ends beyond the row.
        "end": f"tl.cdiv(N, {BLOCK}) * {BLOCK}" if aligned.roomy else "N",
        "inside": "(n < N)[None, :]" if aligned.roomy else "tl.full((1, BLOCK_N // 2), True, tl.int1)",
    }
    kernel, text = named(_LARGE_TEXT, fields, f"large_{'batched_' * batched}", None if aligned.roomy else form)
    programs = min(max(SMS // sizes["b"], 1), copied.count(sizes))
    # The loop over several tiles is longer; without it some results of the largest would not fit registers.
    several = copied == largest or programs < copied.count(sizes)
    given = {**columns, "SEVERAL": several, "WIDE": stage.wide}
    which = f"{'SEVERAL_' * several}{copied.name}_{letters}_{stages}{'_WIDE' * stage.wide}"
    return replace(
        launch,
        kernel=kernel,
        text=text,
        grid=(programs, sizes["b"]) if batched else (programs,),
        constants={"BLOCK_M": copied.m, "BLOCK_N": copied.n, "BLOCK_K": copied.k, **given},
        num_stages=stages,
        expects=("mma", "pipelined", *short),
        # Only the largest tile was measured, so other choices are made as if there were no descriptors.
        seconds=seconds(copied, sizes) / packed if copied == largest else launch.seconds,
        options_name=f"LARGE_TILE_{which}",
        otherwise=launch,
    )


def _form(stage: Stage, of: Contraction) -> str | None:
    """Return the stage's function of the product as a suffix of names: "" or an activation's; None if it is another."""
    if stage.expr == of.product:
        return ""
    match stage.expr:
        case Call(activation, (argument,)) if argument == of.product and activation in FUSED:
            return f"_{activation}"
        case _:
            return None


def expects(sizes: Mapping[str, int], strides: Iterable[Mapping[str, int]], dtype: str) -> tuple[str, ...]:
    """
    Return the kinds of instructions that the compiled kernel of a product must contain: some of `mma` (matrix units)
    and `pipelined` (asynchronous copies to shared memory), which `unity-aot` checks.

    `sizes` has the product's sizes by "m", "n", "k", `strides` the strides of each operand, in elements, by dim ("m",
    "n", "k", "b"), `dtype` their element type. Matrix units multiply 16-bit types only, as float32 is exact. Copies are
    asynchronous if they are of float32, or if all masks and strides are multiples of 16 elements.
    """
    if dtype == "f32":
        return ("pipelined",)
    dims = [(d, s) for own in strides for d, s in own.items() if d != "b" or s]
    wide = all((sizes[d] if s == 1 else s) % 16 == 0 for d, s in dims)
    return ("mma", "pipelined") if wide else ("mma",)


@dataclass(frozen=True, slots=True)
class Tile:
    """
    The part of a matrix product that one program computes (`m` rows, `n` columns, `k` summed elements at a time), and
    how it is launched.
    """

    m: int
    n: int
    """Rows and columns."""
    k: int
    """Elements summed per step."""
    warps: int = 8
    stages: int = 3
    """Steps whose operands are in shared memory, or on their way there."""
    speed: float = 1.0
    """Arithmetic per time of an SM that is never idle, in relation to that of the largest tile: as measured (H100)."""
    work: float = inf
    """Most work of an epilogue (`Epilogue.work`) with which it fits registers."""

    @property
    def name(self) -> str:
        """
        The tile as part of an identifier, that of a dict of launch options: `128_256_64` has the rows, columns and
        summed elements; the number of warps follows if it is not 8.
        """
        return f"{self.m}_{self.n}_{self.k}{'' if self.warps == 8 else f'_{self.warps}'}"

    def of_bytes(self, packed: int, sizes: Mapping[str, int]) -> Tile:
        """Return the tile with `packed` times as many summed elements if these divide those of a product of `sizes`."""
        return replace(self, k=self.k * packed) if sizes["k"] % (self.k * packed) == 0 else self

    def count(self, sizes: Mapping[str, int]) -> int:
        """Return the number of tiles that cover one product of these `sizes`, by "m" and "n"."""
        return -(-sizes["m"] // self.m) * -(-sizes["n"] // self.n)

    def overlaps(self, sizes: Mapping[str, int]) -> bool:
        """
        Return whether some elements of a product of these `sizes`, by "m" and "n", are computed by two tiles: if a size
        is no multiple of the tile's, the last tile is moved back inside.
        """
        return sizes["m"] % self.m > 0 or sizes["n"] % self.n > 0


LARGEST = Tile(128, 256, 64, stages=4, work=LIGHT)
"""The tile of large products whose operands are copied by descriptors."""
COPIED = (LARGEST, Tile(128, 128, 128, speed=0.75), Tile(128, 64, 128, speed=0.55))
"""
Tiles whose operands are copied by descriptors. Around a step of K there are some 80 instructions that wait for copies
and begin others, whatever the tile, so smaller ones have longer steps.
"""
MANY_STEPS = 1024
"""
Least rows, columns and summed elements of a product of which small tiles are copied by descriptors, too: those of a
smaller one are few for the time that it takes to make descriptors.
"""
LARGE = (Tile(128, 128, 64, speed=0.75, work=LIGHT), Tile(128, 64, 64, speed=0.55))
"""Other tiles of large products of 16 bits, the preferred ones first."""
SMS = 132
"""Streaming multiprocessors of the GPU for which tiles are chosen (H100 SXM)."""
FLOPS = 680e12
"""Operations per second of the largest tiles on that GPU: the median of 16 products of BERT, GPT-2 and Llama-3 8B."""


def seconds(tile: Tile, sizes: Mapping[str, int]) -> float:
    """
    Return the estimated seconds on an H100 of a product of 16-bit elements of these `sizes` (by "b", "m", "n", "k"),
    computed in tiles like `tile`: the time of the SM (multiprocessor) that has the most tiles.
    """
    most = -(-tile.count(sizes) * sizes["b"] // SMS)
    return most * tile.m * tile.n * sizes["k"] * 2 * SMS / (tile.speed * FLOPS)


def tile_of(sizes: Mapping[str, int], work: int) -> Tile:
    """
    Return the tile for a product of aligned 16-bit operands of these `sizes` (by "b", "m", "n", "k"), whose tiles are
    loaded by pointers. `work` is the estimate of the epilogue's registers (`Epilogue.work`).

    Of the tiles in `LARGE` that fit the product, it is the fastest by `seconds`: large tiles read the operands fewer
    times, but may leave SMs (multiprocessors) without work. If none fits, a smaller one is made by `blocks`.
    """
    fitting = [t for t in LARGE if all(getattr(t, d) <= sizes[d] for d in "mnk") and work <= t.work]
    if not fitting:
        return Tile(*blocks(sizes, half=True, exact=False, heavy=work > LIGHT))
    return min(fitting, key=lambda t: seconds(t, sizes))


def is_large(sizes: Mapping[str, int]) -> bool:
    """
    Return whether a product of these `sizes` (by "b", "m", "n", "k") has at least `MANY_STEPS` rows, columns and summed
    elements. The products of a batch, such as those with the columns of each head, are rows or columns of one.
    """
    area = sizes["b"] * sizes["m"] * sizes["n"]
    few = sizes["b"] == 1 and min(sizes["m"], sizes["n"]) < MANY_STEPS
    return sizes["k"] >= MANY_STEPS and area >= MANY_STEPS**2 and not few


def takes_descriptors(of: Contraction, dtype: str) -> bool:
    """
    Return whether tiles of both operands of the product `of`, of element type `dtype`, can be copied by descriptors
    (TMA): matrices of elements of 16 or 8 bits whose rows (or columns) are consecutive and start at multiples of 16
    bytes.
    """
    unit = 16 if dtype == FLOAT8 else 8
    if dtype == "f32" or any(own.get("b", 0) % unit for own in (of.x_strides, of.w_strides)):
        return False
    return all(
        1 in (far, near) and max(far, near) % unit == 0
        for far, near in ((of.x_strides["m"], of.x_strides["k"]), (of.w_strides["k"], of.w_strides["n"]))
    )


def descriptor_tile(sizes: Mapping[str, int], tile: Tile, work: int) -> Tile | None:
    """
    Return the tile of `COPIED` in which a product of these `sizes` (by "b", "m", "n", "k"), whose operands descriptors
    can copy (`takes_descriptors`), is estimated to be the fastest; None if it is slower than in tiles `tile`, copied by
    pointers, or if there is none that fits. `work` is the estimate of the epilogue's registers (`Epilogue.work`).
    """
    known = COPIED if is_large(sizes) else () if sizes["b"] > 1 else (LARGEST,)
    fitting = [t for t in known if all(getattr(t, d) <= sizes[d] for d in "mnk") and work <= t.work]
    best = min(fitting, key=lambda t: seconds(t, sizes), default=None)
    return None if best is None or seconds(best, sizes) > seconds(tile, sizes) else best


def blocks(sizes: Mapping[str, int], half: bool, exact: bool, heavy: bool = False) -> tuple[int, int, int, int, int]:
    """
    Return (m, n, k, warps, pipeline stages) for a product of these `sizes` (by "m", "n", "k"): the rows, columns and
    summed elements of a tile, and the launch options.

    `half` says that operands are aligned and of 16 bits; then tiles are larger. `exact` is for products of float32:
    they have more warps and smaller n and k, since threads keep whole rows of both factors. `heavy` says that the
    epilogue has many operations per element; then tiles are less wide.

    Large tiles read the operands the fewest times, and the interpreter's time is per tile. They fit registers and
    shared memory on sm_80, sm_90 and gfx942.
    """
    m, n, k = (sizes[d] for d in "mnk")
    block_m = min(128 if half else 64, max(16, power_of_two(m)))
    # A row of few threads would hold too much of a wide tile.
    narrow = block_m <= 32 or exact or heavy
    block_n = min(64 if narrow else 128, max(16, power_of_two(n)))
    block_k = 16 if exact else min(64 if half else 32, max(16, power_of_two(k)))
    warps = 4 if block_m * block_n < (1024 if exact else 4096) else 8
    return block_m, block_n, block_k, warps, 3

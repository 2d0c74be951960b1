"""
Price matrix products and convolutions of vendors' libraries (cuBLAS, cuDNN), which published steps ran, by shape.

A product is computed in tiles of its result, one on each processor at a time: all tiles of a wave take as long as a
whole one, and the last wave as long as a full one (tile and wave quantisation: NVIDIA, Matrix Multiplication Background
User's Guide). Of all tiles and splits of the sum the fastest is taken, as the libraries do. A convolution is such a
product of its windows (implicit GEMM), or with 3 x 3 or 5 x 5 windows at stride 1 one for each place of transformed
tiles (Lavin and Gray, 2016, arXiv 1509.09308), whichever is faster.

The figures are in `published/kernels/library.toml`, each with its source; none is of an end-to-end measurement.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any

from published_rows import ROWS

from unity_ir.cost.time import rounding_bytes, rounding_seconds
from unity_ir.forms.contraction import contraction
from unity_ir.machine.device import Device
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute
from unity_ir.plan.program import Program, global_line, piece_of_line
from unity_ir.tdl.counts import rounds
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.syntax import Bound

TILES = {
    2: ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64)),
    4: ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128)),
}
"""Rows and columns of a tile of the result by the bytes of an element: those of the names of cuBLAS's kernels."""
SPLITS = (1, 2, 4, 8)
LEAST_SUM = 256
"""Terms of a sum below which it is not split."""
OUTPUTS = 4
"""Rows, and columns, of results that a transformed tile gives (cuDNN's `winograd_nonfused` has 4 x 4)."""


@dataclass(frozen=True)
class Library:
    """Measured rates of the library kernels on one kind of GPU (`published/kernels/library.toml`)."""

    processors: int
    cache: float
    """Bytes/s."""
    product: Mapping[str, float]
    """The part of the peak by element type."""
    convolution: Mapping[str, float]
    fill: float
    """Seconds."""


@dataclass(frozen=True)
class Product:
    """`batch` products of [m, k] and [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def elements(self) -> int:
        """The elements of operands and results."""
        return self.batch * (self.m * self.k + self.k * self.n) + self.results

    @property
    def results(self) -> int:
        """The elements of results."""
        return self.batch * self.m * self.n


@cache
def library(kind: str) -> Library:
    """Return the figures of a kind of GPU, such as `A100`."""
    tables = _tables()
    return Library(**{"convolution": {}, **tables[kind], "fill": tables["fill"]})


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((ROWS / "kernels" / "library.toml").read_text(encoding="utf-8"))


def library_seconds(program: Program, compute: Compute, device: Device, known: Library) -> float | None:
    """
    Return the seconds of an operator of a rank's program, as a kernel of a library; None if it is no product and no
    convolution, or none of an element type that the library has figures of.
    """
    operands = [program.tensors[r] for r in compute.operands]
    dtype = operands[0].dtype
    if dtype not in known.product:
        return None
    line = piece_of_line(global_line(compute.operator, operands, compute.attributes), compute.assignment, program.mesh)
    if compute.operator in CONVOLUTIONS:
        # Groups are convolutions of their own.
        attributes = dict(compute.attributes)
        if dtype not in known.convolution or attributes["groups"] != 1:
            return None
        is_plain = attributes["stride"] == attributes["dilation"] == (1, 1)
        return convolution_seconds(compute.operator, line.extents, is_plain, dtype, device, known)
    found = product_of(line)
    if found is None or not rounds(line, [dtype]):
        return None if found is None else product_seconds(found, dtype, device, known, known.product[dtype])
    # Scales of rows are found, and rows rounded, in one kernel, which the compiler makes.
    sizes = [ELEMENT_BYTES[dtype] * found.batch * rows * found.k for rows in (found.m, found.n)]
    rounding = rounding_seconds(rounding_bytes(sizes, (1, 1))[0], device)
    return rounding + product_seconds(found, FLOAT8, device, known, known.product[FLOAT8])


def product_of(line: Bound) -> Product | None:
    """Return the sizes of a line that is a matrix product, or a batch of them; None for others."""
    found = contraction(line.results[0], line.extents) if len(line.results) == 1 else None
    return None if found is None else Product(*(found.sizes[d] for d in "bmnk"))


STEPS = {"rms_norm": (36, 6), "rms_norm_grad": (76, 10), "rotary": (20, 3)}
"""
Bytes of each element of the operand in 16 bits that the steps of an operator move, and how many kernels they are, as
torchtitan writes them and autograd differentiates them: of an RMSNorm a cast to f32 (6 bytes), the square (8), its mean
(4), the product with the root's inverse (8), the cast back (6) and the product with the weight (4).
"""


def steps_seconds(program: Program, compute: Compute, device: Device) -> float:
    """Return the seconds of an operator of `STEPS` on a rank's piece, a kernel for each step."""
    moved, kernels = STEPS[compute.operator]
    elements = prod(program.tensors[compute.results[0]].local(program.mesh))
    return kernels * device.launch + moved * elements / (device.memory_bandwidth * device.efficiency)


def host_seconds_of_layer() -> float:
    """Return the seconds that the host takes to launch forward and backward of one transformer layer."""
    return _tables()["host"]["layer"]


CONVOLUTIONS: Mapping[str, tuple[str, str, str]] = {
    "conv2d": ("nyz", "o", "cij"),
    "conv2d_data_grad": ("nyz", "c", "oij"),
    "conv2d_weight_grad": ("o", "cij", "nyz"),
}
"""
The index variables that are rows, columns and terms of the sum of a convolution as a product: n images, y and z places,
c channels in and o out, i and j places in the window.
"""


def convolution_seconds(
    operator: str, extents: Mapping[str, int], is_plain: bool, dtype: str, device: Device, known: Library
) -> float:
    """
    Return the seconds of a convolution, or of a gradient of one, by its index variables' extents; `is_plain` if neither
    strided nor dilated.
    """
    # Without a window it is a product.
    part = (known.product if extents["i"] == extents["j"] == 1 else known.convolution)[dtype]
    windows = Product(1, *(prod(extents[v] for v in names) for names in CONVOLUTIONS[operator]))
    direct = product_seconds(windows, dtype, device, known, part)
    if not is_plain or (extents["i"], extents["j"]) not in ((3, 3), (5, 5)):
        return direct
    return min(direct, transformed_seconds(operator, extents, dtype, device, known))


def product_seconds(of: Product, dtype: str, device: Device, known: Library, part: float) -> float:
    """Return the seconds of a batch of products whose whole tiles reach a part of the device's peak."""
    size = 1 if dtype == FLOAT8 else ELEMENT_BYTES[dtype]
    bandwidth = device.memory_bandwidth * device.efficiency
    most = device.peak(dtype) * part * throttled(device)
    seconds: list[float] = []
    for rows, columns in TILES[max(size, 2)]:
        # Each term of a tile's sums takes `rows` and `columns` elements from the cache.
        rate = min(most, known.cache * 2 * rows * columns / (rows + columns) / size)
        for splits in SPLITS:
            if splits > 1 and of.k < LEAST_SUM * splits:
                break
            tiles = of.batch * ceil(of.m / rows) * ceil(of.n / columns) * splits
            wave = 2 * rows * columns * of.k / splits / (rate / known.processors) + known.fill
            # Sums of parts are written in f32, and read again.
            added = 0 if splits == 1 else 8 * splits * of.batch * of.m * of.n / bandwidth
            seconds.append(ceil(tiles / known.processors) * wave + added)
    return device.launch + max(min(seconds), size * of.elements / bandwidth)


def throttled(device: Device) -> float:
    """Return the part of a kind of GPU's products that a board with a lower limit of power reaches."""
    curve = device.curves.get("contraction")
    return 1.0 if curve is None else curve.compute_top / device.efficiency


def transformed_seconds(operator: str, extents: Mapping[str, int], dtype: str, device: Device, known: Library) -> float:
    """
    Return the seconds of a convolution at stride 1 by transformed tiles (Winograd): three transforms and a batch of
    products, one for each place of a tile, which has `OUTPUTS` + window - 1 rows and columns.
    """
    places = (OUTPUTS + extents["i"] - 1) ** 2
    tiled = {v: ceil(extents[v] / OUTPUTS) for v in "yz"} | {"i": 1, "j": 1}
    of = Product(places, *(prod(tiled.get(v, extents[v]) for v in names) for names in CONVOLUTIONS[operator]))
    n, y, z, c, o, i, j = (extents[v] for v in "nyzcoij")
    moved = ELEMENT_BYTES[dtype] * (n * y * z * (c + o) + i * j * c * o + of.elements)
    transforms = 3 * device.launch + moved / (device.memory_bandwidth * device.efficiency)
    return transforms + product_seconds(of, dtype, device, known, known.convolution[dtype])

"""Sizes of the tiles of attention's kernels, by element type and width of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Blocks:
    """A kernel's tile, in rows and columns of the scores, and its launch options (warps, pipeline stages)."""

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 2
    on_amd: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is another on GPUs of AMD, which have 64 KiB of shared memory: of the tile only what moves, and less."""


def fits(width: int, dtype: str) -> bool:
    """
    Return whether attention's kernels can keep tiles of `width` features of element type `dtype` in registers.

    Exact products of float32 keep whole rows of both factors in registers, so heads of the usual width do not fit: such
    attention is computed as separate products and a softmax.
    """
    return width <= (32 if dtype == "f32" else 256)


def forward_blocks(width: int, dtype: str, is_scaled: bool) -> Blocks:
    """
    Return the tile and launch options of the forward's kernel for heads of `width` features of element type `dtype`.
    `is_scaled` says whether scores are scaled products; any other function of them takes registers. Of
    the tiles that fit sm_80, sm_90 and gfx942 (test_aot.py) it is the fastest on an H100, as measured with heads of 64
    and 128 in bf16 and 512 to 8192 positions.
    """
    if dtype == "f32":
        return Blocks(32, 32)
    if width <= 128:
        narrow = 32 if width <= 64 or is_scaled else 16
        return Blocks(64, 64, num_stages=3, on_amd={"COLUMNS": narrow, "num_stages": 2})
    return Blocks(64, 32, num_warps=8)


def backward_blocks(width: int, dtype: str, over_columns: bool, draws: bool, ranges: bool, is_scaled: bool) -> Blocks:
    """
    Return the tile and launch options of a backward's kernel for heads of `width` features of element type `dtype`,
    chosen as in `forward_blocks`. If `over_columns`, a program holds some rows of the scores and loops over columns
    (keys), else the other way round. `draws` says whether it draws random numbers (dropout), `ranges` whether each row
    sees a range of columns, and `is_scaled` whether scores are scaled products, not any function of them: the others
    take registers.
    """
    if dtype == "f32":
        return Blocks(32, 32)
    if width <= 64 and not (draws and not over_columns):
        return Blocks(64, 64, num_stages=3, on_amd={"COLUMNS" if over_columns else "ROWS": 32})
    if width <= 128:
        if over_columns:
            return Blocks(64, 64, on_amd={"COLUMNS": 32 if is_scaled else 16})
        return Blocks(32, 64, num_stages=3, on_amd={"ROWS": 16, "num_stages": 2} if ranges else {})
    return Blocks(32, 16)

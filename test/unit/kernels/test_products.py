"""Tiles of matrix products: their size, and the order in which programs compute them."""

import pytest

from unity_ir.kernels.triton.matmul import tile_of


@pytest.mark.parametrize(
    ("m", "n", "work", "tile"),
    [
        (16384, 4096, 0, (128, 256)),
        (16384, 4096, 3, (128, 128)),
        (16384, 4096, 17, (128, 64)),
        # 64 square tiles are less than half of the SMs.
        (1024, 1024, 0, (128, 64)),
        # 132 square tiles are one for each SM; 66 wide ones would leave half of them without work.
        (1408, 1536, 0, (128, 128)),
        (64, 4096, 0, (64, 128)),
    ],
)
def test_tile(m: int, n: int, work: int, tile: tuple[int, int]) -> None:
    found = tile_of({"b": 1, "m": m, "n": n, "k": 1024}, work)
    assert (found.m, found.n) == tile


def test_tile_of_a_batch() -> None:
    """A batch's products fill SMs together."""
    sizes = {"m": 1024, "n": 1024, "k": 1024}
    assert tile_of({**sizes, "b": 1}, 0).n < tile_of({**sizes, "b": 64}, 0).n == 256

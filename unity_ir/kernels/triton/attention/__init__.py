"""
Generate kernels of attention that never hold a whole matrix of scores (FlashAttention: Dao et al., 2022; Dao, 2023).

`body` (tiles of rows and columns, and the loops over them) -> `forward` and `backward` (one kernel each) -> `launches`
(all kernels of a line). `tiles` has the sizes of tiles.
"""

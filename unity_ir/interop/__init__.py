"""
Plans in the terms of other systems: PyTorch's DTensor (`dtensor`) and torch.distributed.pipelining (`pipelining`), and
JAX (`jax`), which writes StableHLO; a step as execution traces for simulators of networks (`chakra`).

`names` (of a program's values) -> `expressible` (what each system can say of a program) -> `mesh` (the dims of a mesh
with names, and layouts on it) are common to them.
"""

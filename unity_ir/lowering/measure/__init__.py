"""Measure and check kernels.

`operators` times operators and collectives for profiles, `implementations` times Triton's and PyTorch's for tuning,
`aot` compiles for GPUs that need not be present, and `aot_check` reports the kernels that do not suit them.
"""

"""Kernels measured and checked: `operators` and collectives timed for profiles, `implementations` timed for tuning,
`aot` compiles for GPUs that need not be there, and `aot_check` says what is wrong with what it compiled.
"""

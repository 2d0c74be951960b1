"""Triton kernels generated from bound TDL lines, as text; one generator for each form.

`expression` (TDL expressions as Triton code) and `step` (launches and their buffers) are under all of them. Generators:
`pointwise`, `tiling` and `reduction`, `matmul` with `epilogue`, `convolution`, `attention`, `grouped`, `scatter`,
`window_writes`, `optimizer`. `results` splits a line into what single kernels compute.
"""

"""Triton kernels generated from bound TDL lines, as text; one generator for each form.

`expression` (TDL expressions as Triton code) and `launch` (launches and their buffers) are under all of them. The
generators are `pointwise`, `tiling` and `reduction`, `matmul` with `epilogue`, `convolution`, `attention`, `grouped`,
`scatter`, `window_writes`, `optimizer`. `results` cuts a line into parts that one kernel each computes.
"""

"""Recognise which form of computation a bound TDL line has: matrix product, convolution, attention, and so on.

`rewrite` simplifies and compares expressions, `addresses` computes strides of index expressions. Each form has a module
that recognises it: `contraction`, `convolution`, `attention`, `softmax`, `grouped`, `scatter`, `window_writes`;
`classify` asks them in order. `implicit_gemm` has a convolution's sizes as a matrix product, `windows` the masks of
windows that leave their tensor. `compose` writes several lines as one. `kinds` tells which efficiency curve of a device
a line's kernel follows.
"""

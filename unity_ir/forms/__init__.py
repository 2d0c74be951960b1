"""What kind of computation a bound TDL line is: matrix product, convolution, attention, and so on.

`rewrite` and `addresses` are the algebra under it: expressions simplified and compared, index expressions as strides.
Each form has a file that recognises it: `contraction`, `convolution`, `attention`, `grouped`, `windows`. `compose`
writes several lines as one; `kinds` says which efficiency curve of a device a line's kernel follows.
"""

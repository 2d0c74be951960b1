"""A bound line as plain PyTorch code: what a person would write, and autograd can differentiate.

`value` and `writer` (tensors by dims; names, permutations, expansion) are under the files of the forms: `reads`,
`functions`, `softmax`, `grouped`, `windows`, `indexing`, `sums`. `code` matches a line against them, in order.
"""

"""Write bound lines as plain PyTorch code: as a person would write it, and differentiable by autograd.

`tensor_text` (an expression's text with its dims) and `writer` (names, permutation, expansion) are under the modules
of the forms: `reads`, `functions`, `grouped`, `windows`, `indexing`, `sums`. `code` matches a line against them, in
order.
"""

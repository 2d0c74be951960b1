"""
Say a plan in PyTorch's DTensor placements, and run a module by it.

`described` (the plan as data, `-t dtensor`) -> `pieces` (of whole tensors and DTensors) -> `moves` (redistributes) ->
`execute` (the program's forward and backward on local tensors) -> `module` (the user's module, with DTensors for
parameters and the plan for its forward). Only the last four import torch.
"""

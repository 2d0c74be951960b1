"""
Say a plan in PyTorch's DTensor placements, and run a module by it.

`expressible` (what DTensor can say of a rank's program) -> `mesh` (the axes of a `DeviceMesh`, and placements on it) ->
`names` (of values) -> `described` (the plan as data, `-t dtensor`) -> `pieces` (whole tensors, DTensors and local ones)
-> `moves` (redistributes) -> `execute` (the program's forward and backward on local tensors) -> `module` (the user's
module, with DTensors for parameters and the plan for its forward). Only the last four import torch.
"""

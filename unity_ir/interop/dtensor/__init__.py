"""
Say a plan in PyTorch's DTensor placements.

`expressible` (what DTensor can say of a rank's program) -> `mesh` (the dims of a `DeviceMesh`, and placements on it) ->
`names` (of values) -> `described` (the plan as data, `-t dtensor`); `pieces` (placements as PyTorch has them, and DTensors
of tensors).
"""

"""The emitted file.

`tuning` (which implementation of an operator was measured fastest) -> `fusing` (which operators become one kernel) ->
`printer` (the file), with `plan_text` (mesh, groups, shapes) and `reference_text` (the serial forward that `--check`
differentiates), in which `repeats` finds the loops.
"""

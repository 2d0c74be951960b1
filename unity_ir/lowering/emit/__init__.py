"""Write the emitted Python file.

`printer` (the file), with `plan_text` (mesh, groups, shapes), `step_text` (the lines of the step, as `rows`) and
`reference_text` (the serial forward that `--check` differentiates). `repeats` finds the loops in them.
"""

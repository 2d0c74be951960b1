"""
Compute lower bounds on large machines, where searching axis by axis is out of reach.

`axis_counts` (layouts that count equal axes) -> `refine` (rows that survive on a finer problem) -> `ordered_axes` (a
tighter bound, by the order of axes within a dim) -> `assign_axes` (a plan from counts).
"""

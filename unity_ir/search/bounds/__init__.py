"""Lower bounds on large machines, where searching axis by axis is out of reach.

`axis_counts` (layouts that count equal axes) -> `refine` (rows that survive when dims are told apart) ->
`ordered_axes` (a tighter bound that minds the order of axes in a dim) -> `assign_axes` (a plan from counts).
"""

"""Which layouts a value and an operator may have, and the seconds each choice costs.

`axes` (roles of mesh axes) -> `transitions` (legal moves from layout to layout) -> `space` (all layouts of a value and
the distances between them) -> `operator_table` (all configurations of an operator, with costs) -> `objective` (seconds,
or seconds plus a price on bytes).
"""

"""
Enumerate the layouts of values and the configurations of operators, and price each choice in seconds.

`axes` (roles of mesh axes) -> `transitions` (legal moves from layout to layout) -> `space` (all layouts of a value and
the distances between them) -> `operator_table` (all configurations of an operator, with costs) -> `objective` (seconds,
or seconds plus a price on bytes). `limits` has the tuning constants of every room.
"""

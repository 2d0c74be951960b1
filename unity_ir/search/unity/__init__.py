"""Unity's three-level search as its paper has it (section 5).

`series_parallel` (how a graph decomposes) -> `device_shares` and `view_costs` (parts of the machine, and what a mapping
costs) -> `machine_mapping` (5.2) -> `substitutions` (5.1) -> `split` (5.3) -> `search`.
"""

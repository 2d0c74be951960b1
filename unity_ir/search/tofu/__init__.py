"""Tofu's recursive partitioning (section 5): `coarsen` (5.1) -> `step` (one mesh axis) -> `search` (the recursion)."""

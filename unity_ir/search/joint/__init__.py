"""The search over graphs: algebraic rewrites outside, the exact layouts of each candidate inside.

`best_first` rewrites and parallelizes jointly; `sequential` rewrites first, for one device, and parallelizes after.
"""

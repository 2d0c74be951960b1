"""
Define the strategies of `--search=name`. To add one, add a module with a tuple `STRATEGIES` (see `search.strategy`).
"""

"""
Choose the plan that a search returns: the candidate with the least simulated time.

`candidates` (baselines next to the search's own plan) -> `parallel_siblings` and `parallel_branches` (operators on
parts of the machine) -> `winner` (simulate, choose, attach the bound). `worker` runs part of this in a forked process.
"""

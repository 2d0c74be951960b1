"""From what a search found to the plan it returns: the candidate with the least simulated time.

`candidates` (baselines beside the search's own) -> `parallel_siblings` and `parallel_branches` (operators on parts of
the machine) -> `winner` (simulate, choose, attach the bound). `worker` runs part of this in a forked process.
"""

"""
What-if studies: the fastest plan found of a training step at every point of a grid of machines and models, each with a
lower bound (docs/sweeps.md).

| file | what it is for |
|---|---|
| `knobs.py` | what a grid varies, and the values of each knob |
| `grid.py` | the points: models and machines with the knobs set |
| `recipes.py` | the family of plans by degrees that is searched: neighbours, and how one is planned |
| `programs.py` | a planned step, replayed on machines whose figures differ; what it takes at least on others |
| `search.py` | the fastest of a point, from what is known of the points beside it |
| `monotone.py` | no point is slower than one that is nowhere faster |
| `store.py` | points on disk, so that a sweep goes on where it ended |
| `run.py` | the points of a grid, in one process or several |
| `report.py`, `picture.py` | CSV, JSON, a table, and the plot |
"""

"""
Choose the stages of a pipeline, and their schedule.

For any table of what ranges of layers take: `table` (seconds and bytes) -> `problem` (machine, micro-batches; the
choice) -> `windows` and `sweep` (dynamic programming over all choices) -> `stages` (the best under 1F1B's formula, and
the least bound) -> `fastest` (the schedule, simulated). `bound` is the least makespan of any order of given stages.

For a graph on equal parts of a machine: `cuts` (the units of which stages are made) -> `rows` (what each takes, in
given layouts) -> `ranges` (stages of them, with recompute) -> `orders` (the schedules to choose from) -> `best_cuts`
(cuts and a schedule, for given layouts) -> `together` (layouts of all stages, by what each adds to the makespan) ->
`equal` (all of it together) -> `kernels` and `range_bound` (the least that ranges of units take in any layouts) ->
`live_bound` (the least makespan of stages of these that fit) -> `layout_bound` (all of that for a number of parts and
micro-batches) -> `choice` (how many of these, and the bound of all that there are).
"""

"""
Choose the stages of a pipeline, and their schedule. Abstract: what a range of layers takes on a part of the machine is
given as a table, and no plan with stages is made yet.

`table` (what ranges of layers take as stages) -> `problem` (machine, micro-batches; the choice) -> `windows` and
`sweep` (dynamic programming over all choices) -> `stages` (the best under 1F1B's formula, and the least bound) ->
`fastest` (the schedule, simulated). `bound` is the least makespan of any order of given stages.
"""

"""
Simulate one iteration of a plan: when each device computes, each link transfers, and how many bytes are
held (FlexFlow, section 5).

`streams` (what is scheduled on) and `costs` (how long it takes) -> `hops` and `chains` (reshards as tasks) -> `build`
(the task graph of a plan) -> `full` (its timeline) -> `memory`, `report`, `timeline` (SVG) and `trace` (JSON). `delta`
re-simulates a plan after one operator changes, on assignments from `choices`. `pipeline` simulates
a pipeline schedule, given the seconds of its stages.
"""

"""One rank's program: local shapes, explicit collectives, groups, and the order of all of it.

`program` (instructions, from a placed graph) -> `saved_softmax` (backwards that reuse the forward's sums) -> `schedule`
(when moves are issued and waited for; buckets) -> `deadlock` (that no ranks wait for each other for ever) -> `convert`
(to and from the spmd dialect).
"""

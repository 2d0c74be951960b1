"""Make one rank's program: local shapes, explicit collectives, process groups, and the order of its instructions.

`program` (instructions, from a placed graph) -> `saved_softmax` (backwards that reuse the forward's sums) -> `schedule`
(when collectives are started and waited for; buckets) -> `deadlock` (checks that no ranks wait for each other for
ever). `convert` goes to the spmd dialect and back.
"""

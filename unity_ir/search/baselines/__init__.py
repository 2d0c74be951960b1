"""
Make plans as people write them by hand.

`follow` applies a rule and propagates layouts to all other operators; `batch_dims` finds the dims of the samples;
`data_parallel` and `expert` use both. `random_plan` draws a legal plan, for tests and calibration.
"""

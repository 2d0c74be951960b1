"""
Write pipeline schedules as data: for each rank, the list of what it computes, sends and receives.

`actions` (one thing a rank does, in the words of torch.distributed.pipelining) -> `schedule` (the lists of all
ranks) -> `orders` and `vee_orders` (GPipe, 1F1B, zero-bubble, ..: pure functions of ranks and micro-batches) ->
`catalogue` (all by name) -> `check` (all is done once, after what it needs, and no rank waits for ever) -> `sends`
(inserts sends and receives by one total order) -> `live` (how many micro-batches a rank holds) -> `csv_text` (out and
in, as torch reads and writes it).

Nothing here has seconds (`simulate/pipeline.py`) or knows what a stage computes.
"""

"""Plan one rank's step: every decision that costs time or memory, as data that is simulated, printed and emitted.

`moves` (of a value between layouts) -> `program` (one rank's instructions, from a placed graph) -> `saved_softmax`
(backwards that reuse the forward's sums) -> `groups` (of operators that are one kernel; `local_operator` describes one
at a rank's shapes) -> `schedule` (when collectives are started and waited for, and which share a call) -> `deadlock`
(checks that no ranks wait for each other for ever) -> `plan` (all of it). `pipeline` has the orders of steps in stages.
"""

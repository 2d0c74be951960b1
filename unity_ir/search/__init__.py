"""
Search: the fastest parallel graph for a machine. `run` runs a strategy by name.

`strategy` says what a strategy is, and `strategies/` has all; `result` is what each returns, `explain` says why an
operator does what it does. The rooms: `layouts` (what can be chosen) -> `exact` (the best choice for one graph) ->
`joint` (over graphs), `memory` (that fits), `bounds` (how far from optimal) -> `choose` (the winner, simulated);
`pipeline` is for steps in stages, which no strategy makes yet. `unity`, `flexflow` and `tofu` are the papers as
written, `baselines` what people do by hand.
"""

from unity_ir.search.joint.best_first import Progress
from unity_ir.search.result import SearchResult
from unity_ir.search.run import run, run_in_time
from unity_ir.search.strategy import all_strategies

__all__ = ["Progress", "SearchResult", "all_strategies", "run", "run_in_time"]

"""Search: the fastest parallel graph for a machine. `run` picks the strategy by name."""

from unity_ir.search.flexflow.mcmc import Settings
from unity_ir.search.joint.best_first import Progress
from unity_ir.search.result import SearchResult
from unity_ir.search.run import STRATEGIES, run
from unity_ir.search.unity.search import Options

__all__ = ["STRATEGIES", "Options", "Progress", "SearchResult", "Settings", "run"]

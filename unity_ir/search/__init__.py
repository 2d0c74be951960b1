"""Search: the fastest parallel graph for a machine. `run` picks the strategy by name."""

from unity_ir.search.joint import Progress
from unity_ir.search.mcmc import Settings
from unity_ir.search.result import SearchResult
from unity_ir.search.run import STRATEGIES, run
from unity_ir.search.unity import Options

__all__ = ["STRATEGIES", "Options", "Progress", "SearchResult", "Settings", "run"]

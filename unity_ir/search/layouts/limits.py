"""
The tuning constants of every search, in one place: thresholds between algorithms, iteration limits, work charged.

`limits()` returns those in force. `limited` replaces some for the length of a `with` statement, which tests use to take
the path of large graphs on small ones. They are held in a context variable, so a forked worker has those in force at
the fork. Work is in the units of `unity_ir.budget`, about a nanosecond each. Whatever affects only whether a bound is
valid (rounding slack, free moves) is no tuning constant and stays beside the proof it belongs to.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """The limits of every search, and the thresholds at which it changes its algorithm."""

    # search/layouts
    exact_axes: int = 3
    """
    Mesh axes up to which every axis is searched by itself; on more, neighbouring axes are grouped. Tables grow with
    the number of roles to the power of the axes.
    """
    dense_paths: int = 256
    """Layouts up to which the distances between all are computed at once, even where those from a few are asked for."""
    cached_distances: int = 2**17
    """Numbers per block when a distance table is filled, so that a block stays in the processor's cache."""
    relaxed_distances: int = 2**18
    """Distances computed together by relaxing moves: all moves are relaxed several times, so a block stays cached."""
    scattered: int = 20
    """Relax sparsely once fewer than 1/20 of the distances improved."""
    # search/exact
    group_rows: int = 400_000
    """
    Configurations and layouts of a whole graph up to which axes are cut into more than `exact_axes` groups: more
    groups find better plans and take longer.
    """
    group_rows_tried: int = 600_000
    """Configurations and layouts, summed over all cuts tried, after which no other cut is tried."""
    group_gap: float = 1e-4
    """Relative gap to a lower bound on all plans at which no other cut is tried."""
    cached_sums: int = 2**16
    """Numbers per block when tables are summed, so that a block stays in the processor's cache."""
    rows_of_process: int = 50_000
    """Configurations and layouts of a graph from which on searching it is worth a process of its own."""
    dominance_entries: int = 10**6
    """Entries of a sum from which on dropping dominated rows first pays."""
    dominance_rows: int = 12
    """Rows that all others are compared with when dominated rows are dropped."""
    dominance_columns: int = 64
    """Columns compared first when dominated rows are dropped: most rows are below in one of a few."""
    presum_ratio: int = 4
    """Tables are added up before the rest if the result has this many times fewer entries than the sum of all."""
    work_elimination: int = 40_000
    """Work charged to the budget for an elimination, on top of its entries (Python and numpy calls)."""
    work_elimination_order: int = 15_000
    """Work charged for pricing the elimination of one variable."""
    copied_share: float = 0.7
    """Share of a table's entries at which a restricted one is copied: until then, it is read through indices."""
    sparse_layouts: int = 20
    """Layout numbers are sorted, rather than counted in an array, where fewer than 1/20 of the range occurs."""
    shared_rounds: int = 30
    """Rounds in which more layouts are tracked, for shared moves to be charged exactly."""
    shared_rows: int = 30_000
    """Rows of a relay at most: layouts times states of the tracked layouts."""
    shared_exact_rows: int = 100_000
    """
    Configurations and layouts of a graph up to which rounds go on until the optimum is proved, rather than within
    `close`.
    """
    shared_entries: int = 10_000_000
    """Pairs of a relay's row and a layout at most."""
    pruned_entries: int = 20_000_000
    """Entries that an elimination may look at among the rows left after pruning."""
    whole_entries: int = 600_000_000
    """
    Entries that an elimination may look at before any row is pruned, where equal layers share tables and are
    eliminated once.
    """
    known_messages: int = 2**25
    """Numbers in messages that are kept for the next search of the same graph, over all graphs: 256 MiB."""
    short_passes: int = 20
    """TRW-S passes there and back, at most, for a graph with few of another's equal layers."""
    settled: float = 1e-5
    """Part of the bound by which such passes must raise it, for others to follow."""
    few_entries: int = 4_000_000
    """Entries of all tables up to which an incumbent among few rows is looked for with tables of all of them."""
    work_few_rows: int = 10_000
    """Work charged for an edge or a variable in such a search."""
    dominating_rows: int = 16
    """Rows of a variable that are compared with all its others at a time."""
    best_rows: int = 8
    """Rows of each variable, those with the least slack, among which an incumbent is looked for."""
    exact_passes: int = 60
    """TRW-S passes there and back, at most, for one graph."""
    estimated_passes: int = 2
    """
    The same where a pipeline's seconds are estimated: 60 passes take twice as long for mixtures of experts, whose
    layers elimination cannot solve, and change estimates by less than 1%.
    """
    work_port: int = 25_000
    """Work charged for restricting one end of an edge to fewer rows."""
    close: float = 1e-3
    """Relative gap at which the search stops improving an incumbent; the gap is reported."""
    dense_space: int = 600
    """Layouts of a value up to which distances between all of them are tabulated at once."""
    sums_per_work: int = 4
    """Sums of a message per unit of work: equal ones are added up once."""
    work_message: int = 20_000
    """Work charged for a message, on top of its sums (Python and numpy calls)."""
    dense_pairs: int = 2**14
    """Pairs of layouts made and needed up to which two-way costs are summed in one table."""
    cached_messages: int = 2**16
    """Numbers per block when two-way costs are summed, so that a block stays in the processor's cache."""
    recompute_chain: int = 8
    """
    A chain of recomputed operators holds at most 1/8 of the bytes of all activations, unless it is one operator:
    the whole chain is held at once (Chen et al., 2016).
    """
    # search/joint
    alpha: float = 1.05
    """A graph is rewritten further if it costs less than alpha times the incumbent (Unity, section 5.1)."""
    rewritten_operators: int = 500
    """Operators of all graphs that are priced."""
    rewritten_layers: int = 4
    """Equal layers that are left in a graph of more operators, to find what rewrites it, and groups of axes."""
    least_graphs: int = 8
    """Graphs that are rewritten or priced, at least, however small the budget."""
    work_match: int = 3_000
    """Work charged for matching one rule at one operator."""
    work_rebuild: int = 20_000
    """Work charged for an operator of a graph that a rule makes."""
    # search/memory
    byte_prices: int = 24
    """Prices of a byte (Lagrange multipliers) tried for one limit, at most."""
    peak_rounds: int = 6
    """Times the limit is tightened because the simulated peak is above the bytes held at the end of the forward."""
    waited_gathers: float = 0.2
    """Share of the seconds of gathering a weight again for the backward that counts: most of it is beside kernels."""
    spare_memory: float = 5e-3
    """Share of a device's memory that a plan may leave free before less recompute is tried."""
    work_change: int = 50_000
    """Work charged for comparing all rows of a variable in the local search."""
    peak_proposals: int = 200
    """Plans whose peak memory is simulated, at most, in the local search on a graph of `peak_operators`."""
    more_proposals: int = 4
    """Times as many in smaller graphs, in proportion, at most; so with kicks."""
    peak_operators: int = 120
    """Operators of a graph up to which the local search runs: in larger graphs, no single row changes the peak."""
    work_peak: int = 300_000
    """Work charged for a simulated peak, per variable."""
    kick_rows: int = 3
    """Rows changed at random in a kick, where no single change helps."""
    kicks: int = 30
    """Kicks of the local search on a graph of `peak_operators`, at most."""
    # search/bounds
    count_pairs: int = 60_000_000
    """
    Pairs of layouts, over all types of values, up to which the minimum over counts is computed exactly; above,
    TRW-S bounds it.
    """
    pass_sums: int = 22_000_000_000
    """Sums in one TRW-S pass up to which passes are made: some fifteen seconds, beside the search."""
    finer_sums: int = 10
    """About as many times the sums of a pass has a problem of a finer kind."""
    least_finer_sums: int = 3
    """At least as many: 6 to 17 times were seen."""
    settled_sums: int = 4
    """Times as many sums of a pass for a graph whose messages start from those of a shorter one: one pass is made."""
    long_sums: int = 10_000_000_000
    """Sums of a pass above which none follows on one that hardly helps."""
    once_sums: int = 1_000_000_000
    """Sums of a pass, at the finest coarseness, above which none follows on the first one of settled messages."""
    count_rows: int = 3_000_000
    """Configurations of one operator up to which more than the kernels is bounded."""
    count_passes: int = 4
    """TRW-S passes there and back, at most, at one coarseness."""
    merges: tuple[tuple[int, ...], ...] = ((3,), (2,), (0, 1))
    """
    Coarseness of dims (`layouts.space.merged_dims`), coarse to fine, one bound after the other; where two are given,
    the second is for problems that are too large for passes with the first.
    """
    direct_sums: int = 10_000_000_000
    """
    Sums of a pass among all rows of the last problem but the finest up to which no coarser one goes before it: what
    that one rules out is worth less than its tables.
    """
    proved: float = 1e-7
    """Relative gap at which a plan counts as proved to be the fastest."""
    quick_operators: int = 120
    """Operators of a graph up to which a quick bound takes less than to try another grouping of mesh axes."""
    near: float = 3e-3
    """Relative gap below which only cheap passes (`cheap_sums`) are still made."""
    cheap_sums: int = 100_000_000
    """Sums of a pass up to which it is cheap."""
    order_margins: tuple[float, ...] = (5e-3, 2e-2, 1e-1)
    """Margins above the bound, as a part of it, within which the order of axes is searched, one after the other."""
    slow_pass: float = 2e-3
    """Stop when a pass raises the bound by a smaller part than this and leaves half the rows."""
    far: int = 20
    """Stop when a pass closes less than 1/20 of the remaining gap and a finer problem is next."""
    counted_rows: int = 32
    """Rows of each variable, those of least slack, among which a plan is looked for once messages have bounded all."""
    axis_orders: int = 6
    """Orders of axes tried for each operator and value."""
    axis_entries: int = 20_000_000
    """Entries of tables that choosing an order may look at."""
    axis_prices: int = 20_000
    """Pairs of layouts that are priced before giving up."""
    axis_runs: int = 4
    """
    Runs of mesh axes (`pcg.coarse.runs_of`) in a change of layout up to which the planner prices it: of more, it takes
    tens of milliseconds to seconds.
    """
    axis_penalty: float = 3.0
    """Factor of the estimated seconds of other changes, as plans with fewer runs are sooner planned."""
    order_layouts: int = 20_000
    """Layouts of a value, a role but REPEAT for every axis, up to which orders are searched."""
    order_rows: int = 20_000
    """Rows of a variable, one per order, at most."""
    order_pairs: int = 40_000_000
    """Pairs of rows, over all distinct edges, at most."""
    order_sums: int = 600_000_000
    """Moves times source layouts of one shape, at most, that relaxing distances looks at."""
    # search/choose
    tofu_axes: int = 9
    """Mesh axes up to which Tofu's plan is a candidate: it cuts each axis by itself, which takes long on more."""
    planned_runs: int = 7
    """
    Runs of mesh axes (`pcg.coarse.runs_of`) in a change of layout up to which it is: where roles alternate, the planner
    takes a second for a change of 7 runs, and half a minute for one of 9.
    """
    work_candidate: int = 300_000
    """Work charged for making, pricing and simulating a plan, per operator."""
    faster: float = 1 - 1e-6
    """A plan replaces another if its simulated time is below this part of the other's."""
    sibling_operators: int = 120
    """
    Operators of a graph up to which sibling placements are tried: for more, simulating them takes longer than the
    exact search.
    """
    sibling_devices: int = 16
    """Parts of the machine on which siblings are placed, at most."""
    sibling_plans: int = 2
    """Plans, the fastest ones, that MCMC then improves."""
    sibling_budget: int = 4000
    """Proposals of all these MCMC chains."""
    sibling_patience: int = 16
    """Proposals per operator that a chain waits for a better plan."""
    sibling_worth: float = 1.01
    """Ratio to the plan's seconds above which no chain is started from a placement."""
    sibling_assignments: int = 512
    """Assignments of an operator, all axes of a level alike, up to which all are tried."""
    sibling_weights: float = 0.01
    """Minimum share of the weights for exhaustive trial, in a large graph."""
    branch_parts: int = 8
    """Parts of a machine at most: devices of different parts are simulated one by one."""
    branch_proposals: int = 1500
    """Operators given another place, in all, at most."""
    branch_operators: int = 120_000
    """Proposals times operators of the graph, at most: what bounds the simulations' time."""
    branch_gain: float = 1e-6
    """Relative gain below which a plan with branches is not worth being harder to read."""
    hidden_shares: tuple[float, ...] = (0.15, 0.3, 0.5)
    """
    Shares of the moves of weights and their gradients taken to be overlapped, in plans for programs that overlap
    them.
    """
    about_equal: float = 1.01
    """Plans with recompute of two graphs are compared as emitted if one sums at most this times what the other does."""
    rival_operators: int = 120
    """Operators up to which the graph that is fastest on one device gets the full final choice, too."""
    rival_worth: float = 1.25
    """
    Ratio of its plan's seconds to the best known above which no operators of that graph are put on parts of the
    machine: its branches are joined more often, so that parts save less.
    """
    # search/run
    ended_passes: int = 3
    """TRW-S passes there and back for a bound where the budget has ended."""
    collected_objects: int = 300_000
    """Allocations between garbage collections during a search: graphs and tables live long and hold few cycles."""
    alternatives_shown: int = 24
    """Alternatives that `explain` lists."""
    # search/unity
    work_region: int = 100_000
    """Work charged for a region's table, on top of the moves it prices."""
    work_view_pair: int = 3_000
    """Work charged for pricing a move between two views."""
    work_block_entry: int = 20
    """Work charged for an entry of a block's partial mappings."""
    beam: int = 64
    """Partial mappings of a block kept for each view of its source."""
    work_mapping: int = 15_000
    """Work charged for mapping a candidate, per operator."""
    unity_candidates: int = 10_000
    """Candidates of a whole graph, divided by its operators into a budget per operator."""
    unity_views: int = 64
    """Views of one operator that are tried; the first ones keep earlier index variables on outer axes."""
    planned_axes: tuple[tuple[int, int], ...] = ((4, 3), (99, 2))
    """
    (mesh axes of a machine up to which, axes of a mesh up to which the planner is asked); on larger meshes each
    pair of roles is one collective, for the planner's time grows with a power of the axes.
    """
    # search/tofu
    coarsen_depth: int = 3
    """Producers followed back to tell apart operators without weights."""
    # search/flexflow
    mcmc_classes: int = 4
    """Classes of devices that pinned operators tell apart, at most: each class is simulated by itself."""
    mcmc_alike: float = 0.3
    """Probability that a proposal copies the assignment of an operator alike."""
    mcmc_pinning: float = 0.25
    """Probability, in the pinning part of a chain, that a proposal pins its operator on some axes."""
    mcmc_pinned: float = 0.5
    """Probability that it then pins each of these axes."""
    mcmc_shaken: float = 0.25
    """Share of the operators that get a random assignment when a chain restarts near the best plan."""
    mcmc_least_chain: int = 256
    """Proposals left for which another chain is worth starting."""
    mcmc_behind: int = 3
    """Proposals per operator that a chain waits while slower than the plan to beat."""
    # search/baselines
    work_baseline: int = 300_000
    """Work charged for making and pricing a plan by hand, per operator."""


_LIMITS = ContextVar("search limits", default=SearchLimits())


def limits() -> SearchLimits:
    """Return the limits in force: the defaults, or those of the enclosing `limited`."""
    return _LIMITS.get()


@contextmanager
def limited(**changes: Any) -> Generator[None]:
    """
    Replace some limits for the length of the `with` statement, by names of fields of `SearchLimits`:
    `limited(alpha=1.1)`. Raises `TypeError` for unknown names.

    Results that are cached across calls (`unity.device_shares.views`) keep the limits they were computed with.
    """
    token = _LIMITS.set(replace(limits(), **changes))
    try:
        yield
    finally:
        _LIMITS.reset(token)

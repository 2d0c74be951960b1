"""The cheapest layouts of one graph, exactly.

`factor_graph` (the search as a sum of unary and pairwise costs) -> `elimination` (its minimum, exactly) and `trw_s` (a
lower bound of it, by message passing) -> `solver` (a graph's minimum, memoised). `two_way` holds pairwise costs over
the way there and back without their table, `shared_moves` corrects for moves that several readers share, `recompute`
chooses what is computed again, `axis_groups` merges mesh axes on large machines, and `plan_graph` writes the choice as
a graph.
"""

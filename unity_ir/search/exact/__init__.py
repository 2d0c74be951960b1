"""
Find the cheapest layouts of one graph, exactly.

`factor_graph` (the search as a sum of unary and pairwise costs) -> `elimination` (its minimum, exactly) and `trw_s` (a
lower bound, by message passing) -> `solver` (a graph's minimum, memoised). `two_way` computes pairwise costs of
training without a dense table, `shared_moves` charges once for moves that several readers share, `recompute` chooses
what the backward recomputes, `axis_groups` merges mesh axes on large machines, and `plan_graph` writes the choice as a
graph.
"""

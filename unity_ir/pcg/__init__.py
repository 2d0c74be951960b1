"""Parallel computation graphs: types, the compact immutable graph, parallel operators, layouts, interpretation."""

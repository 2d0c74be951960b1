"""Substitutions: rewrites of a graph that keep what it computes."""

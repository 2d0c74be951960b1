"""Compute time, communication and memory of a placed graph."""

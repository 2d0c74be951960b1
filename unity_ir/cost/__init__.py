"""Time, communication and memory of a placed graph."""

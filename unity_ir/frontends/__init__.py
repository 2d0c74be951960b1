"""Import models written for other systems as graphs. Each frontend needs its system installed."""

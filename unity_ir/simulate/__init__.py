"""The execution simulator: what one iteration of a plan does on the streams of a machine, and when (FlexFlow, section 5)."""

"""The execution simulator: when one iteration of a plan does what on a machine (FlexFlow, section 5)."""

"""
Recognise operators that models write out in several: attention, norms, softmaxes, activations, losses.

Each function gets the operands of an operator about to be built, the last of a pattern, and returns the one operator
that computes it, or None. All read the graph that is there (`match`), whichever frontend built it.
"""

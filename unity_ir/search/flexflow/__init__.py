"""FlexFlow's search (section 6): `mcmc`, on the delta simulator."""

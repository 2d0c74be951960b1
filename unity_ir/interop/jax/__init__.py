"""
A plan's training step as a function of JAX, and so as StableHLO. All modules import jax.

`functions` (that TDL calls) -> `named` (arrays over index variables) -> `convolutions` -> `lines` (an operator's line)
-> `moves` (collectives) -> `execute` (one rank's program on a device's pieces), `annotate` (the same on whole arrays)
-> `step` (the function, its shardings, its text) -> `trees` (the same for a loss of JAX, with its own trees).
"""

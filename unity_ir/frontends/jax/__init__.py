"""
Import loss functions of JAX: `from_jax(loss, (weights, batch))`.

The function's jaxpr is run in PyTorch under `torch.export`, so that one importer (`frontends.torch`) knows what becomes
which operator, and recognises attention, norms and losses that are written out. `trace` (the jaxpr, and names) ->
`values`, `random`, `known` (functions of jax.nn), `convolutions`, `indexing` -> `primitives` -> `run` (a jaxpr) ->
`imported` (the graph).
"""

from unity_ir.frontends.jax.imported import ImportedLoss, from_jax

__all__ = ["ImportedLoss", "from_jax"]

"""
Print a plan's training step in upstream MLIR: `linalg` operations on whole tensors, and the layout of each value in the
`shard` dialect (`unity-opt -t linalg`, docs/mlir.md).

`step` makes the module of a program, `shardings` annotates its values. `lines` turns one bound line into operations: it
makes loop nests (`nests`), of operands prepared by `reads`, and scalar operations (`scalars`); `opaque` writes out
functions that have no line.
"""

"""
Print a plan's training step in upstream MLIR: `linalg` operations on whole tensors, and the layout of each value in the
`shard` dialect (`unity-opt -t linalg`, docs/mlir.md).

`step` makes the module of a program, of values on whole tensors with annotations (`shardings`) or on one device's
pieces with `collectives` (`local`). `lines` turns one bound line into operations: it makes loop nests (`nests`), of
operands prepared by `reads`, results written by `writes`, scalar operations (`scalars`) and reshapes (`tensors`);
`opaque` writes out functions that have no line.
"""

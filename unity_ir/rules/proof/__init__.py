"""Proofs of substitutions for all sizes: tensors as functions of symbolic indices, compared by normal forms."""

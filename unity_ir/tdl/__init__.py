"""The tensor description language: syntax, binding to shapes, analysis, numpy evaluation, counts (Tofu, section 4)."""

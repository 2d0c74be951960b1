"""
The generator of substitutions: all terms up to a size, those that are equal on random inputs, the smallest set that
implies the others, each proved for all sizes (TASO, section 3; Ruler, OOPSLA'21).
"""

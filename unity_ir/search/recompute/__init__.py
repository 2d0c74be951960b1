"""
Choose what a placed plan of any strategy recomputes in its backward instead of saving it (docs/search.md, "Recompute").

`min_cut` (which values of a layer to save, at a price per byte) -> `chosen` (what each kind of recompute saves) ->
`fit` (the least recompute with which a plan fits a device).
"""

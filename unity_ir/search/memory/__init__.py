"""The fastest plan that fits the memory of a device.

`lagrangian` prices bytes until the plan fits -> `seconds_and_bytes` (both costs of any choice, and its neighbours) ->
`peak_descent` (local search on peak memory, where the price alone does not reach the limit).
"""

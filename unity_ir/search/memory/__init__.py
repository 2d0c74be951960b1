"""
Find the fastest plan that fits the memory of a device.

`lagrangian` prices bytes until the plan fits -> `seconds_and_bytes` (both costs of any choice, and local search) ->
`peak_descent` (local search on peak memory, where prices alone do not reach the limit).
"""

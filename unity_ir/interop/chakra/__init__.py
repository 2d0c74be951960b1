"""
Plans as Chakra execution traces, for simulators of networks (docs/chakra.md).

`schema` (the wire format) -> `calls` (a collective of one rank) -> `nodes` (from the replay of a plan), `staged` (of a
step in stages) -> `ranks` (groups and peers) -> `step` (all files).
"""

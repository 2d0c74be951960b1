"""
xDSL dialects: the textual form of graphs, machines, rank programs and rules. Each is imported when text first uses it.
"""

DIALECTS: dict[str, str] = {
    "machine": "unity_ir.dialects.machine:MACHINE",
    "pcg": "unity_ir.dialects.pcg:PCG",
    "spmd": "unity_ir.dialects.spmd:SPMD",
    "subst": "unity_ir.dialects.subst:SUBST",
}
"""Dialect by name, as `module:object`."""

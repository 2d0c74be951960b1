"""xDSL dialects: the textual form of what the core computes with. Thin; a dialect is imported when its text is met."""

DIALECTS: dict[str, str] = {
    "machine": "unity_ir.dialects.machine:MACHINE",
    "pcg": "unity_ir.dialects.pcg:PCG",
    "spmd": "unity_ir.dialects.spmd:SPMD",
    "subst": "unity_ir.dialects.subst:SUBST",
}
"""Dialect by name, as `module:object`."""

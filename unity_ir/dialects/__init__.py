"""xDSL dialects: the textual form of what the core computes with. Thin; a dialect is imported when its text is met."""

DIALECTS: dict[str, str] = {
    "machine": "unity_ir.dialects.machine:MACHINE",
    "pcg": "unity_ir.dialects.pcg:PCG",
    "spmd": "unity_ir.dialects.spmd:SPMD",
}
"""Dialect by name, as `module:object`."""

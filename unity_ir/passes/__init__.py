"""One pass or target per module. A module is imported when its pass is asked for."""

PASSES: dict[str, str] = {
    "apply-derivation": "unity_ir.passes.apply_derivation:ApplyDerivation",
    "apply-rule": "unity_ir.passes.apply_rule:ApplyRule",
    "lower-pcg-to-spmd": "unity_ir.passes.lower_to_spmd:LowerToSpmd",
    "machine-expand": "unity_ir.passes.machine_expand:MachineExpand",
    "pcg-differentiate": "unity_ir.passes.differentiate:Differentiate",
    "pcg-erase": "unity_ir.passes.erase:Erase",
    "pcg-fold": "unity_ir.passes.fold:Fold",
    "pcg-freeze": "unity_ir.passes.freeze:Freeze",
    "pcg-fuse-collectives": "unity_ir.passes.fuse_collectives:FuseCollectives",
    "pcg-mixed-precision": "unity_ir.passes.mixed_precision:MixedPrecision",
    "pcg-name-values": "unity_ir.passes.name_values:NameValues",
    "pcg-search": "unity_ir.passes.search:Search",
    "pcg-stripe": "unity_ir.passes.stripe:Stripe",
}
"""Pass by name, as `module:class`."""

TARGETS: dict[str, str] = {
    "dtensor": "unity_ir.passes.dtensor:DTensorTarget",
    "irdl": "unity_ir.passes.irdl:IrdlTarget",
    "linalg": "unity_ir.passes.linalg:LinalgTarget",
    "stablehlo": "unity_ir.passes.stablehlo:StableHloTarget",
    "triton": "unity_ir.passes.triton:TritonTarget",
}
"""Target by name, as `module:class`."""

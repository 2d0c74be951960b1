"""
Name operations for IRDL, which has no operands of different types in an unknown number, and no terminators.

- An operation whose number of operands or results varies has it in its name: `pcg.concat_3` of three operands,
  `pcg.split_2` of two results, `spmd.compute_2_1` of two operands and one result.
- An operation with regions is in a dialect that is not registered, `region`: `region.spmd.program`. MLIR would ask a
  registered one for blocks with terminators.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from xdsl.dialects.builtin import ModuleOp, UnregisteredOp
from xdsl.ir import Operation
from xdsl.irdl import IRDLOperation, VariadicDef

from unity_ir.dialects.machine import MACHINE
from unity_ir.dialects.names import REGION
from unity_ir.dialects.pcg import PCG, ComputeOp
from unity_ir.dialects.spmd import SPMD
from unity_ir.dialects.spmd import ComputeOp as PieceComputeOp
from unity_ir.dialects.subst import SUBST
from unity_ir.dialects.subst.ops import ApplyOp
from unity_ir.errors import UnityError
from unity_ir.ops import operators

IRDL_DIALECTS = (MACHINE, PCG, SPMD, SUBST)

MOST = 32
"""The most operands or results of an operation that has any number of them. IRDL lists each number."""


def has_regions(kind: type[IRDLOperation]) -> bool:
    """
    Return whether operations of the xDSL class `kind` may have regions. IRDL text does not declare these operations,
    and they are named differently there (`irdl_name`).
    """
    return bool(kind.get_irdl_definition().regions)


@cache
def varies(kind: type[IRDLOperation]) -> tuple[bool, bool]:
    """
    Return (whether operations of the xDSL class `kind` differ in their number of operands, whether they differ in that
    of results): (True, False) for the class of `pcg.concat`. A number that varies is a part of the name in IRDL
    (`irdl_name`).
    """
    if issubclass(kind, ComputeOp):
        line = kind.operator().line
        return any(p.variadic for p in line.parameters), any(r.variadic for r in line.results)
    definition = kind.get_irdl_definition()
    operands, results = ((d for _, d in defs) for defs in (definition.operands, definition.results))
    return any(isinstance(d, VariadicDef) for d in operands), any(isinstance(d, VariadicDef) for d in results)


def counts(kind: type[IRDLOperation]) -> Iterator[tuple[int, int]]:
    """
    Yield every pair (number of operands, number of results) that operations of the xDSL class `kind` may have: IRDL
    text declares one operation for each. A number without a limit goes up to `MOST` (32).
    """
    any_operands, any_results = varies(kind)
    if issubclass(kind, ComputeOp):
        line = kind.operator().line
        operands, results = len(line.parameters), len(line.results)
    else:
        definition = kind.get_irdl_definition()
        operands, results = len(definition.operands), len(definition.results)
    if kind in (PieceComputeOp, ApplyOp):
        lines = [operator.line for operator in operators().values()]
        fixed = {(len(line.parameters), len(line.results)) for line in lines}
        yield from sorted(
            {(1, 1), *fixed, *((n, 1) for n in range(1, MOST + 1)), *((1, n) for n in range(1, MOST + 1))}
        )
        return
    for o in range(operands - 1, MOST + 1) if any_operands else (operands,):
        for r in range(results - 1, MOST + 1) if any_results else (results,):
            yield o, r


def irdl_name(kind: type[IRDLOperation], operands: int, results: int) -> str:
    """
    Return the name that operations of the xDSL class `kind`, with these numbers of operands and results, have in IRDL.
    Numbers that vary are part of it: `pcg.concat_3` has three operands. The name of an operation with regions begins
    with `region.`: `region.spmd.program`.
    """
    if has_regions(kind):
        return REGION + kind.name
    numbers = (n for n, is_any in zip((operands, results), varies(kind), strict=True) if is_any)
    return kind.name + "".join(f"_{n}" for n in numbers)


def rename_for_irdl(module: ModuleOp) -> None:
    """
    Give the operations of a module their names in IRDL (`irdl_name`), in place. An operation whose name changes is
    replaced by an unregistered one with the same operands, attributes and regions.

    Raises `UnityError` for an operation with more operands or results than IRDL declares.
    """
    known = {op for dialect in IRDL_DIALECTS for op in dialect.operations}
    for op in list(module.walk(reverse=True)):
        kind = type(op)
        if kind not in known or not isinstance(op, IRDLOperation):
            continue
        name = irdl_name(type(op), len(op.operands), len(op.results))
        if name != op.name:
            if not has_regions(type(op)) and (len(op.operands), len(op.results)) not in set(counts(type(op))):
                raise UnityError(
                    f"-t irdl: {op.name} with {len(op.operands)} operands and {len(op.results)} results; IRDL declares "
                    f"up to {MOST}: print it by --print-op-generic"
                )
            _replace(op, name)


def _replace(op: Operation, name: str) -> None:
    regions = [op.detach_region(region) for region in list(op.regions)]
    attributes = {**op.attributes, **op.properties}
    types = [result.type for result in op.results]
    new = UnregisteredOp.with_name(name).create(
        operands=op.operands, result_types=types, attributes=attributes, regions=regions
    )
    block = op.parent
    assert block is not None, "an operation outside a module cannot be renamed"
    block.insert_op_before(new, op)
    for old, result in zip(op.results, new.results, strict=True):
        result.name_hint = old.name_hint
        old.replace_all_uses_with(result)
    op.detach()
    op.erase()

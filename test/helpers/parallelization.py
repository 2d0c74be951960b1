"""
The parallelization rule of every operator, derived from its TDL line alone (Tofu's partition-n-reduce).

    op(x, y)  ->  undo(op(divide(x), divide(y)))

`divide` is partition along the dims that carry a divided index variable, replicate over those that do not, zero_pad
where an operand carries addends, and halo where windows reach beyond a piece; `undo` is halo_reduce, combine, reduce
and pick. Both sides have the same boundary types and the same erasure, so they are equal: parallel operators never
change a value.
"""

from __future__ import annotations

from collections.abc import Iterator

from unity_ir.pcg.node import Node, Value, divide, parallel
from unity_ir.pcg.parallel import type_steps
from unity_ir.pcg.types import divided_type
from unity_ir.tdl.parallel import Configuration, operand_degrees


def parallelize(node: Node, configuration: Configuration) -> tuple[Value, ...]:
    """
    The right-hand side of the rule: values equal to the results of a serial node, computed under a configuration.

    Given `matmul(x, w)` and k by 2: `reduce(matmul(partition(x, dim 1), partition(w, dim 0)))`.
    """
    operands: list[Value] = []
    for value, d in zip(node.operands, operand_degrees(node.analysis, configuration), strict=True):
        wanted = divided_type(value.type.shape, value.type.dtype, d)
        for op, attributes in type_steps(value.type, wanted):
            value = parallel(op, value, None, **attributes).result
        operands.append(value)
    results: list[Value] = []
    for value in divide(node, operands, configuration).results:
        for op, attributes in type_steps(value.type, value.type.serial):
            value = parallel(op, value, None, **attributes).result
        results.append(value)
    return tuple(results)


def configurations(node: Node, degree: int) -> Iterator[Configuration]:
    """Every way to divide a node's task grid along one axis: each splittable variable, copies, each set of carriers."""
    analysis = node.analysis
    for variable in analysis.splittable:
        if analysis.bound.extents[variable] % degree == 0:
            yield Configuration({variable: degree})
    yield Configuration(copy=degree)
    for carriers in analysis.carriers:
        yield Configuration(sums={carriers: degree})

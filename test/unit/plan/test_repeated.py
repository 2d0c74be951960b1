"""Registers that a step makes a second time instead of keeping the first."""

from unity_ir.api.plans import plan
from unity_ir.interop.expressible import DTENSOR, step_program
from unity_ir.plan.instructions import ReshardMove, equal_registers, makers_of, repeated_registers


def test_weights_gathered_again_are_repeated_and_the_first_gathers_are_not():
    found = plan("mlp", batch=8, hidden=16, layers=3, classes=4, machine="box:4", degrees="zero=3")
    body = step_program(found.graph, found.machine, DTENSOR).body
    again = repeated_registers(body)
    made = makers_of(body)
    gathers = [i for i in body if isinstance(i, ReshardMove) and i.kind == "all_gather"]
    of = [i.operand for i in gathers]
    # The first layer's backward needs no weight, and the last one's is still there.
    assert sorted(i.operand for i in gathers if i.result in again) == sorted({r for r in of if of.count(r) == 2})
    assert {made[r] for r in again} == {i for i in gathers if i.result in again}
    assert len(again) >= 1
    # Of two equal ones, it is the later.
    assert again < equal_registers(body)
    assert all(min(g.result for g in gathers if g.operand == made[r].operand) < r for r in again)

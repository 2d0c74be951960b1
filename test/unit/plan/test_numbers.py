"""Numbers of operators, by which what was found out about one serves all that are alike."""

import pickle
from dataclasses import replace

from unity_ir.api.plans import plan
from unity_ir.interop.expressible import DTENSOR, step_program
from unity_ir.pcg.sharding import REPEAT, Mesh
from unity_ir.plan.groups import GroupMemo
from unity_ir.plan.instructions import Compute, Tensor
from unity_ir.plan.plan import PlanOptions
from unity_ir.plan.program import Program


def _program(*computes: Compute, dtype: str = "f32", row: int = 0) -> Program:
    tensors = {r: Tensor((8, 8), dtype, (REPEAT,), row=row) for r in range(9)}
    return Program("p", Mesh((2,)), tensors, computes, (), None)


def _add(operands: tuple[int, ...], result: int, operator: str = "add") -> Compute:
    return Compute(operator, operands, (result,), (), (REPEAT,))


def test_operators_that_do_the_same_on_equal_types_have_one_number():
    first, second = _add((0, 1), 2), _add((3, 2), 4)
    program, other = _program(first, second), _program(second)
    assert program.number(first) == program.number(second) == other.number(second)
    assert program.number(first) != program.number(_add((0, 1), 2, "mul"))
    # It is another kernel that reads one tensor twice, or tensors of another type, or padded rows.
    assert program.number(first) != program.number(_add((0, 0), 2))
    assert program.number(first) != _program(first, dtype="bf16").number(first)
    assert program.number(first) != _program(first, row=64).number(first)
    assert program.number(first) != replace(program, mesh=Mesh((4,))).number(first)


def test_numbers_stay_in_their_process():
    program = _program(_add((0, 1), 2))
    before = pickle.dumps(program)
    program.number(_add((0, 1), 2))
    assert program.bytes[0] == 256
    assert pickle.dumps(program) == before
    options = PlanOptions()
    options.memo.choices[program.number(_add((0, 1), 2))] = "triton"
    assert pickle.loads(pickle.dumps(options)).memo == GroupMemo()


def test_equal_layers_have_equal_numbers():
    found = plan("mlp", batch=8, hidden=16, layers=6, classes=4, machine="box:4", degrees="zero=3")
    program = step_program(found.graph, found.machine, DTENSOR)
    computes = [i for i in program.body if isinstance(i, Compute)]
    assert len({program.number(i) for i in computes}) < len(computes) // 2

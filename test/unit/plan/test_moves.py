"""Test moves of reshards that the stages of a pipeline make, each by itself."""

from itertools import product

import pytest

from unity_ir.machine import load
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.node import leaf
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, pinned_at
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.moves import plan_moves

MACHINE = load("dgx-h100:2")
VALUE = leaf("weight", tensor_type((4096, 4096), "f32"), name="w").result

AXIS = (COPY, REPEAT, 0)


@pytest.mark.parametrize("role", [COPY, REPEAT, pinned_at(1)])
def test_stages_get_no_help_of_each_other(role: int):
    """What a stage has it moves among its own devices: those of others run another program meanwhile."""
    for there in {role, pinned_at(1)}:
        for source, target in product(product((*AXIS, SUM), repeat=3), product(AXIS, repeat=3)):
            at = (role, *source)
            for move in plan_moves(VALUE, at, (there, *target), MACHINE, stage_axes=1):
                assert not (COLLECTIVES[move.kind].crosses_links and 0 in move.axes)
                at = move.after(at, MACHINE.mesh)
            assert at == (there, *target)

"""Every kernel of emitted programs compiles for a Hopper GPU that is not here, without spills, within shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from extent import sample
from models import MODELS, machine

from unity_ir.dialects.convert import to_graph
from unity_ir.lowering.emit.printer import Emitted, emit
from unity_ir.lowering.measure.aot import SHARED_LIMITS, compile_all
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import plan_step
from unity_ir.search import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Graph:
    """The graph of an example's only function."""
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.dialects.func import Func, FuncOp
    from xdsl.parser import Parser

    from unity_ir.dialects.machine import MACHINE
    from unity_ir.dialects.pcg import PCG

    context = Context()
    for dialect in (Builtin, Func, PCG, MACHINE):
        context.load_dialect(dialect)
    module = Parser(context, (EXAMPLES / f"{name}.pcg").read_text()).parse_module()
    (func,) = (op for op in module.ops if isinstance(op, FuncOp))
    return to_graph(func)


def emitted(graph: Graph, where: str, plan: str, optimizer: str) -> Emitted:
    on = machine(where)
    placed = run(graph, on, plan).graph
    return emit(plan_step(lower(differentiate(placed, Optimizer(optimizer), on.mesh), on)), graph)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "plan", "optimizer"),
    [("mnist_mlp", "2gpu", "joint", "adam"), ("digits", "box:2", "data-parallel", "sgd")]
    + [(name, "ideal:2x2", "joint", "sgd") for name in sample([*MODELS], 2)],
)
def test_kernels_compile_for_hopper(name: str, where: str, plan: str, optimizer: str):
    graph = MODELS[name][0]() if name in MODELS else example(name)
    program = emitted(graph, where, plan, optimizer)
    launched = [c for c in program.compiled if c.is_for("cuda:90")]
    found = compile_all("\n\n".join(program.kernels.values()), launched, "cuda:90")
    assert {r.kernel for r in found} == {c.kernel for c in launched}
    assert found
    for resources in found:
        assert resources.spills == 0, resources
        assert resources.shared_bytes <= SHARED_LIMITS["cuda:90"], resources

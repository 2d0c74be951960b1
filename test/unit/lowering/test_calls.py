"""The step of a program calls its functions with as many arguments as they take."""

from __future__ import annotations

import ast
from itertools import product

import pytest
from extent import sample
from zoo_plans import program, sized

from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer


def wrong_calls(text: str) -> list[str]:
    """Return the calls in `forward_backward` of functions of the text that have too few or too many arguments."""
    defined = [f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)]
    functions = {f.name: f.args for f in defined}
    found: list[str] = []
    for call in (node for f in defined if f.name == "forward_backward" for node in ast.walk(f)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in functions:
            continue
        takes = functions[call.func.id]
        is_known = not any(isinstance(a, ast.Starred) for a in call.args)
        given = len(call.args) + len(call.keywords)
        most = len(takes.args) + len(takes.kwonlyargs)
        least = most - len(takes.defaults) - sum(d is not None for d in takes.kw_defaults)
        if is_known and not (least <= given and (given <= most or takes.vararg is not None)):
            found.append(ast.unparse(call))
    return found


def test_wrong_calls_are_found():
    text = "def f(a, b=1):\n    pass\n\ndef forward_backward():\n    f(1)\n    f(1, 2)\n    f()\n    f(1, 2, 3)\n"
    assert wrong_calls(text) == ["f()", "f(1, 2, 3)"]


PINNED = ("inception_v3", "pinned-0")
"""It has gradients of two weights of one operator that are on one half of the ranks and become addends."""
OTHERS = list(product(("bert_large", "lenet", "xdl"), ("pinned-1", "pinned-2", "random-0", "joint", "fsdp")))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), [*sample([PINNED], 2, 1), *sample(OTHERS, 4)])
def test_calls_fit_what_they_call(model: str, plan: str):
    name, keys = sized(model)
    assert wrong_calls(program(build(name, **keys), plan, 4, Optimizer())) == []

"""Which subexpressions of a line may occur twice, against the canonical forms of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from zoo_plans import SIZES

from unity_ir.forms.rewrite import canonical, is_worth_keeping, recurring
from unity_ir.kernels.triton import expression
from unity_ir.kernels.triton.expression import tdl_lines
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import Compute, Fused
from unity_ir.plan.lower import lower
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound, Call, Expr, children


def subexpressions(expr: Expr) -> Iterator[Expr]:
    yield expr
    for child in children(expr):
        yield from subexpressions(child)


@pytest.fixture(scope="module")
def lines() -> list[Bound]:
    """Those of models' steps, alone and in groups."""
    on, found = load("box:1"), dict[str, Bound]()
    for model in ("gpt2", "lstm_stack", "moe"):
        program = lower(differentiate(build(model, **SIZES[model]), Optimizer(), on.mesh), on)
        for each in (program, with_fusions(program, lambda _: "triton")):
            lines = (each.local_line(i) for i in each.body if isinstance(i, Compute | Fused))
            found |= {repr(line): line for line in lines}
    return list(found.values())


@pytest.mark.slow
def test_nothing_that_occurs_twice_is_missed(lines: list[Bound]):
    number = 0
    for line in lines:
        every = [e for r in line.results for e in subexpressions(r.expr) if is_worth_keeping(e)]
        forms = Counter(canonical(e, line.extents, {})[0] for e in every)
        recurs = recurring(r.expr for r in line.results)
        twice = [e for e in every if forms[canonical(e, line.extents, {})[0]] > 1]
        assert all(map(recurs, twice)), line
        number += bool(twice)
    assert number > 5


@pytest.mark.slow
def test_texts_are_those_of_comparing_everything(lines: list[Bound], monkeypatch: pytest.MonkeyPatch):
    made = list(map(tdl_lines, lines))
    assert any(len(text) > 1 for text in made)
    monkeypatch.setattr(expression, "recurring", lambda exprs: lambda expr: True)
    assert made == list(map(tdl_lines, lines))


def test_indices_do_not_count_and_constants_do():
    written = "f(x)  out[i, j] = exp(x[i]) * exp(x[j]) + tanh(x[i] + 1) * tanh(x[i] + 2)"
    (result,) = bind(parse_line(written), ((4,),), {}).results
    recurs = recurring([result.expr])
    calls = [e for e in subexpressions(result.expr) if isinstance(e, Call)]
    assert [recurs(e) for e in calls] == [True, True, False, False]

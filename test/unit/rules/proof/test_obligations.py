"""Every parallelization rule follows from the operator's line, for all sizes and degrees; what does not is not."""

from __future__ import annotations

import pytest

from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.ops.operator import Operator
from unity_ir.rules.proof import obligations as module
from unity_ir.rules.proof.equal import Undecided
from unity_ir.rules.proof.obligations import obligations
from unity_ir.rules.proof.tensors import Undivided
from unity_ir.tdl.divisibility import Analysis


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
def test_every_parallelization_rule_is_proved(name: str):
    found = list(obligations(operators()[name]))
    assert found
    assert [(o.about, o.proof.detail) for o in found if not o.proof.proved] == []


WRONG_SUMS = [
    ("softmax(x)  let e[a.., i] = exp(x[a.., i]);  out[a.., i] = e[a.., i] / sum[k](e[a.., k])", "k"),
    ("act(x, w)  out[m, n] = relu(sum[k](x[m, k] * w[k, n]))", "k"),
    ("square(x)  out[m] = sum[k](x[m, k]) * sum[k](x[m, k])", "k"),
    ("biased(x, b)  out[m] = sum[k](x[m, k]) + b[m]", "k"),
    ("largest(x)  out[m] = max[k](x[m, k])", "k"),
    ("mean(x)  out[m] = sum[k](x[m, k]) / sum[k](1)", "k"),
]


@pytest.mark.parametrize(("line", "variable"), WRONG_SUMS)
def test_a_sum_that_is_not_one_is_not_proved(line: str, variable: str):
    with pytest.raises((Undecided, Undivided, UnityError)):
        module._sums(Operator(line), variable)  # pyright: ignore[reportPrivateUsage]


WRONG_ADDENDS = [
    ("relu(x)  out[a..] = relu(x[a..])", {"x"}),
    ("both(x, y)  out[a..] = x[a..] * y[a..]", {"x", "y"}),
    ("plus(x, y)  out[a..] = x[a..] + y[a..]", {"x"}),
    ("shift(x)  out[a..] = x[a..] + 1", {"x"}),
    ("pick(c, x)  out[a..] = where(gt(c[a..], 0), x[a..], 0)", {"c"}),
    ("over(x, y)  out[a..] = x[a..] / y[a..]", {"y"}),
]


@pytest.mark.parametrize(("line", "carriers"), WRONG_ADDENDS)
def test_what_is_not_linear_is_not_proved(line: str, carriers: set[str], monkeypatch: pytest.MonkeyPatch):
    operator = Operator(line)
    shapes, given = module.sample(operator)
    analysis = operator.bind(shapes, operator.attributes(given))
    with pytest.raises((Undecided, Undivided, UnityError)):
        module._addends(operator, analysis, frozenset(carriers))  # pyright: ignore[reportPrivateUsage]


WRONG_READS = [
    # The inner one of two variables of a dim, a diagonal shift, a window whose steps are not its variable's.
    ("inner(x)  out[h, d] = x[(h d)]  where size(h) = 3", "d"),
    ("inner(x)  out[d, (h e)] = x[d, (h e)]  where size(h) = 3", "e"),
]


@pytest.mark.parametrize(("line", "variable"), WRONG_READS)
def test_pieces_that_are_no_intervals_are_not_proved(line: str, variable: str):
    with pytest.raises((Undecided, Undivided, UnityError)):
        module._reads(Operator(line), variable)  # pyright: ignore[reportPrivateUsage]


def test_a_halo_that_is_too_small_is_not_proved(monkeypatch: pytest.MonkeyPatch):
    def short(*arguments: object) -> object:
        position, low, high, step, within = interval(*arguments)  # pyright: ignore
        return position, low - 1, high, step, within

    interval = module._interval  # pyright: ignore[reportPrivateUsage]
    module._reads(operators()["conv2d"], "y")  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(module, "_interval", short)
    with pytest.raises(Undecided, match=r"is not shown to be read within a piece"):
        module._reads(operators()["conv2d"], "y")  # pyright: ignore[reportPrivateUsage]


def test_the_decision_of_the_analysis_is_what_is_proved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Analysis, "carriers", (frozenset({"x"}),))
    relu = Operator("relu_again(x)  out[a..] = relu(x[a..])")
    (wrong,) = (o for o in obligations(relu) if o.about == "addends of x")
    assert wrong.proof.verdict == "undecided"

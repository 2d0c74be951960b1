"""Compare the answers about integers that need no solver with those of Z3."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity_ir.rules.parse import parse_poly
from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.rules.proof.forms import Constraint, Extreme, Mono, Quantified, Read, box
from unity_ir.rules.proof.integers import contradictory, holds, solution
from unity_ir.rules.proof.normal import normal
from unity_ir.rules.proof.solver import Answers, Facts, condition, z3

SYMBOLS = ("n", "m", "s", "i#0", "k#1", "@0.0")
FACTORS = st.sampled_from((-2, -1, 1, 2))


@st.composite
def polys(draw: st.DrawFn, products: bool) -> Poly:
    """Sums of a few sizes and indices, with `products` some times a size, and a small number."""
    total = number(draw(st.integers(-4, 4)))
    for name in draw(st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=3)):
        times = draw(st.sampled_from(SYMBOLS[:3])) if products and draw(st.integers(0, 5)) == 0 else None
        total = total + symbol(name) * draw(FACTORS) * (number(1) if times is None else symbol(times))
    return total


LINEAR = st.builds(Constraint, polys(products=False))
BOXES = [symbol(s) - (0 if "#" in s or "@" in s else 1) for s in SYMBOLS]


@pytest.mark.slow
@given(st.frozensets(st.builds(Constraint, polys(products=True), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_is_what_z3_says(constraints: frozenset[Constraint], boxes: bool):
    if boxes:
        constraints |= {Constraint(p) for p in BOXES}
    found = solution(constraints)
    assert found is None or all(holds(c, found) for c in constraints)
    if contradictory(constraints):
        # Z3 may give up on products, but never finds a solution.
        answer, _ = Answers().check([condition(c) for c in constraints])
        assert str(answer) != "sat"


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from((-1, 1, 2)), st.frozensets(LINEAR, max_size=2)), min_size=1, max_size=3),
    st.frozensets(LINEAR, max_size=2),
)
def test_weights_cancel_where_z3_says_so(
    weighted: list[tuple[int, frozenset[Constraint]]], more: frozenset[Constraint]
):
    facts = [condition(c) for c in (*more, *map(Constraint, BOXES))]
    held = [z3.If(z3.And([condition(c) for c in domain]), w, 0) for w, domain in weighted]
    answer, _ = Answers().check([z3.Sum(held) != 0, *facts])
    assert Answers().cancel(tuple(weighted), more | {Constraint(p) for p in BOXES}) == (str(answer) == "unsat")


def test_a_sum_of_constraints_that_fails_is_found():
    boxes = [Constraint(parse_poly("m - 1")), Constraint(parse_poly("n - 1"))]
    between = [Constraint(symbol("i#0") - symbol("n")), Constraint(symbol("m") - symbol("i#0") - 1)]
    assert contradictory([*boxes, *between, Constraint(parse_poly("n - m"))])
    assert not contradictory([*boxes, *between])
    assert solution([*boxes, *between]) == {"i#0": 1, "m": 2, "n": 1}


def test_values_of_a_range_are_tried_from_0_on():
    """`normal` names what a sum or a maximum is over so that the first value tried of it, 0, is in its range."""
    x = Read("x", (symbol("i#0"), symbol("k#1")))
    sums = (Mono(Fraction(1), ("k#1",), frozenset(box("k#1", symbol("n"))), (x,)),)
    most = Extreme("max", (Quantified(("i#0",), frozenset(box("i#0", symbol("n"))), sums),))
    (mono,) = normal((Mono(Fraction(1), (), frozenset(), (most,)),), Facts(()))
    (named,) = [p for f in mono.factors if isinstance(f, Extreme) for p in f.parts]
    for binders, domain in ((named.binders, named.domain), (named.body[0].binders, named.body[0].domain)):
        assert solution(domain) == dict.fromkeys(binders, 0) | {"n": 1}

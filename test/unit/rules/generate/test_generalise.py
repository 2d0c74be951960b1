"""From two equal terms to a rule for all sizes."""

from __future__ import annotations

from typing import Any

from rule_text import shapes, text

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.poly import Poly
from unity_ir.rules.proof.prove import prove
from unity_ir.rules.research.generate.fingerprint import Values
from unity_ir.rules.research.generate.generalise import general, most_general
from unity_ir.rules.research.generate.packs import packed
from unity_ir.rules.research.generate.space import Space
from unity_ir.rules.research.generate.terms import Terms, TermStep, TypedTerm

MATRIX, SQUARE, IMAGES, KERNELS = Space(("conv2d",)).inputs


class Made:
    """Terms by name: `matmul(x, w)`."""

    def __init__(self):
        self.terms = Terms()

    def __call__(self, op: str, *operands: TypedTerm, result: int = 0, **attributes: Any) -> TypedTerm:
        """Attributes are alike at both sets of sizes, but for lists of two."""
        given = ({n: v[i] if isinstance(v, list) else v for n, v in attributes.items()} for i in range(2))
        term = self.terms.make(TermStep(op, tuple(tuple(sorted(g.items())) for g in given), result), operands)
        assert term is not None
        return term


def rule(*sides: TypedTerm) -> Substitution:
    made = general("", sides[:1], sides[1:], 2)
    assert made is not None
    return made.rule


def test_sizes_that_a_line_indexes_alike_are_one():
    m = Made()
    x, w, v = m.terms.variable(0, MATRIX), m.terms.variable(0, SQUARE), m.terms.variable(1, SQUARE)
    act = {"act": "identity"}
    law = rule(m("matmul", m("matmul", x, w, **act), v, **act), m("matmul", x, m("matmul", w, v, **act), **act))
    # The square ones need not be.
    assert shapes(law) == {"x": ["n", "k"], "y": ["k", "m"], "z": ["m", "p"]}


def test_sums_are_compared_part_by_part():
    m = Made()
    x, y = m.terms.variable(0, MATRIX), m.terms.variable(1, MATRIX)
    cut = {"dim": 0, "sizes": [(2, 2), (3, 3)]}
    law = rule(m("add", m("split", x, **cut), m("split", y, **cut)), m("split", m("add", x, y), **cut))
    assert shapes(law) == {"x": ["k + n", "m"], "y": ["k + n", "m"]}
    w, v = m.terms.variable(0, SQUARE), m.terms.variable(1, SQUARE)
    twice = rule(
        m("matmul", m("concat", x, x, dim=1), m("concat", w, v, dim=0), act="identity"),
        m("matmul", x, m("add", w, v), act="identity"),
    )
    assert shapes(twice) == {"x": ["n", "k"], "y": ["k", "m"], "z": ["k", "m"]}


def test_what_is_divided_is_a_multiple_of_the_degree():
    m = Made()
    x, y = m.terms.variable(0, MATRIX), m.terms.variable(1, MATRIX)

    def halves(of: TypedTerm) -> TypedTerm:
        return m("partition", of, dim=1, by=2)

    law = rule(halves(m("concat", x, y, dim=1)), halves(m("concat", x, y, dim=1)))
    assert shapes(law) == {"x": ["n", "d*k"], "y": ["n", "d*m"]}


def test_windows_of_any_stride_and_padding():
    m = Made()
    x, y, z = m.terms.variable(0, IMAGES), m.terms.variable(0, KERNELS), m.terms.variable(1, KERNELS)
    at = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    law = rule(
        m("concat", m("conv2d", x, y, **at), m("conv2d", x, z, **at), dim=1),
        m("conv2d", x, m("concat", y, z, dim=0), **at),
    )
    assert shapes(law) == {"x": ["n", "k", "m", "p"], "y": ["q", "k", "r", "s"], "z": ["t", "k", "r", "s"]}
    given = dict(law.operations(law.target)[-1].attributes)
    for name in ("stride", "padding", "dilation"):
        values = given[name]
        assert isinstance(values, tuple)
        assert all(isinstance(v, Poly) and v.constant is None for v in values)
    assert given["groups"] == Poly((((), 1),))
    assert prove(law).proved


def test_subterms_and_repeated_variables_become_variables():
    m = Made()
    values = Values(0, 0)
    x, y, w = m.terms.variable(0, MATRIX), m.terms.variable(1, MATRIX), m.terms.variable(0, SQUARE)
    found = most_general((m("add", m("relu", x), y), m("add", y, m("relu", x))), m.terms, values)
    assert text(rule(*found)) == "add(x, y) = add(y, x)"
    act = {"act": "identity"}
    product = m("matmul", x, w, **act)
    found = most_general((m("matmul", m("add", x, x), w, **act), m("add", product, product)), m.terms, values)
    assert text(rule(*found)) == "matmul(add(x, y), z) = add(matmul(x, z), matmul(y, z))"
    # Where they must be the same they stay so.
    same = (m("matmul", m("add", x, x), w, **act), m("matmul", x, m("add", w, w), **act))
    assert most_general(same, m.terms, values) == same


def test_packs_are_tried_where_dims_lead():
    m = Made()
    x, y = m.terms.variable(0, MATRIX), m.terms.variable(1, MATRIX)
    made = general("", [m("add", x, y)], [m("add", y, x)], 2)
    assert made is not None
    assert shapes(next(packed(made.rule, made.shape))) == {"x": ["a.."], "y": ["a.."]}
    joined = [m("concat", m("relu", x), m("relu", y), dim=d) for d in (0, 1)]
    others = [m("relu", m("concat", x, y, dim=d)) for d in (0, 1)]
    found = [general("", [a], [b], 2) for a, b in zip(joined, others, strict=True)]
    assert found[0] is not None
    assert list(packed(found[0].rule, found[0].shape)) == []
    assert found[1] is not None
    (wide,) = packed(found[1].rule, found[1].shape)
    assert text(wide) == "concat[#a](relu(x), relu(y)) = relu(concat[#a](x, y))"
    turned = general("", [m("transpose", m("relu", x), perm=(1, 0))], [m("relu", m("transpose", x, perm=(1, 0)))], 2)
    assert turned is not None
    assert list(packed(turned.rule, turned.shape)) == []

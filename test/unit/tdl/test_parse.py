"""What is not a line is refused in one sentence that says where or what."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.tdl.bind import bind
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Access, Binary, Const, Reduce, Var

BAD = [
    ("f(x) out[i] = opaque topk_values[i; j, k](x[j, k])", "f: topk_values[...] takes one plain index and makes one"),
    ("f(x)  out[i] = x[i", "cannot read `f(x) out[i] = x[i` from column 17"),
    ("f(x)\n out[i] =\n x[i] +", "cannot read `f(x) out[i] = x[i] +` from column 20"),
    ("", "cannot read `` from column 1"),
    ("f(x) out[i] = x[i, j]", "f: index j of x is neither in the result nor under a reduction"),
    ("f(x, y) out[i] = sum[j](x[i, j]) * y[j]", "f: index j of y is neither in the result nor under a reduction"),
    ("f(x) a[i] = x[i]; b[] = x[i]", "f: index i of x is neither in the result nor under a reduction"),
    ("f(x) out[i] = x[i] + q", "f: q is neither an index nor an attribute that is a number"),
    ("f(x; a: name = relu) out[i] = x[i] + a", "f: a is neither an index nor an attribute that is a number"),
    ("f(x) out[i] = size(z) * x[i]", "f: index z of size is neither in the result nor under a reduction"),
    ("f(x, x) out[i] = x[i]", "f: parameter x is defined twice"),
    ("f(x; x: int) out[i] = x[i]", "f: parameter x is defined twice"),
    ("f(x) a[i] = x[i]; a[i] = x[i]", "f: result a is defined twice"),
    ("f(x, y) out[i] = x[i]", "f: y is never read"),
    ("f(x) out[i] = z[i]", "f: reads z, which is not a parameter"),
    ("f(x) out[i, i] = x[i]", "f: index i is twice in out"),
    ("f(x) out[(i i)] = x[i]", "f: index i is twice in out"),
    ("f(x) out[i] = x[(i i)]", "f: index i is twice in one dim of x"),
    ("f(x) out[i] = sum[i](x[i])", "f: i is bound twice in nested scopes; rename one"),
    ("f(x) out[(h d)] = sum[h](x[h, d])", "f: h is bound twice in nested scopes; rename one"),
    ("f(x) out[] = sum[j](max[j](x[j]))", "f: j is bound twice in nested scopes; rename one"),
    ("f(x) out[] = sum[a..](max[a..](x[a..]))", "f: a.. is bound twice in nested scopes; rename one"),
    ("f(x) out[] = sum[j, j](x[j])", "f: j is bound twice in nested scopes; rename one"),
    ("f(x) out[i] = sum[(h d)](x[i, h, d])", "f: sum[...] takes plain indices and packs"),
    ("f(x) out[a.., a0] = x[a.., a0]", "f: a0 is also one of a..; rename one"),
    ("f(x*, x0) out[(i*)] = x*[i*] + x0[]", "f: x0 is also one of x*; rename one"),
    ("f(x; k: int) out[k] = x[k] * k", "f: k is an index and an attribute; rename one"),
    ("f(t: int) out[i] = t[i]", "f: no parameter is floating point; say what out holds: out: int[...]"),
    ("f(x*, y*) out[(i*)] = x*[i*] + y*[i*]", "f: only one parameter may be variadic"),
    ("f(x*) out[i] = x*[i]", "f: x is read once per variadic operand, but the result is one"),
    ("f(x) out[i*] = x[i*] where size(i*) = 3", "f: out is one result, but is indexed by i*"),
    ("f(x*) out[i] = x[i]", "f: x is variadic in one place and not in another"),
    ("f(x) out[i] = relu(x[i], x[i])", "f: no function relu of 2 arguments"),
    ("f(x; act: name) out[i] = act(x[i], x[i])", "f: no function act of 2 arguments"),
    ("f(x) out[i] = nosuch(x[i])", "f: no function nosuch of 1 arguments"),
    ("f(x) out[p(a..)] = x[a..]", "f: p orders a.., but is no attribute of kind ints"),
    ("f(x) out[i] = x[i] where size(z) = 3", "f: size(z) is given, but nothing is indexed by z"),
    ("f(x) out[i] = x[i] where size(i) = q", "f: size is given by q, which is no attribute of kind int"),
    ("f(x; q: float) out[i] = x[i] where size(i) = q", "f: size is given by q, which is no attribute of kind int"),
    ("f(x; q: int) out[a..] = x[a..] where size(a..) = q", "f: size is given by q, which is no attribute of kind ints"),
    ("f(x) out[a..] = x[a..] where size(a..) = 3", "f: size of several indices is one number"),
    ("f(x) out[i] = x[i] where rank(i) = 1", r"f: rank(...) takes a pack"),
    ("f(x; d: int = 1.5) out[i] = x[i]", "default of d is 1.5, which is no int"),
    ("f(x; d: int = relu) out[i] = x[i]", "default of d is relu, which is no int"),
    ("f(x; d: ints = 3) out[i] = x[i]", "default of d is 3, which is no ints"),
    ("f(x; d: name = 3) out[i] = x[i]", "default of d is 3, which is no name"),
    ("f(x; d: name = exp) out[i] = x[i]", "f: default of d is not one of identity, relu, gelu"),
    ("f(x; to: dtype = f8) out: to[i] = x[i]", "f: default of to is not one of f32, f64, bf16"),
    ("f(x; to: dtype = 1) out: to[i] = x[i]", "default of to is 1, which is no dtype"),
    ("f(t: int) out: f32[i] = t[i]", "f: out holds f32, which is no attribute of kind dtype"),
    ("f(x; to: int) out: to[i] = x[i]", "f: out holds to, which is no attribute of kind dtype"),
    ("f(x: f32) out[i] = x[i]", "cannot read `f(x: f32) out[i] = x[i]` from column 6"),
    ("f(x) out[~a..] = x[~a..]", "f: ~a.. in out: only operands broadcast"),
    ("f(x) out[] = sum[~a..](x[~a..])", "f: ~a.. in sum: only operands broadcast"),
    ("f(x) out[a..] = x[~a..] / size(~a..)", "f: ~a.. in size: only operands broadcast"),
    ("f(x) out[a..] = x[~a..] where size(~a..) = 3", "f: ~a.. in size: only operands broadcast"),
    ("f(x) out[a.., b..] = x[~a.., b..]", "f: x broadcasts ~a.. beside another pack"),
    ("f(x) out[a..] = x[~a..] * position(b..)", "f: index b.. of position is neither in the result"),
    ("f(x) out[i] = opaque nosuch[i; j](x[j]) where size(i) = 2", "f: no opaque function nosuch; known are equals"),
    ("f(x) out[i] = opaque topk_values[i; i](x[i])", "f: i is bound twice in nested scopes; rename one"),
    ("f(x) out[i] = opaque topk_values[k; j](x[j])", "f: index k of topk_values is neither in the result"),
    ("f(x) out[a..] = opaque topk_values[a..; b..](x[b..])", "f: topk_values[...] takes one plain index and makes one"),
]


def test_line_nested_too_deeply_is_refused():
    with pytest.raises(UnityError, match="nested too deeply"):
        parse_line(f"f(x) out[i] = {'-' * 5000}x[i]")


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_bad_line_is_refused(text: str, message: str):
    with pytest.raises(UnityError) as error:
        parse_line(text)
    assert str(error.value).startswith(f"TDL: {message}")
    assert "\n" not in str(error.value)


@given(st.text("fxyout[]()=*+-/.,;:iab01 \n", max_size=40))
@example("f(x) out[i] = x[i] + 1")
def test_any_text_is_read_or_refused_in_one_line(text: str):
    said = "read"
    try:
        parse_line(text)
    except UnityError as error:
        said = str(error)
    assert len(said.splitlines()) == 1


def test_line_is_read_as_written():
    (result,) = parse_line("f(x) out[i] = 2 * sum[k](x[i, k]) - x[i, i]").results
    total = Reduce("sum", (Var("k"),), Access("x", (Var("i"), Var("k"))))
    assert result.expr == Binary("-", Binary("*", Const(2.0), total), Access("x", (Var("i"), Var("i"))))


def test_every_operator_is_a_line():
    assert all(o.line.operator == name for name, o in operators().items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(x, y) out[] = sum[k](x[] * y[])  where size(k) = 5", 30.0),
        ("f(x, y) out[] = sum[k](sum[l](x[] * y[])) where size(k) = 5, size(l) = 2", 60.0),
        ("f(x, y) out[] = sum[k](k * y[]) + x[]  where size(k) = 4", 20.0),
        ("f(x, y) out[] = -x[] - -y[]  ", 1.0),
        ("f(x, y) out[] = x[] - y[] - 1 - 1", -3.0),
        ("f(x, y) out[] = y[] / x[] / 2 * 4", 3.0),
        ("f(x, y) out[] = max[k](k * x[] - y[]) where size(k) = 4", 3.0),
        ("f(x, y) out[] = prod[k](x[]) + y[] where size(k) = 4", 19.0),
    ],
)
def test_arithmetic(text: str, expected: float):
    (got,) = evaluate(bind(parse_line(text), [(), ()], {}), [np.array(2.0), np.array(3.0)])
    assert got == expected

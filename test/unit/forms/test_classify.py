"""Every operator's line has the form that its kernels are generated from, and near misses have not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from unity_ir.forms.attention import Attention
from unity_ir.forms.classify import (
    Form,
    OpaqueLine,
    Pointwise,
    Reduction,
    classify,
    form_of,
    is_convolution,
    is_product_or_convolution,
)
from unity_ir.forms.contraction import Contraction
from unity_ir.forms.convolution import Convolution
from unity_ir.forms.grouped import Grouped
from unity_ir.forms.rewrite import rename, simplified
from unity_ir.forms.scatter import Scatter
from unity_ir.forms.window_writes import WindowWrites
from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Access, AttrValue, Bound, Result, Window

ONCE = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
FORMS: list[tuple[type[object], str, tuple[tuple[int, ...], ...], Mapping[str, AttrValue]]] = [
    (Contraction, "matmul", ((8, 16), (16, 4)), {}),
    (Contraction, "matmul", ((8, 16), (16, 4)), {"act": "gelu"}),
    (Contraction, "batch_matmul", ((3, 8, 16), (3, 16, 4)), {}),
    (Convolution, "conv2d", ((2, 3, 8, 8), (4, 3, 3, 3)), ONCE),
    (Convolution, "conv2d_data_grad", ((2, 4, 8, 8), (4, 3, 3, 3)), {**ONCE, "sizes": (8, 8)}),
    (Attention, "attention", ((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)), {"scale": 0.25, "causal": 1}),
    (Grouped, "routed_matmul", ((12, 8), (3, 8, 4), (12,)), {}),
    (Scatter, "embedding_grad", ((6, 5, 8), (6, 5)), {"size": 10, "degrees": (1,)}),
    (Reduction, "softmax", ((8, 16),), {}),
    (Reduction, "layer_norm", ((4, 8), (8,), (8,)), {"eps": 1e-5}),
    (Pointwise, "add", ((4, 8), (8,)), {}),
    (Pointwise, "embedding", ((6, 5), (10, 8)), {}),
]


def bound_of(name: str, shapes: tuple[tuple[int, ...], ...], attributes: Mapping[str, AttrValue]) -> Bound:
    one = operator(name)
    return one.bind(shapes, one.attributes(attributes)).bound


def line(text: str, *shapes: tuple[int, ...]) -> Bound:
    return bind(parse_line(text), shapes, {})


def classified(bound: Bound) -> Form:
    return classify(simplified(bound, {}), {})


@pytest.mark.parametrize(("form", "name", "shapes", "attributes"), FORMS)
def test_operators_have_the_form_of_their_kernel(
    form: type[object], name: str, shapes: tuple[tuple[int, ...], ...], attributes: Mapping[str, AttrValue]
) -> None:
    """Catches a recogniser that no longer matches its operator, which then has a slower kernel and no error."""
    assert type(classified(bound_of(name, shapes, attributes))) is form


@pytest.mark.parametrize(("form", "name", "shapes", "attributes"), FORMS)
def test_forms_do_not_depend_on_names(
    form: type[object], name: str, shapes: tuple[tuple[int, ...], ...], attributes: Mapping[str, AttrValue]
) -> None:
    """Catches a recogniser that asks for an operator's name, or a variable's, where form alone decides."""
    bound = bound_of(name, shapes, attributes)
    names = {n: f"other_{n}" for n in bound.extents}

    def renamed(result: Result) -> Result:
        of = rename(result.expr, names, lambda node, _: {n: names[n] for n in node.names})
        written = rename(Access("", result.indices), names)
        assert isinstance(written, Access)
        return replace(result, indices=written.indices, expr=of)

    extents = {names[n]: size for n, size in bound.extents.items()}
    again = replace(bound, operator="other", results=tuple(map(renamed, bound.results)), extents=extents)
    assert type(classified(again)) is form


@pytest.mark.parametrize(
    ("form", "text", "shapes"),
    [
        # A maximum of products is none.
        (Reduction, "f(x, w)  out[m, n] = max[k](x[m, k] * w[k, n])", ((8, 4), (4, 8))),
        # Weights of another row's sum are no softmax, so this is no attention.
        (
            Reduction,
            "f(q, k, v)  out[r, e] = sum[c](exp(q[r, c]) / sum[d](exp(k[r, d])) * v[c, e])",
            ((4, 6), (4, 6), (6, 8)),
        ),
        # A transpose reduces nothing.
        (Pointwise, "f(x)  out[m, n] = x[n, m]", ((8, 4),)),
    ],
)
def test_near_misses(form: type[object], text: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Catches a recogniser that matches too much, whose kernel would compute something else."""
    assert type(classified(line(text, *shapes))) is form


def test_opaque_functions_are_opaque() -> None:
    """Catches a line with `topk` handed to a generator of kernels, which cannot say it."""
    assert isinstance(classified(bound_of("topk", ((4, 8),), {"k": 2})), OpaqueLine)


def test_window_writes_are_solved_for_the_longest_variable() -> None:
    """Catches a loop over the long side of a window, of as many taps as there are elements."""
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "sizes": (16, 16), "degrees": (1, 1)}
    bound = bound_of("avg_pool2d_grad", ((2, 3, 8, 8),), window)
    form = form_of(simplified(bound, {}).results[0], bound.extents)
    assert isinstance(form, WindowWrites)
    for dim, write in form.dims.items():
        assert isinstance(bound.results[0].indices[dim], Window)
        assert write.variable is not None
        assert all(bound.extents[write.variable] >= bound.extents[tap] for _, tap in write.taps)


def test_one_tap_convolutions_are_products_and_convolutions() -> None:
    """Catches a 1 x 1 convolution that cuDNN is not asked about, and a plain product that it is."""
    one_tap = bound_of("conv2d", ((3, 20, 5, 7), (33, 20, 1, 1)), {**ONCE, "padding": (0, 0)})
    product = bound_of("matmul", ((8, 16), (16, 4)), {})
    assert is_convolution(one_tap.results[0], one_tap.extents)
    assert not is_convolution(product.results[0], product.extents)
    assert is_product_or_convolution(product.results[0], product.extents)


def test_epilogues_are_contractions_but_no_bare_products() -> None:
    """Catches a sum added to a product that is left in half precision as the product itself may be."""
    bound = line("f(x, w, b)  out[m, n] = sum[k](x[m, k] * w[k, n]) + b[n]", (8, 16), (16, 4), (4,))
    assert isinstance(classified(bound), Contraction)
    assert not is_product_or_convolution(bound.results[0], bound.extents)

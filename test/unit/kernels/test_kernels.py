"""Every operator, as generated Triton kernels and as PyTorch code, computes what its line says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from case import Case
from covered import NO_EXPRESSION, bound_of, operand_dtypes, refusal
from extent import examples
from hypothesis import HealthCheck, given, settings
from kernel_checks import check, random_operands
from lowered import LOWERED, WITHOUT_GRADIENT
from operator_cases import CASES, DTYPES

from unity_ir.errors import UnityError
from unity_ir.forms.classify import is_convolution
from unity_ir.kernels.launchers import launcher, optimizer_launcher
from unity_ir.kernels.pytorch.code import torch_expression
from unity_ir.kernels.triton.expression import KERNEL_FUNCTIONS
from unity_ir.lowering import runtime
from unity_ir.lowering.runtime import plan
from unity_ir.ops import Operator, operator
from unity_ir.ops.operator import Application
from unity_ir.ops.optimizers import OPTIMIZERS
from unity_ir.tdl.bind import bind
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.functions import FUNCTIONS, ROUNDED
from unity_ir.tdl.parallel import Configuration, line_of_task
from unity_ir.tdl.parse import parse_line

KEPT_BACK = ("detach", "batch_mean", "batch_stats", "batch_norm")
"""Operators that leave out a gradient which the expression alone would have."""


def check_case(name: str, case: Case, impl: str, runner: Any, dtype: str = "f32") -> None:
    bound = bound_of(name, case)
    if (message := refusal(bound, impl)) is not None:
        with pytest.raises(UnityError, match=rf"^pcg\.{name}: {message}"):
            launcher(bound, operand_dtypes(bound, dtype), impl)
        return
    check(bound, random_operands(bound, case), impl, runner, dtype)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name", LOWERED)
def test_random_shapes(name: str, impl: str, runner: Any) -> None:
    @settings(max_examples=examples(15), database=None, suppress_health_check=list(HealthCheck))
    @given(CASES[name])
    def property(case: Case) -> None:
        check_case(name, case, impl, runner)

    property()


ONE_TAP = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
_ONE_COLUMN = {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 1), "sizes": (4, 1), "degrees": (1, 1)}
LARGER: list[tuple[str, Case]] = [
    ("avg_pool2d_grad", Case(((3, 2),), _ONE_COLUMN)),
    ("matmul", Case(((32, 784), (784, 130)), {"act": "relu"})),
    ("matmul", Case(((3, 5, 65), (65, 129)), {"act": "gelu"})),
    ("matmul", Case(((1, 64), (64, 32)), {})),
    ("matmul", Case(((64, 32), (32, 1)), {})),
    ("matmul", Case(((2, 3, 4, 16), (16, 24)), {})),
    ("matmul_nt", Case(((33, 100), (65, 100)), {})),
    ("matmul_tn", Case(((3, 41, 17), (3, 41, 66)), {})),
    # Groups of eight tiles and of the rest; the last tiles are moved inside.
    ("matmul", Case(((600, 32), (32, 130)), {"act": "relu"})),
    ("batch_matmul", Case(((3, 70, 16), (3, 16, 66)), {})),
    ("relu", Case(((129, 127),), {})),
    ("add", Case(((40, 300), (300,)), {})),
    ("add", Case(((2, 1, 4, 3), (4, 3)), {})),
    ("mse", Case(((97, 1001), (97, 1001)), {})),
    ("mse", Case(((1, 1), (1, 1)), {})),
    # The last part of a split reduction ends after the last element, at a multiple of a tile.
    ("mse", Case(((9, 8192), (9, 8192)), {})),
    ("reduce_sum", Case(((3000, 70),), {"dim": 0})),
    ("reduce_sum", Case(((70, 3000),), {"dim": 1})),
    ("reduce_sum", Case(((5, 37, 9, 11),), {"dim": 1, "count": 2})),
    ("cross_entropy", Case(((70, 257), (70,)), {}, 257)),
    ("cross_entropy", Case(((2, 40000), (2,)), {}, 40000)),
    ("cross_entropy_grad", Case(((), (70, 257), (70,)), {}, 257)),
    ("cross_entropy_grad", Case(((), (2, 40000), (2,)), {}, 40000)),
    ("softmax", Case(((70, 130),), {})),
    ("softmax", Case(((3, 20000),), {})),
    ("log_softmax_grad", Case(((65, 129), (65, 129)), {})),
    ("layer_norm", Case(((5, 13, 100), (100,), (100,)), {"eps": 1e-5})),
    ("layer_norm_grad", Case(((65, 130), (65, 130), (130,)), {"eps": 1e-5})),
    ("rms_norm_grad", Case(((2, 20000), (2, 20000), (20000,)), {"eps": 1e-5})),
    ("attention", Case(((2, 6, 33, 16), (2, 2, 40, 16), (2, 2, 40, 24)), {"scale": 0.25, "causal": 1})),
    ("attention", Case(((2, 4, 1, 16), (2, 4, 70, 16), (2, 4, 70, 16)), {"scale": 0.25})),
    # Reductions inside one that is all of the expression, over other rows than its own.
    ("attention", Case(((2, 1, 1, 1), (2, 1, 3, 1), (2, 1, 3, 3)), {"scale": 0.25})),
    (
        "attention_grad",
        Case(((2, 6, 33, 24), (2, 6, 33, 16), (2, 2, 40, 16), (2, 2, 40, 24)), {"scale": 0.25, "causal": 1}),
    ),
    ("rotary", Case(((2, 3, 33, 20),), {"base": 10000.0})),
    ("embedding", Case(((5, 17), (300, 40)), {}, 300)),
    ("embedding_grad", Case(((5, 17, 40), (5, 17)), {"size": 300, "degrees": (1,)}, 300)),
    ("batch_matmul_tn", Case(((2, 3, 70, 20), (2, 3, 70, 33)), {})),
    # One operand is the same for all products of a batch.
    ("conv2d", Case(((3, 20, 5, 7), (33, 20, 1, 1)), ONE_TAP)),
    ("conv2d_data_grad", Case(((3, 33, 5, 7), (33, 20, 1, 1)), {**ONE_TAP, "sizes": (5, 7)})),
    ("add", Case(((40, 1, 30), (70, 1)), {})),
    ("select", Case(((40, 1, 30), (70, 1), ()), {})),
    ("lt", Case(((130, 1), (129,)), {}, 4, dtypes=("i64", "i64"))),
    ("broadcast_grad", Case(((40, 70, 130),), {"shape": (70, 1)})),
    ("batch_mean", Case(((12, 33, 12, 13),), {"groups": 3})),
    ("batch_stats", Case(((12, 33, 12, 13), (3, 33)), {})),
    ("batch_norm", Case(((12, 33, 12, 13), *((3, 33),) * 3, (33,), (33,)), {}, lift=(0, 0, 60))),
    ("batch_norm_grad", Case((*((12, 33, 12, 13),) * 2, *((3, 33),) * 3, (33,)), {}, lift=(0, 0, 0, 60))),
    ("cumsum", Case(((5, 300, 3),), {"dim": 1})),
    ("gather", Case(((50, 70, 3), (50, 90, 3)), {"dim": 1}, 70)),
    ("gather_grad", Case(((50, 90), (50, 90)), {"dim": 1, "size": 70, "degrees": (1,)}, 70)),
    ("embedding_bag", Case(((40, 17), (300, 40)), {}, 300)),
    ("embedding_bag_grad", Case(((40, 33), (40, 17)), {"size": 300, "degrees": (1,)}, 300)),
    ("gate_matmul", Case(((5, 33, 64), (64, 4, 48)), {})),
    ("gate_matmul_data_grad", Case(((5, 33, 4, 48), (64, 4, 48)), {})),
    ("gate_matmul_weight_grad", Case(((5, 33, 64), (5, 33, 4, 48)), {})),
    ("sum_exp", Case(((70, 20000), (70,)), {}, lift=(0, 5))),
    ("max_of_parts_grad", Case(((70, 4), (70, 400), (70, 4)), {})),
    ("reduce_max", Case(((70, 3000),), {"dim": 1})),
    ("reduce_prod_grad", Case(((65,), (65, 33)), {"dim": 1, "sizes": (33,)}, bounds=(0.9, 1.1))),
    ("dropout", Case(((129, 127),), {"p": 0.3, "seed": 2**40 + 1})),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), LARGER)
def test_larger_shapes(name: str, case: Case, runner: Any) -> None:
    check_case(name, case, "triton", runner)


LINES: list[tuple[str, Any]] = [
    # Reductions of every kind, position in memory and nesting.
    (
        "softmax(x)  out[i.., j] = exp(x[i.., j] - max[k](x[i.., k])) / sum[k](exp(x[i.., k] - max[c](x[i.., c])))",
        ((4, 9, 33),),
    ),
    ("columns(x)  out[i, j] = exp(x[i, j]) / sum[k](exp(x[k, j]))", ((300, 17),)),
    ("extremes(x)  out[i] = max[j](x[i, j]) * min[j](x[i, j])", ((7, 65),)),
    ("product(x)  out[i] = prod[j](x[i, j])", ((9, 5),)),
    ("product(x)  out[] = prod[j](x[j])", ((20000,),)),
    ("largest(x)  out[] = max[i, j](x[i, j])", ((300, 301),)),
    ("spread(x)  out[i, j] = sum[k](x[k])  where size(i) = 3, size(j) = 4", ((65,),)),
    ("spread(x)  out[i] = sum[k](x[k])  where size(i) = 3", ((200000,),)),
    ("repeated(x)  out[i] = sum[k](x[i])  where size(k) = 4", ((65,),)),
    ("powers(x)  out[i] = prod[k](x[i]) + max[k](x[i])  where size(k) = 3", ((65,),)),
    ("trace(x)  out[] = sum[i](x[i, i])", ((37, 37),)),
    ("diagonal(x)  out[i] = x[i, i]", ((37, 37),)),
    ("count(t: int, x)  out[b] = sum[c](eq(t[c], b) * x[b])", ((20,), (9,))),
    ("norm(x, g)  out[b, c] = (x[b, c] - sum[i](x[b, i] / size(i))) * g[c]", ((12, 100), (100,))),
    ("batched(x, w)  out[b.., m, n] = sum[k](x[b.., m, k] * w[b.., k, n])", ((2, 3, 5, 20), (2, 3, 20, 18))),
    (
        "scores(q, k)  out[b, h, i, j] = sum[d](q[b, i, (h d)] * k[b, j, (h d)])  where size(h) = 3",
        ((2, 7, 24), (2, 9, 24)),
    ),
    ("merged(x, w)  out[b, s, n] = sum[h, d](x[b, h, s, d] * w[(h d), n])", ((2, 3, 7, 8), (24, 10))),
    ("outer(x, y)  out[m, n] = x[m] * y[n]", ((12,), (30,))),
    ("vector(x, y)  out[m] = sum[k](x[m, k] * y[k])", ((12, 70), (70,))),
    ("dot(x, y)  out[] = sum[k](x[k] * y[k])", ((1000,), (1000,))),
    # A product inside more arithmetic, and reductions that depend on what another one binds.
    ("linear(x, w, b)  out[m, n] = relu(sum[k](x[m, k] * w[k, n]) + b[n])", ((20, 40), (40, 30), (30,))),
    ("plus(x, w)  out[m, n] = sum[k](relu(x[m, k] + w[k, n]))", ((6, 40), (40, 7))),
    ("nested(x, y)  out[i] = sum[j](exp(max[k](x[i, j, k])) * y[j])", ((5, 6, 30), (6,))),
    (
        "attention(s, v)  out[i, d] = sum[j](exp(s[i, j] - max[k](s[i, k])) / sum[k](exp(s[i, k])) * v[j, d])",
        ((9, 33), (33, 16)),
    ),
    # Indices as values, segments of expressions, integers alone.
    ("below(x)  out[i, j] = where(gt(i, j), x[i, j], 0)", ((20, 30),)),
    ("onehot(t: int, x)  out[b, c] = where(eq(t[b], c), x[c], 0 - 1)", ((7,), (11,))),
    ("embedding(t: int, w)  out[b.., e] = sum[v](eq(t[b..], v) * w[v, e])", ((4, 5), (23, 12))),
    ("shifted(x)  out[i] = x[i] * i / 4", ((50,),)),
    (
        "picked(t: int, x)  out[b] = exp(sum[c](where(eq(c, t[b]), x[b, c] * c, 0))) / sum[c](exp(x[b, c]))",
        ((9,), (9, 33)),
    ),
    # Of one pick inside of another, of what ids that are out of range pick, and of ids at the place that is picked.
    (
        "pairs(t: int, s: int, w)"
        "  out[b] = sum[v](where(eq(v, t[b]), sum[u](where(eq(u, s[b]), w[v, u], 0)), 0)) / max[k](w[k, k])",
        ((9,), (9,), (9, 9)),
    ),
    ("known(t: int, x, w)  out[b] = sum[v](where(eq(v, t[b]), x[b], 0)) + sum[v](w[v])", ((30,), (30,), (6,))),
    # A scatter that is added to a tensor: of few places, of many positions for each, of places too many for it.
    *(
        (f"tied(t: int, x, w)  out[v, e] = {line}", ((count,), (count, 5), (places, 5)))
        for line, count, places in (
            ("sum[b](where(eq(v, t[b]), x[b, e], 0)) + w[v, e]", 9, 30),
            ("w[v, e] + sum[b](where(eq(v, t[b]), x[b, e], 0))", 1500, 4),
            ("w[v, e] + sum[b](where(eq(v, t[b]), x[b, e] * 2, 0))", 3, 40),
        )
    ),
    ("turned(t: int, x, w)  out[v, e] = sum[b](where(eq(v, t[b]), x[b, e], 0)) + w[e, v]", ((9,), (9, 7), (7, 7))),
    ("fixed(t: int, x)  out[] = sum[v](where(eq(v, t[v]), x[v], 0))", ((3,), (3,))),
    ("nonzero(x)  out: bool[i] = max[k](x[i, k])", ((9, 7),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("line", "shapes"), LINES)
def test_lines_no_operator_has(line: str, shapes: Any, impl: str, runner: Any) -> None:
    bound = bind(parse_line(line), shapes, {})
    check(bound, random_operands(bound, Case(shapes, {}, max(bound.extents.values()))), impl, runner)


HALF: list[tuple[str, Case]] = [
    ("matmul", Case(((20, 30), (30, 40)), {})),
    ("matmul_tn", Case(((30, 20), (30, 40)), {})),
    # Large tiles, the last ones moved inside.
    ("matmul", Case(((1160, 72), (72, 128)), {"act": "gelu"})),
    ("relu", Case(((9, 13),), {})),
    ("gelu_grad", Case(((9, 13), (9, 13)), {})),
    ("mse", Case(((9, 13), (9, 13)), {})),
    ("transpose", Case(((5, 7),), {"perm": (1, 0)})),
    ("cross_entropy", Case(((9, 13), (9,)), {}, 13)),
    ("layer_norm", Case(((9, 13), (13,), (13,)), {})),
    ("rotary", Case(((5, 12),), {})),
    ("attention", Case(((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 7)), {"scale": 0.3, "causal": 1})),
    ("attention_grad", Case(((2, 4, 5, 7), (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 7)), {"scale": 0.3})),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("name", "case"), HALF)
def test_half(name: str, case: Case, impl: str, dtype: str, runner: Any) -> None:
    check_case(name, case, impl, runner, dtype)


OFFSETS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("embedding(t: int, w)  out[b, e] = sum[v](eq(t[b], v) * w[v, e])", ((30,), (24, 5)), ("v",)),
    ("embedding(t: int, w)  out[b, e] = sum[v](where(eq(v, t[b]), w[v, e], 0))", ((30,), (24, 5)), ("v",)),
    ("rows(t: int, w)  out[b, e] = sum[v](where(eq(v, t[b]), w[v, e] * v, 0))", ((30,), (3, 5)), ("v",)),
]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("line", "shapes", "offsets"), OFFSETS)
def test_offsets(line: str, shapes: Any, offsets: tuple[str, ...], impl: str, runner: Any) -> None:
    """A piece of a variable used as a value counts from where it starts."""
    (ids, (size, width)) = shapes
    whole = bind(parse_line(line), shapes, {})
    t, w = random_operands(whole, Case(shapes, {}, size))
    (expected,) = evaluate(whole, (t, w))
    part = size // 3
    made = launcher(bind(parse_line(line), (ids, (part, width)), {}), ("i64", "f32"), impl, offsets=offsets)
    total = np.zeros(expected.shape)
    for start in range(0, size, part):
        piece = [torch.from_numpy(t), torch.from_numpy(w[start : start + part]).float()]
        total += runner.run(made, piece, start)[0].double().numpy()
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_piece_draws_what_the_whole_draws_there(impl: str, runner: Any) -> None:
    """The position of an element counts in the whole tensor, whose rows are longer than the piece's."""
    line = "drop(x)  out[i, j] = where(lt(philox(11, position(i, j)), 0.4), 0, x[i, j])"
    whole = bind(parse_line(line), ((70, 90),), {})
    x = np.arange(1.0, 6301.0).reshape(70, 90)
    (expected,) = evaluate(whole, [x])
    part = line_of_task(whole, Configuration({"i": 2, "j": 3}))
    made = launcher(part, ("f32",), impl, offsets=("i", "j"))
    corner = torch.from_numpy(x[35:, 60:]).float().contiguous()
    (got,) = runner.run(made, [corner], 35, 60)
    np.testing.assert_array_equal(got.numpy(), expected[35:, 60:])


def test_offset_of_scattered_rows(runner: Any) -> None:
    line = parse_line("rows(g, t: int)  out[v, e] = sum[b](where(eq(v, t[b]), g[b, e] * v, 0))  where size(v) = 8")
    bound = bind(line, ((30, 5), (30,)), {})
    g, t = random_operands(bound, Case(((30, 5), (30,)), {}, 24))
    made = launcher(bound, ("f32", "i64"), offsets=("v",))
    got = [runner.run(made, [torch.from_numpy(g).float(), torch.from_numpy(t)], start)[0] for start in (0, 8, 16)]
    expected = np.zeros((24, 5))
    np.add.at(expected, t, g * t[:, None])
    np.testing.assert_allclose(torch.cat(got).double().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_equal_names_mean_equal_texts(drawn: Any) -> None:
    kernels: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in LOWERED:
        for case in drawn(name, examples(12)):
            bound = bound_of(name, case)
            if refusal(bound, "triton") is not None:
                continue
            made = launcher(bound, operand_dtypes(bound))
            assert sources.setdefault(made.name, made.source) == made.source
            for kernel, text in made.kernels.items():
                assert kernels.setdefault(kernel, text) == text
    for name, text in kernels.items():
        # Nothing is loaded or computed twice.
        values = [line.split(" = ", 1)[1] for line in text.splitlines() if line.startswith("    ") and " = " in line]
        assert "matmul" in name or "attention" in name or len(values) == len(set(values)), text


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["add", "select", "matmul", "softmax", "layer_norm"])
def test_names_tell_element_types_apart_where_texts_do(name: str, impl: str, drawn: Any) -> None:
    """One program may compute in several."""
    found: dict[str, str] = {}
    for case in drawn(name, 2):
        bound = bound_of(name, case)
        first = operand_dtypes(bound, "f32")
        for halves in range(2 ** len(first)):
            dtypes = tuple("f16" if d == "f32" and halves >> i & 1 else d for i, d in enumerate(first))
            made = launcher(bound, dtypes, impl)
            assert found.setdefault(made.name, made.source) == made.source


@pytest.mark.parametrize(("name", "products", "others"), [("attention", 2, 1), ("attention_grad", 5, 1)])
def test_products_inside_are_matrix_products(name: str, products: int, others: int) -> None:
    one = operator(name)
    # In float32 these rows are too long for a kernel of attention.
    heads, groups = (2, 6, 33, 40), (2, 2, 40, 40)
    shapes = ((heads,) if name == "attention_grad" else ()) + (heads, groups, groups)
    made = launcher(one.bind(shapes, one.attributes({"scale": 0.5})).bound, ("f32",) * len(shapes))
    kernels = [c.kernel for c in made.compiled]
    assert kernels.count("batched_matmul_kernel") == products
    assert len(kernels) == products + others


def test_images_are_a_batch_with_one_weight() -> None:
    pairs = (("conv2d", ((3, 20, 5, 7), (33, 20, 1, 1))), ("conv2d_data_grad", ((3, 33, 5, 7), (33, 20, 1, 1))))
    for name, shapes in pairs:
        one = operator(name)
        more = {"sizes": (5, 7)} if name == "conv2d_data_grad" else {}
        bound = one.bind(shapes, one.attributes({**ONE_TAP, **more})).bound
        assert list(launcher(bound, ("f32", "f32")).kernels) == ["batched_matmul_kernel"]
        # Who prefers cuDNN has it of these, too.
        assert is_convolution(bound.results[0], bound.extents)


@pytest.mark.parametrize(("name", "kernels"), [("lstm_cell", 1), ("lstm_cell_grad", 2)])
def test_results_at_the_same_positions_share_a_kernel(name: str, kernels: int) -> None:
    """Of one step of an LSTM, both states; of its backward, the gates' gradients are of another shape."""
    one = operator(name)
    shapes = {"lstm_cell": ((3, 4, 5), (3, 5)), "lstm_cell_grad": ((3, 5), (3, 5), (3, 4, 5), (3, 5))}[name]
    made = launcher(one.bind(shapes, one.attributes({})).bound, ("f32",) * len(shapes))
    assert len(made.kernels) == kernels
    if kernels == 1:
        (text,) = made.kernels.values()
        assert text.count("tl.load(") == 5
        assert text.count("tl.store(") == 2


def test_names_never_become_code(runner: Any) -> None:
    line = (
        "class(tl, torch, lambda, out_ptr, index, print)"
        "  out[if, def] = tl[if, def] + torch[def] * lambda[] + out_ptr[if] * index[if] - print[def]"
    )
    shapes = ((3, 4), (4,), (), (3,), (3,), (4,))
    bound = bind(parse_line(line), shapes, {})
    for impl in ("triton", "torch"):
        check(bound, random_operands(bound, Case(shapes, {})), impl, runner)


def test_refusals() -> None:
    one = operator("relu")
    bound = one.bind(((4,),), one.attributes({})).bound
    with pytest.raises(UnityError, match="no kernel takes f64"):
        launcher(bound, ("f64",))
    with pytest.raises(UnityError, match="use triton or torch"):
        launcher(bound, ("f32",), "cuda")
    assert KERNEL_FUNCTIONS | {"identity", ROUNDED} == set(FUNCTIONS)
    for expression, message in (("log(2 - 3)", r"log\(-1\)"), ("prod[k](2)", "prod of 2")):
        line = f"odd(x)  out[i] = x[i] * {expression}" + "  where size(k) = 2000" * ("k" in expression)
        bound = bind(parse_line(line), ((4,),), {})
        for impl in ("triton", "torch"):
            with pytest.raises(UnityError, match=rf"^pcg\.odd: {message} is not a number"):
                launcher(bound, ("f32",), impl)
    with pytest.raises(UnityError, match="no triton optimizer muon"):
        optimizer_launcher("muon")


# --- PyTorch expressions ---------------------------------------------------------------------------------------------

TEXTS: list[tuple[str, Any, dict[str, Any], tuple[str, ...]]] = [
    ("matmul", ((4, 5), (5, 6)), {}, ("a @ b",)),
    ("matmul", ((2, 4, 5), (5, 6)), {"act": "relu"}, ("torch.relu(a @ b)",)),
    ("matmul_nt", ((4, 5), (6, 5)), {}, ("a @ b.T",)),
    ("matmul_tn", ((5, 4), (5, 6)), {}, ("a.T @ b",)),
    ("matmul_tn", ((2, 5, 4), (2, 5, 6)), {}, ("a.flatten(0, 1).T @ b.flatten(0, 1)",)),
    ("reduce_sum", ((4, 5, 6),), {"dim": 1}, ("a.sum(1)",)),
    ("reduce_sum", ((4, 5),), {"dim": 0, "count": 2}, ("a.sum()",)),
    ("add", ((4, 5), (5,)), {}, ("a + b",)),
    ("gelu", ((4,),), {}, ("torch.nn.functional.gelu(a)",)),
    ("reshape", ((4, 6),), {"shape": (4, 2, 3)}, ("a.reshape(4, 2, 3)",)),
    ("transpose", ((4, 6),), {"perm": (1, 0)}, ("a.T",)),
    ("split_heads", ((2, 4, 6),), {"heads": 2}, ("a.unflatten(2, (2, 3)).permute(0, 2, 1, 3)",)),
    ("merge_heads", ((2, 2, 4, 3),), {}, ("a.permute(0, 2, 1, 3).flatten(2, 3)",)),
    ("concat", ((2, 3), (2, 4)), {"dim": 1}, ("torch.cat([a, b], 1)",)),
    ("split", ((2, 7),), {"dim": 1, "sizes": (3, 4)}, ("a.narrow(1, 0, 3)", "a.narrow(1, 3, 4)")),
    ("mse", ((4, 5), (4, 5)), {}, ("((a - b) * (a - b) / 20).sum()",)),
]


@pytest.mark.parametrize(("name", "shapes", "attributes", "texts"), TEXTS)
def test_torch_text(name: str, shapes: Any, attributes: dict[str, Any], texts: tuple[str, ...]) -> None:
    one = operator(name)
    bound = one.bind(shapes, one.attributes(attributes)).bound
    assert torch_expression(bound, ["a", "b", "c"][: len(shapes)]) == texts


def numbers(tensor: torch.Tensor) -> Any:
    """As numpy holds them, which has no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


@dataclass(frozen=True)
class Eager:
    """A value that gradients can be written over, computed at once."""

    array: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def degrees(self) -> tuple[int, ...]:
        return (1,) * self.array.ndim

    @property
    def dtype(self) -> str:
        return next(n for n, t in DTYPES.items() if t == torch.from_numpy(self.array).dtype)

    def build(self, operator: Operator, operands: Sequence[Any], attributes: Any) -> tuple["Eager", ...]:
        dtypes = tuple(o.dtype for o in operands)
        bound = operator.bind(tuple(o.shape for o in operands), operator.attributes(attributes), dtypes).bound
        return tuple(map(Eager, evaluate(bound, [o.array for o in operands])))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LOWERED if operator(n).gradient is not None])
def test_gradients(name: str, drawn: Any) -> None:
    """Each operator's gradient is what autograd makes of its PyTorch expression."""
    one = operator(name)
    assert one.gradient is not None
    rng = np.random.default_rng(2)
    for number, case in enumerate(drawn(name, examples(15))):
        full = one.attributes(case.attributes)
        bound = one.bind(case.shapes, full, case.dtypes).bound
        arrays = random_operands(bound, case, number)
        tensors = [torch.from_numpy(a) for a in arrays]
        inputs = [t.requires_grad_() for t in tensors if t.is_floating_point()]
        names = [f"t{i}" for i in range(len(tensors))]
        scope = {"torch": torch, **dict(zip(names, tensors, strict=True))}
        if name in NO_EXPRESSION and max(bound.extents.values(), default=1) > 1:
            with pytest.raises(UnityError, match=rf"^pcg\.{name}: {NO_EXPRESSION[name]}"):
                torch_expression(bound, names)
            continue
        results = [eval(text, scope) for text in torch_expression(bound, names)]
        assert all(r.dtype == DTYPES[b.dtype or "f64"] for r, b in zip(results, bound.results, strict=True))
        floating = [r for r in results if r.requires_grad]
        if not floating:
            continue
        grads = [torch.from_numpy(np.asarray(rng.standard_normal(r.shape))).to(r.dtype) for r in floating]
        expected = torch.autograd.grad(floating, inputs, grads, materialize_grads=True)
        application = Application(
            tuple(Eager(numbers(g)) for g in grads),
            tuple(map(Eager, arrays)),
            tuple(Eager(numbers(r)) for r in results),
            dict(full),
        )
        found = [g for g, p in zip(one.gradient(application), bound.operands, strict=True) if p.floating]
        for ours, autograd in zip(found, expected, strict=True):
            if ours is None:
                # Kept back, or zero everywhere.
                assert name in WITHOUT_GRADIENT
                assert name in KEPT_BACK or not autograd.any()
                continue
            assert isinstance(ours, Eager)
            np.testing.assert_allclose(ours.array, autograd.numpy(), rtol=1e-9, atol=1e-11)


# --- optimizers ------------------------------------------------------------------------------------------------------


class Lion:
    """Chen et al., 2023, algorithm 2, which PyTorch does not have."""

    def __init__(self, parameters: list[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float):
        self.of, self.lr, self.betas, self.decay = parameters[0], lr, betas, weight_decay
        self.mean = torch.zeros_like(self.of)

    @torch.no_grad()
    def step(self) -> None:
        assert self.of.grad is not None
        mean = self.betas[0] * self.mean + (1 - self.betas[0]) * self.of.grad
        self.of -= self.lr * (mean.sign() + self.decay * self.of)
        self.mean = self.betas[1] * self.mean + (1 - self.betas[1]) * self.of.grad


OPTIMIZER_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.3}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-7}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}),
    "lion": (Lion, {"betas": (0.8, 0.95), "weight_decay": 0.3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_optimizer_in_torch(name: str, scale: float | None, runner: Any) -> None:
    """With a scale, by gradients in bf16."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal((91, 101)).astype(np.float32)
    reference = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer, flat = torch_optimizer(name, [reference])
    gradient = "f32" if scale is None else "bf16"
    made = optimizer_launcher(name, impl="torch", gradient=gradient, is_scaled=scale is not None)
    line = OPTIMIZERS[name]
    tensors = [torch.from_numpy(start.copy()), *(torch.zeros(start.shape) for _ in line.state)]
    numbers = [flat[n] for n in line.defaults]
    for step in range(1, 6):
        g = torch.from_numpy(rng.standard_normal(start.shape).astype(np.float32))
        g = g if scale is None else g.to(torch.bfloat16)
        reference.grad = g.float() * (1.0 if scale is None else scale)
        optimizer.step()
        given = [*([step] if line.reads_step else []), *numbers, *([] if scale is None else [scale])]
        assert runner.run(made, [tensors[0], g, *tensors[1:]], *given) == ()
        torch.testing.assert_close(tensors[0], reference.detach(), rtol=1e-6, atol=1e-7)


def torch_optimizer(name: str, weights: list[Any], lr: float = 1e-2) -> tuple[Any, dict[str, float]]:
    """PyTorch's optimizer of that name, and its hyperparameters as the line has them."""
    kind, settings = OPTIMIZER_CASES[name]
    betas = dict(zip(("beta1", "beta2"), settings.get("betas", ()), strict=False))
    return kind(weights, lr=lr, **settings), {"lr": 1e-2, **settings, **betas}


SHAPES = [(91, 101), (64, 64), (), (5,), (0, 3), (2049,)]
"""Of one block and of several; only the second has a multiple of 16 elements."""


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("off", [0, 1])
def test_optimizer_of_all_weights(name: str, scale: float | None, off: int, runner: Any) -> None:
    """
    One launch for each alignment. Gradients begin `off` elements after a multiple of 16 bytes; weights whose number is
    odd are of a group with twice the learning rate. In a step that is not live nothing changes. With a scale, casts are
    kept of those of two dims; those of one dim have gradients in bf16, and launches of their own.
    """
    rng, line = np.random.default_rng(0), OPTIMIZERS[name]
    made = optimizer_launcher(name, is_scaled=scale is not None, cast=None if scale is None else "bf16")
    starts = {str(i): torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for i, s in enumerate(SHAPES)}
    plain = {n: torch.nn.Parameter(w.clone()) for n, w in starts.items()}
    flat = torch_optimizer(name, [plain["0"]])[1]
    lr = {n: 2e-2 if int(n) % 2 else 1e-2 for n in starts}
    optimizers = [torch_optimizer(name, [p], lr[n])[0] for n, p in plain.items()]
    kept = {n for n, w in starts.items() if scale is not None and w.dim() == 2}
    gradient = {n: torch.bfloat16 if scale is not None and w.dim() == 1 else torch.float32 for n, w in starts.items()}
    specs = {n: plan.Spec(w.shape, w.dtype, (), cast=torch.bfloat16 if n in kept else None) for n, w in starts.items()}
    own = tuple((n, {"lr": 2e-2}) for n in starts if int(n) % 2)
    settings = {n: flat[n] for n in line.defaults}
    tables = runtime.load(
        ("tables",),
        OPTIMIZER=(name, settings),
        WEIGHTS=specs,
        PARAMETER_GROUPS=own,
        hyperparameters=hyperparameters_of(settings, own),
        trained=dict,
    )
    weights = Weights({n: aligned(w) for n, w in starts.items()})
    weights.casts = {n: aligned(weights[n].to(torch.bfloat16)) for n in kept}
    state = {n: tuple(aligned(torch.zeros(w.shape)) for _ in line.state) for n, w in starts.items()}
    module = runner.load(made)
    for step in range(1, 5):
        live = step != 3
        grads = {
            n: aligned(torch.from_numpy(rng.standard_normal(w.shape).astype(np.float32)).to(gradient[n]), off)
            for n, w in starts.items()
        }
        for n, p in plain.items():
            p.grad = grads[n].float() * (1.0 if scale is None else scale)
        casts = list(weights.casts.values())
        before = [x.clone() for x in (*(x for n in weights for x in (weights[n], *state[n])), *casts)]
        count = torch.tensor(float(step - (step > 3)), dtype=torch.float64)
        line_numbers = getattr(module, f"{name}_numbers")
        packed, by_host = (
            tables.numbers_of(
                line_numbers,
                weights,
                1.0,
                of_live,
                **({"step": of_step} if line.reads_step else {}),
                **({} if scale is None else {"scale": scale}),
            )
            for of_step, of_live in ((count, torch.tensor(float(live))), (count.item(), float(live)))
        )
        torch.testing.assert_close(packed, by_host, rtol=1e-6, atol=0)
        all_of_them = tables.weight_tables(weights, grads, state, 1024)
        assert len(all_of_them) == (1 if off else 2) + (scale is not None)
        for table in all_of_them:
            owned = [
                table.rows,
                table.blocks,
                packed,
                *weights.values(),
                *grads.values(),
                *(m for s in state.values() for m in s),
                *casts,
            ]
            with runner.within(owned):
                getattr(module, name)(table, packed)
        assert all(torch.equal(cast, weights[n].to(torch.bfloat16)) for n, cast in weights.casts.items())
        if not live:
            now = (*(x for n in weights for x in (weights[n], *state[n])), *casts)
            assert all(torch.equal(x, was) for x, was in zip(now, before, strict=True))
            continue
        for each in optimizers:
            each.step()
        for n, p in plain.items():
            torch.testing.assert_close(weights[n], p.detach(), rtol=1e-6, atol=1e-7)


class Weights(dict[str, torch.Tensor]):
    """Weights by name, and casts of some of them, as programs have them."""

    casts: dict[str, torch.Tensor]


def hyperparameters_of(settings: dict[str, float], own: Any) -> Any:
    """What a program's `hyperparameters` returns of a weight, given those of the groups by name."""
    return lambda name: {**settings, **dict(own).get(name, {})}


def aligned(x: torch.Tensor, off: int = 0) -> torch.Tensor:
    """A copy of a tensor that begins `off` elements after a multiple of 64 bytes."""
    memory = torch.zeros(x.numel() + 32 + off, dtype=x.dtype)
    first = (-memory.data_ptr() // x.element_size()) % (64 // x.element_size()) + off
    return memory[first : first + x.numel()].view(x.shape).copy_(x)

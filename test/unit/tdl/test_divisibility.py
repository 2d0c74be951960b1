"""Every configuration the analysis allows computes the same piece by piece, on written lines and on random ones."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from extent import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.tdl.bind import bind
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.functions import Array
from unity_ir.tdl.parallel import Configuration, infer_configuration, line_of_task, operand_degrees, result_degrees
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Window, accesses

Shape = tuple[int, ...]


def analyse(text: str, *shapes: Shape) -> Analysis:
    return Analysis(bind(parse_line(text), shapes, {}))


def axes(analysis: Analysis, degree: int) -> Iterator[Configuration]:
    """Every way to divide the task grid along one axis."""
    for v in analysis.splittable:
        if analysis.bound.extents[v] % degree == 0:
            yield Configuration({v: degree})
    for carriers in analysis.carriers:
        yield Configuration(sums={carriers: degree})
    yield Configuration(copy=degree)


def both(a: Configuration, b: Configuration) -> Configuration:
    degrees = {v: a.degree(v) * b.degree(v) for v in (*a.degrees, *b.degrees)}
    sums = {s: a.sums.get(s, 1) * b.sums.get(s, 1) for s in (*a.sums, *b.sums)}
    return Configuration(degrees, a.copy * b.copy, sums)


def configurations(analysis: Analysis) -> list[Configuration]:
    """Along one axis by 2 or 3, and along any two."""
    single = [*axes(analysis, 2), *axes(analysis, 3)]
    pairs = [both(a, b) for a, b in combinations(single, 2)]
    fits = [c for c in pairs if all(analysis.bound.extents[v] % d == 0 for v, d in c.degrees.items())]
    return [*single, *fits]


def window(array: Array, position: Sequence[int], degrees: Sequence[int]) -> Array:
    sizes = [s // d for s, d in zip(array.shape, degrees, strict=True)]
    return array[(*(slice(p * s, (p + 1) * s) for p, s in zip(position, sizes, strict=True)), ...)]


def addends(array: Array, count: int, random: np.random.Generator) -> list[Array]:
    parts = [random.standard_normal(array.shape) for _ in range(count - 1)]
    return [*parts, array - sum(parts, np.zeros_like(array))] if parts else [array]


def piecewise(analysis: Analysis, by: Configuration, operands: Sequence[Array]) -> list[Array]:
    """The results, put together from what every task makes of its pieces."""
    random = np.random.default_rng(7)
    bound, local = analysis.bound, line_of_task(analysis.bound, by)
    results = [np.zeros(shape) for shape in bound.result_shapes]
    pieces: list[Counter[tuple[int, ...]]] = [Counter() for _ in results]
    typed = operand_degrees(analysis, by)
    parts = [addends(a, d.sum, random) for a, d in zip(operands, typed, strict=True)]
    readers: list[Counter[tuple[int, ...]]] = [Counter() for _ in operands]
    for task in product(*(range(d) for d in (*by.degrees.values(), *by.sums.values()))):
        at = dict(zip(by.degrees, task, strict=False))
        of_sum = dict(zip(by.sums, task[len(by.degrees) :], strict=True))
        arrays: list[Array] = []
        for p, part, read in zip(bound.operands, parts, readers, strict=True):
            dims = analysis.operand_dims[p.name]
            number = 0
            for carriers, addend in of_sum.items():
                if p.name in carriers:
                    number = number * by.sums[carriers] + addend
            position = tuple(at.get(v or "", 0) for v in dims)
            arrays.append(window(part[number], position, [by.degree(v) for v in dims]))
            read[*position, number] += by.copy
        for i, array in enumerate(evaluate(local, arrays, {v: at[v] * local.extents[v] for v in at})):
            dims = analysis.result_dims[i]
            where = tuple(at.get(v or "", 0) for v in dims)
            if any(addend and not analysis.carried(i, carriers) for carriers, addend in of_sum.items()):
                continue  # A copy: the result does not depend on these carriers.
            window(results[i], where, [by.degree(v) for v in dims])[...] += array
            pieces[i][where] += 1
    for read, type in zip(readers, typed, strict=True):
        assert set(read.values()) == {type.copy}
        assert len(read) == prod(type.dims) * type.sum
    for i, (made, type) in enumerate(zip(pieces, result_degrees(analysis, by), strict=True)):
        assert type.copy == by.copy * prod(d for s, d in by.sums.items() if not analysis.carried(i, s))
        assert set(made.values()) == {type.sum}
        assert len(made) == prod(type.dims)
    return results


def values(analysis: Analysis, shapes: Sequence[Shape]) -> list[Array]:
    random = np.random.default_rng(3)
    return [
        random.integers(0, 4, shape) if p.integer else random.uniform(0.5, 1.5, shape)
        for p, shape in zip(analysis.bound.operands, shapes, strict=True)
    ]


def check(analysis: Analysis, shapes: Sequence[Shape]) -> None:
    """Every configuration allowed gives what the whole line does."""
    operands = values(analysis, shapes)
    with np.errstate(all="ignore"):
        whole = evaluate(analysis.bound, operands)
        if not all(np.all(np.abs(a) < 1e6) for a in whole):
            return
        for by in configurations(analysis):
            for got, want in zip(piecewise(analysis, by, operands), whole, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=str(by))
            found = infer_configuration(analysis, operand_degrees(analysis, by))
            assert (dict(found.degrees), found.copy) == (dict(by.degrees), by.copy)
            # Sets of carriers that overlap may be inferred otherwise, but must come to the same types.
            assert operand_degrees(analysis, found) == operand_degrees(analysis, by)
            assert result_degrees(analysis, found) == result_degrees(analysis, by)


LINES: list[tuple[str, list[Shape], set[str], list[set[str]]]] = [
    ("f(x, w) out[m, n] = sum[k](x[m, k] * w[k, n])", [(6, 6), (6, 6)], {"m", "n", "k"}, [{"w"}, {"x"}]),
    ("f(x) out[i] = x[i, i]", [(6, 6)], set(), [{"x"}]),
    ("f(x) out[i, j] = x[i, j] + x[j, i]", [(6, 6)], set(), [{"x"}]),
    ("f(x) out[i, j] = x[i, j] - max[k](x[i, k])", [(6, 6)], {"i"}, []),
    ("f(x, b) out[] = sum[k](x[k]) + b[]", [(6,), ()], set(), [{"b", "x"}]),
    ("f(x, y) out[i] = sum[k](x[i, k]) * sum[k](y[i, k])", [(6, 6), (6, 6)], {"i"}, [{"x"}, {"y"}]),
    ("f(x, y) out[i] = sum[k](x[i, k]) - sum[k](y[i, k])", [(6, 6), (6, 6)], {"i", "k"}, [{"x", "y"}]),
    ("f(x) out[i] = sum[k](sum[l](x[i, k, l]))", [(6, 6, 6)], {"i", "k", "l"}, [{"x"}]),
    ("f(x) out[i] = sum[k](x[i, k]) + 1", [(6, 6)], {"i"}, []),
    ("f(x) out[i] = exp(sum[k](x[i, k]))", [(6, 6)], {"i"}, []),
    ("f(x) out[i] = sum[k](exp(x[i, k]))", [(6, 6)], {"i", "k"}, []),
    ("f(x) out[i] = max[k](x[i, k])", [(6, 6)], {"i"}, []),
    ("f(x, y) out[i] = where(gt(x[i], y[i]), x[i], y[i])", [(6,), (6,)], {"i"}, []),
    ("f(x, y, c) out[i] = where(gt(c[i], 1), x[i], y[i])", [(6,), (6,), (6,)], {"i"}, [{"x", "y"}]),
    ("f(x, y) out[i] = where(gt(y[i], 1), x[i], 0)", [(6,), (6,)], {"i"}, [{"x"}]),
    ("f(x, y) out[i] = x[i] / y[i]", [(6,), (6,)], {"i"}, [{"x"}]),
    ("f(x) out[i] = x[i] / sum[k](x[k])", [(6,)], set(), []),
    ("f(x, y) out[i] = sum[k](x[i, k]) / sum[k](y[i, k])", [(6, 6), (6, 6)], {"i"}, [{"x"}]),
    ("f(x, y) out[i] = x[i] * y[i] + y[i]", [(6,), (6,)], {"i"}, [{"y"}]),
    ("f(x, y) out[i] = x[i] * y[i] + x[i] + y[i]", [(6,), (6,)], {"i"}, []),
    ("f(x) out[i] = x[i] * x[i]", [(6,)], {"i"}, []),
    ("f(x) out[i] = x[i] + i", [(6,)], {"i"}, []),
    ("f(x, y) out[i] = sum[k](eq(k, i) * x[k]) + y[i]", [(6,), (6,)], {"i"}, [{"x", "y"}]),
    ("f(x, y) out[i] = sum[k](gt(k, i) * x[k] * y[i])", [(6,), (6,)], {"i", "k"}, [{"x"}, {"y"}]),
    ("f(t: int, x) out[i, e] = sum[v](eq(t[i], v) * x[v, e])", [(6,), (6, 6)], {"i", "e", "v"}, [{"x"}]),
    (
        "f(t: int, x, w) out[i, e] = sum[v](where(eq(v, t[i]), sum[k](x[i, k] * w[v, k, e]), 0))",
        [(6,), (6, 6), (6, 6, 6)],
        {"i", "e", "v", "k"},
        [{"w"}, {"x"}],
    ),
    ("f(x, y) out[i] = where(gt(sum[k](y[k]), 6), sum[k](x[i, k]), 0)", [(6, 6), (6,)], {"i"}, [{"x"}]),
    ("f(x, y) out[i] = where(gt(y[i], 1), sum[k](x[i, k]), 1)", [(6, 6), (6,)], {"i"}, []),
    ("f(t: int, x) out[i] = t[i] * x[i]", [(6,), (6,)], {"i"}, [{"x"}]),
    ("f(x) a[i] = x[i]; b[] = sum[i](x[i])", [(6,)], {"i"}, [{"x"}]),
    ("f(x) a[i] = sum[k](x[i, k]); b[k] = sum[i](x[i, k])", [(6, 6)], {"i", "k"}, [{"x"}]),
    ("f(x) a[i] = x[i]; b[i] = relu(x[i])", [(6,)], {"i"}, []),
    ("f(x, y) a[i] = x[i]; b[i] = x[i] * y[i]", [(6,), (6,)], {"i"}, [{"x"}, {"y"}]),
    ("f(x, y) a[i] = x[i]; b[i] = x[i] + y[i]", [(6,), (6,)], {"i"}, []),
    ("f(x, y) a[] = sum[i](x[i]); b[i] = max[j](y[j, i])", [(6,), (6, 6)], {"i"}, [{"x"}]),
    ("f(x) out[(i j)] = x[i, j]", [(6, 6)], {"i"}, [{"x"}]),
    ("f(x) out[i, j] = x[(i j)] where size(i) = 6", [(36,)], {"i"}, [{"x"}]),
    ("f(x) out[j] = sum[i](x[(i j)]) where size(i) = 6", [(36,)], {"i"}, [{"x"}]),
    ("f(x) out[i] = sum[j](x[(i j)]) where size(i) = 6", [(36,)], {"i"}, [{"x"}]),
    ("f(x, y) out[i, j] = x[(i j)] * y[i]", [(36,), (6,)], {"i"}, [{"x"}, {"y"}]),
    ("f(x) out[i] = sum[k](x[i] * x[i]) where size(k) = 6", [(6,)], {"i"}, []),
    ("f(x) out[i, k] = x[i] where size(k) = 6", [(6,)], {"i"}, [{"x"}]),
    (
        "f(x, y, z, w) out[i] = x[i] * y[i] + z[i] * w[i]",
        [(6,)] * 4,
        {"i"},
        [{"w", "x"}, {"w", "y"}, {"x", "z"}, {"y", "z"}],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "shapes", "splittable", "carriers"), LINES, ids=[line[0] for line in LINES])
def test_line_allows_exactly(text: str, shapes: list[Shape], splittable: set[str], carriers: list[set[str]]):
    analysis = analyse(text, *shapes)
    assert set(analysis.splittable) == splittable
    assert [set(c) for c in analysis.carriers] == carriers
    check(analysis, shapes)


OPERANDS = {"x": 2, "y": 2, "v": 1, "c": 0}
"""Operands of random lines and their ranks; every variable runs to 6."""


@st.composite
def expressions(draw: st.DrawFn, scope: tuple[str, ...], depth: int, banned: frozenset[str] = frozenset()) -> str:
    """A random expression over variables in scope."""
    free = [v for v in "ijkl" if v not in scope]
    kinds = ["access"] * 3 + ["const", "index"]
    if depth:
        kinds += ["add", "sub", "mul", "mul", "div", "call", "where"] + ["sum", "sum", "max"] * bool(free)
    kind = draw(st.sampled_from(kinds))

    def sub(names: tuple[str, ...] = scope) -> str:
        return draw(expressions(names, depth - 1))

    match kind:
        case "access":
            name = draw(st.sampled_from([n for n, rank in OPERANDS.items() if rank == 0 or scope]))
            return f"{name}[{', '.join(draw(st.sampled_from(scope)) for _ in range(OPERANDS[name]))}]"
        case "index" if scope:
            return draw(st.sampled_from(scope))
        case "const" | "index":
            return draw(st.sampled_from(["0", "1", "2.5"]))
        case "add" | "sub" | "mul" | "div":
            return f"({sub()} {dict(add='+', sub='-', mul='*', div='/')[kind]} {sub()})"
        case "call":
            return f"{draw(st.sampled_from(['relu', 'gelu', 'exp']))}({sub()})"
        case "where":
            return f"where(gt({sub()}, {sub()}), {sub()}, {sub()})"
        case _:
            name = draw(st.sampled_from(free))
            return f"{kind}[{name}]({sub((*scope, name))})"


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A random line of one or two results."""
    results: list[str] = []
    for name in ("out", "two")[: draw(st.integers(1, 2))]:
        indices = draw(st.sampled_from([(), ("i",), ("i", "j"), ("j", "i"), ("k",)]))
        results.append(f"{name}[{', '.join(indices)}] = {draw(expressions(indices, 3))}")
    body = "; ".join(results)
    read = [n for n in OPERANDS if re.search(rf"\b{n}\[", body)]
    assume(read)
    used = [v for v in "ijkl" if re.search(rf"\b{v}\b", body)]
    return f"f({', '.join(read)}) {body}" + (" where " + ", ".join(f"size({v}) = 6" for v in used) if used else "")


@pytest.mark.slow
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(lines())
def test_random_line_is_what_its_pieces_make(text: str):
    line = parse_line(text)
    shapes = [(6,) * OPERANDS[p.name] for p in line.parameters]
    check(Analysis(bind(line, shapes, {})), shapes)


def test_operand_typing_is_refused_with_the_fix():
    matmul = analyse("f(x, w) out[m, n] = act(sum[k](x[m, k] * w[k, n]))".replace("act", "relu"), (6, 6), (6, 6))
    whole = operand_degrees(matmul, Configuration({"m": 2}))
    with pytest.raises(UnityError, match=r"^pcg\.f: dim 1 of x has degree 2, .*insert pcg\.combine dim 1 by 2$"):
        infer_configuration(matmul, operand_degrees(analyse(LINES[0][0], (6, 6), (6, 6)), Configuration({"k": 2})))
    with pytest.raises(UnityError, match=r"^pcg\.f: w has 1 copies, but its tasks need 2; insert pcg\.replicate$"):
        infer_configuration(matmul, (whole[0], operand_degrees(matmul, Configuration())[1]))
    with pytest.raises(UnityError, match=r"^pcg\.f: not linear in x, which is in 2 partial sums; insert pcg\.reduce"):
        infer_configuration(
            matmul, operand_degrees(analyse(LINES[0][0], (6, 6), (6, 6)), Configuration(sums={frozenset("x"): 2}))
        )


def test_window_that_reaches_beyond_the_whole_dim_is_not_divided():
    line = "f(x, w) out[y] = sum[i](x[y + 6*i - 6] * w[i])"
    assert "y" not in analyse(line, (4,), (3,)).splittable
    assert "y" in analyse(line, (8,), (3,)).splittable


def test_windows_under_an_opaque_function_are_of_the_piece():
    line = "f(x) out[a, b] = opaque topk_values[a; j](sum[i](x[j, b + i - 1])) where size(a) = 2, size(i) = 3"
    half = line_of_task(analyse(line, (3, 6)).bound, Configuration({"b": 2}))
    window = accesses(half.results[0].expr)[0].indices[1]
    assert isinstance(window, Window)
    assert (window.size, window.low) == (5, 1)

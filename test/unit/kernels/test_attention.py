"""Attention is found by form, computed without a matrix of scores, and equal to what its line says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CAP, DROP, FOUND, case
from case import Case
from covered import operand_dtypes
from kernel_checks import check, random_operands

from unity_ir.kernels.launchers import launcher
from unity_ir.tdl.bind import bind
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.parallel import Configuration, line_of_task
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

OTHERS: list[tuple[str, Any]] = [
    (
        "squared(q, k, v)  let u[i, j] = exp(sum[e](q[i, e] * k[j, e])); let p[i, j] = u[i, j] / sum[n](u[i, n]);"
        " out[i, d] = sum[t](p[i, t] * p[i, t] * v[t, d])",
        ((20, 8), (20, 8), (20, 9)),
    ),
    # The sum is over the other dim, of something else, or its maximum is another row's.
    (
        "turned(q, k, v)  let u[i, j] = exp(sum[e](q[i, e] * k[j, e]));"
        " out[i, d] = sum[t](u[i, t] / sum[n](u[n, t]) * v[t, d])",
        ((20, 8), (20, 8), (20, 9)),
    ),
    (
        "mixed(q, k, v)  let s[i, j] = sum[e](q[i, e] * k[j, e]);"
        " out[i, d] = sum[t](exp(s[i, t]) / sum[n](exp(2 * s[i, n])) * v[t, d])",
        ((20, 8), (21, 8), (21, 9)),
    ),
    (
        "shifted(q, k, v)  let s[i, j] = sum[e](q[i, e] * k[j, e]);"
        " out[i, d] = sum[t](exp(s[i, t] - max[m](s[m, t])) / sum[n](exp(s[i, n] - max[m](s[m, n]))) * v[t, d])",
        ((20, 8), (21, 8), (21, 9)),
    ),
    (
        "rows(q, k, v)  let s[i, j] = sum[e](q[i, e] * k[j, e]);"
        " out[i, d] = sum[t](exp(s[i, t]) / sum[n](exp(s[i, n])) * v[t, i, d])",
        ((20, 8), (21, 8), (21, 20, 9)),
    ),
]
_SAVED = "let p[i, j] = exp(0.1 * sum[e](q[i, e] * k[j, e]) - l[i]);"
FACTORS: list[tuple[str, Any, list[str]]] = [
    # What is subtracted need not be the logarithm of a row's sum.
    (
        f"shift(q, k, v, l)  {_SAVED} out[i, d] = sum[t](p[i, t] * v[t, d])",
        ((40, 3), (45, 3), (45, 9), (40,)),
        ["rows"],
    ),
    (
        f"gated(q, k, v, l, y, c)  {_SAVED}"
        " out[t, d] = sum[i](p[i, t] * (c[i, t] + t - i) * sum[x](y[i, x] * v[t, x]) * v[i, d])",
        ((40, 3), (40, 3), (40, 9), (40,), (40, 9), (40, 40)),
        ["columns"],
    ),
    (
        f"by_feature(q, k, v, l, y, c)  {_SAVED}"
        " out[t, d] = sum[i](p[i, t] * c[d] * sum[x](y[i, x] * v[t, x]) * v[i, d])",
        ((40, 3), (40, 3), (40, 9), (40,), (40, 9), (9,)),
        ["matmul", "matmul", "2"],
    ),
]


def kinds(bound: Bound, dtype: str = "f32", starts: tuple[str, ...] = ()) -> list[str]:
    made = launcher(bound, operand_dtypes(bound, dtype), offsets=starts)
    return [c.kernel.split("_")[-2] for c in made.compiled]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("line", "shapes", "attributes"), FOUND)
def test_forms(line: str, shapes: Any, attributes: dict[str, Any], dtype: str, runner: Any) -> None:
    bound = bind(parse_line(line), shapes, attributes)
    assert kinds(bound, dtype) == ["forward"]
    check(bound, random_operands(bound, Case(shapes, {}, 2)), "triton", runner, dtype)


@pytest.mark.parametrize(("line", "shapes"), OTHERS)
def test_what_is_no_attention(line: str, shapes: Any, runner: Any) -> None:
    bound = bind(parse_line(line), shapes, {})
    assert "forward" not in kinds(bound)
    check(bound, random_operands(bound, Case(shapes, {}, 2)), "triton", runner)


@pytest.mark.parametrize(("line", "shapes", "expected"), FACTORS)
def test_factors_beside_the_weights(line: str, shapes: Any, expected: list[str], runner: Any) -> None:
    bound = bind(parse_line(line), shapes, {})
    assert kinds(bound) == expected
    check(bound, random_operands(bound, Case(shapes, {}, 2)), "triton", runner)


def test_scores_of_minus_infinity_in_whole_tiles(runner: Any) -> None:
    """Rows of which the first tiles are masked by an infinite bias."""
    line, shapes, _ = FOUND[1]
    bound = bind(parse_line(line), shapes, {})
    operands = random_operands(bound, Case(shapes, {}, 2))
    operands[3] = np.where(np.arange(70)[:, None] > np.arange(75), -np.inf, operands[3])
    assert kinds(bound) == ["forward"]
    check(bound, operands, "triton", runner)


GRADIENTS = {
    "attention_capped_grad": ["forward", "rows", "columns"],
    "attention_capped_ranges_grad": ["forward", "rows", "columns"],
    "attention_capped_ranges_saved_grad": ["rows", "columns"],
    "attention_capped_saved_grad": ["rows", "columns"],
    "attention_dropout_saved_grad": ["rows", "columns"],
    "attention_grad": ["forward", "rows", "columns"],
    "attention_ranges_grad": ["forward", "rows", "columns"],
    "attention_ranges_saved_grad": ["rows", "columns"],
    "attention_saved_grad": ["rows", "columns"],
    "attention_striped_grad": ["forward", "rows", "columns"],
    "attention_striped_saved_grad": ["rows", "columns"],
}
LARGER: list[tuple[str, tuple[int, ...], dict[str, Any], str]] = [
    # Batch, heads, those of keys, rows, columns, features and those of values.
    ("attention", (1, 2, 2, 150, 150, 24, 17), {"causal": 1}, "f32"),
    ("attention", (1, 4, 2, 128, 140, 64, 64), {"causal": 1}, "bf16"),
    ("attention", (2, 1, 1, 50, 33, 80, 100), {}, "bf16"),
    ("attention_saving", (1, 4, 2, 70, 70, 24, 17), {"causal": 1}, "f32"),
    ("attention_grad", (1, 2, 2, 100, 100, 24, 17), {"causal": 1}, "f32"),
    ("attention_grad", (1, 4, 2, 64, 70, 80, 64), {"causal": 1}, "bf16"),
    ("attention_grad", (2, 1, 1, 50, 33, 24, 20), {}, "f32"),
    ("attention_saved_grad", (1, 4, 2, 50, 70, 24, 17), {}, "f32"),
    ("attention_saved_grad", (1, 2, 2, 100, 100, 20, 20), {"causal": 1}, "f32"),
    # Tiles of rows are of one group, so that those that see nothing are left out; and of two.
    ("attention_saving", (2, 6, 2, 96, 96, 24, 17), {"causal": 1}, "f32"),
    ("attention_saved_grad", (2, 6, 2, 96, 96, 24, 17), {"causal": 1}, "f32"),
    ("attention_saved_grad", (1, 4, 2, 128, 64, 20, 20), {"causal": 1}, "f32"),
    ("attention_saved_grad", (1, 4, 2, 70, 96, 20, 20), {"causal": 1}, "f32"),
    ("attention_saved_grad", (1, 4, 2, 192, 192, 128, 128), {"causal": 1}, "bf16"),
    ("attention_ranges", (2, 2, 2, 300, 300, 24, 17), {}, "f32"),
    ("attention_ranges", (1, 4, 2, 192, 140, 64, 64), {}, "bf16"),
    ("attention_ranges_saving", (2, 6, 2, 96, 200, 24, 17), {}, "f32"),
    ("attention_ranges_grad", (2, 2, 2, 150, 150, 24, 17), {}, "f32"),
    ("attention_ranges_saved_grad", (2, 2, 2, 300, 300, 20, 20), {}, "f32"),
    ("attention_ranges_saved_grad", (2, 6, 2, 96, 96, 24, 17), {}, "f32"),
    ("attention_ranges_saved_grad", (1, 4, 2, 70, 200, 20, 20), {}, "f32"),
    ("attention_ranges_saved_grad", (1, 4, 2, 1088, 192, 64, 64), {}, "bf16"),
    ("attention_striped", (1, 2, 2, 192, 192, 24, 17), {"stripes": 3, "rounds": 2, "block": 32}, "f32"),
    # Tiles of rows of two blocks, and a sequence of one tile.
    ("attention_striped", (1, 4, 2, 96, 96, 24, 17), {"stripes": 2, "rounds": 6, "block": 8}, "f32"),
    ("attention_striped", (1, 4, 2, 16, 16, 24, 17), {"stripes": 2, "rounds": 2, "block": 4}, "f32"),
    ("attention_striped_saving", (2, 4, 2, 256, 256, 64, 64), {"stripes": 2, "rounds": 2, "block": 64}, "bf16"),
    ("attention_striped_grad", (1, 4, 2, 128, 128, 24, 17), {"stripes": 2, "rounds": 2, "block": 32}, "f32"),
    ("attention_striped_saved_grad", (1, 6, 2, 192, 192, 20, 20), {"stripes": 3, "rounds": 2, "block": 32}, "f32"),
    ("attention_striped_saved_grad", (1, 2, 2, 256, 256, 64, 64), {"stripes": 2, "rounds": 2, "block": 64}, "bf16"),
    ("attention_striped_saved_grad", (1, 4, 2, 96, 96, 20, 20), {"stripes": 2, "rounds": 3, "block": 16}, "f32"),
    ("attention_capped", (1, 2, 2, 150, 150, 24, 17), {**CAP, "causal": 1}, "f32"),
    ("attention_capped", (1, 4, 2, 128, 140, 64, 64), CAP, "bf16"),
    ("attention_capped_saving", (2, 6, 2, 96, 96, 24, 17), {**CAP, "causal": 1}, "f32"),
    ("attention_capped_grad", (1, 2, 2, 100, 100, 24, 17), {**CAP, "causal": 1}, "f32"),
    ("attention_capped_saved_grad", (1, 4, 2, 50, 70, 24, 17), CAP, "f32"),
    ("attention_capped_saved_grad", (1, 4, 2, 192, 192, 64, 64), {**CAP, "causal": 1}, "bf16"),
    ("attention_capped_ranges", (2, 2, 2, 300, 300, 24, 17), CAP, "f32"),
    ("attention_capped_ranges_saving", (2, 6, 2, 96, 200, 24, 17), CAP, "f32"),
    ("attention_capped_ranges_grad", (2, 2, 2, 150, 150, 24, 17), CAP, "f32"),
    ("attention_capped_ranges_saved_grad", (2, 6, 2, 96, 96, 24, 17), CAP, "f32"),
    ("attention_dropout", (2, 4, 2, 70, 50, 24, 17), {**DROP, "causal": 1}, "f32"),
    ("attention_dropout_saving", (2, 4, 2, 70, 50, 24, 17), DROP, "bf16"),
    ("attention_dropout_saved_grad", (2, 4, 2, 50, 70, 24, 17), {**DROP, "causal": 1}, "f32"),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "attributes", "dtype"), LARGER)
def test_several_tiles(name: str, sizes: tuple[int, ...], attributes: dict[str, Any], dtype: str, runner: Any) -> None:
    bound, operands = case(name, sizes, attributes)
    assert kinds(bound, dtype) == GRADIENTS.get(name, ["forward"])
    check(bound, operands, "triton", runner, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("attention", {}),
        ("attention_saved_grad", {}),
        ("attention_capped", CAP),
        ("attention_capped_saved_grad", CAP),
        ("attention_dropout", DROP),
        ("attention_dropout_saved_grad", DROP),
    ],
)
@pytest.mark.parametrize("heads", [2, 4])
def test_a_piece_of_a_sequence_is_masked_where_it_lies(
    name: str, attributes: dict[str, Any], heads: int, runner: Any
) -> None:
    """Causal attention whose rows are divided: positions count from where the piece starts, those of dropout, too."""
    bound, operands = case(name, (1, heads, 2, 96, 96, 16, 16), {"causal": 1, **attributes})
    expected = evaluate(bound, operands)
    part = line_of_task(bound, Configuration({"i": 3}))
    made = launcher(part, ("f32",) * len(operands), offsets=("i",))
    assert any("forward" in c.kernel or "rows" in c.kernel for c in made.compiled)
    by_rows = {"q", "y", "a", "logsum"}
    total = [np.zeros_like(e) for e in expected]
    for start in range(0, 96, 32):
        pieces = [
            torch.from_numpy(o[:, :, start : start + 32] if p.name in by_rows else o).float().contiguous()
            for p, o in zip(bound.operands, operands, strict=True)
        ]
        for whole, got, result in zip(total, runner.run(made, pieces, start), bound.results, strict=True):
            own = whole[:, :, start : start + 32] if result.name in ("out", "dq") else whole
            own += got.double().numpy()
    for whole, want in zip(total, expected, strict=True):
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 4])
def test_a_piece_of_the_keys_is_masked_where_it_lies(heads: int, runner: Any) -> None:
    """A causal backward whose columns are divided: their positions count from where the piece starts."""
    bound, operands = case("attention_saved_grad", (1, heads, 2, 96, 96, 16, 16), {"causal": 1})
    expected = evaluate(bound, operands)
    made = launcher(line_of_task(bound, Configuration({"t": 3})), ("f32",) * len(operands), offsets=("t",))
    assert kinds(bound) == [c.kernel.split("_")[-2] for c in made.compiled]
    total = [np.zeros_like(e) for e in expected]
    for start in range(0, 96, 32):
        pieces = [
            torch.from_numpy(o[:, :, start : start + 32] if p.name in ("k", "v") else o).float().contiguous()
            for p, o in zip(bound.operands, operands, strict=True)
        ]
        for whole, got, result in zip(total, runner.run(made, pieces, start), bound.results, strict=True):
            own = whole if result.name == "dq" else whole[:, :, start : start + 32]
            own += got.double().numpy()
    for whole, want in zip(total, expected, strict=True):
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-4)


def striped_positions(stripes: int, rounds: int, block: int) -> Any:
    """The positions in natural order of the tokens of a sequence in striped order."""
    return np.arange(rounds * stripes * block).reshape(rounds, stripes, block).swapaxes(0, 1).ravel()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_striped", "attention_striped_saved_grad"])
@pytest.mark.parametrize(
    ("heads", "pieces", "stripes", "block"),
    [(2, 4, 4, 32), (4, 4, 4, 32), (4, 2, 4, 32), (2, 8, 4, 32), (2, 2, 2, 64), (2, 4, 2, 64)],
)
@pytest.mark.parametrize("variable", ["i", "t"])
def test_a_piece_of_a_striped_sequence(
    name: str, heads: int, pieces: int, stripes: int, block: int, variable: str, runner: Any
) -> None:
    """
    Rows, and the columns of a backward, in pieces of one stripe, of two, and of half of one, with blocks of one tile
    and of two: each is masked where it lies, and what it hides of all is not read, since that is not a number here.
    """
    if variable == "t" and "grad" not in name:
        return
    order = {"stripes": stripes, "rounds": 256 // (stripes * block), "block": block}
    bound, operands = case(name, (1, heads, 2, 256, 256, 16, 16), order)
    expected = evaluate(bound, operands)
    made = launcher(
        line_of_task(bound, Configuration({variable: pieces})), ("f32",) * len(operands), offsets=(variable,)
    )
    natural, size = striped_positions(**order), 256 // pieces
    of_rows, of_columns = {"q", "y", "a", "logsum", "out", "dq"}, {"k", "v", "dk", "dv"}
    divided, whole = (of_rows, of_columns) if variable == "i" else (of_columns, of_rows)
    total = [np.zeros_like(e) for e in expected]
    for start in range(0, 256, size):
        own = natural[start : start + size]
        # Tiles have 32 positions.
        hidden = natural > own.max() if variable == "i" else natural < own.min() // 32 * 32
        given: list[torch.Tensor] = []
        for parameter, operand in zip(bound.operands, operands, strict=True):
            piece = operand[:, :, start : start + size] if parameter.name in divided else operand.copy()
            if parameter.name in whole:
                piece[:, :, hidden] = np.nan
            given.append(torch.from_numpy(piece).float().contiguous())
        for sums, got, result in zip(total, runner.run(made, given, start), bound.results, strict=True):
            into = sums[:, :, start : start + size] if result.name in divided else sums
            add = got.double().numpy()
            into += np.where(np.isnan(add) & (result.name in whole), 0, add)
    for sums, want in zip(total, expected, strict=True):
        np.testing.assert_allclose(sums, want, rtol=1e-4, atol=1e-4)


def test_scores_are_never_whole() -> None:
    """No buffer has both a dim of the queries' positions and one of the keys'."""
    names = [("attention", {}), ("attention_saving", {}), ("attention_grad", {}), ("attention_saved_grad", {})]
    names += [(f"attention_capped{kind}", CAP) for kind in ("", "_saving", "_grad", "_saved_grad")]
    names += [("attention_dropout", DROP), ("attention_dropout_saving", DROP), ("attention_dropout_saved_grad", DROP)]
    for name, attributes in names:
        bound, _ = case(name, (1, 2, 2, 37, 53, 16, 16), attributes)
        source = launcher(bound, ("bf16",) * len(bound.operands)).source
        made = [line for line in source.splitlines() if ".new_empty(" in line]
        assert made
        assert not any("37" in line and "53" in line for line in made), source


_RANGED = (
    "let s[i, j] = where(or(lt(j, f[i]), ge(j, l[i])), -1e30, 0.3 * sum[e](q[i, e] * k[j, e]));"
    " let u[i, j] = exp(s[i, j] - max[m](s[i, m])); let p[i, j] = u[i, j] / sum[n](u[i, n]);"
    " let z[i, j] = where(or(lt(j, f[i]), ge(j, l[i])), 0, p[i, j]);"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        # The ends of ranges are floats; weights outside of ranges are not 0, in the only sum, or in one of two.
        f"a(q, k, v, f, l)  {_RANGED} out[i, d] = sum[t](z[i, t] * v[t, d])",
        f"b(q, k, v, f: int, l: int)  {_RANGED} out[i, d] = sum[t](p[i, t] * v[t, d])",
        "c(q, k, v, f: int, l: int, g)"
        f"  let s[i, j] = where(or(lt(j, f[i]), ge(j, l[i])), {-(2.0**100)!r}, 0.3 * sum[e](q[i, e] * k[j, e]));"
        " let p[i, j] = exp(s[i, j] - g[i]); let z[i, j] = where(or(lt(j, f[i]), ge(j, l[i])), 0, p[i, j]);"
        " one[t, d] = sum[i](z[i, t] * v[i, d]); other[t, d] = sum[i](p[i, t] * v[i, d])",
    ],
)
def test_what_are_no_ranges(line: str, runner: Any) -> None:
    shapes = ((64, 16), (64, 16), (64, 16), (64,), (64,), (64,))[: line.partition(")")[0].count(",") + 1]
    bound = bind(parse_line(line), shapes, {})
    operands = random_operands(bound, Case(shapes, {}, 2))
    first = np.maximum(np.arange(64) - 10, 0)
    end = np.where(np.arange(64) % 9 == 0, first, np.arange(64) + 1)
    operands[3:5] = (first, end) if ": int" in line else (first + 0.5, end + 0.5)
    if len(operands) == 6:
        # So that a row that sees nothing has weights.
        operands[5] = np.where(first == end, -(2.0**100), 0.0)
    check(bound, operands, "triton", runner)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_ranges", "attention_ranges_saved_grad"])
def test_a_range_of_all_rows(name: str, runner: Any) -> None:
    """One position of several heads that share keys: there is no least of a number, which Triton refuses."""
    bound, operands = case(name, (2, 4, 2, 1, 70, 16, 16), {})
    kernels = launcher(bound, operand_dtypes(bound, "f32")).kernels
    assert not any("tl.min(" in text for text in kernels.values())
    check(bound, operands, "triton", runner)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_ranges_saving", "attention_ranges_saved_grad"])
@pytest.mark.parametrize("variable", ["i", "t"])
def test_a_piece_of_ranges(name: str, variable: str, runner: Any) -> None:
    """Rows divided, and their ranges with them; and the keys of a backward, which ranges count from the first."""
    if variable == "t" and "grad" not in name:
        return
    bound, operands = case(name, (2, 4, 2, 96, 96, 16, 16), {})
    expected = evaluate(bound, operands)
    made = launcher(
        line_of_task(bound, Configuration({variable: 3})),
        operand_dtypes(bound, "f32"),
        offsets=(variable,),
    )
    assert any("forward" in c.kernel or "rows" in c.kernel for c in made.compiled)
    of_rows = {"q": 2, "y": 2, "a": 2, "logsum": 2, "first": 1, "end": 1, "out": 2, "dq": 2}
    dims = of_rows if variable == "i" else {"k": 2, "v": 2, "dk": 2, "dv": 2}
    total = [np.zeros_like(e) for e in expected]
    for start in range(0, 96, 32):
        pieces = [
            torch.from_numpy(np.take(o, range(start, start + 32), dims[p.name]) if p.name in dims else o)
            for p, o in zip(bound.operands, operands, strict=True)
        ]
        given = [p.float().contiguous() if p.is_floating_point() else p.contiguous() for p in pieces]
        for whole, got, result in zip(total, runner.run(made, given, start), bound.results, strict=True):
            own = whole[:, :, start : start + 32] if result.name in dims or result.name == "logsum" else whole
            own += got.double().numpy()
    for whole, want in zip(total, expected, strict=True):
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_factor_that_is_not_0_where_scores_are_hidden(runner: Any) -> None:
    """Tiles that a causal mask hides are left out only where nothing is added up in them."""
    line = (
        "more(q, k, v, l)  let s[i, j] = where(gt(j - i, 0), -1e30, 0.1 * sum[e](q[i, e] * k[j, e]));"
        " out[i, d] = sum[t]((exp(s[i, t] - l[i]) + 1) * v[t, d])"
    )
    shapes = ((150, 8), (150, 8), (150, 9), (150,))
    bound = bind(parse_line(line), shapes, {})
    check(bound, random_operands(bound, Case(shapes, {}, 2)), "triton", runner)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["attention_ranges", "attention_ranges_saved_grad"])
@pytest.mark.parametrize("heads", [2, 4])
def test_tiles_that_nothing_sees_are_not_read(name: str, heads: int, runner: Any) -> None:
    """Fill all tiles of the first of two documents with NaN: what is computed for the second one has none."""
    bound, operands = case(name, (1, heads, 2, 256, 256, 16, 16), {})
    values = dict(zip([p.name for p in bound.operands], operands, strict=True))
    at = np.arange(256)[None]
    values |= {"first": at // 128 * 128, "end": at // 128 * 128 + 128}
    if name == "attention_ranges_saved_grad":
        values["logsum"] = np.full_like(values["logsum"], 5.0)
    expected = evaluate(bound, list(values.values()))
    poisoned = {n: v.copy() for n, v in values.items()}
    for n in ("q", "k", "v", "y", "a", "logsum"):
        if n in poisoned:
            poisoned[n][:, :, :128] = np.nan
    made = launcher(bound, operand_dtypes(bound, "f32"))
    given = [torch.from_numpy(v).float() if v.dtype.kind == "f" else torch.from_numpy(v) for v in poisoned.values()]
    for got, want in zip(runner.run(made, given), expected, strict=True):
        np.testing.assert_allclose(got.numpy()[:, :, 128:], want[:, :, 128:], rtol=1e-4, atol=1e-4)

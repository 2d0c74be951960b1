"""Matrix products are left to cuBLAS where that is faster, by estimate."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from unity_ir.errors import UnityError
from unity_ir.forms.stored import with_rows
from unity_ir.plan.local_operator import LocalOperator
from unity_ir.plan.plan import PlanOptions
from unity_ir.plan.products import product_implementation
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Binary, Const

NO_ROWS: Mapping[str, int] = MappingProxyType({})
NN, NT, TN = "sum[k](x[m, k] * w[k, n])", "sum[k](x[m, k] * w[n, k])", "sum[k](x[k, m] * w[k, n])"


def product(
    m: int, n: int, k: int, layout: str = NN, after: str = "", dtype: str = "bf16", rows: Mapping[str, int] = NO_ROWS
) -> LocalOperator:
    """A product, as a group if something is computed after it; `rows` are those of operands that are padded."""
    more = tuple(name for name in "br" if f"{name}[" in after)
    line = f"f({', '.join(('x', 'w', *more))}) out[m, n] = {after.replace('P', layout) or layout}"
    shapes: dict[str, Any] = {"b": (n,), "r": (m, n)}
    x, w = (k, m) if layout == TN else (m, k), (n, k) if layout == NT else (k, n)
    bound = with_rows(bind(parse_line(line), (x, w, *(shapes[name] for name in more)), {}), rows, (0,))
    return LocalOperator(bound, (dtype,) * len(bound.operands), (), bool(after))


@pytest.mark.parametrize(
    ("operator", "faster"),
    [
        (product(16384, 4096, 1024), "torch"),
        (product(16384, 4096, 1024, after="P + b[n]"), "triton"),
        (product(16384, 1024, 4096, after="P + b[n] + r[m, n]"), "triton"),
        (product(4096, 4096, 14336, after="P + r[m, n]"), "torch"),
        # 32 tiles for 132 multiprocessors.
        (product(1024, 1024, 16384, TN, after="P + r[m, n]"), "torch"),
        # The gradient of gelu is a long epilogue.
        (product(16384, 1024, 4096, after="gelu(P + b[n]) * exp(r[m, n])"), "torch"),
        # Rows of the result start anywhere, then those of an operand.
        (product(16384, 30522, 1024, NT), "triton"),
        (product(8192, 50257, 768, NT), "triton"),
        (product(30522, 1024, 16384, TN), "torch"),
        # Rows are padded, sizes are odd: both gradients of a head.
        (product(30522, 1024, 16384, TN, rows={"x": 30528}), "triton"),
        (product(16384, 1024, 30522, rows={"x": 30528}), "triton"),
        (product(16384, 4096, 1024, dtype="f32"), "triton"),
    ],
)
def test_measured(operator: LocalOperator, faster: str) -> None:
    """The estimate is as it was on an H100."""
    assert product_implementation(operator) == faster
    assert PlanOptions().fusion_choice(operator) == ("triton" if not operator.fused else faster)
    assert PlanOptions("triton").fusion_choice(operator) == "triton"
    if not operator.fused:
        assert PlanOptions().implementation(operator) == faster
        assert PlanOptions("torch").implementation(operator) == PlanOptions("torch").fusion_choice(operator) == "torch"


def test_gradient_in_float32() -> None:
    """BLAS stores it at once, so that a group with the cast saves nothing; with another operator it does."""
    one = product(4096, 14336, 4096, TN)
    cast = replace(one, line=replace(one.line, results=(replace(one.line.results[0], dtype="f32"),)), fused=True)
    assert product_implementation(one) == "torch"
    assert product_implementation(cast) == "torch"
    (result,) = cast.line.results
    scaled = replace(
        cast, line=replace(cast.line, results=(replace(result, expr=Binary("*", result.expr, Const(2.0))),))
    )
    assert product_implementation(scaled) == "triton"


def test_unknown() -> None:
    with pytest.raises(UnityError, match="matmul is 'fastest'; it must be triton or torch or auto"):
        PlanOptions("fastest")
    with pytest.raises(UnityError, match="kernels is 'auto'; it must be triton or torch"):
        PlanOptions(kernels="auto")

"""The work of many configurations at once is that of each by itself."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cases import CASES

from unity_ir.cost.table import addition_seconds, kernel_counts, seconds, template
from unity_ir.cost.work import Work, repeats, work
from unity_ir.errors import UnityError
from unity_ir.forms.kinds import KINDS
from unity_ir.machine import Device
from unity_ir.machine.curve import RooflineCurve
from unity_ir.machine.profile import Profile
from unity_ir.ops import operator, operators
from unity_ir.pcg.node import Node, apply, leaf
from unity_ir.pcg.types import tensor_type

CURVE = RooflineCurve(1e-6, 0.6, 1e3, 0.7, 0.9, 1e3, -0.3)
DEVICE = Device(
    "d",
    {"f32": 1e12, "f64": 5e11, "f16": 4e12, "bf16": 4e12},
    1e11,
    10**9,
    1e-6,
    curves=dict.fromkeys(KINDS[:2], CURVE),
)
MAX_ROWS = 10


def serial(data: st.DataObject, name: str) -> Node:
    """The operator on inputs, some of which may be the same."""
    case = data.draw(CASES[name])
    kinds = [p.kind for p in operator(name).line.parameters]
    held = [*kinds, *kinds[-1:] * len(case.shapes)]
    once = data.draw(st.booleans())
    operands = []
    for i, shape in enumerate(case.shapes):
        dtype = {"float": "f32", "int": "i64", "bool": "bool"}.get(held[i]) or (case.dtypes or ("f64",) * 9)[i]
        type = tensor_type(shape, dtype)
        first = next((k for k, v in enumerate(operands) if v.type == type), i) if once else i
        operands.append(leaf("input", type, name=f"x{first}").result)
    return apply(name, operands, case.attributes)


def rows(data: st.DataObject, node: Node) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """The variables that may be divided, and ways to divide them."""
    extents = node.analysis.bound.extents
    variables = tuple(v for v in node.analysis.splittable if extents[v] > 1)
    every = product(*([d for d in range(1, extents[v] + 1) if extents[v] % d == 0] for v in variables))
    found = data.draw(st.permutations(list(every)[:400])) if variables else [()]
    return variables, found[:MAX_ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("name", operators())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_rows_cost_what_single_configurations_cost(name: str, data: st.DataObject):
    node = serial(data, name)
    differentiable = operator(name).gradient is not None and any(t.is_floating for t in node.types)
    needs = tuple(differentiable and v.type.is_floating and data.draw(st.booleans()) for v in node.operands)
    variables, ways = rows(data, node)
    operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
    same = repeats(node)
    known: list[tuple[int, ...]] = []
    wanted: list[Work] = []
    for degrees in ways:
        named = tuple((v, d) for v, d in zip(variables, degrees, strict=True) if d > 1)
        try:
            wanted.append(work(name, operands, node.attributes, named, needs, same))
        except UnityError:
            continue
        known.append(degrees)
    degrees = np.array(known, dtype=np.int64).reshape(len(known), len(variables))
    form = template(node, needs, variables, same)
    told = form.is_exact(degrees)
    for place, kernel in enumerate(kernel_counts(form, degrees[told])):
        ones = [[*w.forward, *w.backward][place] for w, t in zip(wanted, told, strict=True) if t]
        assert kernel.flops.tolist() == [k.flops for k in ones]
        assert kernel.bytes.tolist() == [k.bytes for k in ones]
        assert [(k.operator, k.kind, k.dtype) for k in ones] == [
            (kernel.kernel.operator, kernel.kernel.kind, kernel.kernel.dtype)
        ] * len(ones)
        assert [k.sizes for k in ones] == list(map(tuple, kernel.sizes.tolist()))
    # Some kernels were measured, others not.
    every = [k for w in wanted for k in (*w.forward, *w.backward)]
    measured = {k.operator: {k.sizes: float(i + 1)} for i, k in enumerate(every[::3])}
    for device in (
        DEVICE,
        Device("d", DEVICE.flops, 1e11, 1, 1e-6, curves=DEVICE.curves, profile=Profile("d", measured)),
    ):
        found, alone = seconds(node, needs, variables, degrees, np.tile(same, (len(known), 1)), device)
        assert found.tolist() == pytest.approx([w.forward_time(device) + w.backward_time(device) for w in wanted])
        assert alone.tolist() == pytest.approx([w.forward_time(device) for w in wanted])


def test_unknown_divisions_are_rare():
    """What is not told by a template is costed row by row, which is slow."""
    node = apply(
        "conv2d",
        [leaf("input", tensor_type(s, "f32"), name=n).result for n, s in (("x", (8, 4, 32, 32)), ("w", (8, 4, 3, 3)))],
        {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1},
    )
    assert template(node, (True, True), node.analysis.splittable, (0, 1)).unknown == ()


@pytest.mark.parametrize("rows", [8, 2**15])
def test_products_that_add_up_gradients_write_them_wider_and_read_the_sum(rows: int):
    """With few rows a product is bound by memory and takes longer; with many it is bound by arithmetic and does not."""
    x = leaf("input", tensor_type((rows, 512), "bf16"), name="x").result
    weight = leaf("weight", tensor_type((512, 512), "bf16", grad="f32"), name="w").result
    node = apply("matmul", [x, weight])
    assert node.analysis.splittable == ("m0", "n", "k")
    ways = np.array(list(product((1, 2), repeat=3)), dtype=np.int64)
    m, n, k = ((rows, 512, 512) // ways).T
    longer, reading = addition_seconds(node, 1, ("m0", "n", "k"), ways, n * k, DEVICE)
    item, sum_item = 2, 4
    operands = item * m * (n + k)
    alone, stored, added = (
        DEVICE.kernel_times(2 * m * n * k, operands + each * n * k, "bf16", "contraction")
        for each in (item, sum_item, 2 * sum_item)
    )
    assert longer.tolist() == pytest.approx((stored - alone).tolist())
    assert reading.tolist() == pytest.approx((added - stored).tolist())
    assert np.all(reading > 0) if rows == 8 else not np.any(reading)


@pytest.mark.parametrize("name", ["float8_matmul", "float8_matmul_nt"])
def test_products_in_8_bits(name: str) -> None:
    """They take what 8 bits take, after kernels that round their operands, and as long in either way of counting."""
    device = Device("d", {"f32": 1e12, "bf16": 4e12, "f8e4m3": 8e12}, 1e11, 10**9, 1e-6)
    x, w = (64, 512), (256, 512) if name.endswith("_nt") else (512, 256)
    node = apply(name, [leaf("input", tensor_type(shape, "bf16"), name=n).result for n, shape in (("x", x), ("w", w))])
    variables = node.analysis.splittable
    ways = np.array([(1,) * len(variables), (2,) * len(variables)], dtype=np.int64)
    same = np.array([[0, 1]] * len(ways))
    found, alone = seconds(node, (True, True), variables, ways, same, device)
    for row, way in enumerate(ways.tolist()):
        degrees = tuple((v, d) for v, d in zip(variables, way, strict=True) if d > 1)
        done = work(name, tuple((shape, "bf16") for shape in (x, w)), (), degrees, (True, True), (0, 1))
        (product,) = done.forward
        assert product.dtype == "f8e4m3"
        assert [each.dtype for each in done.backward].count("bf16") == 1
        elements = (64 * 512 + 512 * 256) // (1 if row == 0 else 4)
        # A weight that is not transposed is read twice to be rounded.
        twice = 512 * 256 // (1 if row == 0 else 4) if name == "float8_matmul" else 0
        assert product.rounded == 3 * elements + 2 * twice
        assert alone[row] == pytest.approx(done.forward_time(device))
        assert found[row] == pytest.approx(done.forward_time(device) + done.backward_time(device))
        moved = (elements + 2 * 64 * 256 // (1 if row == 0 else 4)) / 1e11 / 0.7
        arithmetic = product.flops / 8e12 / 0.7
        assert alone[row] == pytest.approx(3e-6 + max(moved, arithmetic) + product.rounded / 1e11 / 0.7)

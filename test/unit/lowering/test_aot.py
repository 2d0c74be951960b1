"""Every kernel compiles for GPUs that are not here, without spills, within shared memory, and with pipelined loops."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from covered import bound_of, operand_dtypes, refusal
from extent import sample
from lowered import LOWERED

from unity_ir.errors import UnityError
from unity_ir.kernels.launchers import Compiled, Launcher, launcher, optimizer_launcher
from unity_ir.lowering.measure.aot import SHARED_LIMITS, Job, Resources, compile_all, compile_each
from unity_ir.lowering.measure.aot_check import violations
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.ops import operator
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import Fused
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

Case = tuple[str, Any, dict[str, Any], str]

PRODUCTS: list[Case] = [
    ("matmul", ((512, 784), (784, 512)), {"act": "relu"}, "f32"),
    ("matmul", ((511, 77), (77, 513)), {"act": "gelu"}, "f32"),
    ("matmul_nt", ((512, 784), (512, 784)), {}, "f32"),
    ("matmul_nt", ((511, 77), (513, 77)), {}, "f32"),
    ("matmul_tn", ((512, 784), (512, 512)), {}, "f32"),
    ("matmul_tn", ((77, 511), (77, 513)), {}, "f32"),
    ("matmul", ((512, 784), (784, 512)), {"act": "gelu"}, "bf16"),
    ("matmul_nt", ((511, 77), (513, 77)), {}, "bf16"),
]
SMALL_PRODUCTS: list[Case] = [
    ("matmul_nt", ((m, 77), (n, 77)), {}, "f32") for m, n in ((16, 16), (16, 128), (32, 32), (32, 128), (64, 16))
]
OTHERS: list[Case] = [
    ("relu", ((512, 512),), {}, "f32"),
    ("gelu", ((512, 512),), {}, "bf16"),
    ("gelu_grad", ((511, 513), (511, 513)), {}, "f32"),
    ("add", ((511, 513), (513,)), {}, "f32"),
    ("mse", ((640, 1000), (640, 1000)), {}, "f32"),
    ("mse_grad", ((), (64, 10), (64, 10)), {}, "f32"),
    ("cross_entropy", ((512, 1000), (512,)), {}, "f32"),
    ("cross_entropy", ((64, 16000), (64,)), {}, "f32"),
    ("cross_entropy", ((64, 50257), (64,)), {}, "bf16"),
    ("cross_entropy_grad", ((), (512, 1000), (512,)), {}, "f32"),
    ("cross_entropy_grad", ((), (64, 16000), (64,)), {}, "f32"),
    ("cross_entropy_grad", ((), (64, 50257), (64,)), {}, "f32"),
    ("reduce_sum", ((4096, 512),), {"dim": 0}, "f32"),
    ("reduce_sum", ((64, 4096),), {"dim": 1}, "f32"),
    ("reduce_sum", ((8, 100, 60),), {"dim": 1}, "f32"),
    ("transpose", ((40, 50, 60),), {"perm": (2, 0, 1)}, "f32"),
    ("concat", ((100, 30), (100, 50)), {"dim": 1}, "f32"),
    ("split", ((100, 80),), {"dim": 1, "sizes": (30, 50)}, "f32"),
    ("split_heads", ((2, 100, 64),), {"heads": 4}, "f32"),
    ("expand", ((100, 60),), {"dim": 1, "sizes": (4,), "degrees": (1,)}, "f32"),
    ("softmax", ((8, 1024, 1024),), {}, "bf16"),
    ("log_softmax_grad", ((64, 50257), (64, 50257)), {}, "bf16"),
    ("layer_norm_grad", ((8192, 768), (8192, 768), (768,)), {}, "bf16"),
    ("rms_norm_grad", ((64, 16384), (64, 16384), (16384,)), {}, "f32"),
    ("rotary", ((4, 32, 1024, 128),), {}, "bf16"),
    ("embedding", ((8, 1024), (50257, 768)), {}, "bf16"),
    ("embedding_grad", ((8, 1024, 768), (8, 1024)), {"size": 50257, "degrees": (1,)}, "bf16"),
    *(
        ("embedding_grad", ((*ids, width), ids), {"size": rows, "degrees": (1,)}, dtype)
        for ids, rows, width in (((32, 512), 2, 1024), ((1, 8192), 128256, 4096), ((1, 700000), 30, 1), ((9, 1), 7, 65))
        for dtype in ("f32", "bf16")
    ),
    ("embedding_bag_grad", ((1024, 64), (1024, 1)), {"size": 1000000, "degrees": (1,)}, "f32"),
    (
        "max_pool2d",
        ((32, 64, 112, 112),),
        {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)},
        "bf16",
    ),
    ("avg_pool2d", ((32, 192, 35, 35),), {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1)}, "f32"),
    ("attention_grad", (*((4, 32, 1024, 128),) * 2, *((4, 8, 1024, 128),) * 2), {"scale": 0.1, "causal": 1}, "bf16"),
]


_UNIT = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
CONVOLUTIONS: list[Case] = [
    ("conv2d", ((32, 64, 56, 56), (64, 64, 3, 3)), _UNIT, "bf16"),
    ("conv2d", ((32, 3, 224, 224), (64, 3, 7, 7)), {**_UNIT, "stride": (2, 2), "padding": (3, 3)}, "f32"),
    ("conv2d_data_grad", ((32, 64, 28, 28), (64, 64, 3, 3)), {**_UNIT, "stride": (2, 2), "sizes": (56, 56)}, "bf16"),
    ("conv2d_weight_grad", ((32, 64, 56, 56), (32, 64, 56, 56)), {**_UNIT, "sizes": (3, 3)}, "bf16"),
    ("conv2d_weight_grad", ((32, 64, 56, 56), (32, 64, 56, 56)), {**_UNIT, "sizes": (3, 3)}, "f32"),
]


def of_target(jobs: list[Job], target: str) -> list[Job]:
    """
    Those that the target is to run: in `make test` a third of them for Hopper, a sixth for the others, each other ones;
    all in `make zoo`.
    """
    jobs = [job for job in jobs if job.compiled.is_for(target)]
    return [*sample(jobs, 3)] if target == "cuda:90" else [*sample(jobs, 6, [*SHARED_LIMITS].index(target))]


def made(case: Case) -> Launcher:
    name, shapes, attributes, dtype = case
    one = operator(name)
    bound = one.bind(shapes, one.attributes(attributes)).bound
    return launcher(bound, operand_dtypes(bound, dtype))


def compiled(launchers: list[Launcher], target: str) -> list[tuple[Compiled, Resources]]:
    kernels = {name: text for one in launchers for name, text in one.kernels.items()}
    launches: list[Compiled] = []
    for launch in (c for one in launchers for c in one.compiled):
        if launch not in launches and launch.is_for(target):
            launches.append(launch)
    return list(zip(launches, compile_all("\n\n".join(kernels.values()), launches, target), strict=True))


def fits(launch: Compiled, took: Resources, target: str, frame: int = 0) -> None:
    assert took.kernel == launch.kernel
    assert 0 < took.registers <= 255, took
    assert took.frame_bytes <= frame, (launch, took)
    assert took.shared_bytes <= SHARED_LIMITS[target], took
    assert took.seconds > 0


def fit(launchers: list[Launcher]) -> None:
    texts = {name: text for one in launchers for name, text in one.kernels.items()}
    for launch, took in compiled(launchers, "cuda:90"):
        # Large angles are reduced with a table on the stack.
        trigonometric = any(f in texts[launch.kernel] for f in ("tl.sin", "tl.cos"))
        fits(launch, took, "cuda:90", frame=64 if trigonometric else 0)


@pytest.mark.slow
def test_products_on_sm_90() -> None:
    cases = sample([*PRODUCTS, *SMALL_PRODUCTS], 2)
    for case, (launch, took) in zip(cases, compiled([made(c) for c in cases], "cuda:90"), strict=True):
        fits(launch, took, "cuda:90")
        # An odd stride of 2 bytes leaves copies of less than 4 bytes, which cannot run asynchronously.
        if case in PRODUCTS[:-1]:
            assert took.pipelined, case
        # Float32 products are exact unless the program is told otherwise, so they use no tensor cores.
        assert took.mma == (case[3] == "bf16"), case
        assert "wgmma" in took.instructions or case != PRODUCTS[6]


@pytest.mark.slow
def test_others_on_sm_90() -> None:
    optimizers = [optimizer_launcher("sgd"), optimizer_launcher("adam"), optimizer_launcher("adam", "bf16")]
    last = optimizer_launcher("adamw", cast="bf16", is_averaged=True)
    fit([*sample([made(c) for c in OTHERS], 3), *sample(optimizers, 1), last])


@pytest.mark.slow
def test_convolutions_on_sm_90() -> None:
    for case, (launch, took) in zip(CONVOLUTIONS, compiled([made(c) for c in CONVOLUTIONS], "cuda:90"), strict=True):
        assert "convolution" in launch.kernel
        fits(launch, took, "cuda:90")
        # What is half a float wide is multiplied by tensor cores; float32 is exact.
        assert took.mma == (case[3] == "bf16"), case


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "hip:gfx942"])
def test_other_targets(target: str) -> None:
    for launch, took in compiled([made(c) for c in [*PRODUCTS[::3], OTHERS[0], OTHERS[4], OTHERS[9]]], target):
        fits(launch, took, target)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_attention(target: str) -> None:
    """Of heads of several widths, forward and backward: within registers, by matrix units, copies beside them."""
    jobs: list[Job] = []
    names = [("attention", width) for width in (64, 128, 256)] + [("attention_dropout", 64)]
    names += [
        ("attention_ranges", 64),
        ("attention_ranges", 128),
        ("attention_capped", 64),
        ("attention_capped", 256),
        ("attention_capped_ranges", 128),
        ("attention_striped", 64),
        ("attention_striped", 128),
    ]
    for (name, width), kind in itertools.product(names, ("saving", "saved_grad")):
        heads = ((2, 4, 512, width),) * 3
        ranges = ((2, 512),) * 2 if name.endswith("ranges") else ()
        shapes = (*heads, *ranges) if kind == "saving" else (heads[0], *heads, *ranges, heads[0], heads[0][:3])
        more: dict[str, Any] = {"drop": 0.1, "seed": 3} if name == "attention_dropout" else {}
        more |= {"cap": 50.0} if "capped" in name else {}
        masked = {} if ranges else {"causal": int(width > 64)}
        if name == "attention_striped":
            masked = {"stripes": 2, "rounds": 2, "block": 128}
        one = made((f"{name}_{kind}", shapes, {"scale": 0.1, **masked, **more}, "bf16"))
        jobs += [Job(one.kernels[c.kernel], c) for c in one.compiled]
    assert len(jobs) == 33
    assert {job.compiled.expects[:2] for job in jobs} == {("mma", "pipelined")}
    assert sum("wgmma" in job.compiled.expects for job in jobs) == 27
    jobs = of_target(jobs, target)
    for job, outcome in zip(jobs, compile_each(jobs, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_grouped_products(target: str) -> None:
    """Of a mixture's size, in both types: as matrix products, though rows are looked up on the way."""
    x, y, w, e = (8192, 1024), (8192, 3584), (8, 1024, 3584), (8192,)
    experts = {"size": 8, "degrees": (1,)}
    jobs: list[Job] = []
    for dtype in ("f32", "bf16"):
        cases: list[Case] = [
            ("routed_matmul", (x, w, e), {}, dtype),
            ("routed_matmul_nt", (y, w, e), {}, dtype),
            ("routed_matmul_tn", (x, y, e), experts, dtype),
        ]
        jobs += [Job(one.kernels[c.kernel], c) for one in map(made, cases) for c in one.compiled]
    assert [job.compiled.kernel for job in jobs] == [*["routed_kernel"] * 2, "routed_weight_kernel"] * 2
    assert [job.compiled.expects for job in jobs] == [("pipelined",)] * 3 + [("mma", "pipelined")] * 3
    wide = [replace(job.compiled, constants={**job.compiled.constants, "WIDE": True}) for job in jobs]
    jobs += [replace(job, compiled=compiled) for job, compiled in zip(jobs, wide, strict=True)]
    jobs = of_target(jobs, target)
    for job, outcome in zip(jobs, compile_each(jobs, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_slots(target: str) -> None:
    """Of a mixture's size, in both types; products of experts are matrix products, in bf16 of tensor cores."""
    x, at, y = (2, 4096, 1024), (2, 2, 4096), (8 * 1280, 2, 1024)
    rows, w = (8, 1280, 2, 1024), (8, 1024, 3584)
    cases = [
        ("to_slots", (x, at, at), {"size": y[0], "degrees": (1,)}),
        ("from_slots", (y, at, at), {}),
        ("slot_shares", (x, y, at), {}),
        ("expert_matmul", (rows, w), {}),
        ("expert_matmul_nt", ((*rows[:-1], 3584), w), {}),
        ("expert_matmul_tn", (rows, (*rows[:-1], 3584)), {}),
    ]
    jobs: list[Job] = []
    for dtype, case in itertools.product(("f32", "bf16"), cases):
        one = made((*case, dtype))
        jobs += [Job(one.kernels[c.kernel], c) for c in one.compiled]
        if dtype == "bf16" and case[0].startswith("expert"):
            assert all("mma" in c.expects for c in one.compiled), case
    jobs = of_target(jobs, target)
    for job, outcome in zip(jobs, compile_each(jobs, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)


LAYOUTS = ["x[m, k] * w[k, n]", "x[k, m] * w[k, n]", "x[m, k] * w[n, k]", "x[k, m] * w[n, k]"]
AFTER = [
    "f(x, w) out[m, n] = P",
    "f(x, w, b, r) out[m, n] = relu(P + b[n]) + r[m, n]",
    "f(x, w, b) out[m, n] = gelu(P + b[n]); s[m, n] = P + b[n]",
    "f(x, w, r) out[m, n] = P * (gelu(r[m, n]) + gelu(2.0 * r[m, n]))",
]
"""What follows a product `P`."""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_large_products(target: str) -> None:
    """Tiles fit registers and shared memory, and Hopper copies them by descriptors, in few instructions."""
    jobs: list[Job] = []
    for size, line, layout in sample(list(itertools.product((1024, 1536, 4096), AFTER, LAYOUTS)), 5):
        matrix, row = (size, size), (size,)
        shapes = (matrix, matrix, *([row] if "b" in line else []), *([matrix] if "r[" in line else []))
        bound = bind(parse_line(line.replace("P", f"sum[k]({layout})")), shapes, {})
        one = launcher(bound, ["bf16"] * len(shapes))
        jobs += [Job(one.kernels[c.kernel], c) for c in one.compiled if c.is_for(target)]
    hopper = target == "cuda:90"
    assert {job.compiled.constants["BLOCK_N"] for job in jobs} == ({64, 128, 256} if hopper else {64, 128})
    assert all("short" in job.compiled.expects for job in jobs)
    for job, outcome in zip(jobs, compile_each(jobs, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)
        assert isinstance(outcome, Resources)
        assert not hopper or {"tma", "wgmma"}.issubset(outcome.instructions)


EPILOGUES = [
    ("add", "gelu_tanh", "dropout", "add"),
    ("gelu_grad", "mul", "dropout"),
    ("add", "mul", "add", "silu"),
    ("add", "gelu", "mul", "gelu"),
    ("add", "dropout", "split_heads"),
]
"""What follows a product, with a tensor of its own each where it takes two operands."""


def epilogues(dtype: str) -> Graph:
    """A product with each of them, of which nothing but the last is kept."""
    inputs = [leaf("input", tensor_type((2, 512, 1024), dtype), name=f"x{k}") for k in range(4)]
    attributes: dict[str, dict[str, Any]] = {"dropout": {"p": 0.1, "seed": 3}, "split_heads": {"heads": 8}}
    outputs: list[Value] = []
    for number, names in enumerate(EPILOGUES):
        w = leaf("weight", tensor_type((1024, 1024), dtype), name=f"w{number}")
        value = apply("matmul", [inputs[0].result, w.result]).result
        for k, name in enumerate(names):
            others = [inputs[k % 3 + 1].result] if name in ("add", "mul", "gelu_grad") else []
            value = apply(name, [value, *others], attributes.get(name, {})).result
        outputs.append(value)
    return Graph("epilogues", tuple(inputs), tuple(outputs))


@pytest.mark.slow
def test_float8_products() -> None:
    """Rounded operands are multiplied by wgmma, 128 of K in about the instructions of 64; only from sm_89 on."""
    p, q = "sum[k](float8(x[m, k]) * float8(w[k, n]))", "sum[k](float8(x[m, k]) * float8(w[n, k]))"
    lines: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
        (f"f(x, w)  out[m, n] = {p}", ((8192, 4096), (4096, 14336))),
        (f"f(x, w, r)  out[m, n] = {p} + r[m, n]", ((16384, 2048), (2048, 2048), (16384, 2048))),
        (f"f(x, w, b)  out[m, n] = gelu({q} + b[n])", ((4096, 14336), (4096, 14336), (4096,))),
        (f"f(x, w)  out[m, n] = {p}", ((256, 512), (512, 384))),
    ]
    made_ = [launcher(bind(parse_line(line), shapes, {}), ["bf16"] * len(shapes)) for line, shapes in lines]
    jobs = [Job(one.kernels[c.kernel], c) for one in made_ for c in one.compiled]
    products = [job for job in jobs if "mma" in job.compiled.expects]
    assert products
    assert not any(job.compiled.is_for(target) for job in products for target in ("cuda:80", "hip:gfx942"))
    jobs = of_target(jobs, "cuda:90")
    for job, outcome in zip(jobs, compile_each(jobs, "cuda:90"), strict=True):
        assert violations(job, outcome, "cuda:90") == [], (job.compiled, outcome)
        assert isinstance(outcome, Resources)
        if "X_COLUMNS" in job.compiled.constants:
            assert outcome.loop is not None
            assert (outcome.loop.matrix, job.compiled.constants["BLOCK_K"]) == ("QGMMA", 128)


@pytest.mark.slow
@pytest.mark.parametrize("target", sample(list(SHARED_LIMITS), 3, 1))
def test_groups_of_operators(target: str) -> None:
    """Products with all that follows them, on tiles of every size, and rows with what is before and after them."""
    on, jobs = load("box:1"), dict[str, Job]()
    sizes = {"batch": 2, "sequence": 128, "layers": 1, "hidden": 1024, "heads": 8, "vocabulary": 1000}
    for dtype in ("f32", "bf16"):
        steps = [
            epilogues(dtype),
            differentiate(with_dtype(build("bert_large", **sizes), dtype), Optimizer(), on.mesh),
            differentiate(
                with_dtype(build("llama3_8b", **sizes, kv_heads=4, intermediate=3072), dtype), Optimizer(), on.mesh
            ),
        ]
        for step in steps:
            program = with_savings(lower(step, on))
            fused = [i for i in with_fusions(program, lambda _: "triton").body if isinstance(i, Fused)]
            assert len(fused) >= len(EPILOGUES)
            for local in (local_operator(program, i) for i in fused):
                one = launcher(local.line, local.dtypes, "triton", local.divided)
                jobs |= {repr(c): Job(one.kernels[c.kernel], c) for c in one.compiled}
    assert sum("mma" in job.compiled.expects for job in jobs.values()) >= 10
    chosen = of_target(list(jobs.values()), target)
    for job, outcome in zip(chosen, compile_each(chosen, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)


EDGES: list[Case] = [
    ("matmul_nt", ((256, 1000), (4096, 1000)), {}, "bf16"),
    ("matmul", ((256, 4096), (4096, 1000)), {}, "bf16"),
    ("conv2d_data_grad", ((8, 32, 147, 147), (32, 32, 3, 3)), {**_UNIT, "sizes": (149, 149)}, "f32"),
    ("conv2d_data_grad", ((8, 64, 7, 7), (64, 64, 3, 3)), {**_UNIT, "padding": (1, 1), "sizes": (7, 7)}, "f32"),
    ("batch_norm_grad", (*((64, 24, 17, 17),) * 2, *((1, 24),) * 3, (24,)), {}, "f32"),
    ("batch_norm_grad", (*((8, 192, 71, 71),) * 2, *((1, 192),) * 3, (192,)), {}, "bf16"),
    ("batch_norm_grad", (*((64, 64, 7, 7),) * 2, *((1, 64),) * 3, (64,)), {}, "bf16"),
    ("class_score", ((1, 4096, 512), (1, 4096)), {}, "bf16"),
]
RMS_NORM_GRADS = """
norms(g, x, w, y)
  let s[b] = rsqrt(sum[j](x[b, j] * x[b, j] / 4096) + 1e-5);
  let n[b, e] = x[b, e] * s[b];
  let r[b, e] = y[b, e] + s[b] * (g[b, e] * w[e] - n[b, e] * sum[m](g[b, m] * w[m] * n[b, m] / 4096));
  dw[e] = sum[b](g[b, e] * n[b, e]); one[b, e] = r[b, e]; two[b, e] = r[b, e]
"""
"""Both gradients of an RMS norm and a sum with another gradient, which is stored twice."""


def normalised(shape: tuple[int, ...], dtype: str) -> Graph:
    """A residual block's end: images normalised, added to others, rectified."""
    x, y, center = (leaf("input", tensor_type(shape, dtype), name=name) for name in ("x", "y", "target"))
    w, b = (leaf("weight", tensor_type(shape[1:2], dtype), name=name) for name in ("w", "b"))
    mean = apply("batch_mean", [x.result]).result
    stats = apply("batch_stats", [x.result, mean]).results
    value = apply("batch_norm", [x.result, *stats, mean, w.result, b.result], {"eps": 1e-5}).result
    value = apply("relu", [apply("add", [value, y.result]).result]).result
    return Graph("normalised", (x, y, center, w, b), (apply("mse", [value, center.result]).result,))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_what_just_fits_registers(target: str) -> None:
    """Whose tiles or warps were chosen because with others the assembler spilled."""
    rows, on = (512, 4096), load("box:1")
    norms = launcher(bind(parse_line(RMS_NORM_GRADS), (rows, rows, rows[1:], rows), {}), ["f32"] * 4)
    jobs = [Job(one.kernels[c.kernel], c) for one in (norms, *map(made, EDGES)) for c in one.compiled]
    for shape in ((64, 256, 7, 7), (8, 192, 71, 71)):
        for dtype in ("f32", "bf16"):
            program = with_savings(lower(differentiate(normalised(shape, dtype), Optimizer(), on.mesh), on))
            fused = [i for i in with_fusions(program, lambda _: "triton").body if isinstance(i, Fused)]
            assert fused
            for local in (local_operator(program, i) for i in fused):
                one = launcher(local.line, local.dtypes, "triton", local.divided)
                jobs += [Job(one.kernels[c.kernel], c) for c in one.compiled]
    jobs = of_target(jobs, target)
    for job, outcome in zip(jobs, compile_each(jobs, target), strict=True):
        assert violations(job, outcome, target) == [], (job.compiled, outcome)


@pytest.mark.slow
def test_every_operator(drawn: Any) -> None:
    def elements(bound: Bound) -> int:
        return math.prod(bound.extents.values())

    launchers: list[Launcher] = []
    for name in sample([*LOWERED], 8):
        covered = [b for b in (bound_of(name, c) for c in drawn(name, 6)) if refusal(b) is None]
        if covered:
            bound = max(covered, key=elements)
            launchers.append(launcher(bound, operand_dtypes(bound)))
    fit(launchers)


@pytest.mark.slow
def test_batches_and_wide_positions() -> None:
    lines: list[tuple[str, Any]] = [
        ("bmm(x, w)  out[b.., m, n] = sum[k](x[b.., m, k] * w[b.., k, n])", ((2, 3, 128, 64), (2, 3, 64, 128))),
        ("mm(x, w)  out[m, n] = sum[k](x[m, k] * w[k, n])", ((100000, 40000), (40000, 512))),
        ("add(x, w)  out[m, n] = x[m, n] + w[n]", ((100000, 40000), (40000,))),
        ("columns(x)  out[n] = sum[m](x[m, n])", ((100000, 40000),)),
    ]
    launchers = [launcher(bind(parse_line(line), shapes, {}), ["bf16"] * len(shapes)) for line, shapes in lines]
    for launch, took in compiled(launchers, "cuda:90"):
        fits(launch, took, "cuda:90")


def test_refusals() -> None:
    one = made(OTHERS[0])
    text = one.kernels["relu_kernel"]
    with pytest.raises(UnityError, match="target 'tpu' is not known"):
        compile_all(text, one.compiled, "tpu")
    wrong = replace(one.compiled[0], signature={"x_ptr": "*fp32"})
    with pytest.raises(UnityError, match="its parameters are"):
        compile_all(text, [wrong])

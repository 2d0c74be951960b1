"""
Programs whose operators are in stages, on 2, 4 and 8 ranks: over two steps losses, gradients by name, Adam's moments
and weights equal those of the model written by hand in PyTorch.

A sample of pairs by default: each model, order, way to divide a stage and number of ranks meets several of the others.
With ZOO=all (`make zoo`) every model meets every order on every number of ranks, every order every way to divide a
stage on every number of ranks, and every model every way to divide a stage. Of model, order and way together most are
left out: stages are divided before they have an order, and are ordered whatever is in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import differences
from covering import covering
from extent import ALL
from models import convolved, data, machine, masked, mlp, weight
from ranks import Ranks, check, loaded, order_of_second_step, refused, run_main, saved, trained
from recipe import against_torch
from witness import against_torch_pipelining
from zoo import by_hand as zoo_by_hand
from zoo_plans import MACHINES, SIZES, VARIANTS, of_type, planned, program, sized

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.errors import UnityError
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.forward import forward_of
from unity_ir.plan.lower import lower
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.csv_text import from_csv
from unity_ir.plan.pipeline.sends import with_sends
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import schedule
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.with_stages import run_with_stages

ADAM = Optimizer("adam", 1e-2, weight_decay=0.1)

ORDERS = ("gpipe,2", "1f1b,2", "eager-1f1b,2", "interleaved,2,2", "looped-bfs,2,2", "zb-h1,2", "zb-h2,2", "zb-v,2,2")
ORDERS += ("dualpipe-v,2,2", "1f1b,4", "zb-h1,4", "zb-v,4,2")
TRANSFORMERS = ("bert_large", "gpt2", "llama3_8b")
MODELS = (*TRANSFORMERS, "deepseek_v3", "dlrm", "lenet", "lstm_stack", "mlp", "moe", "nmt", "qwen3_moe", "rnnlm", "xdl")
MODELS += VARIANTS
SPARSE = "moe,dispatch=sparse"


def possible(model: str, order: str, plan: str, world: int) -> bool:
    """Whether each part of the ranks has something to divide, and the model what is divided."""
    part = world // int(order.split(",")[1])
    if plan.startswith("degrees,tp"):
        return part == 2 and model in TRANSFORMERS
    if plan.startswith("experts"):
        return part > 1 and model == SPARSE
    return part in (1, 2) and (part == 2 or plan.startswith("data-parallel"))


PLANS = ("data-parallel/4", "fsdp/4", "fsdp/4i", "degrees,zero=3/4i", "degrees,zero=1/4", "random-1/4", "random-3/4i")
PLANS += ("recompute-2/4", "recompute-4/4i", "joint/4", "degrees,tp=2/4", "degrees,tp=2,sp=true/4", "experts/4")
POSSIBLE = [each for each in product(MODELS, ORDERS, PLANS, (2, 4, 8)) if possible(*each)]
SAMPLE = [
    ("bert_large", "zb-h2,2", "degrees,tp=2,sp=true/4", 4),
    ("deepseek_v3", "1f1b,2", "data-parallel/4", 2),
    ("dlrm", "looped-bfs,2,2", "random-3/4i", 4),
    ("gpt2", "1f1b,4", "fsdp/4i", 8),
    ("gpt2", "dualpipe-v,2,2", "recompute-4/4i", 4),
    ("lenet", "1f1b,2", "data-parallel/4", 2),
    ("llama3_8b", "interleaved,2,2", "degrees,tp=2/4", 4),
    ("lstm_stack", "eager-1f1b,2", "random-1/4", 4),
    ("mlp", "zb-h1,4", "degrees,zero=1/4", 8),
    ("mlp", "zb-v,4,2", "data-parallel/4", 4),
    ("moe", "zb-v,2,2", "degrees,zero=3/4i", 4),
    (SPARSE, "zb-h1,2", "experts/4", 4),
    ("nmt", "zb-h1,4", "random-1/4", 8),
    ("nmt", "zb-v,4,2", "joint/4", 8),
    ("qwen3_moe", "zb-h1,2", "data-parallel/4", 2),
    ("rnnlm", "gpipe,2", "fsdp/4", 4),
    ("rnnlm", "interleaved,2,2", "recompute-2/4", 4),
    ("xdl", "zb-v,2,2", "data-parallel/4", 2),
    (VARIANTS[1], "interleaved,2,2", "data-parallel/4", 2),
    (VARIANTS[2], "1f1b,2", "random-1/4", 4),
    (VARIANTS[3], "zb-v,2,2", "fsdp/4i", 4),
    (VARIANTS[4], "1f1b,2", "data-parallel/4", 2),
    (VARIANTS[5], "1f1b,2", "data-parallel/4", 4),
]


CASES = [*dict.fromkeys((*covering(POSSIBLE, [(0, 1, 3), (1, 2, 3)]), *SAMPLE))] if ALL else SAMPLE


def told(case: tuple[str, str, str, int]) -> str:
    return "-".join(map(str, case)).replace(",", ".")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=told)
def test_equals_pytorch(ranks: Ranks, case: tuple[str, str, str, int]):
    torch.set_num_threads(1)
    model, order, plan, world = case
    name, keys = sized(model)
    text = program(build(name, **keys), f"{order}:{plan}", world, ADAM, double=True)
    found = ranks.run(text, world, trained, 2, False)[0]
    assert differences(found, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), ADAM, "f64") == []


@pytest.mark.slow
def test_sums_over_devices_that_hold_too_much_are_waited_for_in_their_part(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    graph, options = build("gpt2", **SIZES["gpt2"]), PlanOptions(kernels="torch", bucket=0)
    step = planned(graph, "zb-h1,2:degrees,zero=1/4", 4, ADAM)
    texts = [emit(plan_step(step, options), graph).text]
    monkeypatch.setattr("unity_ir.plan.plan.schedule", partial(schedule, under_way=1000))
    texts.append(emit(plan_step(step, options), graph).text)
    waited = [re.findall(r"sums\['(\w+)'\]\.wait\(\)", text.partition("def after")[0]) for text in texts]
    assert not waited[0]
    assert len(waited[1]) > 4
    found, want = (ranks.run(text, 4, trained, 2, False)[0] for text in texts)
    torch.testing.assert_close(found["gradients"], want["gradients"], rtol=0, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("order", ["interleaved:2", "zb-v"])
def test_several_stages_per_part_as_joint_chooses_them_equal_pytorch(ranks: Ranks, order: str):
    torch.set_num_threads(1)
    name, keys = sized("gpt2")
    graph, on = build(name, **keys), machine(MACHINES[4])
    found = run_with_stages(graph, on, "joint", ADAM, micro_batches=4, stages=Stages.of(4, order))
    assert found.graph.pipeline == Pipeline(order.partition(":")[0], 2, 2)
    step = lower(fuse_collectives(differentiate(found.graph, ADAM, on.mesh)), on)
    losses = ranks.run(text_of(step, graph), 4, trained, 2, False)[0]
    assert differences(losses, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), ADAM, "f64") == []


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "world"),
    [
        ("gpt2", "1f1b,2:data-parallel/4*2", 2),
        ("gpt2", "zb-h1,4:data-parallel/4*2", 4),
        ("gpt2", "zb-v,2,2:fsdp/4i*2", 4),
        ("llama3_8b", "interleaved,2,2:degrees,tp=2/4*2", 4),
        ("llama3_8b", "gpipe,2:recompute-2/2*2", 4),
    ],
)
def test_a_loss_in_pieces_equals_pytorch(ranks: Ranks, model: str, plan: str, world: int):
    """Also where stages that are counted by operators end between the head and the loss."""
    torch.set_num_threads(1)
    name, keys = sized(model)
    graph = build(name, **keys)
    step = planned(graph, plan, world, ADAM)
    assert from_op(to_op(step)) == step
    text = text_of(step, graph)
    assert text.count("in loss_pieces(ctx, 2)") == 1
    found = ranks.run(text, world, trained, 2, False)[0]
    assert differences(found, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), ADAM, "f64") == []


NOTED = """
DONE = []
run_part, own = UnderWay.run, {name: globals()[name] for name in ("all_reduce", "reduce_scatter") if name in globals()}

def noted(self, ctx, weights, stage, kind, k):
    run_part(self, ctx, weights, stage, kind, k)
    DONE.append(f"{stage}{kind}{k}")

def summed(name):
    return lambda ctx, x, *more: DONE.append("sum") or own[name](ctx, x, *more)

UnderWay.run = noted
globals().update({name: summed(name) for name in own})
"""
"""Code appended to a program: it records, in order, the actions of a rank and the sums over devices it starts."""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "order"),
    [
        # Of the first of 2 parts: those of stage 2 are under way while stage 0 still has two backwards to do.
        ("interleaved,2,2:data-parallel/4", "2B2 sums 2B3 0B2 sums 0B3"),
        ("zb-h1,2:degrees,zero=1/4", "0I3 sums 0W3"),
        ("1f1b,2:data-parallel/4*2", "0B2 sums 0B3"),
        ("2bw,2:degrees,zero=1/4", "0F0 sums 0B3"),
    ],
)
def test_sums_over_devices_begin_beside_what_a_rank_has_left(ranks: Ranks, plan: str, order: str):
    """They are the same, digit by digit, as those that begin behind all micro-batches, and share calls."""
    graph = build("gpt2", **SIZES["gpt2"])
    step = planned(graph, plan, 4, ADAM)
    early, late = (emit(plan_step(step, PlanOptions(kernels="torch", bucket=b)), graph).text for b in (0, 2**20))
    found, want = (ranks.run(text, 4, trained, 3, False)[0] for text in (early, late))
    for what in ("losses", "gradients", "after"):
        torch.testing.assert_close(found[what], want[what], rtol=0, atol=0)
    done = [ranks.run(text + NOTED, 4, order_of_second_step)[0].split() for text in (early, late)]
    computed, behind = ([each for each in words if "RECV" not in each] for words in done)
    words = [each for i, each in enumerate(computed) if each != "sum" or computed[i - 1] != "sum"]
    assert " ".join(words).replace("sum", "sums").endswith(order)
    last = order.split()[-1]
    assert computed[-1] == last
    assert behind[-2:] == [last, "sum"]


def test_the_sample_has_everything():
    parts = [set(each) for each in zip(*SAMPLE, strict=True)]
    assert parts == [{*MODELS}, {*ORDERS}, {*PLANS}, {2, 4, 8}]
    assert all(possible(*case) for case in SAMPLE)


def text_of(program: Program, graph: Graph, kernels: str = "torch", double: bool = True) -> str:
    made = emit(plan_step(program, PlanOptions(kernels=kernels)), graph).text
    return made.replace("torch.float32", "torch.float64") if double else made


def carried() -> Graph:
    """
    A mask, labels and a weight that several stages read, a value that crosses all boundaries, dropout, a mean over the
    labels that are not 0.
    """
    x, labels = data("x", 8, 4, 24), data("labels", 8, 4, dtype="i64")
    shared = weight("shared", 24, 24)
    first = h = apply("matmul", [x.result, weight("in", 24, 24)]).result
    zero = leaf("constant", tensor_type((), "i64"), value=0.0).result
    counts = apply("ne", [labels.result, zero]).result
    for i in range(4):
        h = apply("tanh", [apply("matmul", [h, weight(f"h{i}", 24, 24)]).result]).result
        h = apply("add", [apply("matmul", [h, shared]).result, first]).result
        h = apply("dropout", [h], {"p": 0.25, "seed": i}).result
        # Where a label is not counted, the position is not either.
        scale = apply("reshape", [apply("cast", [counts], {"to": "f32"}).result], {"shape": (8, 4, 1)}).result
        h = apply("mul", [h, scale]).result
    scores = apply("log_softmax", [apply("matmul", [h, weight("out", 24, 12)]).result]).result
    found = apply("class_score", [scores, labels.result]).result
    kept = apply("select", [counts, found, leaf("constant", tensor_type((), "f32"), value=0.0).result]).result
    total = apply("reduce_sum", [kept], {"dim": 0, "count": 2}).result
    number = apply("reduce_sum", [apply("cast", [counts], {"to": "f32"}).result], {"dim": 0, "count": 2}).result
    return Graph("carried", (x, labels), (apply("div", [apply("neg", [total]).result, number]).result,))


def running() -> Graph:
    """Batch norms with running statistics, of which a micro-batch knows too little: for one micro-batch."""
    return in_groups(True)


def in_groups(keeps: bool = False) -> Graph:
    """
    Strided convolutions, a residual, and batch norms of which each group of 2 samples has its own statistics; with
    running statistics of the first and the last one if it `keeps` any.
    """
    x, labels = data("x", 16, 4, 16, 8), data("labels", 16, dtype="i64")
    running: dict[str, Node] = {}
    after: list[Value] = []

    def normed(h: Value, name: str) -> Value:
        groups, w, b = {"groups": 8}, weight(f"{name}.weight", 8), weight(f"{name}.bias", 8)
        center = apply("batch_mean", [h], groups).result
        stats = apply("batch_stats", [h, center]).results
        if keeps and name in ("bn1", "bn1.2"):
            known = [running.setdefault(n, data(n, 8)).result for n in (f"{name}.mean", f"{name}.var")]
            after.extend(apply("running_stats", [*known, *stats, center], {"count": 2 * prod(h.shape[2:])}).results)
        return apply("batch_norm", [h, *stats, center, w, b], {"eps": 1e-5}).result

    h = apply("relu", [normed(convolved(x.result, "conv1", 8, 3, 2), "bn1")]).result
    for i in range(2):
        more = apply("relu", [normed(convolved(h, f"conv{i}.1", 8, 3), f"bn{i}.1")]).result
        h = apply("add", [h, normed(convolved(more, f"conv{i}.2", 8, 3), f"bn{i}.2")]).result
    h = apply("reshape", [apply("relu", [h]).result], {"shape": (16, 256)}).result
    logits = apply("matmul", [h, weight("fc", 256, 8)]).result
    loss = apply("cross_entropy", [logits, labels.result]).result
    return Graph("in_groups", (x, labels, *running.values()), (loss, *after))


OWN = [
    (carried, "1f1b,4:data-parallel/4", 4),
    (carried, "zb-v,2,2:fsdp/4i", 4),
    (carried, "interleaved,2,2:recompute-1/4", 4),
    (masked, "zb-h1,2:joint/2i", 4),
    (in_groups, "1f1b,2:spatial/4", 4),
    (in_groups, "zb-v,2,2:data-parallel/4", 4),
    (mlp, "1f1b,4:data-parallel", 4),
    (running, "1f1b,2:data-parallel", 4),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("made", "plan", "world"), OWN)
def test_what_stages_share_equals_pytorch(ranks: Ranks, made: Callable[[], Graph], plan: str, world: int):
    """The program's own reference is PyTorch's, too; a step of one micro-batch may be in stages as well."""
    graph = made()
    program = planned(graph, plan, world, ADAM)
    assert ranks.run(text_of(program, graph), world, check, 2) == [[]] * world
    assert from_op(to_op(program)) == program


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kernels"), [("zb-v,2,2:fsdp/4i", "torch"), ("1f1b,2:data-parallel/2", "triton")])
def test_mixed_precision_and_kernels(ranks: Ranks, plan: str, kernels: str):
    graph = of_type(build("gpt2", **SIZES["gpt2"]), "mixed" if kernels == "torch" else "f32")
    made = text_of(planned(graph, plan, 4, ADAM), graph, kernels, False)
    assert ranks.run(made, 4, check, 1) == [[]] * 4


def staged_gpt2(plan: str, world: int, optimizer: Optimizer, evaluates: bool = False) -> str:
    graph = build("gpt2", **SIZES["gpt2"])
    step, options = planned(graph, plan, world, optimizer), PlanOptions(kernels="torch")
    forward = plan_step(forward_of(step, machine(MACHINES[world])), options) if evaluates else None
    return emit(plan_step(step, options), graph, forward=forward).text


V_SHAPED, PLAIN = "zb-v,2,2:fsdp/4i", "1f1b,2:data-parallel/4"


@pytest.mark.slow
def test_checkpoints_move_between_stages_and_none(ranks: Ranks, tmp_path: Path):
    graph, adam = build("gpt2", **SIZES["gpt2"]), Optimizer("adam", 1e-3)
    texts = {plan: program(graph, plan, 4, adam, double=True) for plan in (V_SHAPED, PLAIN, "random-2")}
    for number, (first, then) in enumerate(((V_SHAPED, "random-2"), ("random-2", PLAIN), (PLAIN, V_SHAPED))):
        folder = str(tmp_path / str(number))
        want = ranks.run(texts[first], 4, saved, 2, folder)[0]
        found = ranks.run(texts[then], 4, loaded, folder)[0]
        for what, values in want.items():
            for name, value in values.items():
                np.testing.assert_allclose(found[what][name], value, rtol=1e-7, atol=1e-10, err_msg=f"{what} of {name}")


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [-1, 2])
def test_the_norm_is_of_the_gradients_of_all_stages(ranks: Ranks, spoiled: int):
    """Also of weights that several stages read, and where it is nan."""
    graph = build("mlp", **SIZES["mlp"])
    clipped = Optimizer("adamw", 0.01, eps=1e-4, weight_decay=0.1, clip=0.2)
    step = plan_step(planned(graph, "zb-v,2,2:fsdp/4", 4, clipped), PlanOptions(kernels="torch"))
    found = ranks.run(emit(step, graph).text, 4, against_torch, 4, ["cosine", 2, 6, 0.0], {}, spoiled)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert all(norm > clipped.clip for norm in found[0][1] if norm == norm)


@pytest.mark.zoo
@pytest.mark.slow
def test_a_run_on_files_is_that_of_other_plans(ranks: Ranks, tmp_path: Path):
    """Token files, evaluation, weights in and out."""
    np.save(tmp_path / "t.npy", np.random.default_rng(0).integers(0, 16, 4 * 8 * 4 + 1).astype("int32"))
    adam, said = Optimizer("adam", 1e-3), list[list[str]]()
    data = ["--data", "t.npy", "--eval-data", "t.npy", "--eval-every", "2"]
    for plan, own in (("random-2", "a"), (PLAIN, "b"), (V_SHAPED, "c")):
        text = staged_gpt2(plan, 4, adam, True)
        options = ["--steps", "3", *data, "--weights-out", f"{own}.safetensors"]
        first = ranks.run(text, 4, run_main, options, {}, str(tmp_path))[0]
        then = ["--steps", "1", "--weights", "a.safetensors", *data]
        said.append([*first, *ranks.run(text, 4, run_main, then, {}, str(tmp_path))[0]])
    assert len(said[0]) >= 6
    for lines in said[1:]:
        for got, want in zip(lines, said[0], strict=True):
            *words, number = want.split()
            assert got.split()[:-1] == words
            assert float(got.split()[-1]) == pytest.approx(float(number), abs=2e-4)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("pieces", [2, 1])
def test_a_profile_and_the_guard_see_the_lines_of_all_stages(ranks: Ranks, tmp_path: Path, pieces: int):
    text = staged_gpt2(f"zb-h1,2:data-parallel/4*{pieces}", 4, ADAM)
    ranks.run(text, 4, run_main, ["--steps", "1", "--profile", "p.json"], {}, str(tmp_path))
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    spans = [(e["pid"], e["name"], e["cat"]) for e in events if e["ph"] == "X"]
    # Each of the 4 micro-batches: on ranks of the first stage the embeddings, on those of the last the loss.
    assert spans.count((0, "embedding", "forward")) == 4
    made = [spans.count((2, *each)) for each in (("cross_entropy", "forward"), ("cross_entropy_grad", "backward"))]
    assert made == [4 * pieces] * 2
    assert {kind for rank, _, kind in spans if rank == 0} >= {"forward", "backward", "update"}
    wrong = re.sub(r"(    cross_entropy = .*?)  #", r"\1 * float('nan')  #", text)
    assert wrong != text
    for code, line in ranks.run(wrong, 4, refused, ["--steps", "1"], {}):
        assert code == 1
        assert "loss nan; first the result of cross_entropy" in line
        assert line.count("\n") == 1


MUTANTS = {
    "nothing is sent": ("[x.contiguous() for x", "[torch.zeros_like(x) for x"),
    "micro-batches are swapped in one stage": ("is_last = k,", "is_last = (MICRO_BATCHES - 1 - k if stage else k),"),
    "the sum over stages is left out": (r"(def after.*?    \w+ = )add_\w+\((\w+), \w+\)", r"\1\2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_wrong_in_a_pipeline_is_told(ranks: Ranks, mutant: str):
    text = staged_gpt2("zb-h1,2:data-parallel/4", 2, ADAM)
    right, wrong = MUTANTS[mutant]
    changed = re.sub(right if "def after" in right else re.escape(right), wrong, text, count=1, flags=re.DOTALL)
    assert changed != text
    assert any(ranks.run(changed, 2, check, 1))


@pytest.mark.slow
def test_a_backward_cut_in_the_wrong_halves_is_told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    def late(parts: Any) -> None:
        """Leave all of it to the weight gradients, that of the stage's input, too."""
        parts.part.update({r: ("W", stage) for r, (kind, stage) in parts.part.items() if kind == "B"})

    monkeypatch.setattr("unity_ir.plan.pipeline.parts._Parts._split", late)
    with pytest.raises(AssertionError, match="KeyError"):
        ranks.run(staged_gpt2("zb-h1,2:data-parallel/4", 2, ADAM), 2, check, 1)


OWN_ORDER = "0F0,0F1,0F2,0F3,0B0,0B3,0B1,0B2\n1F0,1B0,1F3,1B3,1F1,1F2,1B1,1B2\n"


@pytest.mark.slow
def test_a_schedule_of_the_user_s_is_run(ranks: Ranks):
    graph = mlp()
    step = planned(graph, "1f1b,2:data-parallel/4", 2, ADAM)
    made = plan_step(step, PlanOptions(kernels="torch", order=from_csv(OWN_ORDER, "own.csv")))
    text = emit(made, graph).text
    assert "1F0 1RECV" in text or "1RECV_F0 1F0" in text
    assert ranks.run(text, 2, check, 2) == [[]] * 2


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("0B2", "", "rank 0: 0B2 is missing; add it"),
        ("0B2", "0B2,0B2", "rank 0: 0B2 is there twice; leave one out"),
        ("1F0,1B0", "1B0,1F0", "all ranks wait"),
        ("\n1F0", "\n2F0,2B0,1F0", "1 micro-batches|is missing"),
    ],
)
def test_schedules_that_cannot_run_are_refused(right: str, wrong: str, said: str):
    with pytest.raises(UnityError, match=said) as error:
        from_csv(OWN_ORDER.replace(right, wrong), "own.csv")
    assert "\n" not in str(error.value)


def test_schedules_that_would_deadlock_are_refused_when_emitted():
    """Sends before receives on both ranks, which wait for each other."""
    step = planned(mlp(), "1f1b,2:data-parallel/2", 2, ADAM)
    order = with_sends(pipeline_schedule("1f1b", 2, 2))
    first, last = order.ranks
    turned = tuple(sorted(last, key=lambda a: a.kind == "RECV_F" and a.micro_batch == 0))
    with pytest.raises(UnityError, match="1f1b"):
        plan_step(step, PlanOptions(kernels="torch", order=replace(order, ranks=(first, turned))))
    for other in (pipeline_schedule("1f1b", 4, 2), pipeline_schedule("interleaved", 2, 2, 2)):
        with pytest.raises(UnityError, match="its stages are on ranks"):
            plan_step(step, PlanOptions(kernels="torch", order=other))
    with pytest.raises(UnityError, match="has 2 micro-batches, its schedule 4"):
        plan_step(step, PlanOptions(kernels="torch", order=pipeline_schedule("1f1b", 2, 4)))
    with pytest.raises(UnityError, match="has no stages"):
        plan_step(planned(mlp(), "data-parallel/2", 2, ADAM), PlanOptions(kernels="torch", order=order))


def stack() -> Graph:
    """Four layers, each of a product and what follows it."""
    x, y = data("x", 16, 8), data("y", 16, 8)
    h = x.result
    for i in range(4):
        h = apply("matmul", [h, weight(f"w{i}", 8, 8)]).result
        h = apply("tanh", [h]).result if i < 3 else h
    return Graph("stack", (x, y), (apply("mse", [h, y.result]).result,))


DEALT, THERE_AND_BACK = [[0, 2], [1, 3]], [[0, 3], [1, 2]]
WITNESSES = [
    ("ScheduleGPipe", "gpipe,2", [[0], [1]]),
    ("Schedule1F1B", "1f1b,2", [[0], [1]]),
    ("ScheduleInterleaved1F1B", "interleaved,2,2", DEALT),
    ("ScheduleLoopedBFS", "looped-bfs,2,2", DEALT),
    ("ScheduleInterleavedZeroBubble", "interleaved,2,2", DEALT),
    ("ScheduleZBVZeroBubble", "zb-v,2,2", THERE_AND_BACK),
    ("ScheduleDualPipeV", "dualpipe-v,2,2", THERE_AND_BACK),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "order", "indices"), WITNESSES)
def test_torch_pipelining_has_the_same_gradients(ranks: Ranks, name: str, order: str, indices: list[list[int]]):
    text = text_of(planned(stack(), f"{order}:data-parallel/4", 2, ADAM), stack())
    found = ranks.run(text, 2, against_torch_pipelining, name, 4, indices, 4)
    assert [len(each) for each in found] == [2, 2]
    assert max(off for each in found for off in each) < 1e-12

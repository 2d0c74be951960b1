"""Operators that are one kernel compute what they compute one by one, no later, and with no more memory than that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from graphs import boxes, random_graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import data, machine, weight
from operator_cases import DTYPES

from unity_ir.forms.compose import AND
from unity_ir.kernels.launchers import launcher
from unity_ir.machine import Machine, load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Node, Value, apply, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import piece_index
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.groups import MOST_OPERATORS, with_fusions
from unity_ir.plan.instructions import Compute, Fused, HaloExchange, Leaf, ReshardMove, communicates
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.plan.schedule import schedule
from unity_ir.plan.scheduled import Schedule, Wait
from unity_ir.search import run
from unity_ir.tdl.evaluate import evaluate

Arrays = dict[int, Any]


def in_triton(operator: LocalOperator) -> str:
    return "triton"


def lowered(graph: Graph, on: Machine) -> Program:
    return with_savings(lower(fuse_collectives(differentiate(graph, Optimizer(), on.mesh)), on))


def groups(fused: Program) -> list[Fused]:
    """The groups of a program that has them, of those with equal lines one."""
    found: dict[object, Fused] = {}
    for i in fused.body:
        if isinstance(i, Fused):
            operator = local_operator(fused, i)
            found.setdefault(launcher(operator.line, operator.dtypes, "triton", operator.divided).name, i)
    return list(found.values())


def values(program: Program, seed: int = 0) -> Arrays:
    """What every register holds in all, in float64, from random leaves: operators compute on whole tensors."""
    rng, found = np.random.default_rng(seed), Arrays()
    for instruction in program.body:
        match instruction:
            case Leaf(op, result, _, value):
                tensor = program.tensors[result]
                integer = tensor.dtype in ("i64", "i32")
                made = rng.integers(0, 2, tensor.shape) if integer else rng.standard_normal(tensor.shape)
                found[result] = np.full(tensor.shape, value) if op == "constant" else np.asarray(made)
            case Compute():
                for member in instruction.members if isinstance(instruction, Fused) else (instruction,):
                    line = program.analysis(member).bound
                    found |= zip(member.results, evaluate(line, [found[r] for r in member.operands]), strict=True)
            case ReshardMove(operand, result) | HaloExchange(operand, result):
                found[result] = found[operand]
            case _:
                pass
    return found


TOLERANCES = {"f32": 2e-5, "bf16": 1.6e-2}


def part(program: Program, register: int, device: int, whole: Any) -> Any:
    """A device's piece of what a register holds in all."""
    tensor = program.tensors[register]
    for dim in range(len(tensor.shape)):
        index, count = piece_index(tensor.layout, program.mesh, device, dim)
        whole = np.split(whole, count, dim)[index]
    return whole


def rounded_operands(program: Program, group: Fused, known: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    return {
        r: torch.from_numpy(np.asarray(known[r])).to(DTYPES[program.tensors[r].dtype]).contiguous()
        for r in group.operands
    }


def one_by_one(program: Program, group: Fused, rounded: Mapping[int, torch.Tensor]) -> Arrays:
    """Evaluate the members of a group on whole operands."""
    found: Arrays = {r: t.double().numpy() if t.is_floating_point() else t.numpy() for r, t in rounded.items()}
    for member in group.members:
        line = program.analysis(member).bound
        found |= zip(member.results, evaluate(line, [found[r] for r in member.operands]), strict=True)
    return found


def by_kernel(
    program: Program, group: Fused, rounded: Mapping[int, torch.Tensor], runner: Any, device: int
) -> list[torch.Tensor]:
    """Run a group's kernel on one device's pieces of the operands."""
    operator = local_operator(program, group)
    made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
    assert len(made.compiled) == len(made.work)
    starts: list[int] = []
    for variable in operator.divided:
        index = 0
        sizes = program.mesh.sizes
        for size, what, at in zip(sizes, group.assignment, program.mesh.coordinates(device), strict=True):
            index = index * size + at if what == variable else index
        starts.append(index * operator.line.extents[variable])
    pieces = {
        r: part(program, r, device, (t.float() if t.is_floating_point() else t).numpy()) for r, t in rounded.items()
    }
    operands = [torch.from_numpy(np.ascontiguousarray(pieces[r])).to(t.dtype) for r, t in rounded.items()]
    return runner.run(made, operands, *starts)


def compare(program: Program, group: Fused, known: Mapping[int, Any], runner: Any, device: int = 0) -> None:
    """One kernel on a device's pieces of what is known, and the members on the whole of it."""
    rounded = rounded_operands(program, group, known)
    found = one_by_one(program, group, rounded)
    for register, one in zip(group.results, by_kernel(program, group, rounded, runner, device), strict=True):
        is_equal(program, group, register, one, part(program, register, device, found[register]))


def is_equal(program: Program, group: Fused, register: int, one: torch.Tensor, expected: Any) -> None:
    """Assert that a kernel's result has its type, and is what is expected."""
    dtype = program.tensors[register].dtype
    assert one.dtype == DTYPES[dtype]
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    tolerance = max(TOLERANCES[dtype], *(TOLERANCES[program.tensors[m.results[0]].dtype] for m in group.members))
    np.testing.assert_allclose(one.double().numpy(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.slow
def test_random_groups(runner: Any) -> None:
    seen = set[str]()

    @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 10**6), st.integers(3, 12))
    def property(seed: int, size: int) -> None:
        program = lowered(random_graph(Random(seed), size, dims=(2, 3, 6), dtype="f32"), load("box:1"))
        program = with_fusions(program, in_triton)
        known = values(program, seed)
        for group in groups(program):
            compare(program, group, known, runner)
            seen.add(group.operator)

    property()
    assert len(seen) > 10


def parts_of(random: Random) -> Graph:
    """A tensor that is split, whose parts are changed one by one, or two at a time, and some concatenated again."""
    count, heads = random.choice([2, 3, 4]), random.choice([1, 2])
    sizes = [random.choice([4, 6]) for _ in range(count)] if random.random() < 0.3 else [4] * count
    x = data("x", 2, 3, sum(sizes))
    dim = 2
    parts = list(apply("split", [x.result], {"dim": dim, "sizes": tuple(sizes)}).results)
    outputs: list[Value] = []
    for number, size in enumerate(sizes):
        what = random.choice(["gelu", "split_heads", "mul", "kept", "none"])
        if what == "mul":
            parts[number] = apply(
                "mul", [parts[number], random.choice([p for p in parts if p.type.shape == (2, 3, size)])]
            ).result
        elif what == "split_heads":
            parts[number] = apply("split_heads", [parts[number]], {"heads": heads}).result
            if random.random() < 0.5:
                outputs.append(parts[number])
            parts[number] = apply("merge_heads", [apply("tanh", [parts[number]]).result]).result
        elif what != "none":
            parts[number] = apply("gelu", [parts[number]]).result
            outputs += [parts[number]] * (what == "kept")
    random.shuffle(parts)
    outputs.append(apply("concat", parts, {"dim": dim}).result)
    return Graph("parts", (x,), tuple(outputs))


@pytest.mark.slow
def test_random_groups_of_parts(runner: Any) -> None:
    seen = set[str]()

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def property(random: Random) -> None:
        program = with_fusions(lower(parts_of(random), load("box:1")), in_triton)
        known = values(program)
        for group in groups(program):
            compare(program, group, known, runner)
            seen.add(group.operator)

    property()
    assert sum("split" in name.split(" + ") for name in seen) > 5
    assert sum("concat" in name for name in seen) > 5


@pytest.mark.slow
def test_random_copies_of_attention(runner: Any) -> None:
    """Results of attention and its gradients are stored where copies of them, some with grouped heads, would be."""
    seen = set[str]()

    @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def property(random: Random) -> None:
        heads, shared, rows, columns = (random.choice([1, 2, 3]) for _ in range(4))
        q, y = (data(name, 2, heads * shared, rows + 1, 8) for name in "qy")
        k, v = (data(name, 2, heads, columns + 1, 8) for name in "kv")
        of = {"scale": 0.3, "causal": random.choice([0, 1])}
        made = apply("attention", [q.result, k.result, v.result], of).results
        if random.random() < 0.7:
            made = apply("attention_grad", [y.result, q.result, k.result, v.result], of).results
        outputs: list[Value] = []
        for result in made:
            what = random.choice(["merge_heads", "transpose", "kept"])
            attributes = {"perm": tuple(random.sample(range(4), 4))} if what == "transpose" else {}
            outputs.append(result if what == "kept" else apply(what, [result], attributes).result)
        inputs = tuple(node for node in (y, q, k, v) if node is not y or len(made) > 1)
        program = with_fusions(lower(Graph("copies", inputs, tuple(outputs)), load("box:1")), in_triton)
        known = values(program)
        for group in groups(program):
            compare(program, group, known, runner)
            seen.add(group.operator)

    property()
    assert {name for name in seen if name.endswith("merge_heads") or name.endswith("transpose")}
    assert any(name.startswith("attention_grad") and name.count(AND) == 3 for name in seen)


def test_heads_of_a_fused_product_are_one_kernel_each_way() -> None:
    """
    Queries, keys and values are split, and their gradients concatenated, with their heads, once in memory each, if
    attention is cuDNN's.
    """

    def by_cudnn(operator: LocalOperator) -> str:
        return "torch" if "attention" in operator.line.operator else "triton"

    program = with_fusions(lowered(SMALL["gpt2"](), load("box:1")), by_cudnn)
    of = [i for i in program.body if isinstance(i, Fused) and {"split", "concat"} & {m.operator for m in i.members}]
    names = ["split + split_heads + split_heads + split_heads", "merge_heads + merge_heads + merge_heads + concat"]
    assert {i.operator for i in of} == {*names}
    for each in of:
        operator = local_operator(program, each)
        assert len(launcher(operator.line, operator.dtypes, "triton", operator.divided).work) == 1


@pytest.mark.parametrize("eager", [False, True])
def test_pytorch_moves_parts_of_tensors_by_kernels_of_their_own(eager: bool) -> None:
    on = load("box:1")
    step = lower(differentiate(SMALL["gpt2"](), Optimizer(), on.mesh), on)
    made = [i for i in plan_step(step, PlanOptions(eager=eager)).program.body if isinstance(i, Compute)]
    names = [m.operator for i in made if isinstance(i, Fused) for m in i.members]
    assert {"split", "concat", "attention_saved_grad"}.isdisjoint(names) == eager
    assert ("cross_entropy_saving" in [i.operator for i in made]) != eager
    assert any("embedding_grad + add" in i.operator for i in made) != eager


def divided() -> Graph:
    """Rows and columns of a product, its bias, dropout in heads and in all, and a residual, each over two devices."""

    def piece(name: str, *sizes: int, op: str = "weight", degrees: tuple[int, ...]) -> Node:
        copy = 4 // prod(degrees)
        return leaf(op, tensor_type(sizes, "f32", degrees, copy=copy), name=name)

    x = piece("x", 4, 6, 16, op="input", degrees=(2, 1, 1))
    y = piece("y", 4, 6, 8, op="input", degrees=(2, 1, 2))
    z = piece("z", 4, 4, 6, 2, op="input", degrees=(2, 2, 1, 1))
    b = piece("b", 8, degrees=(2,)).result
    products = [
        apply("add", [apply("matmul", [x.result, piece(name, 16, 8, degrees=(1, 2)).result]).result, b]).result
        for name in ("v", "w")
    ]
    h = apply("add", [y.result, apply("dropout", [products[0]], {"p": 0.4, "seed": 7}).result]).result
    rows = apply("mse", [apply("gelu", [apply("dropout", [h], {"p": 0.2, "seed": 8}).result]).result, y.result]).result
    heads = apply("split_heads", [apply("dropout", [products[1]], {"p": 0.3, "seed": 9}).result], {"heads": 4}).result
    return Graph("divided", (x, y, z), (rows, apply("mse", [heads, z.result]).result))


def test_pieces_draw_what_the_whole_draws_there(runner: Any) -> None:
    program = with_fusions(with_savings(lower(divided(), boxes(2, 2))), in_triton)
    known = values(program)
    found = [g for g in groups(program) if any(isinstance(a, str) for a in g.assignment)]
    assert {g.operator for g in found} == {
        "matmul + add + dropout + add + dropout + gelu",
        "matmul + add + dropout + split_heads",
    }
    assert all(len(set(g.assignment)) == 2 for g in found)
    for group in found:
        for device in range(4):
            compare(program, group, known, runner, device)


def dropped() -> Graph:
    """A product, its bias, dropout of it in heads and in all, a residual, and a normalised sum."""
    x, y = data("x", 8, 12, 16), data("y", 8, 12, 16)
    h = apply("add", [apply("matmul", [x.result, weight("w", 16, 16)]).result, weight("b", 16)]).result
    h = apply("dropout", [h], {"p": 0.4, "seed": 7}).result
    h = apply("add", [x.result, h]).result
    h = apply("layer_norm", [h, weight("scale", 16), weight("shift", 16)]).result
    h = apply("dropout", [apply("silu", [h]).result], {"p": 0.2, "seed": 9}).result
    heads = apply("split_heads", [apply("matmul", [h, weight("v", 16, 16)]).result], {"heads": 4}).result
    heads = apply("dropout", [heads], {"p": 0.3, "seed": 8}).result
    merged = apply("merge_heads", [heads]).result
    return Graph("dropped", (x, y), (apply("mse", [merged, y.result]).result,))


SMALL: Mapping[str, Callable[[], Graph]] = {
    "dropped": dropped,
    "bert": lambda: build("bert_large", batch=4, sequence=12, layers=1, hidden=32, heads=2, vocabulary=40),
    "gpt2": lambda: build("gpt2", batch=4, sequence=12, layers=1, hidden=32, heads=2, vocabulary=40),
    "llama": lambda: build(
        "llama3_8b", batch=4, sequence=12, layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=40
    ),
    "moe": lambda: build(
        "moe",
        batch=2,
        sequence=12,
        layers=1,
        hidden=32,
        heads=4,
        kv_heads=2,
        intermediate=48,
        experts=4,
        chosen=2,
        vocabulary=40,
        dispatch="sparse",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "mixed"])
@pytest.mark.parametrize("name", SMALL)
def test_groups_of_models(name: str, dtype: str, runner: Any) -> None:
    graph = mixed_precision(SMALL[name](), "bf16") if dtype == "mixed" else with_dtype(SMALL[name](), dtype)
    program = with_fusions(lowered(graph, load("box:1")), in_triton)
    known = values(program)
    found = groups(program)
    assert len(found) > 3
    for group in found:
        compare(program, group, known, runner)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_casts_break_no_group(name: str) -> None:
    """
    In mixed precision the groups are those of f32, and those with casts; only weights are cast alone, and none that is
    only gathered from.
    """
    one = load("box:1")
    plain = with_fusions(lowered(SMALL[name](), one), in_triton)
    mixed = with_fusions(lowered(mixed_precision(SMALL[name](), "bf16"), one), in_triton)
    operators = {AND.join(m.operator for m in i.members if m.operator != "cast") for i in groups(mixed)}
    assert operators >= {i.operator for i in plain.body if isinstance(i, Fused)}
    apart = {i.result for i in mixed.body if isinstance(i, Leaf) and i.op == "weight"}
    alone = [i for i in mixed.body if isinstance(i, Compute) and i.operator == "cast"]
    assert alone
    assert all(i.operands[0] in apart for i in alone)
    reading = [i for i in mixed.body if isinstance(i, Compute) and "embedding" in i.operator.split(" + ")]
    tied = {"bert": 1, "gpt2": 1, "llama": 0}[name]  # tables that the last product reads, too
    assert sum(not i.operator.startswith("cast + ") for i in reading) == tied


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_stored_in_bf16(name: str) -> None:
    """The loss and its gradient compute in f32, and cast what they read and make in their kernels."""
    program = with_fusions(lowered(mixed_precision(SMALL[name](), "bf16"), load("box:1")), in_triton)
    operators = [i.operator for i in program.body if isinstance(i, Fused)]
    assert {"cast + cross_entropy_saving", "cast + cross_entropy_saved_grad + cast"} <= {*operators}
    stored = [program.tensors[r] for i in program.body if isinstance(i, Compute) for r in i.results]
    assert {t.dtype for t in stored if t.shape == (4, 12, 40)} == {"bf16"}


def of_casts(reader: str, twice: bool = False) -> Program:
    """A product of which two f32 casts are added, or one is read by a loss and, `twice`, is returned itself."""
    x, w = data("x", 8, 16, dtype="bf16"), leaf("weight", tensor_type((16, 16), "bf16"), name="w")
    y = apply("cast", [apply("matmul", [x.result, w.result]).result], {"to": "f32"}).result
    if reader == "add":
        other = apply("cast", [apply("square", [x.result]).result], {"to": "f32"}).result
        y = apply("gelu", [apply("add", [y, other]).result]).result
    loss = apply("mse", [y, data("t", 8, 16).result]).result
    inputs = x, loss.node.operands[1].node
    return with_savings(lower(Graph("casts", inputs, (loss, y) if twice else (loss,)), load("box:1")))


def test_a_cast_that_cannot_be_made_twice_stays() -> None:
    """None is copied where its own result is returned, or where a reader reads two; each is in the program once."""
    for program in (of_casts("mse", twice=True), of_casts("add")):
        after = with_fusions(program, in_triton)
        members = [
            m for i in after.body if isinstance(i, Compute) for m in (i.members if isinstance(i, Fused) else [i])
        ]
        assert [m.operator for m in members].count("cast") == [
            i.operator for i in program.body if isinstance(i, Compute)
        ].count("cast")
        assert after.tensors == program.tensors
    once = with_fusions(of_casts("mse"), in_triton)
    assert [i.operator for i in once.body if isinstance(i, Compute)] == ["matmul", "cast + mse"]


@pytest.mark.parametrize("columns", [16, 30_000])
def test_what_a_group_reads(columns: int, runner: Any) -> None:
    """A row that is not held is read in every pass: two operands then, instead of one, are too many."""

    def fused(returned: bool) -> Program:
        x, y = data("x", 2, columns), data("y", 2, columns)
        h = apply("add", [x.result, y.result]).result
        outputs = (apply("softmax", [h]).result, h)[: 1 + returned]
        return with_fusions(lower(Graph("rows", (x, y), outputs), load("box:1")), in_triton)

    def operators(program: Program) -> list[str]:
        return [i.operator for i in program.body if isinstance(i, Compute)]

    program = fused(returned=False)
    assert operators(program) == ["add + softmax"]
    for group in groups(program):
        compare(program, group, values(program), runner)
    assert operators(fused(returned=True)) == (["add + softmax"] if columns == 16 else ["add", "softmax"])


# --- the step


PLANS = [("bert", "ideal:2x2", "data-parallel"), ("gpt2", "box:4", "fsdp"), ("llama", "box:4", "tofu")] + [
    (name, "ideal:2x2", "joint") for name in SMALL
]


@cache
def planned(name: str, where: str, strategy: str) -> tuple[Program, Program]:
    """A program as it is, and with groups."""
    on = machine(where)
    program = lowered(run(SMALL[name](), on, strategy).graph, on)
    after = with_fusions(program, in_triton)
    assert sum(isinstance(i, Fused) for i in after.body) > 3
    return program, after


def made(program: Program, found: Schedule, read: set[int]) -> list[tuple[Any, int]]:
    """What is done, and how many operators before it, of groups each, whose results (`read`) others read."""
    count, out = 0, list[tuple[Any, int]]()
    for line in found.lines:
        out.append((line.action, count))
        if isinstance(line.action, Compute):
            members = line.action.members if isinstance(line.action, Fused) else (line.action,)
            count += sum(not read.isdisjoint(m.results) for m in members)
    return out


def read_by_operators(program: Program) -> set[int]:
    """The registers that operators read, and those that moves make them of."""
    moved = {i.result: i.operand for i in program.body if isinstance(i, ReshardMove | HaloExchange)}
    found = {r for i in program.body if isinstance(i, Compute) for r in i.operands}
    for register in [*found]:
        while register in moved:
            register = moved[register]
            found.add(register)
    return found


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "where", "strategy"), PLANS)
def test_collectives_start_and_are_waited_for_where_they_were(name: str, where: str, strategy: str) -> None:
    """
    Those that move what an operator makes, right after it; what is moved, not before it was, but for weights. Operators
    that only updates read are delayed, and not counted.
    """
    before, after = planned(name, where, strategy)
    read = read_by_operators(before)
    weights = {i.result for i in before.body if isinstance(i, Leaf)}
    for i in before.body:
        if isinstance(i, ReshardMove) and i.operand in weights:
            weights.add(i.result)
    places: list[tuple[dict[int, int], dict[int, int]]] = []
    for program in (before, after):
        starts, waits = dict[int, int](), dict[int, int]()
        operators = {r for i in program.body if isinstance(i, Compute) for r in i.results if r in read}
        for action, count in made(program, schedule(program, 0), read):
            if isinstance(action, ReshardMove) and communicates(action) and action.operand in operators:
                starts[action.result] = count
            if isinstance(action, Wait) and not weights & {*action.registers}:
                waits |= dict.fromkeys(action.registers, count)
        places.append((starts, waits))
    assert places[0][0] == places[1][0]
    readers = {r for i in before.body if isinstance(i, Compute) for r in i.operands}
    assert readers
    assert all(places[1][1][r] >= place for r, place in places[0][1].items() if r in readers)


def peak(program: Program) -> int:
    """The bytes that lines hold at most, of what is neither an input nor a weight."""
    alive, most = set[int](), 0
    kept = {i.result for i in program.body if isinstance(i, Leaf) and i.op != "constant"}
    for line in schedule(program, 0).lines:
        match line.action:
            case Compute(_, _, results):
                alive |= {*results}
            case Leaf(_, result) | ReshardMove(_, result) | HaloExchange(_, result):
                alive |= {result} - kept
            case _:
                pass
        most = max(most, sum(program.bytes[r] for r in alive))
        alive -= {*line.dies}
    return most


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "where", "strategy"), PLANS)
def test_no_more_is_held(name: str, where: str, strategy: str) -> None:
    before, after = planned(name, where, strategy)
    assert peak(after) <= peak(before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "where", "strategy"), PLANS)
def test_every_operator_is_in_one_place(name: str, where: str, strategy: str) -> None:
    """In the order it was, but for copies of attention's results, with all that others read, and nothing else."""
    before, after = planned(name, where, strategy)
    spelled = [m for i in after.body if isinstance(i, Compute) for m in (i.members if isinstance(i, Fused) else (i,))]
    listed = [i for i in before.body if isinstance(i, Compute)]
    copies = {m for i in after.body if isinstance(i, Fused) and "attention" in i.operator for m in i.members[1:]}
    assert [i for i in spelled if i not in copies] == [i for i in listed if i not in copies]
    assert (len(spelled), {*spelled}) == (len(listed), {*listed})
    made_there = {r for i in before.body if isinstance(i, Compute) for r in i.results}
    there, read = set[int](), {*after.outputs}
    for i in after.body:
        match i:
            case Compute(_, operands, results):
                assert there >= {*operands}
                read |= {*operands}
                there |= {*results}
            case Leaf(_, result):
                there.add(result)
            case ReshardMove(operand, result) | HaloExchange(operand, result):
                assert operand in there
                read.add(operand)
                there.add(result)
            case _:
                assert {i.weight, i.grad} <= there
                read.add(i.grad)
    unread = made_there & (there - read)
    assert unread <= {r for i in before.body if isinstance(i, Compute) for r in i.results[-2:]}
    fusions = [i for i in after.body if isinstance(i, Fused)]
    assert all({*i.results} - {*i.members[-1].results} <= read and len(i.members) <= MOST_OPERATORS for i in fusions)
    # Once more, there is nothing left to do, nor to undo.
    assert with_fusions(before, lambda operator: "torch") == before


def together(graph: Graph, choice: Callable[[LocalOperator], str] = in_triton, on: Machine | None = None) -> set[str]:
    """The names of a forward's groups."""
    program = lower(graph, on or load("box:1"))
    return {i.operator for i in with_fusions(program, choice).body if isinstance(i, Fused)}


def test_what_is_read_at_many_places_is_computed_once() -> None:
    """A vector is added once, not for every row that it scales, nor what is multiplied for every column."""

    def scaled(*shape: int) -> Graph:
        x, y = data("x", 8, 16), data("y", *shape)
        h = apply("mul", [x.result, apply("add", [y.result, weight("w", *shape)]).result]).result
        return Graph("scaled", (x, y), (apply("sigmoid", [h]).result,))

    assert together(scaled(16)) == {"mul + sigmoid"}
    assert together(scaled(8, 1)) == {"mul + sigmoid"}
    assert together(scaled(8, 16)) == {"add + mul + sigmoid"}
    x = data("x", 8, 16)
    product = apply("matmul", [apply("relu", [x.result]).result, weight("w", 16, 16)]).result
    assert together(Graph("product", (x,), (product,))) == set()
    total = apply("reduce_sum", [apply("matmul", [x.result, weight("w", 16, 16)]).result], {"dim": 1}).result
    assert together(Graph("rows of a product", (x,), (total,))) == set()


def test_what_is_held_beside_what_is_kept_has_to_fit() -> None:
    """Of a chain behind a value that nobody else reads, either that value or what the chain keeps is held in a line."""

    def chain(kept: bool) -> Graph:
        x = data("x", 64, 64)
        h = apply("relu", [apply("matmul", [x.result, weight("w", 64, 64)]).result]).result
        out = apply("tanh", [h]).result
        return Graph("chain", (x,), (out, h) if kept else (out,))

    def products_in_torch(operator: LocalOperator) -> str:
        return "torch" if operator.line.operator == "matmul" else "triton"

    assert together(chain(False), products_in_torch) == {"relu + tanh"}
    assert together(chain(True), products_in_torch) == set()
    # A product holds its operands anyway.
    assert together(chain(True)) == {"matmul + relu + tanh"}


def test_a_collective_does_not_wait_for_what_it_does_not_move() -> None:
    """A value that is gathered for others is gathered before what else is made of it."""

    def gathered(moved: str) -> Graph:
        x = leaf("input", tensor_type((8, 16), "f32", (2, 1)), name="x")
        h = apply("exp", [x.result]).result
        t = apply("tanh", [h]).result
        whole = parallel("combine", h if moved == "early" else t, dim=0, by=2).result
        last = apply("mul", [t, h]).result
        return Graph("gathered", (x,), (last, apply("sigmoid", [whole]).result))

    assert together(gathered("early"), on=boxes(2)) == {"tanh + mul"}
    assert together(gathered("last"), on=boxes(2)) == {"exp + tanh"}


@pytest.mark.slow
def test_sums_of_columns_are_made_with_what_is_summed(runner: Any) -> None:
    """
    Of rows that two devices share, and of which each draws its own dropout. The gradients' collectives start after the
    group, and wait for no other.
    """
    x, y = data("x", 8, 200, 8), data("y", 8, 200, 8)
    z = data("z", 8, 200, 64)
    h = apply("add", [apply("mul", [x.result, weight("u", 8)]).result, weight("bias", 8)]).result
    h = apply("layer_norm", [h, weight("w", 8), weight("b", 8)]).result
    h = apply("dropout", [h], {"p": 0.4, "seed": 7}).result
    # The step's peak memory is not where sums of columns are.
    large = apply("mse", [apply("exp", [apply("mul", [z.result, weight("v", 64)]).result]).result, z.result]).result
    loss = apply("add", [apply("mse", [h, y.result]).result, large]).result
    on = boxes(2)
    program = lowered(run(Graph("summed", (x, y, z), (loss,)), on, "data-parallel").graph, on)
    fused = with_fusions(program, in_triton)
    (group,) = (i for i in fused.body if isinstance(i, Fused) and "layer_norm_weight_grad" in i.operator)
    assert group.operator == (
        "mse_grad + dropout + reduce_sum + layer_norm_weight_grad + reduce_sum + layer_norm_grad + reduce_sum"
        " + mul + reduce_sum"
    )
    rounded = rounded_operands(fused, group, values(program))
    expected = one_by_one(fused, group, rounded)
    pieces = [by_kernel(fused, group, rounded, runner, device) for device in range(2)]
    for register, one, other in zip(group.results, *pieces, strict=True):
        whole = torch.cat([one, other]) if one.dim() > 1 else one + other
        is_equal(fused, group, register, whole, expected[register])
    moved = {i.operand for i in fused.body[fused.body.index(group) + 1 :] if isinstance(i, ReshardMove)}
    sums = {r for r in group.results if program.tensors[r].shape == (8,)}
    assert len(sums) == 4
    assert sums <= moved


def test_a_scatter_stores_what_a_cast_makes_of_it():
    """The gradient of a table is stored in float32 at once."""
    model = {"batch": 4, "tables": 2, "rows": 50, "features": 8, "dense": 8, "bottom": 16, "top": 16}
    graph = mixed_precision(build("dlrm", **model), "bf16")
    on = load("box:1")
    fused = with_fusions(lower(differentiate(graph, Optimizer("sgd"), on.mesh), on), lambda operator: "triton")
    names = [i.operator for i in fused.body if isinstance(i, Compute) and "embedding_bag_grad" in i.operator]
    assert names == ["embedding_bag_grad + cast"] * 2


def test_the_gradient_of_a_tied_table_is_added_to_the_product_s():
    fused = with_fusions(lowered(mixed_precision(SMALL["gpt2"](), "bf16"), load("box:1")), in_triton)
    (group,) = (
        i for i in fused.body if isinstance(i, Fused) and "embedding_grad" in i.operator and "add" in i.operator
    )
    assert group.operator == "embedding_grad + cast + add"
    operator = local_operator(fused, group)
    made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
    assert {work.kind for work in made.work} == {"scatter"}


def test_gradients_of_experts_are_stored_in_float32():
    fused = with_fusions(lowered(mixed_precision(SMALL["moe"](), "bf16"), load("box:1")), in_triton)
    names = [i.operator for i in fused.body if isinstance(i, Compute) and "routed_matmul_tn" in i.operator]
    assert names == ["routed_matmul_tn + cast"] * 3

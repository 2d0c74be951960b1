"""When a program does what: what is read is there, collectives run beside operators, and no rank waits for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned import pinned

from unity_ir.errors import UnityError
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, SUM, Mesh
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.deadlock import CollectiveCall, Place, calls, check_order
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    ReshardMove,
    Tensor,
    UpdateWeight,
    communicates,
)
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import FAR, LAG, NEAR, schedule
from unity_ir.plan.scheduled import Action, Bucket, Schedule, Wait
from unity_ir.search.baselines.data_parallel import data_parallel, fsdp
from unity_ir.search.baselines.follow import follow
from unity_ir.search.baselines.random_plan import sample


def random_program(seed: int, with_pins: bool) -> Program:
    graph = random_graph(Random(seed), Random(seed).randint(1, 8), dims=(2, 4, 6, 12))
    plan, machine = pinned(graph, seed) if with_pins else (sample(graph, boxes(2, 2), seed), boxes(2, 2))
    return lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)


def layers(count: int, width: int = 64) -> Program:
    """A data-parallel stack on two devices."""
    x, y = (leaf("input", tensor_type((8, width), "f32"), name=n) for n in "xy")
    h = x.result
    for i in range(count):
        h = apply("matmul", [h, leaf("weight", tensor_type((width, width), "f32"), name=f"w{i}").result]).result
    graph = Graph("f", (x, y), (apply("mse", [h, y.result]).result,))
    machine = boxes(2)
    return lower(fuse_collectives(differentiate(data_parallel(graph, machine), Optimizer(), machine.mesh)), machine)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 64, 2**20]))
@settings(max_examples=examples(80))
def test_what_is_read_is_there_and_nothing_stays(seed: int, with_pins: bool, bucket: int):
    program = random_program(seed, with_pins)
    found = schedule(program, bucket)
    there: set[int] = set()
    pending: set[int] = set()
    for line in found.lines:
        match line.action:
            case Leaf(_, result):
                there.add(result)
            case Compute(_, operands, results):
                assert {found.held(r) for r in operands} <= there - pending
                there.update(results)
            case Bucket(moves):
                assert {found.held(m.operand) for m in moves} <= there - pending
                assert sum(program.bytes[m.operand] for m in moves[:-1]) < bucket
                there.update(m.result for m in moves)
                pending.update(m.result for m in moves)
            case Wait(registers):
                assert set(registers) <= pending
                pending.difference_update(registers)
            case ReshardMove(operand, result) | HaloExchange(operand, result) as move:
                assert found.held(operand) in there - pending
                there.add(result)
                if communicates(move):
                    pending.add(result)
        assert set(line.dies) <= there
        there.difference_update(line.dies)
    returned = {found.held(i.grad) for i in program.body if isinstance(i, UpdateWeight)} | {program.outputs[0]}
    assert not pending
    assert returned <= there
    held_by_caller = {i.result for i in program.body if isinstance(i, Leaf) and i.op != "constant"}
    assert there <= returned | held_by_caller
    computes = [i for i in program.body if isinstance(i, Compute)]
    scheduled = [line.action for line in found.lines if isinstance(line.action, Compute)]
    assert Counter(scheduled) == Counter(computes)
    # What others read is made in the program's order; what only updates read may be delayed.
    read = sources_read(program)
    assert [c for c in scheduled if not read.isdisjoint(c.results)] == [
        c for c in computes if not read.isdisjoint(c.results)
    ]


def with_retypes(program: Program, random: Random) -> Program:
    """The program in which what some moves read has been called something else before, which takes no step."""
    body: list[Instruction] = []
    tensors = dict(program.tensors)
    for instruction in program.body:
        if isinstance(instruction, ReshardMove | HaloExchange) and random.random() < 0.5:
            operand = instruction.operand
            again = max(tensors) + 1
            tensors[again] = tensors[operand]
            body.append(ReshardMove(operand, again, "retype", (0,), REPEAT, REPEAT))
            instruction = replace(instruction, operand=again)
        body.append(instruction)
    return replace(program, body=tuple(body), tensors=tensors)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_what_takes_no_step_changes_no_order(seed: int):
    program = random_program(seed, False)
    found, want = schedule(with_retypes(program, Random(seed))), schedule(program)

    def known(action: Action) -> Action:
        match action:
            case ReshardMove() | HaloExchange():
                return replace(action, operand=found.held(action.operand))
            case Bucket(moves):
                return Bucket(tuple(replace(m, operand=found.held(m.operand)) for m in moves))
            case _:
                return action

    held = replace(want, lines=tuple(replace(line, action=known(line.action)) for line in want.lines))
    assert [known(line.action) for line in found.lines] == [line.action for line in held.lines]


def sources_read(program: Program) -> set[int]:
    """The registers that operators read or the step returns, and those that moves make them of."""
    moved = {i.result: i.operand for i in program.body if isinstance(i, ReshardMove | HaloExchange)}
    found = {r for i in program.body if isinstance(i, Compute) for r in i.operands} | {*program.returned}
    for register in [*found]:
        while register in moved:
            register = moved[register]
            found.add(register)
    return found


def test_a_gradient_of_a_weight_is_computed_while_that_of_an_activation_is_summed():
    """Rows of a weight on each device: the gradient of what it reads is gathered, that of the weight needs no other."""
    x, y = (leaf("input", tensor_type((64, 64), "f32"), name=n) for n in "xy")
    h = x.result
    for i in range(4):
        h = apply("matmul", [h, leaf("weight", tensor_type((64, 64), "f32"), name=f"w{i}").result]).result
        h = apply("relu", [h]).result
    graph = Graph("f", (x, y), (apply("mse", [h, y.result]).result,))
    machine = boxes(2)
    plan = follow(
        graph,
        machine.mesh,
        lambda node, axis, followed: {"matmul": "n"}.get(node.op, REPEAT),
        lambda value: None,
    )
    program = lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)
    lines = actions(schedule(program))
    # A sum of three gradients of activations starts, a product runs, and the sum is waited for.
    beside = [b for a, b, c in zip(lines, lines[1:], lines[2:], strict=False) if crosses_(a) and isinstance(c, Wait)]
    assert [b.operator for b in beside if isinstance(b, Compute)] == ["matmul_tn"] * 3


def scheduled_order(steps: list[tuple[str, str, str]]) -> list[str]:
    """
    The operators of a program on two devices in the order in which they run. Each step is an operator or a kind of
    collective, what it reads, and what it makes: `x` is the input, `last` is returned, and an update reads `gradient`,
    which is larger than what others make, another `small`.
    """
    number = {"w": 0, "x": 1} | {makes: i for i, (_, _, makes) in enumerate(steps, 2)}
    body: list[Instruction] = [Leaf("weight", 0, "w"), Leaf("input", 1, "x")]
    layouts = {"all_gather": (0, REPEAT), "all_reduce": (SUM, REPEAT)}
    for name, reads, makes in steps:
        if name in layouts:
            body.append(ReshardMove(number[reads], number[makes], name, (0,), *layouts[name]))
        else:
            body.append(Compute(name, (number[reads],), (number[makes],), (), (REPEAT,)))
    tensors = dict.fromkeys(number.values(), Tensor((4, 4), "f32", (REPEAT,)))
    for name in number.keys() & {"gradient", "small"}:
        body.append(UpdateWeight(0, number[name]))
    tensors[number["gradient"]] = Tensor((8, 4), "f32", (REPEAT,))
    program = Program("steps", Mesh((2,)), tensors, tuple(body), (number["last"],), None)
    return [a.operator for a in actions(schedule(program)) if isinstance(a, Compute)]


def test_what_was_waited_for_before_is_no_wait():
    """`sqrt` reads what `exp` has waited for; the weight's gradient hides the second gather, which `abs` waits for."""
    first = [("neg", "x", "a"), ("all_gather", "a", "b"), ("exp", "b", "c"), ("matmul_tn", "c", "gradient")]
    then = [("sqrt", "b", "d"), ("all_gather", "d", "e"), ("abs", "e", "last")]
    assert scheduled_order([*first, *then]) == ["neg", "exp", "sqrt", "matmul_tn", "abs"]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_largest_gradient_hides_a_collective(is_first: bool):
    steps = [("matmul_tn", "x", "gradient"), ("outer", "x", "small")][:: 1 if is_first else -1]
    steps += [("neg", "x", "a"), ("all_gather", "a", "b"), ("abs", "b", "last")]
    assert scheduled_order(steps) == ["outer", "neg", "matmul_tn", "abs"]


@pytest.mark.parametrize(
    ("between", "is_summed", "is_delayed"),
    [
        (NEAR, False, True),
        (FAR - 1, False, True),
        (FAR, False, False),
        (NEAR - 1, True, True),
        (NEAR, True, False),
    ],
)
def test_a_gradient_that_is_not_summed_may_hide_a_collective_further_on(
    between: int, is_summed: bool, is_delayed: bool
):
    """A sum over devices of the gradient has to begin soon."""
    steps = [("matmul_tn", "x", "made" if is_summed else "gradient")]
    steps += [("all_reduce", "made", "gradient")] if is_summed else []
    names = ["x", *(f"a{i}" for i in range(between))]
    steps += [("neg", *each) for each in pairwise(names)]
    steps += [("all_gather", names[-1], "whole"), ("abs", "whole", "last")]
    at = between if is_delayed else 0
    assert scheduled_order(steps) == [*["neg"] * at, "matmul_tn", *["neg"] * (between - at), "abs"]


def test_gradients_are_summed_while_the_backward_goes_on():
    found = schedule(layers(6), bucket=0)
    kinds = ["wait" if isinstance(a, Wait) else "move" if crosses_(a) else "-" for a in actions(found)]
    first, last = kinds.index("move"), len(kinds) - kinds[::-1].index("-")
    assert kinds[first:last].count("move") == 5
    assert "wait" not in kinds[:last]


def test_small_gradients_share_a_call_until_it_is_full():
    program = layers(7)
    found = schedule(program, bucket=3 * 64 * 64 * 4)
    assert [len(a.moves) for a in actions(found) if isinstance(a, Bucket)] == [3, 3]
    assert sum(crosses_(a) for a in actions(found)) == 1
    assert not any(isinstance(a, Bucket) for a in actions(schedule(program, bucket=64 * 64 * 4)))


def held_until_the_end(program: Program, found: Schedule) -> list[list[int]]:
    """
    For each line after its waits: what each collective of gradients under way holds that is not an all-reduce, oldest
    first, of those which nothing but the end reads, and that started at least `LAG` operators ago.
    """
    wanted = {found.held(i.grad) for i in program.body if isinstance(i, UpdateWeight)}
    late: dict[int, int] = {}
    began: dict[int, int] = {}
    out: list[list[int]] = []
    operators = 0
    for line in found.lines:
        operators += isinstance(line.action, Compute)
        match line.action:
            case Wait(registers):
                late.pop(registers[0], None)
                if out:
                    out.pop()
            case Bucket(moves) if moves[0].kind != "all_reduce" and moves[0].result in wanted:
                late[moves[0].result] = sum(program.bytes[m.operand] for m in moves)
            case ReshardMove(operand, result, kind) if (
                kind != "all_reduce" and crosses_(line.action) and result in wanted
            ):
                late[result] = program.bytes[operand]
            case HaloExchange(operand, result) if result in wanted:
                late[result] = program.bytes[operand]
            case _:
                pass
        for register in late:
            began.setdefault(register, operators)
        newest = next(reversed(late), None)
        out.append([size for r, size in late.items() if operators - began[r] >= LAG or r == newest])
    return out


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 64, 2**20]), st.sampled_from([0, 64, 256, 2**20]))
@settings(max_examples=examples(60))
def test_collectives_under_way_hold_so_much(seed: int, with_pins: bool, bucket: int, under_way: int):
    program = random_program(seed, with_pins)
    bound, free = (schedule(program, bucket, limit) for limit in (under_way, 2**60))
    for held in held_until_the_end(program, bound):
        assert len(held) < 2 or sum(held) <= under_way
    # All that changes is what is waited for when.
    assert [a for a in actions(bound) if not isinstance(a, Wait)] == [
        a for a in actions(free) if not isinstance(a, Wait)
    ]
    assert calls(program, bound) == calls(program, free)


def test_only_what_is_too_much_is_waited_for():
    """A divided stack on two devices, of which every gradient is scattered: 16 KiB each."""
    machine = boxes(2)
    x, y = (leaf("input", tensor_type((8, 64), "f32"), name=n) for n in "xy")
    h = x.result
    for i in range(9):
        h = apply("matmul", [h, leaf("weight", tensor_type((64, 64), "f32"), name=f"w{i}").result]).result
    plan = fsdp(Graph("f", (x, y), (apply("mse", [h, y.result]).result,)), machine)
    program = lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)
    few, all_ = (schedule(program, 0, limit) for limit in (4 * 2**14, 2**60))
    waits = [[isinstance(a, Wait) for a in actions(each) if isinstance(a, Wait | Compute)] for each in (few, all_)]
    # The backward has two operators for a layer, so that four collectives began fewer than `LAG` operators ago: the
    # fifth makes room by waiting for the first, and each after it for one more. Else all are waited for at the end.
    last = len(waits[1]) - 1 - waits[1][::-1].index(False)
    assert sum(waits[1][:last]) == 9
    assert sum(waits[0]) == sum(waits[1])
    assert sum(waits[0][: len(waits[0]) - waits[0][::-1].index(False)]) - 9 == 9 - LAG // 2 - 1


def actions(found: Schedule) -> list[object]:
    return [line.action for line in found.lines]


def crosses_(action: object) -> bool:
    return isinstance(action, ReshardMove | HaloExchange) and communicates(action)


# --- the order on every rank


def ordered(seed: int) -> dict[Place, list[CollectiveCall]]:
    program = random_program(seed, True)
    return calls(program, schedule(program))


@given(st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_no_rank_waits_for_ever(seed: int):
    check_order("f", ordered(seed))


def shared(found: dict[Place, list[CollectiveCall]]) -> list[tuple[Place, int]]:
    """Calls that several ranks make."""
    return [(place, i) for place, mine in found.items() for i, call in enumerate(mine) if len(call.group) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["dropped", "twice", "swapped", "other bytes", "other kind", "other axes"])
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_differs_is_found(change: str, seed: int):
    found = ordered(seed)
    for place, i in shared(found):
        mine = list(found[place])
        if change == "dropped":
            del mine[i]
        elif change == "twice":
            mine.insert(i, mine[i])
        elif change == "swapped":
            j = next((j for j, c in enumerate(mine) if j > i and len(c.group) > 1 and c != mine[i]), None)
            if j is None:
                continue
            mine[i], mine[j] = mine[j], mine[i]
        else:
            other = {"other bytes": {"bytes": mine[i].bytes + 1}, "other kind": {"kind": "gather"}}
            if mine[i].kind == "gather" and change == "other kind":
                continue
            mine[i] = replace(mine[i], **other.get(change, {"axes": (9,)}))
        with pytest.raises(UnityError, match=r"^spmd.program @f: \w+ of .*same calls in the same order$"):
            check_order("spmd.program @f", {**found, place: mine})


def test_groups_that_cross_are_found():
    """Each group's members agree, and yet each waits for the other."""
    one, other = (CollectiveCall(((0,), (1,)), (axis,), "all_reduce", 4, "add") for axis in (0, 1))
    with pytest.raises(UnityError, match=r"ranks at \[0\] wait for those at \[1\], which does all_reduce of add along"):
        check_order("f", {(0,): [one, other], (1,): [other, one]})


def test_calls_that_only_move_something_else_are_told_apart():
    one, other = (CollectiveCall(((0,), (1,)), (0,), "all_reduce", 4, "add", result) for result in (1, 2))
    with pytest.raises(UnityError, match=r"ranks at \[0\] wait for those at \[1\]"):
        check_order("f", {(0,): [one, other], (1,): [other, one]})


@pytest.mark.parametrize("read_again", [False, True])
def test_an_addend_that_was_padded_is_summed_in_its_own_memory(read_again: bool):
    """Beside devices that hold zeros, a product is its own addend; what is read later must stay as it was."""
    pieces, product = Tensor((8, 4), "f32", (0, REPEAT)), Tensor((4, 4), "f32", (SUM, REPEAT))
    tensors = {0: Tensor((4, 4), "f32", (REPEAT, REPEAT)), 1: pieces, 2: pieces, 3: product}
    tensors |= {4: replace(product, layout=(SUM, SUM)), 5: tensors[0], 6: product}
    body = [
        Leaf("weight", 0, "w"),
        Leaf("input", 1, "x"),
        Leaf("input", 2, "g"),
        Compute("matmul_tn", (1, 2), (3,), (), ("m0", REPEAT)),
        ReshardMove(3, 4, "zero_pad", (1,), REPEAT, SUM),
        ReshardMove(4, 5, "all_reduce", (0, 1), SUM, REPEAT),
    ]
    body += [Compute("neg", (3,), (6,), (), (frozenset("x"), REPEAT))] if read_again else []
    program = Program("padded", Mesh((2, 2)), tensors, (*body, UpdateWeight(0, 5)), (6,) if read_again else (), None)
    assert plan_step(program).in_place == (set() if read_again else {5})


def test_what_a_view_is_of_is_summed_in_a_copy():
    """The second sum of a chain starts late: views were made of its operand by then, and other collectives read it."""
    whole = Tensor((8, 4), "f32", (REPEAT, REPEAT))
    tensors = {0: whole, 1: replace(whole, layout=(SUM, SUM))}
    tensors |= {8: whole} | {r: replace(whole, layout=(0, SUM)) for r in (2, 3)}
    tensors |= {r: replace(whole, layout=(0, REPEAT)) for r in (4, 5, 6, 7)}
    body = (
        Leaf("input", 0, "x"),
        Compute("neg", (0,), (1,), (), (frozenset("x"), frozenset("x"))),
        ReshardMove(1, 2, "reduce_scatter", (0,), SUM, 0),
        Compute("detach", (2,), (3,), (), ("a0", frozenset("x"))),
        Compute("neg", (0,), (8,), (), (REPEAT, REPEAT)),
        ReshardMove(2, 4, "all_reduce", (1,), SUM, REPEAT),
        Compute("relu", (4,), (5,), (), ("a0", REPEAT)),
        ReshardMove(3, 6, "all_reduce", (1,), SUM, REPEAT),
        Compute("add", (5, 6), (7,), (), ("a0", REPEAT)),
    )
    plan = plan_step(Program("viewed", Mesh((2, 2)), tensors, body, (7, 8), None), PlanOptions(kernels="torch"))
    dies = next(line.dies for line in plan.schedule.lines if line.action == body[5])
    assert 2 in dies, "the view is made later"
    assert plan.in_place == set()

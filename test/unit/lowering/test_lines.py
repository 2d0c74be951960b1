"""The step as it is printed does what its schedule says, in that order, however many moves and waits are one line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from extent import examples
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned import pinned

from unity_ir.lowering.emit.printer import emit
from unity_ir.lowering.emit.rows import MOVES
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import is_pinned
from unity_ir.plan.instructions import Compute, HaloExchange, Leaf, ReshardMove, UpdateWeight, communicates
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import schedule
from unity_ir.plan.scheduled import Bucket, Wait
from unity_ir.search import run
from unity_ir.search.baselines.random_plan import sample

Event = tuple[Any, ...]


def said(program: Program, bucket: int) -> tuple[list[Event], list[str]]:
    """What a schedule does, every value numbered in the order in which they are made, and what is returned."""
    found = schedule(program, bucket)
    numbers, values, events = numbered(), dict[int, str](), list[Event]()
    for line in found.lines:
        match line.action:
            case Leaf(op, result, name):
                values[result] = next(numbers) if op == "constant" else name
            case Compute(_, operands, results) as action:
                events.append(("compute", *(values[found.held(r)] for r in operands)))
                values.update((r, next(numbers)) for r in results)
            case Bucket(moves):
                read = tuple(values[found.held(m.operand)] for m in moves)
                events.append((f"{moves[0].kind}_many", moves[0].axes, *read))
                values.update((m.result, next(numbers)) for m in moves)
            case Wait(registers):
                events.append(("wait", *(values[r] for r in registers)))
            case ReshardMove(operand, result, "retype", _, source) if not is_pinned(source):
                values[result] = values[found.held(operand)]
            case ReshardMove(operand, result) | HaloExchange(operand, result) as action:
                kind = action.kind if communicates(action) else "local"
                events.append((kind, action.axes, values[found.held(operand)]))
                values[result] = next(numbers)
    updated = [found.held(i.grad) for i in program.body if isinstance(i, UpdateWeight)]
    return events, [values[found.held(r)] for r in (program.outputs[0], *updated)]


class Pending:
    """A collective that says when it is waited for, which is once."""

    def __init__(self, events: list[Event], made: Sequence[str], many: bool):
        self.events, self.made, self.many, self.waited = events, made, many, False

    def wait(self) -> str | Sequence[str]:
        assert not self.waited
        self.waited = True
        self.events.append(("wait", *self.made))
        return self.made if self.many else self.made[0]


class Name(str):
    """A tensor; a copy of it is called the same."""

    def clone(self) -> Name:
        return self


class Names(dict[str, Name]):
    """Weights and inputs, each read as its name."""

    def __missing__(self, name: str) -> Name:
        return Name(name)


def numbered() -> Iterator[Name]:
    return (Name(f"#{n}") for n in count())


def done(text: str) -> tuple[list[Event], list[str]]:
    """What a printed step does; what it reads must be there, and what it has left at the end it returns."""
    step = next(s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef) and s.name == "forward_backward")
    assigned = {s.lineno: s.targets[0] for s in step.body if isinstance(s, ast.Assign)}
    calls = [c for c in ast.walk(step) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)]
    events, numbers = list[Event](), numbered()

    def move(kind: str, *read: Any) -> Any:
        operands = read[0] if kind.endswith("_many") else read[:1]
        assert all(isinstance(x, str) for x in operands)
        made = [next(numbers) for _ in operands]
        if kind in ("zero_elsewhere", "keep_part", "zero_pad", "zero_pad_many"):
            events.extend(("local", read[-1], x) for x in operands)
            return tuple(made) if kind.endswith("_many") else made[0]
        events.append((kind, read[-1], *operands))
        return Pending(events, made, kind.endswith("_many"))

    def compute(*read: Any) -> Any:
        assert all(isinstance(x, str | int) for x in read)
        events.append(("compute", *(x for x in read if isinstance(x, str))))
        target = assigned[sys._getframe(1).f_lineno]  # pyright: ignore[reportPrivateUsage]
        if isinstance(target, ast.Tuple):
            return tuple(next(numbers) for _ in target.elts)
        return next(numbers)

    scope: dict[str, Any] = {}
    for call in calls:
        assert isinstance(call.func, ast.Name)
        name = call.func.id
        moves = bool(call.args) and ast.unparse(call.args[0]) == "ctx"
        scope[name] = (lambda ctx, *read, name=name: move(name, *read)) if moves else compute
    scope["constant"] = lambda ctx, *read: next(numbers)
    scope["wait"] = lambda *pending: tuple(p.wait() for p in pending)
    scope["torch"] = SimpleNamespace(float32=None, int64=None)
    source = "\n".join(text.splitlines()[step.lineno - 1 : step.end_lineno])
    # In its place in the file, for the numbers of lines.
    exec("\n" * (step.lineno - 1) + source.replace("    return ", "    return locals(), "), scope)
    ctx = SimpleNamespace(at=lambda pinned: True, index=lambda axes: 0)
    left, loss, grads = scope["forward_backward"](ctx, Names(), Names())
    returned = [loss, *grads.values()]
    assert {v for v in left.values() if isinstance(v, str) and v.startswith("#")} <= set(returned)
    assert all(v.waited for v in left.values() if isinstance(v, Pending))
    return events, returned


def small(name: str) -> Graph:
    if name == "lenet":
        return build("lenet", batch=8)
    return build("gpt2", batch=4, sequence=4, layers=1, hidden=8, heads=2, vocabulary=8)


@pytest.mark.slow
@given(st.sampled_from(["lenet", "gpt2"]), st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 64, 2**20]))
@settings(max_examples=examples(25))
def test_lines_do_what_the_schedule_says(name: str, seed: int, with_pins: bool, bucket: int):
    graph = small(name)
    plan, machine = pinned(graph, seed) if with_pins else (sample(graph, boxes(2, 2), seed), boxes(2, 2))
    program = lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)
    assert done(emit(plan_step(program, PlanOptions(kernels="torch", bucket=bucket)), graph).text) == said(
        program, bucket
    )


@pytest.mark.slow
@pytest.mark.parametrize(("where", "strategy"), [("box:8", "tofu"), ("box:8", "fsdp"), ("box:8", "data-parallel")])
def test_moves_after_each_other_are_one_line(where: str, strategy: str):
    machine = load(where)
    plan = run(build("gpt2", batch=8, sequence=8, layers=2, hidden=64, heads=8, vocabulary=64), machine, strategy).graph
    program = lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)
    text = emit(
        plan_step(program, PlanOptions(kernels="torch", bucket=1024)), erase(replace(plan, updates=(), optimizer=None))
    ).text
    assert done(text) == said(program, 1024)
    step = text[text.index("def forward_backward(") : text.index("def update(")]
    inside = [line.count("(ctx, ") for line in step.splitlines()]
    assert max(inside) <= MOVES
    assert strategy != "tofu" or max(inside) > 2
    # A wait that only the next line reads is in it.
    lines = step.splitlines()
    for line, after in pairwise(lines):
        name = line.split(" = ")[0].strip()
        if line.partition("  #")[0].rstrip().endswith(f" = {name}.wait()"):
            code, died = after.partition("  #")[0].partition("; del ")[::2]
            assert not (f"(ctx, {name}, " in code and name in died.split(", "))

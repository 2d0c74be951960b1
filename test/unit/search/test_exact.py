"""What the exact search writes out costs what it says; `test_brute.py` has that nothing is faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from random import Random

import numpy as np
import pytest
from devices import layouts
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import SMALL

from unity_ir.cost.plan import cost, update_time
from unity_ir.cost.work import work
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.reshard import cheapest_moves
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Layout,
    as_layout,
    dual,
    layout_type,
    operand_layout,
    result_layout,
)
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.exact.elimination import Factor, Projection, every, minimise, plain
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver
from unity_ir.search.layouts.axes import Ints
from unity_ir.search.layouts.limits import limited
from unity_ir.search.layouts.space import LayoutSpace, Spaces

SGD = Optimizer()
TWO, FOUR, SIX = boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6)


class Everything:
    """The least time of a graph by trying all configurations; what each value's rest or relay adds is then its own."""

    def __init__(self, graph: Graph, machine: Machine):
        self.graph, self.machine, self.mesh = graph, machine, machine.mesh
        nodes = graph.nodes()
        loss = self.before([graph.outputs[0].node])
        after: set[Node] = set()
        for node in nodes:
            if node.op == "weight" or any(v.node in after for v in node.operands):
                after.add(node)
        self.trained = loss & after
        self.operators = [n for n in nodes if n.is_compute]
        self.users = graph.users()
        self.reshard = cache(self._reshard)
        self.operator = cache(self._operator)
        self.value = cache(self._value)

    def before(self, nodes: Iterable[Node]) -> set[Node]:
        found, stack = set[Node](), list(nodes)
        while stack:
            node = stack.pop()
            found.add(node)
            stack += [v.node for v in node.operands if v.node not in found]
        return found

    def least(self) -> float:
        """Over every choice of a configuration for every operator."""
        best = float("inf")
        for choice in product(*(self.configurations(n) for n in self.operators)):
            best = min(best, self.seconds(dict(zip(self.operators, choice, strict=True))))
        return best

    def configurations(self, node: Node) -> list[Assignment]:
        """Everything each axis may do, as far as sizes divide and integers are not added up."""
        analysis = node.analysis
        may: tuple[GridRole, ...] = (*analysis.splittable, COPY, REPEAT, *analysis.carriers)
        out: list[Assignment] = []
        for ways in product(may, repeat=len(self.mesh.sizes)):
            degrees = {v: 1 for v in analysis.splittable}
            for what, size in zip(ways, self.mesh.sizes, strict=True):
                if isinstance(what, str):
                    degrees[what] *= size
            if all(analysis.bound.extents[v] % d == 0 for v, d in degrees.items()):
                out.append(ways)
        return out

    def seconds(self, ways: Mapping[Node, Assignment]) -> float:
        total = sum(self.operator(n, ways[n]) for n in self.operators)
        for node in self.graph.nodes():
            for i, value in enumerate(node.results):
                needs = tuple(
                    (user, need)
                    for user in dict.fromkeys(u for u, _ in self.users.get(value, ()))
                    for need in dict.fromkeys(
                        operand_layout(user.analysis, k, ways[user]) for k, v in enumerate(user.operands) if v == value
                    )
                )
                total += self.value(value, None if node.is_leaf else result_layout(node.analysis, i, ways[node]), needs)
        return total

    def _operator(self, node: Node, way: Assignment) -> float:
        degrees: dict[str, int] = {}
        for what, size in zip(way, self.mesh.sizes, strict=True):
            if isinstance(what, str):
                degrees[what] = degrees.get(what, 1) * size
        needs = tuple(node in self.trained and v.node in self.trained for v in node.operands)
        operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
        named = tuple((v, degrees[v]) for v in node.analysis.splittable if v in degrees)
        read = [(v, operand_layout(node.analysis, i, way)) for i, v in enumerate(node.operands)]
        same = tuple(read.index(r) for r in read)
        done = work(node.op, operands, node.attributes, named, needs, same)
        return done.forward_time(self.machine.device) + done.backward_time(self.machine.device)

    def _value(self, value: Value, made: Layout | None, needs: tuple[tuple[Node, Layout], ...]) -> float:
        """From where it is made, or wherever a leaf best rests, over the best relay, to its users."""
        trained = value.node in self.trained
        back = trained and any(u in self.trained for u, _ in needs)
        best = float("inf")
        for at in layouts(value.shape, self.mesh):
            if made is None and (COPY in at or SUM in at):
                continue
            if made is not None and len(self.users.get(value, ())) == 0:
                return 0.0
            total = sum(self.reshard(value, at, need, trained and user in self.trained) for user, need in needs)
            if made is not None:
                total += self.reshard(value, made, at, back)
            elif value.node.op == "weight" and trained:
                type = layout_type(value.type, at, self.mesh)
                total += update_time(leaf("weight", type, name="piece"), SGD, self.machine)
            best = min(best, total)
        return best

    def _reshard(self, value: Value, source: Layout, target: Layout, back: bool) -> float:
        ways = [(source, target), (dual(target), dual(source))][: 1 + back]
        dtype = value.type.dtype
        return sum(
            self.machine.move_time(m, dtype)
            for a, b in ways
            for m in cheapest_moves(a, b, value.shape, self.mesh, lambda m: self.machine.move_time(m, dtype))
        )


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TWO, FOUR, SIX, boxes(2, 2, 2, overhead=1e-6)], ids=["2", "2x2", "2x3", "2x2x2"])
@given(st.integers(0, 10**6))
@settings(max_examples=examples(25))
def test_plan_costs_what_the_search_says_and_nothing_beats_it(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 8), dims=(2, 4, 6, 12))
    solver = Solver(Spaces(machine), SGD)
    found = solver.solve(graph)
    plan = realise(graph, found, solver)
    assert erase(plan) == graph
    assert cost(plan, machine, SGD).time == pytest.approx(found.seconds, abs=1e-9)
    others = [sample(graph, machine, seed)]
    try:
        others.append(data_parallel(graph, machine))
    except UnityError:
        pass
    for other in others:
        assert cost(other, machine, SGD).time >= found.seconds - 1e-9


def named(roles: Sequence[GridRole], counts: Ints) -> Assignment:
    """The role each axis has, on a machine searched axis by axis."""
    return tuple(roles[int(row.argmax())] for row in counts)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TWO, FOUR, SIX], ids=["2", "2x2", "2x3"])
@given(st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_any_choice_costs_the_sum_of_its_terms(machine: Machine, seed: int):
    """Configurations, rests and relays at random: the plan written out puts everything where it was chosen."""
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 6), dims=(2, 4, 6, 12))
    problem, solver, users = Everything(graph, machine), Solver(Spaces(machine), SGD), graph.users()
    rows: dict[Node, int] = {}
    ways: dict[Node, Assignment] = {}
    at: dict[Value, int] = {}
    for node in graph.nodes():
        if not node.is_leaf:
            table = solver.table(node, problem.trained)
            rows[node] = random.randrange(len(table))
            ways[node] = named(table.roles, table.counts[rows[node]])
        for value in node.results:
            if node.is_leaf:
                at[value] = random.choice(np.flatnonzero(np.isfinite(solver.rest(node, problem.trained))).tolist())
            elif len(users.get(value, ())) > 1:
                at[value] = random.randrange(len(solver.space(value)))
    total = sum(problem.operator(n, ways[n]) for n in problem.operators)
    for node in graph.nodes():
        trained = node in problem.trained
        for i, value in enumerate(node.results):
            made = None if node.is_leaf else result_layout(node.analysis, i, ways[node])
            where = made
            if value in at:
                roles = (*range(len(value.shape)), COPY, SUM, REPEAT)
                where = as_layout(named(roles, solver.space(value).counts[at[value]]))
            assert where is not None
            needs: dict[Layout, set[Node]] = {}
            for user, k in users.get(value, ()):
                needs.setdefault(operand_layout(user.analysis, k, ways[user]), set()).add(user)
            for need, by in needs.items():
                total += problem.reshard(value, where, need, trained and bool(by & problem.trained))
            if made is not None and value in at:
                back = trained and any(by & problem.trained for by in needs.values())
                total += problem.reshard(value, made, where, back)
            if node.op == "weight" and trained:
                type = layout_type(value.type, where, machine.mesh)
                total += update_time(leaf("weight", type, name="piece"), SGD, machine)
    plan = realise(graph, ExactPlan(0.0, rows, at), solver)
    assert cost(plan, machine, SGD).time == pytest.approx(total, abs=1e-10)


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=examples(5))
def test_on_larger_machines_the_search_is_a_bound(seed: int):
    machine = boxes(2, 2, 2, 2, overhead=1e-6)
    graph = random_graph(Random(seed), 3, dims=(4, 16))
    solver = Solver(Spaces(machine), SGD)
    found = solver.solve(graph)
    plan = realise(graph, found, solver)
    assert erase(plan) == graph
    assert cost(plan, machine, SGD).time >= found.seconds - 1e-9
    assert cost(sample(graph, machine, seed), machine, SGD).time >= found.seconds - 1e-9


@pytest.mark.parametrize("machine", [TWO, FOUR], ids=["2", "2x2"])
@given(st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_tables_hold_every_configuration(machine: Machine, seed: int):
    graph = random_graph(Random(seed), 3, dims=(2, 4, 6, 12))
    problem, solver = Everything(graph, machine), Solver(Spaces(machine), SGD)
    for node in problem.operators:
        table = solver.table(node, problem.trained)
        rows = {tuple(n[i] for n in (*table.operands, *table.results)): s for i, s in enumerate(table.seconds)}
        assert len(rows) == len(table)
        best: dict[tuple[int, ...], float] = {}
        for way in problem.configurations(node):
            made = [(v, result_layout(node.analysis, i, way)) for i, v in enumerate(node.results)]
            needed = [(v, operand_layout(node.analysis, i, way)) for i, v in enumerate(node.operands)]
            key = tuple(number(solver.space(v), layout) for v, layout in (*needed, *made))
            best[key] = min(best.get(key, np.inf), problem.operator(node, way))
        assert rows == pytest.approx(best, rel=1e-12)


def number(space: LayoutSpace, layout: Layout) -> int:
    """The number of a layout in a space of a machine searched axis by axis."""
    roles = [space.role(r) for r in layout]
    return int(space.find(np.array([[[int(c == r) for c in range(space.roles)] for r in roles]]))[0])


def test_branch_without_loss_costs_no_way_back():
    """Rows are worth dividing; the branch must bring them together, but nothing comes back from it."""
    machine = boxes(2, bandwidth=1e13)
    x, y = (leaf("input", tensor_type(s, "f64"), name=n) for s, n in [((64, 999), "x"), ((64, 3), "y")])
    h = apply("matmul", [x.result, leaf("weight", tensor_type((999, 3), "f64"), name="w").result]).result
    loss, side = apply("mse", [h, y.result]).result, apply("concat", [h, h], {"dim": 0}).result
    graph = Graph("f", (x, y), (loss, side))
    solver = Solver(Spaces(machine), SGD)
    found = solver.solve(graph)
    assert found.seconds == pytest.approx(Everything(graph, machine).least(), abs=1e-11)
    plan = realise(graph, found, solver)
    assert cost(plan, machine, SGD).time == pytest.approx(found.seconds, abs=1e-11)
    assert cost(differentiate(plan, SGD, machine.mesh), machine).elements == cost(plan, machine).elements


def test_weight_that_is_only_an_output_rests_somewhere():
    x = leaf("input", tensor_type((4, 4), "f64"), name="x")
    v, w = (leaf("weight", tensor_type((4, 4), "f64"), name=n).result for n in "vw")
    graph = Graph("part", (x,), (apply("matmul", [x.result, v]).result, w))
    solver = Solver(Spaces(TWO), SGD)
    found = solver.solve(graph)
    plan = realise(graph, found, solver)
    assert erase(plan) == graph
    assert cost(plan, TWO, SGD).time == pytest.approx(found.seconds, abs=1e-9)


def classes(random: np.random.Generator, size: int) -> Projection:
    """Some projection of a variable; often one that tells none of its values apart."""
    if random.random() < 0.3:
        return Projection(np.zeros(size, int), 1)
    _, at = np.unique(random.integers(0, size, size), return_inverse=True)
    return Projection(at, int(at.max()) + 1)


def test_elimination_of_a_variable_with_more_neighbours_than_an_array_has_dims():
    alone = Projection(np.zeros(2, int), 1)
    few = [Factor((0, v), (every(2), alone), np.array([[5.0], [2.0]])) for v in range(1, 80)]
    costs = [plain((v,), np.array([3.0, 1.0])) for v in range(80)]
    least, found = minimise(dict.fromkeys(range(80), 2), [*few, *costs])
    assert least == 2 * 79 + 80
    assert found == dict.fromkeys(range(80), 1)


@given(st.integers(0, 10**6), st.sampled_from([1, 4, 2**16]))
@settings(max_examples=examples(200))
def test_elimination_finds_the_least_sum(seed: int, near: int):
    random = np.random.default_rng(seed)
    sizes = {v: int(random.integers(1, 4)) for v in range(int(random.integers(1, 6)))}
    factors: list[Factor] = []
    for _ in range(int(random.integers(0, 7))):
        variables = tuple(int(v) for v in random.permutation(len(sizes))[: random.integers(0, 4)])
        axes = tuple(classes(random, sizes[v]) for v in variables)
        table = random.integers(0, 9, [axis.size for axis in axes]).astype(float)
        table[random.random(table.shape) < 0.1] = np.inf
        factors.append(Factor(variables, axes, table))

    def total(choice: Mapping[int, int]) -> float:
        return float(sum(f.table[places(f, choice)] for f in factors))

    def places(factor: Factor, choice: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(int(axis.at[choice[v]]) for v, axis in zip(factor.variables, factor.axes, strict=True))

    best = min(total(dict(enumerate(c))) for c in product(*(range(s) for s in sizes.values())))
    with limited(cached_sums=near, dominance_entries=near):
        least, found = minimise(sizes, factors)
    assert least == best
    assert found.keys() == sizes.keys()
    assert all(0 <= found[v] < size for v, size in sizes.items())
    assert total(found) == best


def test_ids_that_are_picked_with_values_have_no_gradient_to_move():
    """`topk` makes values, which have a gradient, and their ids, which have none: the search moves those once."""
    graph = build("moe", **SMALL["moe"])
    builder = FactorGraphBuilder(Solver(Spaces(boxes(2, 2)), Optimizer()), graph)
    seen: dict[str, set[bool]] = {}
    for node in graph.nodes():
        for value in node.operands:
            if value.node.op == "topk":
                seen.setdefault(value.type.dtype, set()).add(builder.training(value, [node]))
    assert seen == {"f32": {True}, "i64": {False}}

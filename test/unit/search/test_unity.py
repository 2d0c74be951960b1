"""Unity's search: mappings are optimal, plans valid, and switches change nothing but the time."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from graphs import RandomGraph, boxes, data_for, random_graph
from zoo import SMALL

from unity_ir.machine.model import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import Node, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import SUM, operand_layout, pins_of, place, result_layout
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.algebraic import algebraic
from unity_ir.rules.derivation import replay
from unity_ir.search import run
from unity_ir.search.unity.device_shares import Degrees, Share, divisors, roles, splits, views
from unity_ir.search.unity.machine_mapping import Mapper, Subgraph
from unity_ir.search.unity.search import Options, unity
from unity_ir.search.unity.series_parallel import Block, DirectEdge, Parallel, Region, Sequence
from unity_ir.search.unity.split import ENTRY, partitionings, subgraphs
from unity_ir.search.unity.substitutions import Substitutions, corresponding
from unity_ir.search.unity.view_costs import ViewCosts


def random_degrees(random: Random, piece: Subgraph, devices: int) -> dict[Node, Degrees]:
    """Any degrees that fit: as many random steps as there are operators."""
    substitutions = Substitutions((), devices)
    found: dict[Node, Degrees] = {}
    for node in piece.flow.nodes:
        may = [(), *substitutions.degrees(node, ())]
        found[node] = random.choice(may)
    return found


# --- mapping


def believed(mapper: Mapper, piece: Subgraph, degrees: dict[Node, Degrees], chosen: dict[Node, int]) -> float:
    """Seconds of one way to map everything to the whole machine, one operator after another: all prices summed up."""
    share = mapper.prices.machine.mesh.sizes
    of = {n: mapper.of(piece, n, degrees[n], share) for n in piece.flow.nodes}
    total = sum(float(of[n].seconds[chosen[n]]) for n in of)
    for node in of:
        brought = {(v, of[node].needs[i][chosen[node]]) for i, v in enumerate(node.operands) if v.node.is_compute}
        for value, need in brought:
            made = of[value.node].makes[value.index][chosen[value.node]]
            gradient = value.node in piece.trained and node in piece.trained
            total += mapper.prices.move(value.type, made, need, gradient)
    return total


@pytest.mark.slow
def test_a_mapping_costs_as_little_as_any_without_branches_at_once():
    seen = dict.fromkeys((DirectEdge, Sequence, Parallel, Block), 0)

    def count(region: Region) -> None:
        seen[type(region)] += 1
        match region:
            case Sequence(left, _, right):
                count(left)
                count(right)
            case Parallel(first, rest):
                count(first)
                count(rest)
            case _:
                pass

    checked = 0
    for seed in range(60):
        random = Random(seed)
        graph, machine = random_graph(random, 4, dims=(4, 8)), boxes(2, 2, overhead=1e-6)
        piece, mapper = Subgraph(graph), Mapper(ViewCosts(machine, Optimizer()))
        degrees = random_degrees(random, piece, 4)
        share = machine.mesh.sizes
        counts = {n: len(mapper.of(piece, n, degrees[n], share)) for n in piece.flow.nodes}
        if np.prod(list(counts.values())) > 3000 or any(splitting(piece, mapper, degrees)):
            continue
        checked += 1
        count(piece.region)
        best = min(
            believed(mapper, piece, degrees, dict(zip(counts, way, strict=True)))
            for way in product(*map(range, counts.values()))
        )
        assert mapper.costs(piece, degrees)[0, 0] == pytest.approx(best, rel=1e-9)
        ways = mapper.views(piece, degrees)
        of = {n: mapper.of(piece, n, degrees[n], share).assignments.index(ways[n]) for n in counts}
        assert believed(mapper, piece, degrees, of) == pytest.approx(best, rel=1e-9)
    assert checked > 20
    assert all(seen.values()), seen


def splitting(piece: Subgraph, mapper: Mapper, degrees: dict[Node, Degrees]) -> list[Region]:
    """The parallel regions whose sides would fit on parts of the machine."""
    machine, found = mapper.prices.machine, list[Region]()

    def fits(region: Region, share: Share) -> bool:
        return all(len(mapper.of(piece, n, degrees[n], share)) for n in region.inner)

    def walk(region: Region) -> None:
        match region:
            case Sequence(left, _, right):
                walk(left)
                walk(right)
            case Parallel(first, rest):
                walk(first)
                walk(rest)
                ways = splits(machine.mesh.sizes, machine.mesh.sizes, machine.axis_levels)
                if first.inner and rest.inner and any(fits(first, a) and fits(rest, b) for _, a, b in ways):
                    found.append(region)
            case _:
                pass

    walk(piece.region)
    return found


def towers(count: int, rows: int = 256) -> Graph:
    """Products of their own on one input, added up."""
    x, y = (leaf("input", tensor_type((rows, 64), "f32"), name=n) for n in "xy")
    made = None
    for i in range(count):
        h = x.result
        for j in range(3):
            w = leaf("weight", tensor_type((64, 64), "f32"), name=f"w{i}.{j}").result
            h = apply("matmul", [h, w]).result
        made = h if made is None else apply("add", [made, h]).result
    assert made is not None
    return Graph("towers", (x, y), (apply("mse", [made, y.result]).result,))


def test_branches_at_once_take_as_long_as_the_longest():
    graph, machine = towers(3), boxes(3, bandwidth=1e13)
    piece, mapper = Subgraph(graph), Mapper(ViewCosts(machine, Optimizer()))
    ways = mapper.views(piece, {})
    where = {tuple(pins_of(ways[n])) for n in piece.flow.nodes if n.op == "matmul"}
    assert where == {((0, 0),), ((0, 1),), ((0, 2),)}
    alone = mapper.costs(Subgraph(towers(1)), {})[0, 0]
    together = mapper.costs(piece, {})[0, 0]
    # Beside one tower: the moves of what is added up, and the sums.
    assert alone < together < 2 * alone


def test_views_make_the_degrees():
    for seed in range(40):
        random = Random(seed)
        machine = boxes(*random.choice([(2, 2), (4, 3), (2, 3, 2), (8, 2)]))
        sizes, devices = machine.mesh.sizes, machine.devices
        first = random.choice(divisors(devices))
        second = random.choice(divisors(devices // first))
        degrees: Degrees = tuple((v, d) for v, d in (("m", first), ("n", second)) if d > 1)
        found = views(degrees, sizes, sizes, machine.axis_levels)
        assert found
        assert len(set(found)) == len(found)
        for view in found:
            for role, degree in degrees:
                assert np.prod([s for s, r in zip(sizes, view, strict=True) if r == role]) == degree
        half = (1, *sizes[1:])
        for view in views(degrees, half, sizes, machine.axis_levels):
            assert pins_of(view) == ((0, 0),)


# --- plans


def gradients(graph: Graph) -> dict[str, np.ndarray]:
    inputs, weights = data_for(graph)
    serial = differentiate(graph, Optimizer())
    whole = interpret(serial, inputs, weights)
    return {u.weight.node.name: whole[u.grad] for u in serial.updates}


def check_gradients(graph: Graph, plan: Graph, machine: Machine) -> None:
    inputs, weights = data_for(graph)
    expected = gradients(graph)
    step = differentiate(plan, Optimizer(), machine.mesh)
    pieces = interpret_pieces(step, inputs, weights)
    for u in step.updates:
        got = join(pieces[u.grad], u.grad.type)
        np.testing.assert_allclose(got, expected[u.weight.node.name], rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("options", [Options(budget=5), Options(budget=5, least=2), Options(budget=5, split=False)])
def test_any_plan_has_the_serial_gradients(options: Options):
    cut = 0
    for seed in range(12):
        graph, machine = random_graph(Random(seed), 6, dims=(4, 8)), boxes(2, 2)
        cut += len(subgraphs(graph, machine, algebraic(), options.least)) > 1
        found = unity(graph, machine, algebraic(), Optimizer(), options)
        assert erase(found.graph).outputs == found.rewritten.outputs
        assert replay(graph, found.derivation).outputs == found.rewritten.outputs
        check_gradients(graph, found.graph, machine)
    assert cut > 5 or options.least > 2


def test_branches_placed_apart_have_the_serial_gradients():
    graph, machine = towers(2, rows=7), boxes(2, bandwidth=1e13)
    found = unity(graph, machine, (), Optimizer())
    assert any(pins_of(r) for r in place(found.graph, machine.mesh).assignments.values())
    check_gradients(graph, found.graph, machine)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert_large", "dlrm", "nmt", "moe"])
def test_plans_of_the_zoo_are_of_their_model(model: str):
    serial, machine = build(model, **{**SMALL[model], "batch": 8}), boxes(2, 2)
    found = unity(serial, machine, algebraic(), Optimizer(), Options(budget=1))
    assert erase(found.graph).outputs == found.rewritten.outputs
    assert replay(serial, found.derivation).outputs == found.rewritten.outputs
    assert found.seconds > 0


@pytest.mark.slow
def test_the_cache_changes_nothing():
    for graph in (build("mlp", batch=64, hidden=64, layers=8, classes=64), random_graph(Random(3), 6, dims=(4, 8))):
        for least in (2, 10):
            plans = [
                unity(graph, boxes(2, 2), algebraic(), Optimizer(), Options(budget=10, least=least, cache=cache))
                for cache in (True, False)
            ]
            assert plans[0].graph.outputs == plans[1].graph.outputs
            assert plans[0].derivation == plans[1].derivation
            assert plans[0].seconds == plans[1].seconds


@pytest.mark.slow
def test_a_chain_of_products_ends_as_the_joint_search_has_it():
    graph = build("mlp", batch=64, hidden=256, layers=8, classes=64)
    for machine in (boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6)):
        best = run(graph, machine, "joint").cost.time
        assert best * (1 - 1e-9) <= run(graph, machine, "unity").cost.time <= 1.05 * best


# --- splitting


def test_subgraphs_put_together_are_the_graph():
    for seed in range(20):
        graph = random_graph(Random(seed), 8, dims=(4, 8))
        found = subgraphs(graph, boxes(2, 2), algebraic(), 2)
        assert sum(len(p.flow.nodes) for p in found) == len(Subgraph(graph).flow.nodes)
        assert all(len(p.flow.nodes) >= 2 for p in found)
        for before, after in pairwise(found):
            assert before.exits == after.entries
            assert after.entry is not None
            assert after.entry.name == ENTRY
            assert before.graph.outputs[0].type == after.entry.types[0]


def test_partitionings_have_no_replicas():
    for layout in partitionings((12, 8), boxes(2, 3)):
        assert SUM not in layout
        for dim, size in enumerate((12, 8)):
            assert size % np.prod([s for s, r in zip((2, 3), layout, strict=True) if r == dim]) == 0
    assert len(partitionings((12, 8), boxes(2, 3))) == 1 + 3 + 1 + 1


def test_operators_that_remain_are_found_again():
    rewritten = 0
    for seed in range(30):
        graph = RandomGraph(Random(seed), 8, dims=(4, 8)).graph()
        for rule in algebraic():
            for _, after in rule.applications(graph):
                rewritten += 1
                same = corresponding(graph, after)
                assert set(same) <= set(after.nodes())
                for new, old in same.items():
                    assert (new.op, new.attributes, new.types) == (old.op, old.attributes, old.types)
    assert rewritten > 10


def test_what_an_operator_needs_and_makes_follows_from_its_view():
    piece, mapper = Subgraph(towers(1)), Mapper(ViewCosts(boxes(2, 2), Optimizer()))
    for node in piece.flow.nodes:
        for role in roles(node):
            found = mapper.of(piece, node, ((role, 2),), (2, 2))
            for i, view in enumerate(found.assignments):
                assert found.needs[0][i] == operand_layout(node.analysis, 0, view)
                assert found.makes[0][i] == result_layout(node.analysis, 0, view)


@pytest.mark.slow
def test_what_is_kept_of_one_graph_is_right_for_another():
    machine = boxes(2, 2, overhead=1e-6)
    shared = Mapper(ViewCosts(machine, Optimizer()))
    blocks = 0
    for seed in range(60):
        random = Random(seed)
        graph = random_graph(random, 6, dims=(4, 8)) if seed % 2 else tangled(random)
        degrees = random_degrees(random, Subgraph(graph), 4)
        if not seed % 2:
            # Alike in all but what flows where.
            degrees = {n: ((roles(n)[0], 2),) for n in degrees}
        alone = Mapper(ViewCosts(machine, Optimizer()))
        blocks += isinstance(Subgraph(graph).region, Sequence)
        assert shared.costs(Subgraph(graph), degrees) == alone.costs(Subgraph(graph), degrees)
    assert blocks > 10


def tangled(random: Random) -> Graph:
    """A graph that is not series-parallel, of products of what is there, in any order."""
    x, y = (leaf("input", tensor_type((8, 8), "f32"), name=n) for n in "xy")
    w = leaf("weight", tensor_type((8, 8), "f32"), name="w").result
    values = [apply("matmul", [x.result, w]).result]
    for _ in range(5):
        pair = [values[-1], random.choice(values[-3:])]
        random.shuffle(pair)
        values.append(apply("matmul", pair).result)
    return Graph("tangled", (x, y), (apply("mse", [values[-1], y.result]).result,))

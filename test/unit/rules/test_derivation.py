"""Derivations: what a joint search did can be done again, from text."""

from __future__ import annotations

from random import Random

import pytest
from graphs import boxes, random_graph

from unity_ir.errors import UnityError
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.striped import striped
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.algebraic import algebraic
from unity_ir.rules.derivation import RuleApplication, parse_derivations, replay, stripe_step
from unity_ir.rules.rule import substitute
from unity_ir.search.joint.best_first import joint


def heads() -> Graph:
    """A perceptron of three layers with two heads, whose results are put together."""
    x, y = (leaf("input", tensor_type(s, "f32"), name=n).result for s, n in [((4096, 512), "x"), ((4096, 60), "y")])
    value = x
    for i in range(3):
        w = leaf("weight", tensor_type((512, 512), "f32"), name=f"w{i}").result
        value = apply("relu", [apply("matmul", [value, w]).result]).result
    parts = [leaf("weight", tensor_type((512, 30), "f32"), name=n).result for n in "ab"]
    both = apply("concat", [apply("matmul", [value, w]).result for w in parts], {"dim": 1}).result
    return Graph("heads", (x.node, y.node), (apply("mse", [both, y]).result,))


@pytest.mark.slow
def test_replay_of_a_search_is_what_it_rewrote_to():
    lengths, together = set[int](), set[int]()
    for graph in (heads(), *(random_graph(Random(seed), 6, dims=(4, 8)) for seed in range(16))):
        plan = joint(graph, boxes(2, 2, overhead=1e-6), algebraic(), Optimizer())
        text = f"@{graph.name}\n" + "\n".join(map(str, plan.derivation))
        again = replay(graph, parse_derivations(text, "d.txt")[graph.name])
        assert again == plan.rewritten
        lengths.add(len(plan.derivation))
        together.add(max((step.at.count("#") for step in plan.derivation), default=0))
    assert lengths == {0, 1, 3}
    assert together == {0, 2, 3}


def test_every_application_has_a_place_of_its_own():
    for seed in range(40):
        graph = random_graph(Random(seed), 10, dims=(2, 4))
        for rule in algebraic():
            found = list(rule.applications(graph))
            assert len({place for place, _ in found}) == len(found)
            for place, after in found:
                assert replay(graph, [RuleApplication(rule.name, place)]) == after


def test_places_at_once_are_one_after_the_other():
    several = 0
    for seed in range(40):
        graph = random_graph(Random(seed), 30, dims=(2, 4))
        for rule in algebraic():
            found = rule.together(graph)
            if found is None or len(found[0]) < 2:
                continue
            places, after = found
            assert replay(graph, [RuleApplication(rule.name, ", ".join(places))]) == after
            nodes = graph.nodes()
            rest = [nodes[int(place.partition("#")[2])] for place in places]
            one = graph
            for left in range(len(rest), 0, -1):
                # What is applied later in the order of nodes leaves the places before it as they are.
                place = f"{rest[left - 1].op}#{one.nodes().index(rest[left - 1])}"
                one = replay(one, [RuleApplication(rule.name, place)])
            assert one.outputs == after.outputs
            several += 1
    assert several > 8


def test_replacements_that_need_each_other_are_not_made_at_once():
    x, y = (leaf("input", tensor_type((4, 4), "f32"), name=n).result for n in "xy")
    a, b = apply("relu", [x]).result, apply("tanh", [y]).result
    first, second = apply("neg", [a]).result, apply("neg", [b]).result
    graph = Graph("f", (x.node, y.node), (first, second))
    assert substitute(graph, {a: apply("tanh", [second]).result}, {b: apply("relu", [y]).result}) is not None
    assert substitute(graph, {a: apply("tanh", [second]).result}, {b: apply("relu", [first]).result}) is None


def test_text():
    text = (
        "// all\nfuse-activation at relu#4, relu#9 // here\n\n"
        "@f\n  merge-matmuls at matmul#3.2\n@g\na.b at c#1 with d=2, e=3\n"
    )
    assert parse_derivations(text, "d.txt") == {
        "": [RuleApplication("fuse-activation", "relu#4, relu#9")],
        "f": [RuleApplication("merge-matmuls", "matmul#3.2")],
        "g": [RuleApplication("a.b", "c#1", (("d", 2), ("e", 3)))],
    }


@pytest.mark.parametrize(
    "line",
    [
        "fuse-activation",
        "fuse-activation at relu",
        "fuse activation at relu#4",
        "a at b#4.",
        "a at b#4,",
        "a at b#4.2, b#5",
    ],
)
def test_malformed(line: str):
    with pytest.raises(UnityError, match=r"^d\.txt:2: `.*` is no step of a derivation; write `rule at operator#3`$"):
        parse_derivations(f"@f\n{line}\n", "d.txt")


@pytest.mark.parametrize("given", ["d", "d=0", "d=x", "=2", "d=2;e=3"])
def test_malformed_values(given: str):
    with pytest.raises(UnityError, match=r"^d\.txt:1: '.*' gives no values; write d=2,e=4, with numbers from 1$"):
        parse_derivations(f"a at b#1 with {given}", "d.txt")


def test_tokens_in_striped_order():
    """A transformation of the whole graph, at no operator."""
    graph = build("gpt2", batch=1, sequence=16, layers=1, hidden=8, heads=2, vocabulary=8)
    steps = parse_derivations("stripe-sequence with stripes=4,block=2\nstripe-sequence with stripes=2", "d.txt")[""]
    assert [str(step) for step in steps] == [
        "stripe-sequence with stripes=4,block=2",
        "stripe-sequence with stripes=2",
    ]
    assert str(stripe_step(4, 2)) == str(steps[0])
    assert replay(graph, steps[:1]) == striped(graph, 4, 2)
    assert replay(graph, steps[1:]) == striped(graph, 2)
    with pytest.raises(UnityError, match=r"^step 2: stripes: they balance causal attention"):
        replay(graph, [*steps[:1], *steps[:1]])
    for given in ("", " with block=2", " with stripes=2,d=2"):
        with pytest.raises(UnityError, match=r"^step 1: stripe-sequence: takes stripes, and perhaps block; write "):
            replay(graph, parse_derivations(f"stripe-sequence{given}", "d.txt")[""])


def test_steps_of_hybrid_rules():
    x, w = (leaf("input", tensor_type((4, 4), "f32"), name=n).result for n in "xw")
    graph = Graph("f", (x.node, w.node), (apply("matmul", [x, w]).result,))
    step = RuleApplication("divide-matmul.sum", "matmul#2", (("d", 4),))
    assert parse_derivations(str(step), "d.txt") == {"": [step]}
    after = replay(graph, [step])
    assert [n.attribute("by") for n in after.nodes() if n.op == "reduce"] == [4]
    assert erase(after) == graph


def test_steps_that_cannot_be_done():
    x, w = (leaf("input", tensor_type((4, 4), "f32"), name=n).result for n in "xw")
    graph = Graph("f", (x.node, w.node), (apply("relu", [apply("matmul", [x, w]).result]).result,))
    fuse = RuleApplication("fuse-activation", "relu#3")
    with pytest.raises(UnityError, match=r"^step 1: unknown rule fuse; did you mean "):
        replay(graph, [RuleApplication("fuse", "relu#3")])
    with pytest.raises(
        UnityError, match=r"^step 1: fuse-activation: does not apply at relu#2 of @f; it applies at relu#"
    ):
        replay(graph, [RuleApplication("fuse-activation", "relu#2")])
    with pytest.raises(
        UnityError, match=r"^step 1: fuse-activation: does not apply at relu#2 of @f; it applies at relu#3$"
    ):
        replay(graph, [RuleApplication("fuse-activation", "relu#3, relu#2")])
    with pytest.raises(UnityError, match=r"^step 1: fuse-activation: does not apply at 2 places at once of @f; it "):
        replay(graph, [RuleApplication("fuse-activation", "relu#3, relu#3")])
    with pytest.raises(
        UnityError, match=r"^step 2: fuse-activation: does not apply at relu#3 of @f; it applies nowhere$"
    ):
        replay(graph, [fuse, fuse])

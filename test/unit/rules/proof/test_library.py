"""The rules of the library: proved for all sizes, right on physical shards, unproved as soon as they are changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from extent import examples

from unity_ir.ops import operator
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import Node, Value, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.parallel import PARALLEL_OPERATORS, type_steps
from unity_ir.pcg.types import TensorType
from unity_ir.rules.library import all_substitutions
from unity_ir.rules.pattern import ELEMENTS, Bindings, Input, Operation, ResultOf, Substitution, Term, build, input_type
from unity_ir.rules.poly import Poly
from unity_ir.rules.proof.prove import prove
from unity_ir.rules.proof.sides import samples
from unity_ir.rules.trust import proof_of
from unity_ir.tdl.functions import Array

RULES = {rule.name: rule for rule in all_substitutions()}


TIES = {
    "max-pool2d-of-relu",
    "relu-of-max-pool2d",
    "relu-of-reduce-max",
    "reduce-of-reduce.max",
    "reduce-of-concat.max",
}
"""Rules whose gradients are not shown to be equal where several elements are the maximum."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_proved(name: str):
    proof = prove(RULES[name])
    assert proof.verdict == ("almost everywhere" if name in TIES else "proved"), proof.detail
    # Searches believe the verdicts that are kept with the library.
    assert proof_of(RULES[name]).verdict == proof.verdict


# --- physical shards -------------------------------------------------------------------------------------------------


def typed(value: Value, type: TensorType) -> Value:
    for op, attributes in type_steps(value.type, type):
        value = parallel(op, value, None, **attributes).result
    return value


def with_gradients(side: tuple[Term, ...], rule: Substitution, bindings: Bindings) -> tuple[Graph, tuple[Value, ...]]:
    """A side's results, and the gradients of its inputs from those of the results."""
    leaves: dict[str, Node] = {}
    inputs: dict[str, Value] = {}
    for i in rule.inputs:
        type = input_type(i, ELEMENTS[i.elements][0], bindings)
        leaves[i.name] = leaf("weight" if i.elements == "float" else "input", type.serial, name=i.name)
        inputs[i.name] = typed(leaves[i.name].result, type)
    results = build(side, inputs, bindings)
    loss: Value | None = None
    for n, result in enumerate(results):
        g = leaf("input", result.type.serial, name=f"g{n}").result
        (product,) = operator("mul")(typed(result, result.type.serial), g)
        (term,) = operator("reduce_sum")(product, dim=0, count=len(result.shape))
        (loss,) = (term,) if loss is None else operator("add")(loss, term)
    assert isinstance(loss, Value)
    graph = differentiate(Graph("side", (), (loss, *results)), Optimizer())
    own = tuple(n for n in graph.nodes() if n.op == "input")
    return replace(graph, inputs=own), results


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_both_sides_are_equal_on_physical_shards(name: str):
    """Piece by piece, forward and gradient, at random sizes and degrees."""
    rule = RULES[name]
    for seed, bindings in enumerate(samples(rule, examples(3), seed=7)):
        random = np.random.default_rng(seed)
        arrays: dict[str, Array] = {}
        found: list[dict[str, Array]] = []
        for side in (rule.source, rule.target):
            graph, results = with_gradients(side, rule, bindings)
            for node in (*graph.inputs, *graph.weights()):
                (type,) = node.types
                made = random.integers(0, 2, type.shape) if type.is_integer else random.standard_normal(type.shape)
                arrays.setdefault(node.name, made)
            # A window of padding only has no maximum, and infinities have no sum.
            with np.errstate(invalid="ignore"):
                pieces, whole = interpret_pieces(graph, arrays, arrays), interpret(graph, arrays, arrays)
            values = {f"result {i}": v for i, v in enumerate(results)}
            values |= {u.weight.node.name: u.grad for u in graph.updates}
            for value in values.values():
                np.testing.assert_allclose(join(pieces[value], value.type), whole[value], rtol=1e-9, atol=1e-9)
            found.append({key: join(pieces[v], v.type) for key, v in values.items()})
        # A side that does not read an input has a gradient of 0 for it.
        for key in found[0].keys() | found[1].keys():
            a, b = (of.get(key, np.zeros(())) for of in found)
            np.testing.assert_allclose(*np.broadcast_arrays(a, b), rtol=1e-8, atol=1e-9, err_msg=f"{key} at {bindings}")


# --- mutants ---------------------------------------------------------------------------------------------------------

COMMUTATIVE = ("add", "mul", "maximum", "minimum")
OTHER = {
    "add": "mul",
    "mul": "add",
    "relu": "exp",
    "exp": "relu",
    "reduce_max": "reduce_sum",
    "reduce_sum": "reduce_max",
}
OTHER |= {"partition": "combine", "combine": "partition", "replicate": "zero_pad", "reduce": "pick", "maximum": "add"}


def mutants(rule: Substitution) -> Iterator[tuple[str, Substitution]]:
    """The rule with one thing changed in its target: operands exchanged, another operator, dim, size or degree."""

    def rewritten(old: Operation, new: Operation) -> Substitution:
        made: dict[int, Operation] = {}

        def term(t: Term) -> Term:
            if isinstance(t, Input):
                return t
            key = id(t.operation)
            if key not in made:
                of = new if t.operation is old else t.operation
                made[key] = replace(of, operands=tuple(map(term, of.operands)))
            return replace(t, operation=made[key])

        return replace(rule, target=tuple(map(term, rule.target)))

    for operation in rule.operations(rule.target):
        name, operands = operation.op, operation.operands
        if len(operands) == 2 and operands[0] is not operands[1] and name not in COMMUTATIVE:
            yield f"{name}: operands", rewritten(operation, replace(operation, operands=operands[::-1]))
        if name in OTHER:
            yield f"{name}: {OTHER[name]}", rewritten(operation, replace(operation, op=OTHER[name]))
        for i, (attribute, value) in enumerate(operation.attributes):
            if isinstance(value, Poly):
                for by in (1, -1):
                    changed = (*operation.attributes[:i], (attribute, value + by), *operation.attributes[i + 1 :])
                    yield f"{name}: {attribute} {by:+}", rewritten(operation, replace(operation, attributes=changed))
    if len(rule.target) == 2 and all(isinstance(t, ResultOf) for t in rule.target):
        yield "results", replace(rule, target=rule.target[::-1])


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_no_mutant_is_proved(name: str):
    survivors: list[str] = []
    for what, mutant in mutants(RULES[name]):
        if prove(mutant).forward:
            survivors.append(what)
    assert survivors == []


def test_mutants_are_many():
    assert sum(1 for rule in RULES.values() for _ in mutants(rule)) >= 200


def test_parallel_operators_are_among_the_rules():
    used = {o.op for rule in RULES.values() for o in rule.operations((*rule.source, *rule.target))}
    assert {"partition", "combine", "replicate", "reduce"} <= used & PARALLEL_OPERATORS.keys()

"""The matcher: it finds what trying every choice of operators finds, and only what may be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from random import Random

import numpy as np
import pytest
from graphs import data_for, random_cnn, random_graph

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Node, Value, apply, leaf, parallel
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.check import attribute_defaults, free
from unity_ir.rules.library import all_substitutions, family, find
from unity_ir.rules.match import COMMUTATIVE, Match, OpIndex, matches
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Input, ResultOf, Substitution, build
from unity_ir.rules.rule import Rule, substitute
from unity_ir.rules.solve import solve


def x(*shape: int, name: str = "x", dtype: str = "f64", degrees: tuple[int, ...] | None = None, sum: int = 1) -> Value:
    return leaf("input", tensor_type(shape, dtype, degrees, sum), name=name).result


def op(name: str, *operands: Value, **attributes: float | str | tuple[int, ...]) -> Value:
    return apply(name, operands, attributes).results[0]


def graph(*outputs: Value) -> Graph:
    leaves = [n for n in OpIndex(Graph("f", (), outputs)).nodes if n.op == "input"]
    return Graph("f", tuple(leaves), outputs)


def found(name: str, *outputs: Value, **given: int) -> list[Match]:
    """The matches of a rule of the library in the graph of some outputs."""
    return list(find(name).matches(graph(*outputs), given))


def rule(text: str) -> Substitution:
    return parse_rules(text)[0]


# Against trying everything


def exhaustive(rule: Substitution, index: OpIndex) -> set[frozenset[tuple[Value, Value]]]:
    """What a rule replaces by what, found by trying every operator for each of the pattern's, in every order."""
    operations = rule.operations(rule.source)
    out: set[frozenset[tuple[Value, Value]]] = set()
    for nodes in product(*(index.by_op.get(o.op, []) for o in operations)):
        at = {id(o): n for o, n in zip(operations, nodes, strict=True)}
        orders = [list(permutations(n.operands)) if n.op in COMMUTATIVE else [n.operands] for n in nodes]
        for operands in product(*orders):
            inputs: dict[str, Value] = {}
            both = list(zip((o.operands for o in operations), operands, strict=True))
            if all(len(ts) == len(vs) for ts, vs in both) and all(
                inputs.setdefault(t.name, v) == v
                if isinstance(t, Input)
                else v.node is at[id(t.operation)] and v.index == t.index
                for ts, vs in both
                for t, v in zip(ts, vs, strict=True)
            ):
                out |= replacement(rule, index, at, inputs)
    return out


def replacement(
    rule: Substitution, index: OpIndex, at: dict[int, Node], inputs: dict[str, Value]
) -> set[frozenset[tuple[Value, Value]]]:
    attributes = [
        ({**attribute_defaults(o.op), **dict(o.attributes)}[name], value)
        for o in rule.operations(rule.source)
        for name, value in at[id(o)].attributes
    ]
    bindings = solve([(i, inputs[i.name].type) for i in rule.inputs], attributes, rule.conditions, {})
    if bindings is None:
        return set()
    terms = [t for t in rule.source if isinstance(t, ResultOf)]
    if any(t.index >= len(at[id(t.operation)].types) for t in terms):
        return set()
    roots = [at[id(t.operation)].value(t.index) for t in terms]
    try:
        made = build(rule.target, inputs, bindings)
    except UnityError:
        return set()
    if len(set(roots)) < len(roots) or list(made) == roots or any(depends(v, roots) for v in inputs.values()):
        return set()
    alike = all(a.type == b.type for a, b in zip(roots, made, strict=True))
    return {frozenset(zip(roots, made, strict=True))} if alike else set()


def depends(value: Value, roots: Sequence[Value]) -> bool:
    return value.node in {r.node for r in roots} or any(depends(v, roots) for v in value.node.operands)


def sets(of: set[frozenset[tuple[Value, Value]]]) -> set[frozenset[Value]]:
    return {frozenset(old for old, _ in pairs) for pairs in of}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_matches_are_those_that_trying_everything_finds(seed: int):
    random = Random(seed)
    index = OpIndex(random_cnn(random, 8) if seed % 4 == 0 else random_graph(random, 12, dims=(2, 4)))
    for rule in all_substitutions():
        if free(rule):
            continue
        all_found = exhaustive(rule, index)
        own = {frozenset(m.replaced.items()) for m in matches(rule, index)}
        # Of matches that only differ in the order of the replaced values, one is given.
        assert own <= all_found, rule.name
        assert sets(own) == sets(all_found), rule.name
        if len({id(t.operation) for t in rule.source if isinstance(t, ResultOf)}) == 1:
            assert own == all_found, rule.name


@pytest.mark.parametrize("seed", range(40))
def test_every_replacement_computes_the_same(seed: int):
    random = Random(seed)
    source = random_cnn(random, 6) if seed % 4 == 0 else random_graph(random, 10, dims=(2, 4))
    inputs, weights = data_for(source)
    values = interpret(source, inputs, weights)
    index = OpIndex(source)
    for rule in all_substitutions():
        for match in matches(rule, index, {"d": 2} if rule in family("parallel") else {}):
            after = substitute(source, match.replaced)
            new = interpret(after, inputs, weights)
            for a, b in zip(source.outputs, after.outputs, strict=True):
                assert a.type == b.type
                np.testing.assert_allclose(new[b], values[a], rtol=1e-8, atol=1e-8, err_msg=rule.name)


def test_random_graphs_match_many_rules():
    names = {
        rule.name
        for seed in range(40)
        for index in [OpIndex(random_graph(Random(seed), 12, dims=(2, 4))), OpIndex(random_cnn(Random(seed), 8))]
        for rule in all_substitutions()
        if next(matches(rule, index), None) is not None
    }
    assert len(names) >= 30, sorted(names)


# What matches


def test_each_pair_of_products_once():
    a = x(2, 4)
    p = [op("matmul", a, x(4, n, name=f"w{n}")) for n in (3, 5, 7)]
    ms = found("merge-matmuls", *p)
    assert [tuple(m.replaced) for m in ms] == [(p[0], p[1]), (p[0], p[2]), (p[1], p[2])]
    assert [m.bindings["n"] for m in ms] == [3, 3, 5]
    places = [place for place, _ in find("merge-matmuls").applications(graph(*p))]
    first, second = ms[0].reference, ms[2].reference
    assert places == [first, f"{first}.2", second]


def test_attributes_must_agree():
    a, v, w = x(2, 4), x(4, 3, name="v"), x(4, 3, name="w")
    relu, gelu, plain = op("matmul", a, v, act="relu"), op("matmul", a, w, act="gelu"), op("matmul", a, w)
    assert not found("merge-matmuls", relu, gelu)
    assert not found("merge-matmuls", relu, plain)
    assert len(found("merge-matmuls", relu, op("matmul", a, w, act="relu"))) == 1
    # An attribute that is not written has its default.
    assert not found("fuse-activation", op("relu", relu))
    assert len(found("fuse-activation", op("relu", plain))) == 1


def test_products_one_of_which_needs_the_other_are_left_alone():
    a, v = x(4, 4), x(4, 4, name="v")
    first = op("matmul", a, v)
    assert not found("merge-matmuls", op("matmul", a, first))
    assert not found("merge-matmuls", op("matmul", a, op("relu", op("gelu", first))))
    assert len(found("merge-matmuls", first, op("matmul", a, op("relu", v)))) == 1


def test_operands_of_a_sum_in_any_order():
    a, b, c = x(2, name="a"), x(2, name="b"), x(2, name="c")
    for left in (op("mul", a, c), op("mul", c, a)):
        for right in (op("mul", b, c), op("mul", c, b)):
            assert any(
                m.replaced == {op("add", left, right): op("mul", op("add", a, b), c)}
                for m in found("factor-products", op("add", left, right))
            )
    assert not found("factor-products", op("add", op("mul", a, c), op("mul", b, b)))


@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (3, 5, 2)])
def test_packs_of_any_rank(shape: tuple[int, ...]):
    a, b = x(*shape, 2, *shape, name="a"), x(*shape, 4, *shape, name="b")
    (match,) = found("activation-of-concat", op("relu", op("concat", a, b, dim=len(shape))))
    assert (match.bindings["a"], match.bindings["b"], match.bindings["n"]) == (shape, shape, 2)


def test_sizes_are_solved_for():
    a = x(10, 7)
    part = op("slice", op("slice", a, dim=0, start=3, size=6), dim=0, start=0, size=2)
    (match,) = found("slice-of-slice", part)
    assert match.replaced == {part: op("slice", a, dim=0, start=3, size=2)}
    assert not found("slice-of-slice", op("slice", op("slice", a, dim=0, start=3, size=6), dim=1, start=0, size=2))
    heads = op("merge_heads", op("split_heads", x(2, 3, 12), heads=4))
    assert found("merge-of-split-heads", heads)[0].bindings["d"] == 3


def test_conditions_must_hold():
    a = x(1, 2, 8, 8)
    for padding, number in ((1, 1), (2, 0)):
        pool = {"kernel": (3, 3), "stride": (1, 1), "padding": (padding, padding), "dilation": (1, 1)}
        assert len(found("relu-of-max-pool2d", op("relu", op("max_pool2d", a, **pool)))) == number


def test_degrees_sums_and_copies():
    a, b = (x(2, 4, name=n, sum=2) for n in "ab")
    reduced = [parallel("reduce", v, by=2).result for v in (a, b)]
    assert len(found("concat-of-reduces", op("concat", *reduced, dim=1))) == 1
    assert len(found("add-of-sums", op("add", *reduced))) >= 1
    divided = x(2, 8, degrees=(1, 4))
    again = parallel("partition", parallel("combine", divided, dim=1, by=2).result, dim=1, by=2).result
    (match,) = found("partition-of-combine", again)
    assert (match.bindings["d"], match.bindings["e"], match.replaced) == (2, 2, {again: divided})
    assert not found(
        "partition-of-combine",
        parallel("partition", parallel("combine", x(8, 8, degrees=(1, 4)), dim=1, by=2).result, dim=0, by=2).result,
    )


def test_degrees_are_chosen_by_the_caller():
    y = op("matmul", x(6, 4), x(4, 6, name="w"))
    assert not found("divide-matmul", y)
    names = ["divide-matmul.rows", "divide-matmul.columns", "divide-matmul.sum"]
    assert [m.rule.name for m in found("divide-matmul", y, d=2)] == names
    assert [m.rule.name for m in found("divide-matmul", y, d=3)] == names[:2]
    assert not found("divide-matmul", y, d=5)


def test_integers_are_not_numbers():
    ids, t = x(3, 2, dtype="i64", name="ids"), x(7, 4, name="t")
    (match,) = found("embedding-bag-as-sum", op("embedding_bag", ids, t))
    assert match.bindings["l"] == 2
    same = rule('subst.rule "r" (%x: [a..]) { %y = embedding_bag %x, %x yield %y } to { yield %x }')
    assert not list(matches(same, OpIndex(graph(op("embedding_bag", ids, t)))))


def test_values_that_stay_are_told():
    p = op("matmul", x(2, 4), x(4, 6, name="w"))
    y = op("relu", p)
    (alone,), (read,), (output,) = (found("fuse-activation.relu", *o) for o in ((y,), (y, op("gelu", p)), (y, p)))
    assert (alone.kept, alone.repeats_work) == ((), False)
    assert (read.kept, read.repeats_work) == ((p.node,), True)
    assert (output.kept, output.repeats_work) == ((p.node,), True)
    assert not list(find("fuse-activation").applications(graph(y, p)))
    # A concat that stays is not done again where its parts are read instead.
    a, b = x(2, 4, name="a"), x(2, 6, name="b")
    joined = op("concat", a, b, dim=1)
    parts = apply("split", [joined], {"dim": 1, "sizes": (4, 6)}).results
    (match,) = found("split-of-concat", *parts, joined)
    assert (match.kept, match.repeats_work) == ((joined.node,), False)


def test_work_that_a_longer_operator_does_again_is_told():
    """A product that others read stays; the longer one would compute it once more, with as many operators."""
    p, q = (op("matmul", x(2, 4, name=f"x{n}"), x(4, 6, name=f"w{n}")) for n in "pq")
    total = op("add", p, q)
    assert not any(m.repeats_work for m in found("add-of-matmuls", total))
    assert all(m.repeats_work for m in found("add-of-matmuls", total, p))
    # relu(concat) is not free where the concatenation stays, though it has no arithmetic.
    joined = op("concat", x(2, 4, name="a"), x(2, 6, name="b"), dim=1)
    (match,) = found("activation-of-concat.relu", op("relu", joined), joined)
    assert match.repeats_work


def test_symbols_are_one_or_more_and_packs_are_whole():
    longer = rule('subst.rule "r" (%x: [n + 2]) { %y = relu %x %z = relu %y yield %z } to { %y = relu %x yield %y }')
    for size, number in ((2, 0), (3, 1)):
        assert len(list(matches(longer, OpIndex(graph(op("relu", op("relu", x(size)))))))) == number
    assert len(found("relu-of-relu", op("relu", op("relu", x(4, 4))))) == 1
    assert not found("relu-of-relu", op("relu", op("relu", x(4, 4, degrees=(1, 2)))))


def test_replacement_may_hold_what_it_replaces():
    twice = rule('subst.rule "r" (%x: [a..]) { %y = relu %x yield %y } to { %y = relu %x %z = relu %y yield %z }')
    y = op("relu", x(4))
    ((_, after),) = Rule("r", (twice,)).applications(graph(op("gelu", y)))
    assert after.outputs == (op("gelu", op("relu", y)),)


def test_one_value_for_two_inputs():
    a, w = x(2, 4), x(4, 3, name="w")
    both = op("concat", op("matmul", a, w), op("matmul", a, w), dim=1)
    (match,) = found("concat-of-matmuls.columns", both)
    assert match.inputs["v"] == match.inputs["w"] == w


def test_a_side_is_not_built_without_the_values_of_its_attributes():
    one = rule('subst.rule "r" (%x: [n]) { %y = scale %x {by = $s} yield %y } to { %y = scale %x {by = $s} yield %y }')
    with pytest.raises(UnityError, match=r"^rule: \$s has no value$"):
        build(one.target, {"x": x(4)}, {"n": 4})

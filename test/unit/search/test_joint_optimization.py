"""
Unity's Figure 16: rewrites that help only together with a parallelization, so that algebra first does not find them.

Sizes are such that it matters which; on other machines, or others of the same kind, both find the same.
"""

from __future__ import annotations

import pytest

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.algebraic import SEARCHED, algebraic, selected
from unity_ir.rules.derivation import replay
from unity_ir.search import SearchResult, run
from unity_ir.search.joint.best_first import one_device
from unity_ir.simulate.report import as_emitted


def given(name: str, *shape: int, dtype: str = "f32") -> Node:
    return leaf("input", tensor_type(shape, dtype), name=name)


def weight(name: str, *shape: int) -> Value:
    return leaf("weight", tensor_type(shape, "f32"), name=name).result


def fused(batch: int = 64, hidden: int = 2048, layers: int = 4) -> Graph:
    """16a: products with relu in their epilogue, of few samples."""
    x, labels = given("x", batch, hidden), given("labels", batch, dtype="i64")
    h = x.result
    for i in range(layers):
        act = {"act": "relu"} if i < layers - 1 else {}
        h = apply("matmul", [h, weight(f"w{i}", hidden, hidden)], act).result
    return Graph("fused", (x, labels), (apply("cross_entropy", [h, labels.result]).result,))


def wide(batch: int = 16384, tables: int = 4, rows: int = 10000, features: int = 64) -> Graph:
    """16b: embeddings, concatenated, before a product: the wide part of Wide & Deep."""
    ids, labels = [given(f"ids{i}", batch, dtype="i64") for i in range(tables)], given("labels", batch, 1)
    rows_of = [apply("embedding", [n.result, weight(f"table{i}", rows, features)]).result for i, n in enumerate(ids)]
    x = apply("concat", rows_of, {"dim": 1}).result
    y = apply("matmul", [x, weight("w", tables * features, 1)]).result
    return Graph("wide", (*ids, labels), (apply("mse", [y, labels.result]).result,))


def bags(batch: int = 16384, bag: int = 30, rows: int = 200_003, features: int = 51) -> Graph:
    """16c: bags of embeddings, and the same ids' embeddings one by one; the table can't be divided by 2."""
    ids = given("ids", batch, bag, dtype="i64")
    sums, each = given("sums", batch, features), given("each", batch, bag, features)
    table = weight("table", rows, features)
    bagged = apply("embedding_bag", [ids.result, table]).result
    single = apply("embedding", [ids.result, table]).result
    losses = [apply("mse", [x, y.result]).result for x, y in ((bagged, sums), (single, each))]
    return Graph("bags", (ids, sums, each), (apply("add", losses).result,))


CASES = {"unfuse-activation": fused, "matmul-of-parts": wide, "embedding-bag-as-sum": bags}


def seconds(found: SearchResult) -> float:
    """Of the plan nearest to the bound."""
    return (found.proved or found.cost).time


def rules_of(found: SearchResult) -> set[str]:
    return {step.rule for step in found.derivation}


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
def test_a_rewrite_helps_only_with_its_parallelization(rule: str):
    graph, machine = CASES[rule](), load("dgx-h100:1")
    joint, sequential = (run(graph, machine, strategy) for strategy in ("joint", "sequential"))
    assert rule in rules_of(joint)
    assert rule not in rules_of(sequential)
    assert seconds(joint) < 0.97 * seconds(sequential)
    # On one device the rewrite is no help: that is why the other does not find it.
    assert rule not in rules_of(run(graph, one_device(machine)))
    # Nor is the plan found without the rule.
    without = run(graph, machine, options={"rules": f"common+~{rule}"})
    assert seconds(joint) < 0.97 * seconds(without)
    rewritten = replay(graph, joint.derivation)
    assert joint.joint is not None
    assert rewritten.outputs == joint.joint.rewritten.outputs


def test_rules_by_name():
    assert selected("common") == algebraic()
    assert [r.name for r in algebraic()] == list(SEARCHED)
    assert selected("none") == ()
    assert [r.name for r in selected("embedding+~embedding-of-matmul+fuse-activation")][-1] == "fuse-activation"
    assert "embedding-of-matmul" not in {r.name for r in selected("embedding+~embedding-of-matmul")}
    names = [r.name for r in selected("library")]
    assert names[: len(SEARCHED)] == list(SEARCHED)
    assert len(set(names)) == len(names) > 60
    with pytest.raises(UnityError, match="search: rules: unknown rule fuse-activatoin; did you mean fuse-activation"):
        selected("fuse-activatoin")


def together(products: tuple[str, bool], tokens: int = 4096, size: int = 256, hidden: int = 1024) -> Graph:
    """A feed-forward layer whose gate and up projections are one product, with bias or without."""
    product, biased = products
    x, y = given("x", tokens, size), given("y", tokens, size)
    shape = (2 * hidden, size) if product == "matmul_nt" else (size, 2 * hidden)
    both = apply(product, [x.result, weight("gate_up", *shape)]).result
    if biased:
        both = apply("add", [both, weight("bias", 2 * hidden)]).result
    gate, up = apply("split", [both], {"dim": 1, "sizes": (hidden, hidden)}).results
    inner = apply("mul", [apply("silu", [gate]).result, up]).result
    out = apply("matmul", [inner, weight("down", hidden, size)]).result
    return Graph("together", (x, y), (apply("mse", [out, y.result]).result,))


@pytest.mark.parametrize("products", [("matmul", False), ("matmul", True), ("matmul_nt", False), ("matmul_nt", True)])
def test_parts_of_a_product_are_products_with_parts_of_the_weight(products: tuple[str, bool]):
    graph, machine = together(products), load("dgx-h100:1x1")
    rule = f"split-of-{products[0].replace('_', '-')}"
    found, without = (run(graph, machine, options={"rules": text}) for text in ("common", f"common+~{rule}"))
    assert rules_of(found) == {rule}
    assert seconds(found) < seconds(without)
    assert seconds_as_emitted(found) < seconds_as_emitted(without)


def seconds_as_emitted(found: SearchResult) -> float:
    return as_emitted(found.graph, found.cost.machine, Optimizer())[0]


def test_every_baseline_of_the_graph_without_rewrites_counts_where_that_graph_wins():
    """Tofu's plan is faster than data parallelism's, which is faster than the best one of products taken apart."""
    machine, optimizer = load("dgx-h100:1"), Optimizer("adam")
    plans = [run(from_text("gpt2,batch=64,layers=2"), machine, name, optimizer) for name in ("joint", "tofu")]
    joint, tofu = (as_emitted(plan.graph, machine, optimizer)[0] for plan in plans)
    assert plans[0].derivation == ()
    assert joint <= tofu

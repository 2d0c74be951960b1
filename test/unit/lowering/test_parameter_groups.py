"""Groups of weights are patterns of names in a program; `@embeddings` are the tables that an `embedding` reads."""

from __future__ import annotations

import ast

import pytest

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.optimizer import optimizer_of
from unity_ir.plan.plan import PlanOptions, plan_graph
from unity_ir.search import run


@pytest.mark.parametrize(
    ("model", "tables"),
    [
        ("gpt2,layers=1", ["wte.weight"]),
        ("bert_large,layers=1", ["embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"]),
    ],
)
def test_embeddings_are_the_tables_that_are_read_by_ids(model: str, tables: list[str]):
    name, layers = model.split(",layers=")
    graph, on = build(name, layers=int(layers)), load("box:1")
    adamw = optimizer_of("test", "adamw", {"groups": "@embeddings weight_decay=0; @vectors lr=0.5"})
    text = emit(
        plan_graph(run(graph, on, "data-parallel", adamw).graph, on, adamw, PlanOptions("torch", "torch")), graph
    )
    (line,) = (line for line in text.text.splitlines() if line.startswith("PARAMETER_GROUPS = "))
    found = ast.literal_eval(line.partition(" = ")[2].partition("  #")[0])
    assert sorted(found[:-1]) == sorted((table, {"weight_decay": 0}) for table in tables)
    assert found[-1] == ("@vectors", {"lr": 0.5})

"""Text of the source graph never becomes code of the program."""

from __future__ import annotations

import ast

import pytest
from ranks import Ranks, check
from test_programs import program

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type

NAMES = [
    'w"] + [__import__("os").abort()] + ["',
    "w'] + [__import__('os').abort()] + ['",
    '"""\nimport os; os.abort()\n"""',
    "w\nimport os; os.abort()",
    "{__import__('os').abort()}",
    "\\",
    "lambda",
    "all_reduce",
    "torch",
    "ctx",
    "matmul_8x8_8x4",
    "__builtins__",
    "é\u202e\u2028",
]


def crafted(name: str) -> Graph:
    x = leaf("input", tensor_type((8, 8), "f32"), name=name)
    labels = leaf("input", tensor_type((8,), "i64"), name=name + "2")
    w = leaf("weight", tensor_type((8, 8), "f32"), name=name).result
    logits = apply("matmul", [x.result, w]).result
    return Graph(name, (x, labels), (apply("cross_entropy", [logits, labels.result]).result,))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_names_are_data(ranks: Ranks, name: str):
    text = program(crafted(name), "ideal:2", "data-parallel")
    tree = ast.parse(text)
    # Nothing but definitions, imports and the plan's constants at the top level, however the name reads.
    allowed = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Expr)
    assert all(isinstance(statement, allowed) for statement in tree.body)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "__import__" not in names
    assert ranks.run(text, 2, check, 1) == [[], []]

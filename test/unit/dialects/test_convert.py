"""The two forms of a graph say the same."""

import pytest
from extent import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placed_graphs import CONTEXT, graphs
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation
from xdsl.parser import Parser
from xdsl.printer import Printer

from unity_ir.dialects.convert import from_graph, pcg_functions, to_graph
from unity_ir.dialects.pcg import COMPUTE_OPS, PARALLEL_OPS
from unity_ir.errors import UnityError
from unity_ir.ops import operators
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type


def module(text: str) -> ModuleOp:
    parsed = Parser(CONTEXT, text).parse_module()
    parsed.verify()
    return parsed


def function(text: str) -> FuncOp:
    (func,) = [op for op in module(text).ops if isinstance(op, FuncOp)]
    return func


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(graphs())
def test_round_trip(graph: Graph) -> None:
    func = from_graph(graph)
    ModuleOp([func]).verify()
    assert to_graph(func) == graph


@settings(max_examples=examples(60))
@given(graphs(), st.booleans())
def test_round_trip_through_text(graph: Graph, generic: bool) -> None:
    # xDSL's generic form of a function loses names beyond ASCII.
    assume(not generic or graph.name.isascii())
    from io import StringIO

    text = StringIO()
    Printer(stream=text, print_generic_format=generic).print_op(ModuleOp([from_graph(graph)]))
    assert to_graph(function(text.getvalue())) == graph


def test_every_operator_has_a_class() -> None:
    assert list(COMPUTE_OPS) == list(operators())
    for name, op in COMPUTE_OPS.items():
        assert op.name == f"pcg.{name}"
        assert op.__doc__ == f"`{operators()[name].line.text}`"


def test_names() -> None:
    func = function("""
        func.func @"f \\22g\\22"(%x: !pcg.tensor<[4], f32>, %x_1: !pcg.tensor<[4], f32>, %0: !pcg.tensor<[4], f32>,
                                %y: !pcg.tensor<[4], f32> {pcg.name = "a/b"}) {
          func.return
        }""")
    graph = to_graph(func)
    assert graph.name == 'f "g"'
    assert [n.name for n in graph.inputs] == ["x", "x_1", "arg2", "a/b"]
    again = from_graph(graph)
    assert [a.name_hint for a in again.args] == ["x", "x", "arg2", "a_b"]


def test_readable_names() -> None:
    w = leaf("weight", tensor_type((4, 4), "f32"), name="fc/1.weight").result
    x = leaf("input", tensor_type((4, 4), "f32"), name="x").result
    y = apply("relu", [apply("matmul", [apply("matmul", [x, w]).result, w]).result])
    func = from_graph(Graph("f", (x.node,), y.results))
    assert [r.name_hint for op in func.body.block.ops for r in op.results] == [
        "fc_1.weight",
        "matmul0",
        "matmul1",
        "relu0",
    ]


SERIAL = "!pcg.tensor<[4], f32>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"func.func private @f({SERIAL}) -> ()", "@f: is a declaration"),
        ("func.func @f() { func.return\n ^a: func.return }", "@f: has 2 blocks"),
        ('func.func @f() { %0 = "test.op"() : () -> i32 func.return }', "@f: test.op is not an operator of pcg"),
        ("func.func @f(%x: i32) { func.return }", "a value of type i32; only !pcg.tensor values"),
        (
            f"func.func @f() -> {SERIAL} {{ %a = pcg.relu %a : {SERIAL} func.return %a : {SERIAL} }}",
            "@f: pcg.relu uses %a before it is made",
        ),
        (
            f"func.func @f(%x: {SERIAL} {{pcg.view = 1}}) {{ func.return }}",
            "@f: pcg.view is 1 : i64; it must be a #machine.view",
        ),
        (
            f"func.func @f(%x: {SERIAL} {{pcg.view = #machine.view<0, [2 @ 1]>}}) {{ func.return }}",
            "its view has degrees [2], but its task grid is []",
        ),
        (
            f'func.func @f(%x: {SERIAL} {{pcg.name = "y"}}, %y: {SERIAL}) {{ func.return }}',
            "@f: 2 inputs are named 'y'",
        ),
        (
            f"""func.func @f(%g: {SERIAL}) {{
              %w = pcg.weight "w" : {SERIAL}
              pcg.update %w, %g {{optimizer = "sgd"}} : {SERIAL}, {SERIAL}
              pcg.update %w, %g {{optimizer = "adam"}} : {SERIAL}, {SERIAL}
              func.return
            }}""",
            "@f: its updates have different optimizers",
        ),
    ],
)
def test_not_a_graph(text: str, message: str) -> None:
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        to_graph(function(text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Graph("a\nb", (), ()), "control character U+000A"),
        (Graph("f", (), (leaf("input", tensor_type((4,), "f32"), name="x").result,)), "not among the graph's inputs"),
        (
            Graph("f", (), (leaf("constant", tensor_type((4,), "f32"), value=float("inf")).result,)),
            "not a finite number",
        ),
        (
            Graph("f", (), tuple(leaf("weight", tensor_type((n,), "f32"), name="w").result for n in (4, 5))),
            "'w' has two types",
        ),
    ],
)
def test_not_text(graph: Graph, message: str) -> None:
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        from_graph(graph)
    assert message in str(error.value)


@pytest.mark.parametrize(("kind", "lacks"), [(COMPUTE_OPS["relu"], "result"), (PARALLEL_OPS["combine"], "operand")])
def test_unverified_operations_are_refused(kind: type[Operation], lacks: str):
    func = function(f"func.func @f(%x: {SERIAL}) {{ %c = pcg.constant 1.0 : {SERIAL} func.return }}")
    constant, end = func.body.block.ops
    results = [] if lacks == "result" else [constant.results[0].type]
    func.body.block.insert_op_before(kind.create(result_types=results), end)
    with pytest.raises(UnityError, match=rf"^@f: {kind.name} has no {lacks}; verify the module first$"):
        to_graph(func)


def test_pcg_functions() -> None:
    parsed = module(f"""
        func.func @a(%x: {SERIAL}) {{ func.return }}
        func.func @b() {{ func.return }}
        func.func private @c({SERIAL}) -> ()
        func.func @d() {{ %c = pcg.constant 1.0 : {SERIAL} func.return }}""")
    assert [f.sym_name.data for f in pcg_functions(parsed)] == ["a", "d"]

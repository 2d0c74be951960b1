"""TASO's protobuf is read; its operators mean what they do there; bytes that are no collection have one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from taso_rules import Op, collection, concat, convolution, matmul, message, pool, rule, split

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import DimPack
from unity_ir.rules.research.foreign import ImportedRule, import_rules
from unity_ir.rules.research.foreign.collection import read_rules

RELU = {"ACTI": 2}


def imported(tmp_path: Path, *rules: bytes) -> tuple[ImportedRule, ...]:
    path = tmp_path / "rules.pb"
    path.write_bytes(collection(*rules))
    return import_rules(path).rules


def test_rules_are_read_as_they_are(tmp_path: Path):
    (tmp_path / "rules.pb").write_bytes(collection(rule([matmul(-1, -4, acti=2)], [split(1, -300), split(0, (0, 1))])))
    (found,) = read_rules(tmp_path / "rules.pb")
    assert found.name == "rule_0"
    (product,), (first, second) = found.source, found.target
    assert (product.type, product.inputs, product.parameters) == ("OP_MATMUL", ((-1, 0), (-4, 0)), {"PM_ACTI": 2})
    assert (first.inputs, second.inputs) == (((-300, 0),), ((0, 1),))
    assert found.outputs == (((0, 0), (1, 0)),)


def test_what_holds_is_proved(tmp_path: Path):
    associative = rule([matmul(-1, -4), matmul(0, -5)], [matmul(-4, -5), matmul(-1, 0)])
    rows = rule(
        [matmul(-1, -4, 2), matmul(-2, -4, 2)],
        [concat(0, 2, -1, -2), matmul(0, -4, 2), split(0, 1)],
        *((0, 0, 2, 0), (1, 0, 2, 1)),
    )
    outputs = rule(
        [convolution(-7, -10, **RELU), convolution(-7, -11, **RELU), concat(1, 4, 0, 1)],
        [concat(0, 4, -10, -11), convolution(-7, 0, **RELU)],
    )
    inner = rule(
        [concat(1, 4, -7, -8), concat(1, 4, 0, -9), split(1, 1), split(1, (2, 0))],
        [Op("RELU", (-7,)), Op("EW_ADD", (-7, 0))],
        (3, 0, 1, 0),
    )
    found = imported(tmp_path, associative, rows, outputs, inner)
    assert [r.verdict for r in found] == ["proved", "proved", "proved", "refuted"]
    assert found[1].rule is not None
    assert [str(s) for s in found[1].rule.inputs[0].shape] != [str(s) for s in found[1].rule.inputs[2].shape]


def test_sums_of_any_number_of_dims(tmp_path: Path):
    (found,) = imported(
        tmp_path,
        rule([Op("EW_ADD", (-1, -2)), Op("EW_MUL", (0, -3))], [Op("EW_ADD", (-2, -1)), Op("EW_MUL", (-3, 0))]),
    )
    assert found.verdict == "proved"
    assert found.rule is not None
    assert all(isinstance(i.shape[0], DimPack) and len(i.shape) == 1 for i in found.rule.inputs)


def test_a_split_of_a_split_is_that_of_the_inner_concatenation(tmp_path: Path):
    (found,) = imported(
        tmp_path,
        rule(
            [concat(1, 2, -1, -2), concat(1, 2, 0, -3), split(1, 1), split(1, (2, 0)), Op("RELU", ((3, 1),))],
            [Op("RELU", (-2,))],
        ),
    )
    assert found.verdict == "proved"
    assert found.rule is not None
    assert len({str(i.shape[1]) for i in found.rule.inputs}) == 3


def test_a_convolution_has_as_many_groups_as_its_sizes_tell(tmp_path: Path):
    """The joined one has two, which do the work of both only if the kernels have equal parts."""
    joined = rule(
        [convolution(-7, -10), convolution(-8, -11), concat(1, 4, 0, 1)],
        [concat(1, 4, -7, -8), concat(0, 4, -10, -11), convolution(0, 1)],
    )
    equal = rule(
        [Op("EW_ADD", (-10, -11)), convolution(-7, -10), convolution(-8, -11), concat(1, 4, 1, 2)],
        [concat(1, 4, -7, -8), concat(0, 4, -10, -11), convolution(0, 1)],
    )
    found = imported(tmp_path, joined, equal)
    assert [r.verdict for r in found] == ["refuted", "proved"]
    assert "result 0 at" in found[0].detail
    assert found[0].rule is not None
    assert [str(c.poly) for c in found[0].rule.conditions]


def test_two_patterns_of_a_rule_may_be_apart(tmp_path: Path):
    (found,) = imported(
        tmp_path,
        rule(
            [Op("RELU", (-1,)), Op("RELU", (-2,))],
            [concat(0, 2, -1, -2), Op("RELU", (0,)), split(0, 1)],
            *((0, 0, 2, 0), (1, 0, 2, 1)),
        ),
    )
    assert found.verdict == "proved"


@pytest.mark.parametrize(
    ("op", "detail"),
    [
        (convolution(-7, -10, STRIDE_H=2), "stride (2, 1)"),
        (convolution(-7, -10, KERNEL_W=2), "kernel (3, 2)"),
        (convolution(-7, -10, PAD=2), "padding 2"),
        (pool("MAX", -7, PAD=3), "OP_POOL2D_MAX of kernel (3, 3), stride (1, 1), padding 3"),
        (Op("MERGE_GCONV", (-10,)), "operator OP_MERGE_GCONV"),
        (Op("CONSTANT_IMM", ()), "OP_CONSTANT_IMM of 0 operands"),
        (Op("CONCAT", (), {"NUMDIM": 2, "AXIS": 0}), "OP_CONCAT of 0 operands"),
        (Op("ENLARGE", (-10,), {"KERNEL_H": 0}), "OP_ENLARGE to 0"),
        (Op("TRANSPOSE", (-1,), {"NUMDIM": 2, "PERM": 3}), "OP_TRANSPOSE by 3 of 2 dims"),
        (matmul(-1, -4, acti=7), "activation 7"),
        (concat(4, 4, -7, -8), "OP_CONCAT along dim 4 of 4"),
        (Op("RELU", (-1, -2)), "OP_RELU of 2 operands"),
        (Op("SPLIT", (-1,), {"AXIS": 0, "NUM_OUTPUTS": 2}), "OP_SPLIT along dim 0 of 0"),
    ],
)
def test_what_is_not_known_is_named(op: Op, detail: str, tmp_path: Path):
    (found,) = imported(tmp_path, rule([op], [op]))
    assert found.verdict == "unsupported"
    assert detail in found.detail


def test_a_matrix_is_no_image(tmp_path: Path):
    (found,) = imported(tmp_path, rule([matmul(-1, -4), convolution(0, -10)], [matmul(-1, -4)]))
    assert (found.verdict, found.detail) == ("ill-typed", "tensors of 2 and 4 dims are one")


def test_a_tensor_is_no_scalar(tmp_path: Path):
    scaled = Op("MUL", (-1, -4))
    found = imported(tmp_path, rule([scaled, matmul(0, -4)], [scaled, matmul(0, -4)]), rule([scaled], [scaled]))
    assert [r.verdict for r in found] == ["ill-typed", "proved"]
    assert found[0].detail == "tensors of 0 and 2 dims are one"
    assert found[1].rule is not None
    assert [len(i.shape) for i in found[1].rule.inputs] == [1, 0]


GOOD = collection(rule([matmul(-1, -4)], [matmul(-1, -4)]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x05ab", "5 bytes at byte 2 of 4"),
        (b"\x0a", "a number without an end at byte 1"),
        (b"\x80" * 12, "a number without an end at byte 0"),
        (message((2, b"")), "field 2 of RuleCollection at byte 2"),
        (message((1, 7)), "field 1 of RuleCollection at byte 1"),
        (message((1, message((1, message((1, b"")))))), "field 1 of Operator at byte 6"),
        (GOOD[:-1], "bytes at byte"),
        (b'{"rule": []}', "is not TASO's protobuf"),
        (collection(message((1, message((1, 18), (2, message((1, -1))))))), "rule 0: srcOp 0: has no 'tsId'"),
        (collection(message((1, b""))), "rule 0: srcOp 0: has no 'type'"),
        (collection(rule([matmul(-1, 0)], [matmul(-1, -4)])), "reads operation 0, which does not come before it"),
        (collection(rule([matmul(-1, -4)], [matmul(-1, -4)], (0, 0, 3, 0))), "'dstOpId' is 3"),
    ],
)
def test_what_is_no_collection_has_an_error_of_one_line(data: bytes, message: str, tmp_path: Path):
    path = tmp_path / "rules.pb"
    path.write_bytes(data)
    with pytest.raises(UnityError) as error:
        import_rules(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"rules {path}: ")
    assert "\n" not in str(error.value)


def test_a_protobuf_by_another_name_is_told(tmp_path: Path):
    path = tmp_path / "rules.json"
    path.write_bytes(b"\xff" + GOOD)
    with pytest.raises(UnityError, match=r"not UTF-8, and no protobuf, which is named \.pb"):
        import_rules(path)

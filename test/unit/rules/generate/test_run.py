"""The generator: named laws are found, nothing false is kept, runs are deterministic and go on where they stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rule_text import shapes, text

from unity_ir import ops
from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator
from unity_ir.rules.check import check
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove, refute
from unity_ir.rules.research.generate import enumerate, fingerprint, run
from unity_ir.rules.research.generate.run import GenerationReport, generate
from unity_ir.rules.research.generate.space import Space
from unity_ir.rules.research.generate.terms import Terms, TermStep, TypedTerm
from unity_ir.rules.text import rule_text


def laws(report: GenerationReport) -> dict[str, Substitution]:
    return {text(r): r for r in report.rules}


@pytest.fixture(scope="module")
def small() -> GenerationReport:
    """Size 2 with all parallel operators."""
    return generate(Space(("relu", "transpose", "add", "concat", "split"), size=2, variables=2))


def texts(report: GenerationReport) -> list[str]:
    """The rules but for the seconds their proofs took."""
    return [rule_text(replace(r, proof=None)) for r in report.rules]


TINY = Space(("relu", "add"), ("partition", "combine", "replicate"), size=2, variables=2)


@pytest.fixture(scope="module")
def tiny() -> GenerationReport:
    return generate(TINY)


@pytest.mark.slow
def test_serial_laws(small: GenerationReport):
    found = laws(small)
    assert "transpose(transpose(x)) = x" in found
    assert "add(x, y) = add(y, x)" in found
    assert shapes(found["add(x, y) = add(y, x)"]) == {"x": ["a.."], "y": ["a.."]}
    assert {"split[0].0(concat[0](x, y)) = x", "split[0].1(concat[0](x, y)) = y"} <= found.keys()
    # For any number of leading dims, which need not be written.
    assert shapes(found["split[#a].0(concat[#a](x, y)) = x"]) == {"x": ["a..", "k"], "y": ["a..", "m"]}
    assert "split[0].0(concat[0](x, y)), split[0].1(concat[0](x, y)) = x, y" in found


@pytest.mark.slow
def test_parallel_operators_undo_each_other(small: GenerationReport):
    found = laws(small)
    assert shapes(found["combine[0](partition[0](x)) = x"]) == {"x": ["d*n", "k"]}
    assert {"combine[#a](partition[#a](x)) = x", "reduce(zero_pad(x)) = x", "pick(replicate(x)) = x"} <= found.keys()
    # Zeros in the place of addends are no copies, and the sum of copies is not the value.
    assert not {"reduce(replicate(x)) = x", "pick(zero_pad(x)) = x"} & found.keys()
    assert "partition[0](relu(x)) = relu(partition[0](x))" in found


@pytest.mark.slow
def test_matmul_with_relu_and_add():
    found = laws(generate(Space(("matmul", "relu", "add"), parallel=(), size=3, variables=2)))
    assert "relu(matmul(x, y)) = matmul[relu](x, y)" in found
    assert "matmul(matmul(x, y), z) = matmul(x, matmul(y, z))" in found
    assert "add(matmul(x, y), matmul(x, z)) = matmul(x, add(y, z))" in found
    assert "add(matmul(x, y), matmul(z, y)) = matmul(add(x, z), y)" in found
    # What follows from smaller laws is left out, though it was found before them.
    assert "matmul[relu](matmul(x, y), z) = matmul[relu](x, matmul(y, z))" not in found
    assert "matmul(add(x, x), y) = matmul(x, add(y, y))" not in found


@pytest.mark.slow
def test_matmul_with_concat_and_split():
    found = laws(generate(Space(("matmul", "concat", "split"), parallel=(), size=3, variables=2)))
    law = found["concat[#a](matmul(x, y), matmul(x, z)) = matmul(x, concat[1](y, z))"]
    assert shapes(law) == {"x": ["a..", "k"], "y": ["k", "m"], "z": ["k", "p"]}
    merged = "matmul(x, concat[1](y, z))"
    law = found[f"matmul(x, y), matmul(x, z) = split[#a].0({merged}), split[#a].1({merged})"]
    assert shapes(law)["x"] == ["a..", "k"]
    assert "concat[0](split[0].0(x), split[0].1(x)) = x" in found


def test_what_other_rules_make_up_is_not_joined(small: GenerationReport):
    found = laws(small)
    for dim in ("0", "#a"):
        split = [f"split[{dim}].{i}" for i in range(2)]
        assert ", ".join(f"relu({s}(x))" for s in split) + " = " + ", ".join(f"{s}(relu(x))" for s in split) in found
        # relu out of split, twice.
        assert not any(t.startswith(f"relu(relu({split[0]}") for t in found)


def test_matmul_is_divided():
    found = laws(generate(Space(("matmul",), ("partition", "replicate", "reduce", "zero_pad"), size=3, variables=2)))
    assert "matmul(partition[0](x), replicate(y)) = partition[0](matmul(x, y))" in found
    assert "matmul(replicate(x), partition[1](y)) = partition[#a](matmul(x, y))" in found
    # Equal as values: the addends are others, their sum is the same.
    assert "matmul(partition[#a](x), partition[0](y)) = zero_pad(matmul(x, y))" in found


@pytest.mark.slow
def test_rules_are_true(small: GenerationReport):
    assert small.counts.proved > 20
    for rule in small.rules:
        check(rule)
        assert refute(rule, seed=17) is None, text(rule)


def test_rules_are_proved(tiny: GenerationReport):
    assert all(prove(rule, seed=17).proved for rule in tiny.rules)


def test_a_false_law_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    terms, (matrix, _) = Terms(), TINY.inputs
    relu, add = TermStep("relu", ((), ())), TermStep("add", ((), ()))

    def make(step: TermStep, *operands: TypedTerm) -> TypedTerm:
        made = terms.make(step, operands)
        assert made is not None
        return made

    x, y = terms.variable(0, matrix), terms.variable(1, matrix)
    false = (make(relu, make(add, x, y)), make(add, make(relu, x), make(relu, y)))
    true = (make(add, x, y), make(add, y, x))
    assert not fingerprint.Values(0, 0).equal(*false)
    monkeypatch.setattr(run._Run, "_candidates", lambda self: ([false, true], []))  # pyright: ignore
    report = generate(TINY)
    assert list(laws(report)) == ["add(x, y) = add(y, x)"]
    assert (report.counts.proved, report.counts.refuted) == (1, 1)


def test_nothing_false_passes_when_fingerprints_are_worthless(monkeypatch: pytest.MonkeyPatch):
    """Of sixteen fingerprints to a type, every one is soon shared by terms that are not equal."""

    def worthless(values: fingerprint.Batch) -> fingerprint.Fingerprints:
        return values.reshape(len(values), -1)[:, 0].astype(np.uint64) % np.uint64(16)

    monkeypatch.setattr(enumerate, "fingerprints", worthless)
    monkeypatch.setattr(fingerprint.Values, "equal", lambda self, left, right: left.type == right.type)
    monkeypatch.setattr(run, "most_general", lambda sides, terms, values: terms.renamed(*sides))
    report = generate(Space(("relu", "add"), parallel=("partition", "combine"), size=2, variables=3))
    assert report.counts.refuted >= 10
    assert report.rules
    for rule in report.rules:
        assert refute(rule, seed=5) is None, text(rule)


def test_is_deterministic(tiny: GenerationReport):
    again = generate(TINY)
    assert texts(again) == texts(tiny)
    assert again.counts == tiny.counts


def test_another_seed_finds_the_same_laws(tiny: GenerationReport):
    assert laws(generate(replace(TINY, seed=1))).keys() == laws(tiny).keys()


class _Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 1, 2, 3])
def test_goes_on_where_it_stopped(tiny: GenerationReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int):
    state = tmp_path / "state.json"
    monkeypatch.setattr(run, "SAVE", 0.0)
    monkeypatch.setattr(run, "BATCH", 4)
    calls: list[int] = []
    original = run.Provers.__call__

    def stopping(self: run.Provers, rules: list[Substitution]):
        calls.append(len(rules))
        if len(calls) > batch:
            raise _Stopped
        return original(self, rules)

    with monkeypatch.context() as patch:
        patch.setattr(run.Provers, "__call__", stopping)
        with pytest.raises(_Stopped):
            generate(TINY, state)
    assert list(tmp_path.iterdir()) == [state]
    # Nothing is enumerated again.
    monkeypatch.setattr(run, "Enumeration", None)
    report = generate(TINY, state)
    assert texts(report) == texts(tiny)
    assert report.counts == tiny.counts
    # A finished run is read.
    monkeypatch.setattr(run, "Provers", None)
    assert texts(generate(TINY, state)) == texts(tiny)


def test_refuses_the_state_of_another_run(tmp_path: Path):
    state = tmp_path / "state.json"
    generate(Space(("relu",), parallel=(), size=1), state)
    with pytest.raises(UnityError, match="with other parameters"):
        generate(Space(("relu",), parallel=(), size=2), state)
    for broken in ("{", "[]", "{}"):
        state.write_text(broken)
        with pytest.raises(UnityError, match="no state of a run"):
            generate(Space(("relu",), parallel=(), size=1), state)


@pytest.mark.slow
def test_a_new_operator_needs_its_line_only(monkeypatch: pytest.MonkeyPatch):
    mine = Operator(
        "blend(x, y; dim: int, by: float)  out[a.., b..] = by * x[a.., b..] + y[a.., b..]  where rank(a..) = dim"
    )
    known = {**ops.operators(), "blend": mine}
    monkeypatch.setattr(ops, "operators", lambda: known)
    found = laws(generate(Space(("blend", "add"), ("partition",), size=3, variables=3)))
    assert any(t.startswith("add(blend[") or " = add(blend[" in t for t in found)
    assert any("partition" in t and "blend" in t for t in found)


def test_refuses_what_cannot_be_generated():
    with pytest.raises(UnityError, match=r"pcg\.reshape: its line depends on sizes"):
        Space(("reshape",))
    with pytest.raises(UnityError, match=r"pcg\.halo: no parallel operator to generate"):
        Space(("relu",), ("halo",))
    with pytest.raises(UnityError, match=r"pcg\.rel: unknown operator; did you mean relu"):
        Space(("rel",))
    with pytest.raises(UnityError, match="1 to 4 variables"):
        Space(("relu",), variables=0)
    with pytest.raises(UnityError, match="16 variables, of 4 types; 15 are told apart; take fewer of each type"):
        generate(Space(("conv2d",), variables=4))


def test_sizes_differ_between_sets():
    sizes = Space(("relu",)).sizes
    assert all(first != second for first, second in sizes)
    assert all(len({s[i] for s in sizes}) == len(sizes) for i in range(2))

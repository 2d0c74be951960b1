"""The library's rules: each holds together, computes the same on both sides, and matches its own source."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret
from unity_ir.rules.check import check, sample_inputs, samples
from unity_ir.rules.library import all_substitutions, families, family, find, group_cases, read_rules, rules
from unity_ir.rules.match import OpIndex, matches
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Bindings, Substitution, build
from unity_ir.rules.text import rule_text

LIBRARY = all_substitutions()


def fitting(rule: Substitution) -> list[Bindings]:
    """Two choices of sizes at which the source is well typed."""

    def fits(bindings: Bindings) -> bool:
        try:
            build(rule.source, sample_inputs(rule, bindings), bindings)
        except UnityError:
            return False
        return True

    return list(islice(filter(fits, samples(rule)), 2))


@pytest.mark.slow
@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_rule_holds_together_and_is_read_back(rule: Substitution):
    check(rule)
    assert len(fitting(rule)) == 2
    (again,) = parse_rules(rule_text(rule))
    assert rule_text(again) == rule_text(rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_both_sides_compute_the_same(rule: Substitution):
    for bindings in fitting(rule):
        inputs = sample_inputs(rule, bindings)
        sides = (build(rule.source, inputs, bindings), build(rule.target, inputs, bindings))
        # Parallel operators are identities on meaning, so the serial graphs say whether a rule is true.
        old, new = (erase(Graph("f", tuple(v.node for v in inputs.values()), side)) for side in sides)
        random = np.random.default_rng(0)
        values = {
            item.name: random.integers(0, 2, inputs[item.name].shape)
            if item.elements != "float"
            else random.standard_normal(inputs[item.name].shape)
            for item in rule.inputs
        }
        left, right = interpret(old, values, {}), interpret(new, values, {})
        for a, b in zip(old.outputs, new.outputs, strict=True):
            np.testing.assert_allclose(right[b], left[a], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", LIBRARY, ids=lambda r: r.name)
def test_rule_matches_its_own_source(rule: Substitution):
    for bindings in fitting(rule):
        inputs = sample_inputs(rule, bindings)
        source = build(rule.source, inputs, bindings)
        graph = Graph("f", tuple(v.node for v in inputs.values()), source)
        found = list(matches(rule, OpIndex(graph), bindings))
        expected = dict(zip(source, build(rule.target, inputs, bindings), strict=True))
        assert expected in [m.replaced for m in found]
        for match in found:
            assert all(old.type == new.type for old, new in match.replaced.items())


def test_names():
    assert set(rules()) == set(group_cases(LIBRARY))
    assert [c.name for c in find("fuse-activation").cases] == ["fuse-activation.relu", "fuse-activation.gelu"]
    assert [c.name for c in find("fuse-activation.gelu").cases] == ["fuse-activation.gelu"]
    assert sum(len(family(f)) for f in families()) == len(LIBRARY)
    with pytest.raises(UnityError, match=r"^unknown rule merge-matmul; did you mean merge-matmuls"):
        find("merge-matmul")
    with pytest.raises(UnityError, match=r"^subst\.rule: relu-of-relu: there are two of this name; rename one"):
        group_cases([find("relu-of-relu").cases[0]] * 2)


def test_file_of_rules(tmp_path):
    rule = find("relu-of-relu").cases[0]
    file = tmp_path / "mine.pcg"
    file.write_text(f"// Mine.\nbuiltin.module {{\n{rule_text(rule)}\n}}\n")
    (found,) = read_rules(str(file))
    assert rule_text(found) == rule_text(rule)
    file.write_text('subst.rule "x" (%x: [n]) {\n  %y = relu %x\n  yield %z } to { yield %x }')
    with pytest.raises(UnityError, match=r"mine\.pcg:3:9: %z is not defined; it must be an input or a result before"):
        read_rules(str(file))
    file.write_text(
        'subst.rule "x" (%x: [n, m]) { %y = relu %x yield %y } to { %y = reduce_sum %x {dim = 0} yield %y }'
    )
    with pytest.raises(UnityError, match=r"^subst\.rule: x: result 0 is .* in the source and .* in the target at m = "):
        read_rules(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(UnityError, match=r"mine\.pcg: byte 0 is not UTF-8 text"):
        read_rules(str(file))

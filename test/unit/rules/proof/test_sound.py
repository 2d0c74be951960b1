"""False rules that once were proved, with the numbers that would have refuted them kept away from the prover."""

from __future__ import annotations

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.proof import prove as module

FALSE = {
    "dims multiplied": """(%x: [a.., n, n, n, n, n, n, n]) { %y = reduce_sum %x {dim = #a} yield %y } to {
        %y = reduce_sum %x {dim = #a*#a*#a - 3*#a*#a + 3*#a} yield %y }""",
    "a dim that depends on a size": """(%x: [m, m, m], %z: [n]) { %y = reduce_sum %x {dim = n - 2} yield %y, %z } to {
        %y = reduce_sum %x {dim = 2} yield %y, %z }""",
    "relu of the maximum of nothing": """(%x: [n, c, h, w]) {
        %a = max_pool2d %x {kernel = [2, 1], stride = [1, 1], padding = [2, 0], dilation = [1, 1]}
        %s = slice %a {dim = 2, start = 0, size = 1} %z = relu %s yield %z } to {
        %a = max_pool2d %x {kernel = [2, 1], stride = [1, 1], padding = [2, 0], dilation = [1, 1]}
        %s = slice %a {dim = 2, start = 0, size = 1} yield %s }""",
    "abs of a maximum": """(%x: [n, m]) { %a = reduce_max %x {dim = 1} %b = abs %a yield %b } to {
        %c = abs %x %a = reduce_max %c {dim = 1} yield %a }""",
    "the first as the maximum": """(%x: [n, m]) { %a = reduce_max %x {dim = 1} yield %a } to {
        %b = slice %x {dim = 1, start = 0, size = 1} %a = reduce_sum %b {dim = 1} yield %a }""",
    "a product as a maximum": """(%x: [n, 2]) { %a = reduce_prod %x {dim = 1} yield %a } to {
        %a = reduce_max %x {dim = 1} yield %a }""",
    "a comparison with a maximum": """(%x: [n, m], %y: [n]) { %a = reduce_max %x {dim = 1} %b = gt %a, %y
        yield %b } to { %c = reduce_min %x {dim = 1} %b = gt %c, %y yield %b }""",
    "other operators": "(%x: [n]) { %y = relu %x yield %y } to { %y = exp %x yield %y }",
    "sizes of one": "(%x: [n, n - 1], %y: [n, n]) { %z = mul %x, %y yield %z } to { %z = add %x, %y yield %z }",
}


@pytest.mark.parametrize("name", FALSE)
def test_is_not_proved(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "refute", lambda rule, seed: None)
    (rule,) = parse_rules(f'subst.rule "false" {FALSE[name]}', "here")
    assert not module.prove(rule).proved

"""The subst dialect: operations, text and substitutions are three forms of one thing."""

from __future__ import annotations

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.universe import Universe
from xdsl.utils.exceptions import ParseError

from unity_ir.dialects.subst import RuleOp, from_rule, to_rule
from unity_ir.rules.library import families, family
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.text import rule_text


def parsed(text: str) -> list[Substitution]:
    """The rules of a text, read through xDSL."""
    context = Context()
    for dialect, factory in Universe.get_multiverse().all_dialects.items():
        context.register_dialect(dialect, factory)
    for dialect in ("builtin", "subst"):
        context.load_registered_dialect(dialect)
    module = Parser(context, text).parse_module()
    module.verify()
    return [to_rule(op) for op in module.ops if isinstance(op, RuleOp)]


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_library_through_text_and_back(name: str):
    texts = [rule_text(rule) for rule in family(name)]
    module = ModuleOp([from_rule(rule) for rule in family(name)])
    module.verify()
    assert [rule_text(r) for r in parsed(str(module))] == texts
    # What the driver prints, the core reads without xDSL.
    assert [rule_text(r) for r in parse_rules(str(module))] == texts


RULE = """subst.rule "r" (%x: [a.., to*n]) where to >= 2 attributes {{exact}} {{ // {{ "
  %y = relu %x
  yield %y
}}
// } to {
to {{ // }}
  %y = relu %x
  %z = relu %y
  yield %z
}}"""


def test_braces_words_and_quotes_in_comments_end_nothing():
    text = RULE.replace("{{", "{").replace("}}", "}")
    first, second = parsed(text + "\n" + text)
    assert rule_text(first) == rule_text(second) == rule_text(parse_rules(text)[0])


def test_errors_are_at_their_place():
    with pytest.raises(ParseError) as error:
        parsed('// A comment.\nsubst.rule "r" (%x: [n]) {\n  %y = relu %x\n  yield %z\n} to {\n  yield %x\n}')
    span = error.value.span
    assert str(span.get_location()).endswith(":4:9")
    assert "%z is not defined" in error.value.msg

"""
The operations of a rule.

    subst.rule "relu-of-relu" (%x: [a..]) {
      %y = relu %x
      %z = relu %y
      yield %z
    } to {
      %y = relu %x
      yield %y
    }

is a `subst.rule` with a region for each side, whose block has the inputs as arguments, a `subst.apply` for every
operator and a `subst.yield` for what is replaced, or replaces it. The text is `unity_ir.rules.parse`'s; the generic
form shows the operations.
"""

from __future__ import annotations

import re

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr, UnitAttr
from xdsl.irdl import (
    AttrConstraint,
    BaseAttr,
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    region_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import HasParent, IsTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.subst.types import SubstTensorType, SubstValueType
from unity_ir.errors import UnityError
from unity_ir.rules.check import check
from unity_ir.rules.parse import RuleTextError, parse_rules
from unity_ir.rules.text import rule_text

_VALUE: AttrConstraint = BaseAttr(SubstTensorType) | BaseAttr(SubstValueType)


@irdl_op_definition
class RuleOp(IRDLOperation):
    """A substitution: see `unity_ir.rules.pattern.Substitution`."""

    name = "subst.rule"

    rule_name = prop_def(StringAttr, prop_name="name")
    inputs = prop_def(ArrayAttr[StringAttr])
    """The names of the blocks' arguments."""
    conditions = prop_def(ArrayAttr)
    """`#subst.poly`, each 0 or more."""
    exact = opt_prop_def(UnitAttr)
    """It only moves and copies numbers: both sides round alike."""
    proof = opt_prop_def(DictionaryAttr)
    """
    `verdict`, `seconds`, what was `assumed` and the `digest` of what was proved. Nothing is applied because of it.
    """

    source = region_def("single_block")
    target = region_def("single_block")

    @classmethod
    def parse(cls, parser: Parser) -> RuleOp:
        from unity_ir.dialects.subst.convert import from_rule

        content, start = parser.lexer.input.content, parser.pos
        if content[start : start + 1] != '"':
            parser.raise_error("subst.rule: expected a name in double quotes")
        end = _end(content, start)
        head = cls.name + " "
        try:
            (rule,) = parse_rules(head + content[start:end])
            check(rule)
        except RuleTextError as error:
            at = start + max(0, error.position - len(head))
            parser.raise_error(f"subst.rule: {error}", at, at)
        except UnityError as error:
            parser.raise_error(str(error), start, start)
        parser.lexer.pos = end - 1
        parser.parse_str_literal()
        parser.parse_punctuation("}")
        return from_rule(rule)

    def print(self, printer: Printer) -> None:
        from unity_ir.dialects.subst.convert import to_rule

        printer.print_string(rule_text(to_rule(self)).removeprefix(self.name))

    def verify_(self) -> None:
        from unity_ir.dialects.subst.convert import to_rule

        try:
            if self.attributes:
                raise UnityError(f"subst.rule: unknown attribute {next(iter(self.attributes))}; remove it")
            check(to_rule(self))
        except UnityError as error:
            raise VerifyException(str(error)) from error


_TOKEN = re.compile(r'//[^\n]*|"[^"\n]*"|[{}]|\bto\b')


def _end(text: str, start: int) -> int:
    """Where a rule ends: after the brace that closes its target, or at the end of the text."""
    depth, target, last = 0, False, ""
    for token in _TOKEN.finditer(text, start):
        if token[0].startswith("//"):
            continue
        if token[0] == "to" and last == "}":
            target |= depth == 0
        elif token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if depth < 0 or (depth == 0 and target):
                return token.end()
        last = token[0]
    return len(text)


@irdl_op_definition
class ApplyOp(IRDLOperation):
    """`subst.apply`: an operator, parallel or compute, on values."""

    name = "subst.apply"

    operator = prop_def(StringAttr)
    values = prop_def(DictionaryAttr)
    """The operator's attributes: `#subst.poly`, lists of them, `#subst.parameter`, strings and numbers."""

    arguments = var_operand_def(_VALUE)
    outputs = var_result_def(SubstValueType)

    traits = traits_def(Pure(), HasParent(RuleOp))


@irdl_op_definition
class YieldOp(IRDLOperation):
    """`subst.yield`: the values a side is for."""

    name = "subst.yield"

    arguments = var_operand_def(_VALUE)

    traits = traits_def(IsTerminator(), HasParent(RuleOp))

"""
The operations of a rewrite rule (a substitution: where the pattern `source` matches, `target` may replace it).

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
from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, StringAttr, UnitAttr, f64
from xdsl.ir import Attribute, Block, Region, SSAValue
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

from unity_ir.dialects.subst.attributes import PolyAttr, from_attribute, to_attribute
from unity_ir.dialects.subst.types import SubstTensorType, SubstValueType
from unity_ir.errors import UnityError
from unity_ir.rules.check import check
from unity_ir.rules.parse import RuleTextError, check_rule_name, parse_rules, parse_tensor
from unity_ir.rules.pattern import Condition, Input, Operation, ProofRecord, ResultOf, Substitution, Term
from unity_ir.rules.text import operations_with_results, rule_text, tensor_text

_VALUE: AttrConstraint = BaseAttr(SubstTensorType) | BaseAttr(SubstValueType)


@irdl_op_definition
class RuleOp(IRDLOperation):
    """
    A rewrite rule (`unity_ir.rules.pattern.Substitution`) as an operation: one region for the pattern to match
    (source), one for what replaces it (target).
    """

    name = "subst.rule"

    rule_name = prop_def(StringAttr, prop_name="name")
    inputs = prop_def(ArrayAttr[StringAttr])
    """The names of the blocks' arguments."""
    conditions = prop_def(ArrayAttr)
    """Polynomials (`#subst.poly`) that must be 0 or more."""
    exact = opt_prop_def(UnitAttr)
    """Present if the rule only moves and copies numbers, so that both sides round alike."""
    proof = opt_prop_def(DictionaryAttr)
    """
    `verdict`, `seconds`, what was `assumed` and the `digest` of what was proved. Nothing is applied because of it.
    """

    source = region_def("single_block")
    target = region_def("single_block")

    @classmethod
    def parse(cls, parser: Parser) -> RuleOp:
        """
        Parse what follows `subst.rule`: the text of a rule (`unity_ir.rules.parse`). Raises `ParseError`, also for a
        rule that is not well formed.
        """
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
        """Print the text of the rule, as `parse` reads it."""
        printer.print_string(rule_text(to_rule(self)).removeprefix(self.name))

    def verify_(self) -> None:
        """
        Raise `VerifyException` for a rule that is not well formed, such as one whose sides have different types.
        Whether both sides compute the same is not checked here, but proved (`unity_ir.rules.proof`).
        """
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
    """`subst.apply`: an operator of a pattern, parallel or compute, applied to values."""

    name = "subst.apply"

    operator = prop_def(StringAttr)
    values = prop_def(DictionaryAttr)
    """The operator's attributes: `#subst.poly`, lists of them, `#subst.parameter`, strings and numbers."""

    arguments = var_operand_def(_VALUE)
    outputs = var_result_def(SubstValueType)

    traits = traits_def(Pure(), HasParent(RuleOp))


@irdl_op_definition
class YieldOp(IRDLOperation):
    """
    `subst.yield`: ends a side of a rewrite rule. In the source, its operands are the values that a match replaces; in
    the target, those that replace them.
    """

    name = "subst.yield"

    arguments = var_operand_def(_VALUE)

    traits = traits_def(IsTerminator(), HasParent(RuleOp))


# -- between substitutions and their operations


def from_rule(rule: Substitution) -> RuleOp:
    """Return a substitution as a `subst.rule` operation, without checking that it is well formed."""
    properties: dict[str, Attribute] = {
        "name": StringAttr(rule.name),
        "inputs": ArrayAttr(StringAttr(i.name) for i in rule.inputs),
        "conditions": ArrayAttr(PolyAttr(c.poly) for c in rule.conditions),
    }
    if rule.exact:
        properties["exact"] = UnitAttr()
    if rule.proof is not None:
        properties["proof"] = DictionaryAttr(
            {
                "verdict": StringAttr(rule.proof.verdict),
                "seconds": FloatAttr(rule.proof.seconds, f64),
                "assumed": ArrayAttr(map(StringAttr, rule.proof.assumed)),
                **({"digest": StringAttr(rule.proof.digest)} if rule.proof.digest else {}),
            }
        )
    return RuleOp.create(properties=properties, regions=[_region(rule, rule.source), _region(rule, rule.target)])


def _region(rule: Substitution, side: tuple[Term, ...]) -> Region:
    block = Block(arg_types=[SubstTensorType(tensor_text(i)) for i in rule.inputs])
    inputs: dict[str, SSAValue] = {}
    for item, argument in zip(rule.inputs, block.args, strict=True):
        argument.name_hint = item.name
        inputs[item.name] = argument
    made: dict[int, Sequence[SSAValue]] = {}

    def value(term: Term) -> SSAValue:
        return inputs[term.name] if isinstance(term, Input) else made[id(term.operation)][term.index]

    for operation, results in operations_with_results(rule, side):
        op = ApplyOp.create(
            operands=[value(t) for t in operation.operands],
            properties={
                "operator": StringAttr(operation.op),
                "values": DictionaryAttr({name: to_attribute(v) for name, v in operation.attributes}),
            },
            result_types=[SubstValueType()] * results,
        )
        made[id(operation)] = op.results
        block.add_op(op)
    block.add_op(YieldOp.create(operands=[value(t) for t in side]))
    return Region(block)


def to_rule(op: RuleOp) -> Substitution:
    """
    Return the substitution that a `subst.rule` operation holds.

    Raises `UnityError` for a rule whose inputs, conditions, attributes or operations are invalid.
    """
    check_rule_name(op.rule_name.data)
    names = [n.data for n in op.inputs]
    types = [a.type for a in op.source.block.args]
    if types != [a.type for a in op.target.block.args] or len(types) != len(names) or len(set(names)) < len(names):
        raise UnityError("subst.rule: both sides must have the inputs as arguments, each with a name of its own")
    inputs = tuple(_input(name, type) for name, type in zip(names, types, strict=True))
    conditions: list[Condition] = []
    for condition in op.conditions:
        if not isinstance(condition, PolyAttr):
            raise UnityError(f"subst.rule: the condition {condition} is no #subst.poly")
        conditions.append(Condition(condition.data))
    return Substitution(
        op.rule_name.data,
        inputs,
        _side(op.source.block, inputs),
        _side(op.target.block, inputs),
        tuple(conditions),
        op.exact is not None,
        None if op.proof is None else _proof(op.proof),
    )


def _input(name: str, type: Attribute) -> Input:
    if not isinstance(type, SubstTensorType):
        raise UnityError(f"subst.rule: input {name} is {type}; it must be a !subst.tensor")
    found = parse_tensor(type.data)
    return Input(name, found.shape, found.degrees, found.sum, found.copy, found.elements)


def _side(block: Block, inputs: Sequence[Input]) -> tuple[Term, ...]:
    terms: dict[SSAValue, Term] = dict(zip(block.args, inputs, strict=True))

    def operands(op: ApplyOp | YieldOp) -> tuple[Term, ...]:
        if not all(v in terms for v in op.operands):
            raise UnityError(f"subst.rule: {op.name} uses a value before it is made; reorder them")
        return tuple(terms[v] for v in op.operands)

    for op in block.ops:
        match op:
            case ApplyOp():
                attributes = ((name, from_attribute(name, a)) for name, a in op.values.data.items())
                operation = Operation(op.operator.data, operands(op), tuple(sorted(attributes, key=lambda a: a[0])))
                terms.update((result, ResultOf(operation, i)) for i, result in enumerate(op.results))
            case YieldOp():
                return operands(op)
            case _:
                raise UnityError(f"subst.rule: {op.name} in a rule; only subst.apply and subst.yield are allowed")
    raise UnityError("subst.rule: a side does not end in subst.yield; add it")


def _proof(attribute: DictionaryAttr) -> ProofRecord:
    found = attribute.data
    verdict, seconds, assumed = (found.get(name) for name in ("verdict", "seconds", "assumed"))
    texts = [a.data for a in _items(assumed) if isinstance(a, StringAttr)]
    if not isinstance(verdict, StringAttr) or not isinstance(seconds, FloatAttr):
        raise UnityError(f"subst.rule: the proof is {attribute}; it must have a verdict and seconds")
    digest = found.get("digest")
    return ProofRecord(
        verdict.data, seconds.value.data, tuple(texts), digest.data if isinstance(digest, StringAttr) else ""
    )


def _items(attribute: Attribute | None) -> Sequence[Attribute]:
    if not isinstance(attribute, ArrayAttr):
        return ()
    items: ArrayAttr[Attribute] = attribute  # pyright: ignore[reportUnknownVariableType]
    return items.data

"""Between substitutions and their operations."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, StringAttr, UnitAttr, f64
from xdsl.ir import Attribute, Block, Region, SSAValue

from unity_ir.dialects.subst.attributes import PolyAttr, from_attribute, to_attribute
from unity_ir.dialects.subst.ops import ApplyOp, RuleOp, YieldOp
from unity_ir.dialects.subst.types import SubstTensorType, SubstValueType
from unity_ir.errors import UnityError
from unity_ir.rules.parse import check_rule_name, parse_tensor
from unity_ir.rules.pattern import Condition, Input, Operation, ProofRecord, Result, Substitution, Term
from unity_ir.rules.text import applications, tensor_text


def from_rule(rule: Substitution) -> RuleOp:
    """The operation of a substitution."""
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

    for operation, results in applications(rule, side):
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
    """The substitution of an operation. Raises `UnityError` for operations that are none."""
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
    return Input(name, found.shape, found.degrees, found.sum, found.copy, found.integer)


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
                terms.update((result, Result(operation, i)) for i, result in enumerate(op.results))
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

"""Prints rewrite rules (substitutions) as the text that `unity_ir.rules.parse` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from unity_ir.ops import operator as find_operator
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import (
    AttrExpr,
    AttrParameter,
    Condition,
    DimPack,
    Input,
    Operation,
    ProofRecord,
    ResultOf,
    Substitution,
    Term,
)
from unity_ir.rules.poly import ONE, Poly


def tensor_text(of: Input) -> str:
    """
    Return the text of a rule's input without its name: its shape and division, such as `int [b.., d*n:d] sum = d`.
    """
    degrees = of.degrees or (ONE,) * len(of.shape)
    dims = (
        f"{size.name}.." if isinstance(size, DimPack) else f"{size}" if degree == ONE else f"{size}:{degree}"
        for size, degree in zip(of.shape, degrees, strict=True)
    )
    extra = "".join(f" {kind} = {d}" for kind, d in (("sum", of.sum), ("copy", of.copy)) if d != ONE)
    kind = "" if of.elements == "float" else f"{of.elements} "
    return f"{kind}[{', '.join(dims)}]{extra}"


def _condition_text(condition: Condition) -> str:
    """Return the text of a condition, such as `n >= m + 1`: negative terms go to the right."""
    left = Poly(tuple((m, c) for m, c in condition.poly.terms if c > 0))
    right = Poly(tuple((m, -c) for m, c in condition.poly.terms if c < 0))
    return f"{left} >= {right}"


def _attribute_text(value: AttrExpr) -> str:
    """Return the text of the value of a rule's attribute, such as `[n, m]` or `$act`."""
    match value:
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case AttrParameter(name):
            return f"${name}"
        case str():
            return _quoted(value)
        case _:
            return str(value)


def _quoted(text: str) -> str:
    """Return a string in quotes, on one line: backslashes and quotes in it are replaced."""
    return '"' + " ".join(text.replace("\\", "/").replace('"', "'").split()) + '"'


def rule_text(rule: Substitution) -> str:
    """
    Return the text of a rule, on several lines, from which `parse_rules` makes the same rule, with its proof record
    (verdict and seconds of its proof). Results are named after their operators; in strings, `"` becomes `'` and a
    backslash `/`.
    """
    inputs = ", ".join(f"%{i.name}: {tensor_text(i)}" for i in rule.inputs)
    where = f" where {', '.join(map(_condition_text, rule.conditions))}" if rule.conditions else ""
    flags = ["exact"] * rule.exact + ([] if rule.proof is None else [_proof_text(rule.proof)])
    attributes = f" attributes {{{', '.join(flags)}}}" if flags else ""
    lines = [f"subst.rule {_quoted(rule.name)} ({inputs}){where}{attributes} {{"]
    lines += [f"  {line}" for line in _side_text(rule, rule.source)]
    lines += ["} to {", *(f"  {line}" for line in _side_text(rule, rule.target)), "}"]
    return "\n".join(lines)


def _proof_text(proof: ProofRecord) -> str:
    assumed = f", assumed = [{', '.join(map(_quoted, proof.assumed))}]" if proof.assumed else ""
    digest = f", digest = {_quoted(proof.digest)}" if proof.digest else ""
    return f"proof = {{verdict = {_quoted(proof.verdict)}, seconds = {proof.seconds!r}{assumed}{digest}}}"


def operations_with_results(rule: Substitution, side: tuple[Term, ...]) -> list[tuple[Operation, int]]:
    """
    Return (operation, count) for each operation of one side of a rule, operands first. The count is how many results
    the rule's text has to name for the operation: one more than the highest number of a result that is used, at least
    1.
    """
    operations = rule.operations(side)
    results = {id(o): 1 for o in operations}
    for term in (*side, *(t for o in operations for t in o.operands)):
        if isinstance(term, ResultOf):
            results[id(term.operation)] = max(results[id(term.operation)], term.index + 1)
    return [(o, results[id(o)]) for o in operations]


def _side_text(rule: Substitution, side: tuple[Term, ...]) -> Iterator[str]:
    taken = {i.name for i in rule.inputs}
    counts: Counter[str] = Counter()
    names: dict[int, list[str]] = {}

    def name(term: Term) -> str:
        return f"%{term.name}" if isinstance(term, Input) else f"%{names[id(term.operation)][term.index]}"

    def fresh(op: str) -> str:
        while (found := f"{op}{counts[op]}") in taken:
            counts[op] += 1
        taken.add(found)
        return found

    for o, results in operations_with_results(rule, side):
        names[id(o)] = [fresh(o.op) for _ in range(results)]
        made = ", ".join(f"%{n}" for n in names[id(o)])
        values = ", ".join(f"{key} = {_attribute_text(value)}" for key, value in o.attributes)
        yield f"{made} = {o.op} {', '.join(map(name, o.operands))}" + (f" {{{values}}}" if values else "")
    yield f"yield {', '.join(map(name, side))}"


def side_text(side: tuple[Term, ...]) -> str:
    """
    Return one side of a rule as one line: `matmul(relu(x), w)`; results of operators that may have several carry their
    number, `split(y).0, split(y).1`.
    """
    return ", ".join(map(_term_text, side))


def _term_text(term: Term) -> str:
    if isinstance(term, Input):
        return term.name
    o = term.operation
    given = [f"{key}={_attribute_text(value)}" for key, value in o.attributes]
    text = f"{o.op}({', '.join([*map(_term_text, o.operands), *given])})"
    return f"{text}.{term.index}" if _has_several(o.op) else text


def _has_several(op: str) -> bool:
    """Return whether an operator has more results than one."""
    return op not in PARALLEL_OPERATORS and any(
        len(find_operator(op).line.results) > 1 or r.variadic for r in find_operator(op).line.results
    )

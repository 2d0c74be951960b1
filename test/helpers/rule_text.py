"""Rules as one line, with variables by order of use, to compare them with."""

from __future__ import annotations

from unity_ir.rules.pattern import DimPack, Input, Substitution, Term


def text(rule: Substitution) -> str:
    """`add(x, y) = add(y, x)`; attributes but `by`, sizes and those at their default are shown."""
    return " = ".join(", ".join(map(term_text, side)) for side in (rule.source, rule.target))


def term_text(term: Term) -> str:
    if isinstance(term, Input):
        return term.name
    o = term.operation
    values = [str(v) for n, v in o.attributes if n == "dim"]
    values += [f"{v}" for n, v in o.attributes if n == "act" and v != "identity"]
    several = f".{term.index}" if o.op == "split" else ""
    return f"{o.op}{''.join(f'[{v}]' for v in values)}{several}({', '.join(map(term_text, o.operands))})"


def shapes(rule: Substitution) -> dict[str, list[str]]:
    """The shape of every input: sizes as text, packs with two dots."""
    return {i.name: [f"{s.name}.." if isinstance(s, DimPack) else str(s) for s in i.shape] for i in rule.inputs}

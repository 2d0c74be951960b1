"""
Checks that a rewrite rule (a source and a target pattern of operators) is well formed: operators and attributes exist,
and both sides have the same types.

Types are compared at two choices of small sizes, unequal ones for unequal symbols. That finds slips of the pen, such as
a forgotten transpose; that both sides are equal for all sizes is for the prover (`rules.proof`).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from random import Random

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.pcg.node import Value, leaf
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import (
    ELEMENTS,
    AttrExpr,
    AttrParameter,
    Bindings,
    DimPack,
    Input,
    Operation,
    ResultOf,
    Substitution,
    Term,
    attribute_expression,
    build,
    input_type,
    value_of,
)
from unity_ir.rules.poly import Poly

TRIES = 400
"""Bindings tried in search of those at which the source is well typed."""

SAMPLES = 2
"""Bindings at which both sides must have the same types."""

_PARAMETERS = {"name": "relu", "float": 0.5, "dtype": "f32"}
"""Sample values of attribute parameters, by kind."""


def _attribute_kinds(op: str) -> dict[str, str]:
    """
    Return the kind (`int`, `ints`, `float`, `name` or `dtype`) of each of an operator's attributes, by name.

    Raises `UnityError` for an unknown operator.
    """
    if op in PARALLEL_OPERATORS:
        return dict.fromkeys(PARALLEL_OPERATORS[op].attributes, "int")
    return {a.name: a.kind for a in find_operator(op).line.attributes}


@lru_cache(maxsize=1024)
def attribute_defaults(op: str) -> dict[str, AttrExpr]:
    """
    Return the default values of an operator's attributes, by name; attributes without a default are left out, and a
    parallel operator has none. Cached: do not change the dict. Raises `UnityError` for an unknown operator.
    """
    if op in PARALLEL_OPERATORS:
        return {}
    found = {a.name: a.default for a in find_operator(op).line.attributes}
    return {name: attribute_expression(value) for name, value in found.items() if value is not None}


def check(rule: Substitution) -> None:
    """
    Check that a rule is well formed; raise `UnityError`, with the rule, the fault and the fix, if not.

    Its attributes and numbers of operands must fit its operators, every input and every attribute parameter of the
    target must occur in the source, and both sides must have the same types at sample sizes.
    """
    try:
        if not rule.name:
            raise UnityError("give it a name")
        for operation in rule.operations((*rule.source, *rule.target)):
            _check_operation(operation)
        _check_bound(rule)
        _check_types(rule)
    except UnityError as error:
        raise UnityError(f"subst.rule: {rule.name or 'without a name'}: {error}") from error


def _check_operation(operation: Operation) -> None:
    op, given = operation.op, dict(operation.attributes)
    known = _attribute_kinds(op)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}" if near else f"it has {', '.join(known) or 'none'}"
            raise UnityError(f"{op} has no attribute {name}; {hint}")
    for name, kind in known.items():
        if name not in given and name not in attribute_defaults(op):
            raise UnityError(f"{op} needs the attribute {name}; add it")
        if name in given and not _fits(kind, given[name]):
            raise UnityError(f"{op}: attribute {name} is of kind {kind}; write it so")
    if op in PARALLEL_OPERATORS:
        least, variadic = 1, False
    else:
        parameters = find_operator(op).line.parameters
        least, variadic = len(parameters), any(p.variadic for p in parameters)
    found = len(operation.operands)
    if found < least or (found > least and not variadic):
        raise UnityError(f"{op} takes {least}{' or more' * variadic} operands, not {found}")


def _fits(kind: str, value: AttrExpr) -> bool:
    match kind:
        case "int":
            return isinstance(value, Poly)
        case "ints":
            return isinstance(value, tuple)
        case "float":
            return isinstance(value, float | AttrParameter) or (isinstance(value, Poly) and value.constant is not None)
        case _:
            return isinstance(value, str | AttrParameter)


def parameters(rule: Substitution, side: tuple[Term, ...]) -> dict[str, str]:
    """
    Return the attribute parameters (`$act`: an attribute whose value a match gives) on one side of a rule,
    `rule.source` or `rule.target`, as {name of the parameter: kind of its value}.

    The kind is `name` (a function such as `relu`), `float`, or `dtype` (an element type). Given `matmul` with `act =
    $act`, returns `{"act": "name"}`.
    """
    return {
        value.name: _attribute_kinds(o.op)[name]
        for o in rule.operations(side)
        for name, value in o.attributes
        if isinstance(value, AttrParameter)
    }


def _inputs(rule: Substitution, side: tuple[Term, ...]) -> set[str]:
    terms = (*side, *(t for o in rule.operations(side) for t in o.operands))
    return {t.name for t in terms if isinstance(t, Input)}


def _check_bound(rule: Substitution) -> None:
    if len(rule.source) != len(rule.target) or not rule.source:
        raise UnityError(f"the source yields {len(rule.source)} values, the target {len(rule.target)}; yield as many")
    if not all(isinstance(t, ResultOf) for t in rule.source):
        raise UnityError("the source yields an input, which nothing can match; yield results")
    for item in rule.inputs:
        if item.name not in _inputs(rule, rule.source):
            raise UnityError(f"input %{item.name} is not in the source, so a match does not give it; remove it")
    for name in parameters(rule, rule.target):
        if name not in parameters(rule, rule.source):
            raise UnityError(f"${name} is not in the source, so a match does not give it; write a value")
    packs = {p.name for i in rule.inputs for p in i.shape if isinstance(p, DimPack)}
    for s in sorted(rule.symbols):
        if s.startswith("#") and s[1:] not in packs:
            raise UnityError(f"{s} is the number of dims in {s[1:]}.., which no input has; add it to one")
        if s in packs:
            raise UnityError(f"{s} is a size and the dims {s}..; rename one")


def _check_types(rule: Substitution) -> None:
    found, reason = 0, "its conditions hold at none"
    for bindings in samples(rule):
        try:
            inputs = sample_inputs(rule, bindings)
            source = build(rule.source, inputs, bindings)
        except (UnityError, IndexError) as error:
            reason = str(error)
            continue
        sizes = ", ".join(f"{name} = {value}" for name, value in sorted(bindings.items()))
        try:
            target = build(rule.target, inputs, bindings)
        except IndexError:
            raise UnityError("the target names more results than an operator has; remove some") from None
        except UnityError as error:
            raise UnityError(f"the target is ill typed at {sizes}: {error}") from error
        for i, (old, new) in enumerate(zip(source, target, strict=True)):
            if old.type != new.type:
                raise UnityError(f"result {i} is {old.type} in the source and {new.type} in the target at {sizes}")
        found += 1
        if found == SAMPLES:
            return
    if not found:
        raise UnityError(f"no small sizes make the source well typed: {reason}")


def sample_inputs(rule: Substitution, bindings: Bindings) -> dict[str, Value]:
    """
    Make an input node for each of the rule's inputs, with the sizes and degrees that they have when the rule's symbols
    have the values in `bindings`, by name; return the nodes' values by input name. Element types are i64 for integers,
    bool for conditions, else f32.

    Raises `UnityError` if the bindings give an impossible type.
    """
    found: dict[str, Value] = {}
    for item in rule.inputs:
        type = input_type(item, "f32" if item.elements == "float" else ELEMENTS[item.elements][0], bindings)
        found[item.name] = leaf("input", type, name=item.name).result
    return found


def samples(rule: Substitution) -> Iterator[Bindings]:
    """
    Yield up to `TRIES` choices of values for a rule's symbols (sizes, degrees) and the attribute parameters of its
    source, by name, at which to try it; the same in every run.

    Sizes of dims are small and unequal for unequal symbols; all degrees are 2, integers that occur in attributes only
    are 1 to 3, and each pack `a..` (any number of dims) has 0 to 2 dims. Choices that break the rule's conditions are
    left out.
    """
    symbols = {s for s in rule.symbols if not s.startswith("#")}
    shapes = frozenset[str]().union(*(s.symbols for i in rule.inputs for s in i.shape if isinstance(s, Poly)))
    degrees = _degrees(rule)
    sizes, others = sorted((symbols & shapes) - degrees), sorted(symbols - shapes - degrees)
    packs = sorted({p.name for i in rule.inputs for p in i.shape if isinstance(p, DimPack)})
    named = {p: _PARAMETERS[kind] for p, kind in parameters(rule, rule.source).items() if kind in _PARAMETERS}
    for seed in range(TRIES):
        random = Random(seed)
        numbers = iter(random.sample(range(2, 8 + 2 * len(sizes) + 4 * len(packs)), len(sizes) + 2 * len(packs)))
        bindings: dict[str, int | float | str | tuple[int, ...]] = {**named}
        bindings |= {s: next(numbers) for s in sizes}
        bindings |= {s: random.randint(1, 3) for s in others}
        bindings |= dict.fromkeys(degrees, 2)
        bindings |= {p: tuple(next(numbers) for _ in range(random.randint(0, 2))) for p in packs}
        if all(value_of(c.poly, bindings) >= 0 for c in rule.conditions):
            yield bindings


def _degrees(rule: Substitution) -> frozenset[str]:
    """Return the symbols of degrees, of sums and copies, and of what parallel operators divide by."""
    polys = [p for i in rule.inputs for p in (*i.degrees, i.sum, i.copy)]
    for o in rule.operations((*rule.source, *rule.target)):
        if o.op in PARALLEL_OPERATORS:
            polys += [v for name, v in o.attributes if name == "by" and isinstance(v, Poly)]
    return frozenset[str]().union(*(p.symbols for p in polys))


def free(rule: Substitution) -> tuple[str, ...]:
    """
    Return the symbols of a rule that matching its source does not determine, usually degrees (numbers of pieces); to
    apply the rule, give values for them.

    A symbol is determined if the shapes, degrees and attributes of the source can be solved for it. Given the rule that
    divides `matmul(x, w)`, of x [a.., d*k] (`a..`: any number of dims), by d along k, returns `("d",)`, from which k
    follows.
    """
    known = {f"#{p.name}" for i in rule.inputs for p in i.shape if isinstance(p, DimPack)}
    equations = [p for i in rule.inputs for p in (*i.degrees, i.sum, i.copy, *i.shape) if isinstance(p, Poly)]
    for o in rule.operations(rule.source):
        for _, value in o.attributes:
            equations += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Poly)]
    found: list[str] = []
    while unknown := rule.symbols - known:
        solved = {s for p in equations for s in p.symbols - known if _solves(p, s, known)}
        if not solved:
            found.append(min(unknown & _degrees(rule) or unknown))
            solved = {found[-1]}
        known |= solved
    return tuple(found)


def _solves(poly: Poly, symbol: str, known: set[str]) -> bool:
    """Return whether an equation of a polynomial gives a symbol, all others of it being known."""
    return poly.symbols <= known | {symbol} and all(m.count(symbol) <= 1 for m, _ in poly.terms)

"""
Selects the graph rewrite rules that searches use: those of the library known to matter for models, others of it by
name, and those of a user's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

from unity_ir.errors import UnityError
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.library import families, family, find, group_cases, read_rules, rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.rule import Rule
from unity_ir.rules.trust import check_trusted, equal_but_at_ties, unproved

SEARCHED = (
    "fuse-activation",
    "unfuse-activation",
    "merge-matmuls",
    "split-of-matmul",
    "split-of-matmul-nt",
    "split-of-concat",
    "concat-of-split",
    "matmul-of-parts",
    "embedding-bag-as-sum",
    "matmul-of-embedding",
    "max-pool2d-of-relu",
)
"""The names of the rules that searches rewrite with, in the order they are tried."""

FAMILIES = ("algebraic", "conv", "embedding")
"""The families of these rules: no other text is read for them."""

COMMON = "common"
"""The word that, among the names, selects the rules of `SEARCHED`."""

UNPROVED = "unproved"
"""The word that, among the names, selects rules even if they are not proved."""

WITHOUT = "~"
"""The prefix of a name that is left out."""

FILE = ".pcg"
"""The end of a name that is a file's."""


@cache
def algebraic() -> tuple[Rule, ...]:
    """
    Return the rules of the library that searches rewrite with by default, which are known to pay in real models (those
    named in `SEARCHED`), in the order in which they are tried.
    """
    known = group_cases(rule for name in FAMILIES for rule in family(name))
    return tuple(known[name] for name in SEARCHED)


def selected(text: str) -> tuple[Rule, ...]:
    """
    Return the rules that a search option's text selects, in the order in which they are tried.

    Names are joined by `+` and read from left to right: `common` (the rules of `SEARCHED`), `library` (all, `common`
    first), `none`, a family (a file of the library), a rule, a file of rules (a path that ends in `.pcg`). A name after
    `~` removes its rules from those selected so far: `library+~fuse-activation`. The word `unproved` allows rules
    without a proof.

    Of a file, substitutions with parallel operators are left out: searches rewrite serial graphs, and divide operators
    by their TDL lines. Raises `UnityError` for unknown names, for files that cannot be read or have no rule of serial
    operators, for a rule of a file that has the name of one of the library, for rules that are not proved, and always
    for rules that may change gradients.
    """
    found: dict[str, Rule] = {}
    names = [n for n in (n.strip() for n in text.split("+")) if n]
    for name in names:
        if name == UNPROVED:
            continue
        said = name.removeprefix(WITHOUT)
        some = (found[said],) if said in found else _named(said)
        for rule in some:
            if name.startswith(WITHOUT):
                found.pop(rule.name, None)
            else:
                found.setdefault(rule.name, rule)
    for rule in found.values():
        check_trusted(rule, UNPROVED in names)
    return tuple(found.values())


def reservations(used: Collection[str], given: Iterable[Rule]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Return (unproved, ties), which a search reports about the rules called `used` that its result applies: the names of
    their substitutions that are not proved, and the names of the rules that are proved except for the gradients at ties
    of a maximum.

    A name is looked up in the rules `given`, then in the library; one that is in neither is ignored.
    """
    if not used:
        return (), ()
    known = rules() | {rule.name: rule for rule in given}
    found = [known[name] for name in dict.fromkeys(used) if name in known]
    return tuple(case for rule in found for case in unproved(rule)), equal_but_at_ties(found)


def _named(name: str) -> tuple[Rule, ...]:
    match name:
        case _ if name == COMMON:
            return algebraic()
        case "none":
            return ()
        case "library":
            return (*algebraic(), *(r for r in rules().values() if r.name not in SEARCHED))
        case _ if name in families():
            return tuple(group_cases(family(name)).values())
        case _ if name.endswith(FILE):
            return _of_file(name)
        case _:
            try:
                return (find(name),)
            except UnityError as error:
                raise UnityError(f"search: rules: {error}") from error


def _of_file(path: str) -> tuple[Rule, ...]:
    """Return the rules of serial operators in the file at `path`."""
    try:
        serial = group_cases(filter(_is_serial, read_rules(path)))
    except OSError as error:
        raise UnityError(f"search: rules: {path}: {error.strerror or error}") from error
    if not serial:
        raise UnityError(f"search: rules: {path} has no rule of serial operators; give the search one to rewrite by")
    for name in serial.keys() & rules().keys():
        raise UnityError(f"search: rules: {path}: {name} is the name of a rule of the library, too; rename it")
    return tuple(serial.values())


def _is_serial(rule: Substitution) -> bool:
    used = {o.op for o in rule.operations((*rule.source, *rule.target))}
    return used.isdisjoint(PARALLEL_OPERATORS)

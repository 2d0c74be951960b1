"""
Selects the graph rewrite rules that searches use, by name: all of the library, or those known to matter for models.
"""

from __future__ import annotations

from functools import cache

from unity_ir.errors import UnityError
from unity_ir.rules.library import families, family, find, group_cases, rules
from unity_ir.rules.rule import Rule
from unity_ir.rules.trust import check_trusted

SEARCHED = (
    "fuse-activation",
    "unfuse-activation",
    "merge-matmuls",
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

UNPROVED = "unproved"
"""The word that, among the names, selects rules even if they are not proved."""

WITHOUT = "~"
"""The prefix of a name that is left out."""


@cache
def algebraic() -> tuple[Rule, ...]:
    """
    Return the rules of the library that searches rewrite with by default, which are known to pay in real models (those
    named in `SEARCHED`), in the order in which they are tried.
    """
    known = group_cases(rule for name in FAMILIES for rule in family(name))
    return tuple(known[name] for name in SEARCHED)


@cache
def selected(text: str) -> tuple[Rule, ...]:
    """
    Return the rules that a search option's text selects, in the order in which they are tried.

    Names are joined by `+` and read from left to right: `common` (the rules of `SEARCHED`), `library` (all, `common`
    first), `none`, a family (a file of the library), a rule. A name after `~` removes its rules from those selected so
    far: `library+~fuse-activation`. The word `unproved` allows rules without a proof. Raises `UnityError` for unknown
    names, for rules that are not proved, and always for rules that may change gradients.
    """
    found: dict[str, Rule] = {}
    names = [n for n in (n.strip() for n in text.split("+")) if n]
    for name in names:
        if name == UNPROVED:
            continue
        some = _named(name.removeprefix(WITHOUT))
        for rule in some:
            if name.startswith(WITHOUT):
                found.pop(rule.name, None)
            else:
                found.setdefault(rule.name, rule)
    for rule in found.values():
        check_trusted(rule, UNPROVED in names)
    return tuple(found.values())


def _named(name: str) -> tuple[Rule, ...]:
    match name:
        case "common":
            return algebraic()
        case "none":
            return ()
        case "library":
            return (*algebraic(), *(r for r in rules().values() if r.name not in SEARCHED))
        case _ if name in families():
            return tuple(group_cases(family(name)).values())
        case _:
            try:
                return (find(name),)
            except UnityError as error:
                raise UnityError(f"search: rules: {error}") from error

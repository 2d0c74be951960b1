"""
The rewrite rules that come with the compiler: text, one file per family (such as `matmul.pcg`), the form of which is in
`unity_ir.rules.parse`.

A rule's name is its family's idea and, after a dot, the case: `fuse-activation.relu` and `fuse-activation.gelu` are the
cases of the rule `fuse-activation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.rules.check import check
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.rule import Rule


@cache
def family(name: str) -> tuple[Substitution, ...]:
    """
    Return the rewrite rules (substitutions) of one file of the library, named without `.pcg`, in the order of its text:
    given "algebraic", those of `algebraic.pcg`. They are not checked. Raises `FileNotFoundError` for another name.
    """
    file = files(__name__).joinpath(f"{name}.pcg")
    return parse_rules(file.read_text(encoding="utf-8"), f"{name}.pcg")


def families() -> tuple[str, ...]:
    """Return the families of the library's rules: the names of its files, without `.pcg`, sorted."""
    return tuple(sorted(f.name.removesuffix(".pcg") for f in files(__name__).iterdir() if f.name.endswith(".pcg")))


def all_substitutions() -> tuple[Substitution, ...]:
    """Return every substitution of the library, by family (sorted by name) and in the order of the text."""
    return tuple(rule for name in families() for rule in family(name))


def read_rules(path: str) -> tuple[Substitution, ...]:
    """
    Read the substitutions in the file at `path`, and check that they are well formed.

    Raises `UnityError` for text that is no rule and for rules that are not well formed; `OSError` if it cannot be read.
    """
    try:
        rules = parse_rules(Path(path).read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise UnityError(f"{path}: byte {error.start} is not UTF-8 text") from error
    for rule in rules:
        check(rule)
    return rules


def group_cases(substitutions: Iterable[Substitution]) -> dict[str, Rule]:
    """
    Group substitutions that are cases of one rule; return the rules by name, which is that of their cases up to the
    first dot: `fuse-activation.relu` and `fuse-activation.gelu` are cases of `fuse-activation`.

    Raises `UnityError` where two substitutions have one name.
    """
    cases: dict[str, list[Substitution]] = {}
    seen: set[str] = set()
    for substitution in substitutions:
        if substitution.name in seen:
            raise UnityError(f"subst.rule: {substitution.name}: there are two of this name; rename one")
        seen.add(substitution.name)
        cases.setdefault(substitution.name.partition(".")[0], []).append(substitution)
    return {name: Rule(name, tuple(found)) for name, found in cases.items()}


@cache
def rules() -> dict[str, Rule]:
    """Return all rules of the library by name. Cached: do not change the dict."""
    return group_cases(all_substitutions())


def find(name: str, known: dict[str, Rule] | None = None) -> Rule:
    """
    Return the rule called `name`; if that is the name of one case of a rule, such as `fuse-activation.relu`, a rule of
    this case alone. Looks in `known` if given, else in the library.

    Raises `UnityError` naming the nearest names if there is none.
    """
    known = rules() if known is None else known
    if name in known:
        return known[name]
    cases = {case.name: case for rule in known.values() for case in rule.cases}
    if name in cases:
        return Rule(name, (cases[name],))
    near = get_close_matches(name, {**known, **cases}, n=3) or [k for k in known if name and name in k][:3]
    hint = f"did you mean {' or '.join(near)}" if near else "docs/rules.md says where they are"
    raise UnityError(f"unknown rule {name}; {hint}")

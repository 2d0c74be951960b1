"""
Collections of rewrite rules of TASO and FlexFlow (JSON), read, typed, and proved or refuted.

A collection is `{"rule": [{"name", "srcOp": [Op], "dstOp": [Op], "mappedOutput": [..]}]}`, an Op
`{"type": "OP_LINEAR", "input": [{"opId", "tsId"}], "para": [{"key": "PM_ACTI", "value": 2}]}`. An input with `opId` of
at least 0 is a result of that operation of the same side; below 0 it is an input of the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove
from unity_ir.rules.research.foreign.collection import ForeignOp, ForeignRule, read_rules
from unity_ir.rules.research.foreign.sizes import Unsupported
from unity_ir.rules.research.foreign.terms import substitution


@dataclass(frozen=True, slots=True)
class ImportedRule:
    """
    A rule of another system's collection, and its verdict; `detail` gives the reason, `rule` the substitution (None
    where the rule could not be converted), `seconds` the time its proof took.

    The verdict is one of the prover's (`rules.proof.prove`), `ill-typed`, `disconnected` (its source is two patterns),
    `unbound` (its target has an input that its source has not) or `unsupported`.
    """

    name: str
    verdict: str
    detail: str = ""
    rule: Substitution | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """The rules of a collection with their verdicts, in the collection's order."""

    rules: tuple[ImportedRule, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rules per verdict, most frequent first."""
        return dict(Counter(r.verdict for r in self.rules).most_common())


def import_rules(path: Path | str, seed: int = 0) -> CollectionReport:
    """
    Read TASO's or FlexFlow's collection of rules (JSON), and prove or refute each rule; return them with verdicts.

    `seed` is that of the random samples on which rules are tested. Raises `UnityError` (one line) where the file is no
    collection.
    """
    return CollectionReport(tuple(_import_rule(rule, seed) for rule in read_rules(path)))


def _import_rule(foreign: ForeignRule, seed: int = 0) -> ImportedRule:
    """
    Convert a rule of another system to a substitution, and prove or refute it; return it with its verdict, which also
    tells why a rule could not be converted (`unsupported`, `ill-typed`, ..): no error is raised for it.

    `seed` is that of the random samples on which it is tested.
    """
    bound = {i for op in foreign.source for i, _ in op.inputs if i < 0}
    unbound = sorted({i for op in foreign.target for i, _ in op.inputs if i < 0} - bound, reverse=True)
    if unbound:
        return ImportedRule(foreign.name, "unbound", f"its source has no input {', '.join(map(str, unbound))}")
    if not _connected(foreign.source):
        return ImportedRule(foreign.name, "disconnected", "its source is more than one pattern")
    try:
        rule = substitution(foreign)
    except Unsupported as reason:
        return ImportedRule(foreign.name, "unsupported", str(reason))
    except UnityError as error:
        return ImportedRule(foreign.name, "ill-typed", str(error))
    proof = prove(rule, seed)
    ill = proof.verdict == "refuted" and proof.detail.startswith("ill-typed: ")
    verdict = "ill-typed" if ill else proof.verdict
    return ImportedRule(foreign.name, verdict, proof.detail.removeprefix("ill-typed: "), rule, proof.seconds)


def _connected(side: Sequence[ForeignOp]) -> bool:
    """Return whether the operations of a side are connected through results or inputs."""
    groups: list[set[object]] = []
    for at, op in enumerate(side):
        own: set[object] = {("op", at), *(("op", i) if i >= 0 else ("input", i) for i, _ in op.inputs)}
        apart = [g for g in groups if g.isdisjoint(own)]
        groups = [*apart, own.union(*(g for g in groups if not g.isdisjoint(own)))]
    return len(groups) == 1

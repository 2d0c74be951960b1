"""
Collections of rewrite rules of TASO (protobuf) and FlexFlow (JSON), read, typed, and proved or refuted.

A collection of FlexFlow's is `{"rule": [{"name", "srcOp": [Op], "dstOp": [Op], "mappedOutput": [..]}]}`, an Op
`{"type": "OP_LINEAR", "input": [{"opId", "tsId"}], "para": [{"key": "PM_ACTI", "value": 2}]}`. An input with `opId` of
at least 0 is a result of that operation of the same side; below 0 it is an input of the rule. TASO's says the same in
numbers (`protobuf`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove
from unity_ir.rules.research.foreign.collection import ForeignRule, read_rules
from unity_ir.rules.research.foreign.convert import STACKED, Encoding, encodings, stacks
from unity_ir.rules.research.foreign.sizes import Unsupported

PROVED = ("proved", "almost everywhere")
"""The verdicts of rules that hold."""


@dataclass(frozen=True, slots=True)
class ImportedRule:
    """
    A rule of another system's collection (TASO's or FlexFlow's), and its verdict; `detail` gives the reason, `rule` the
    substitution (None where the rule could not be converted), `seconds` the time its proofs took.

    The verdict is one of the prover's (`rules.proof.prove`), `ill-typed`, `unbound` (its target has an input that its
    source has not) or `unsupported`. `loses` is what the substitution leaves out of the rule (`Encoding.loses`);
    `detail` then begins with it, and ends with the reason why the encoding that leaves out nothing failed.
    """

    name: str
    verdict: str
    detail: str = ""
    rule: Substitution | None = None
    seconds: float = 0.0
    loses: str = ""


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
    Read a collection of rules, TASO's protobuf (`.pb`) or FlexFlow's JSON, and prove or refute each rule; return them
    with verdicts.

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
    tried: list[ImportedRule] = []
    for encoding in encodings(foreign):
        tried.append(_tried(foreign, encoding, seed))
        if tried[-1].verdict in PROVED:
            break
    # What is said of the degrees that it has tells most; but then no sizes may fit, where some did before.
    decided = [r for r in tried if r.verdict not in ("ill-typed", "unsupported")]
    found = (decided or tried)[-1]
    if found.verdict in PROVED and found.loses:
        found = replace(found, detail=f"{found.loses}: {tried[0].detail}")
    elif found.verdict in PROVED and stacks(foreign):
        # Addends in another order, or copies among them, are one sum here, but another stack there.
        tried.append(_tried(foreign, STACKED, seed))
        found = tried[-1] if tried[-1].verdict == "refuted" else found
    return replace(found, seconds=sum(r.seconds for r in tried))


def _tried(foreign: ForeignRule, encoding: Encoding, seed: int) -> ImportedRule:
    """Return a rule with the verdict on one of its encodings."""
    try:
        rule = encoding.convert(foreign)
    except Unsupported as reason:
        return ImportedRule(foreign.name, "unsupported", str(reason))
    except UnityError as error:
        return ImportedRule(foreign.name, "ill-typed", str(error))
    proof = prove(rule, seed)
    ill = proof.verdict == "refuted" and proof.detail.startswith("ill-typed: ")
    verdict, detail = "ill-typed" if ill else proof.verdict, proof.detail.removeprefix("ill-typed: ")
    return ImportedRule(foreign.name, verdict, detail, rule, proof.seconds, encoding.loses)

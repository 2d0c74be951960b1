"""
Decides which rewrite rules may be applied: those that the present prover proves from their present text.

A proof belongs to a digest of the rule's normal form, the lines and gradients of the operators it names, and the
version of the prover. The verdicts on the library's rules are stored with the library, by digest, and a test proves
them again. Other rules are proved before they are applied (some 20 ms each). The proof that a rule's own text carries
is not believed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from inspect import getsource
from typing import get_args

from unity_ir.errors import UnityError
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Operator
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.verdict import Proof, Verdict
from unity_ir.rules.rule import Rule
from unity_ir.rules.text import rule_text

PROVER = 7
"""The version of the prover. Raise it with every change by which a verdict may become another."""

LIBRARY = "proofs.toml"
"""The file of the library with the verdicts on its rules, by digest; `unity-rules check --write` writes it."""


def digest(rule: Substitution) -> str:
    """
    Return a hash of all that the proof of a rule depends on, by which verdicts are stored: equal for two texts of one
    rule, different once its meaning may differ. It covers the lines and gradients of the rule's operators and the
    prover's version, but not the rule's name and the verdict that its text may carry.
    """
    ops = sorted({o.op for o in rule.operations((*rule.source, *rule.target))} - PARALLEL_OPERATORS.keys())
    lines = [text for op in ops for text in _said_of(find_operator(op))]
    text = "\n".join([f"prover {PROVER}", rule_text(replace(rule, name="", proof=None)), *lines])
    return sha256(text.encode()).hexdigest()[:32]


@cache
def _said_of(operator: Operator) -> tuple[str, str]:
    """Return an operator's line, and the text of its gradient; of one that no file holds, only whether it has one."""
    try:
        gradient = "none" if operator.gradient is None else getsource(operator.gradient)
    except (OSError, TypeError):
        gradient = "some"
    return operator.tdl if isinstance(operator.tdl, str) else operator.signature or "", gradient


@cache
def _kept() -> Mapping[str, str]:
    file = files("unity_ir.rules.library").joinpath(LIBRARY)
    table = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {str(entry["digest"]): str(entry["verdict"]) for entry in table.values()}


def verdicts_text(proofs: Iterable[tuple[Substitution, Proof]]) -> str:
    """
    Return the text of the file that keeps the verdicts on the library's rules, one line per (rule, proof) in `proofs`.
    """
    head = "# What the prover says of every rule of the library: `unity-rules check --write` writes this file.\n"
    lines = (f'"{r.name}" = {{digest = "{digest(r)}", verdict = "{p.verdict}"}}\n' for r, p in proofs)
    return head + "".join(lines)


_proofs: dict[str, Proof] = {}


def proof_of(rule: Substitution) -> Proof:
    """
    Return the proof of a rule: the verdict stored for its digest (which comes without detail or seconds), or else the
    result of proving it now (once per process).
    """
    key = digest(rule)
    if key not in _proofs:
        kept = next((v for v in get_args(Verdict) if v == _kept().get(key)), None)
        _proofs[key] = _proved_now(rule) if kept is None else Proof(kept)
    return _proofs[key]


def _proved_now(rule: Substitution) -> Proof:
    # It imports Z3, which a search that finds all its rules proved need not wait for.
    from unity_ir.rules.proof.prove import prove

    return prove(rule)


def unproved(rule: Rule) -> tuple[str, ...]:
    """
    Return the names of those cases of a rule for which it is not proved that the forward's values stay the same. A case
    that is proved to keep them, but may change gradients, is not among them.
    """
    return tuple(case.name for case in rule.cases if not proof_of(case).forward)


def equal_but_at_ties(given: Iterable[Rule]) -> tuple[str, ...]:
    """
    Return the names of those rules with a case whose gradients are proved equal except perhaps at ties of a maximum.
    """
    return tuple(r.name for r in given if any(proof_of(c).verdict == "almost everywhere" for c in r.cases))


def check_trusted(rule: Rule, allow_unproved: bool = False, graph: Graph | None = None) -> None:
    """
    Raise `UnityError` if it is not proved that every case of `rule` keeps the forward's values, unless
    `allow_unproved`.

    In any case, raise it if only forward values are proved equal and `graph` is still to be differentiated, since
    gradients may change; None for the graph counts as still to be differentiated.
    """
    for case in rule.cases:
        proof = proof_of(case)
        if not proof.forward and not allow_unproved:
            raise UnityError(
                f"{case.name}: is not proved ({proof.verdict}: {proof.detail}); mend it, or apply it with unproved"
            )
        if proof.verdict == "forward only" and (graph is None or (not graph.updates and nodes_with_gradient(graph))):
            raise UnityError(
                f"{case.name}: keeps values but not gradients ({proof.detail}); apply it after pcg-differentiate"
            )

"""`unity-rules certify` and `verify`: write certificates of rules, and check them without the prover."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from unity_ir.errors import UnityError
from unity_ir.rules import library
from unity_ir.rules.certificate.replay import Certificate, check_certificate
from unity_ir.rules.certificate.terms import Refused
from unity_ir.rules.certificate.write import Unwritten, write_certificate
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.verdict import Proof
from unity_ir.rules.trust import proof_of

WORDS = {True: "values and gradients", False: "values"}
"""The words for what a certificate proves, by whether it proves gradients equal."""


def certify(proofs: Iterable[tuple[Substitution, Proof]]) -> tuple[Counter[str], list[tuple[str, Proof]]]:
    """
    Write and check a certificate of each rule that is proved; return how many of them prove what, and those of the
    others, with the reason.
    """
    found = Counter[str]()
    without: list[tuple[str, Proof]] = []
    for rule, proof in proofs:
        if proof.forward:
            try:
                found[WORDS[check_certificate(rule, write_certificate(rule, proof.proved))]] += 1
            except (Unwritten, Refused) as reason:
                without.append((rule.name, Proof("undecided", f"no certificate: {reason}")))
    return found, without


def _certify_options(parser: ArgumentParser) -> None:
    parser.add_argument("--file", help="rules of a file instead of the library's")
    parser.add_argument("-o", "--output", type=Path, required=True, help="write the certificates to a file, as JSON")


def _certify(options: Namespace) -> int:
    """Write certificates of those rules that are proved. The exit code is 1 if one of these has none."""
    rules = library.all_substitutions() if options.file is None else library.read_rules(options.file)
    certificates: dict[str, object] = {}
    missing = 0
    for rule in rules:
        proof = proof_of(rule)
        try:
            if not proof.forward:
                raise Unwritten(f"it is {proof.verdict}")
            certificates[rule.name] = write_certificate(rule, proof.proved)
        except Unwritten as reason:
            print(f"{rule.name}: no certificate: {reason}")
            missing += 1
    options.output.write_text(json.dumps(certificates), encoding="utf-8")
    print(f"{len(certificates)} of {len(rules)} rules have certificates")
    return 1 if missing else 0


def _verify_options(parser: ArgumentParser) -> None:
    parser.add_argument("certificates", type=Path, help="what certify wrote")
    parser.add_argument("--file", help="rules of a file instead of the library's")


def _verify(options: Namespace) -> int:
    """Check certificates. The exit code is 1 if a rule has none, or one that is refused."""
    rules = library.all_substitutions() if options.file is None else library.read_rules(options.file)
    try:
        certificates: Any = json.loads(options.certificates.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnityError(f"{options.certificates}: no JSON: {error}") from error
    if not isinstance(certificates, dict):
        raise UnityError(f"{options.certificates}: not what unity-rules certify writes; run that")
    found = Counter[str]()
    for rule in rules:
        try:
            if rule.name not in certificates:
                raise Refused("it has none")
            found[WORDS[check_certificate(rule, cast("Certificate", certificates[rule.name]))]] += 1
        except Refused as reason:
            print(f"{rule.name}: {reason}")
            found["refused"] += 1
    print(", ".join(f"{n} {what}" for what, n in found.items()))
    return 1 if found["refused"] else 0


SUBCOMMANDS: dict[str, tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]] = {
    "certify": ("write certificates of rules that are proved", _certify_options, _certify),
    "verify": ("check certificates, without the prover", _verify_options, _verify),
}
"""The subcommands of `unity-rules` on certificates, by name."""

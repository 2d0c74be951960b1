"""Compare the counts of a run of the generator with the published ones."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from unity_ir.pcg.parallel import PARALLEL_OPERATORS
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.research.generate.run import GenerationReport

TASO = {"candidates": 28744, "canonical": 17346, "general": 743}
"""Candidates; those left after renaming; those left without common subgraphs, too (Jia et al., SOSP'19)."""

UNITY = {"parallel": 651}
"""
The substitutions that parallel operators add, found and verified in 30 minutes (Unger et al., OSDI'22, section 4).
"""


def rows(report: GenerationReport) -> list[tuple[str, str, str, str]]:
    """
    Return the rows of the table that a report prints, as text: (what is counted, the count in this run, TASO's
    published count, Unity's); "" where none is published.
    """
    counts, taso = report.counts, {n: f"{c:,}" for n, c in TASO.items()}
    serial = sum(not _is_parallel(r) for r in report.rules)
    found: list[tuple[str, int, str, str]] = [
        ("terms", counts.terms, "", ""),
        ("candidates", counts.candidates, taso["candidates"], ""),
        ("  but for renamings", counts.compared, "", ""),
        ("  equal at other sizes", counts.other_sizes, "", ""),
        ("  canonical", counts.canonical, taso["canonical"], ""),
        ("  without common subgraphs", counts.general, taso["general"], ""),
        ("minimal", counts.minimal, "", ""),
        ("  for all sizes", counts.generalised, "", ""),
        ("  proved", counts.proved, "", ""),
        ("  proved but at ties", counts.almost_everywhere, "", ""),
        ("  proved forward only", counts.forward_only, "", ""),
        ("  undecided", counts.undecided, "", ""),
        ("  refuted", counts.refuted, "", ""),
        ("  superfluous", counts.superfluous, "", ""),
        ("of several results", counts.joined, "", ""),
        ("rules", len(report.rules), taso["general"], ""),
        ("  serial", serial, "", ""),
        ("  with parallel operators", len(report.rules) - serial, "", f"{UNITY['parallel']:,}"),
        ("  for any number of leading dims", counts.ranks, "", ""),
    ]
    return [(name, f"{count:,}", first, second) for name, count, first, second in found]


def _is_parallel(rule: Substitution) -> bool:
    return any(o.op in PARALLEL_OPERATORS for o in rule.operations((*rule.source, *rule.target)))


def summary(report: GenerationReport) -> dict[str, Any]:
    """
    Return the report as a dict for `json.dump`: the space, the counts after each step of generating rules, the seconds
    of each of its main steps and of the proofs, and the counts published for TASO and Unity.
    """
    proofs = sorted(report.proofs)
    times = {"total": sum(proofs), "median": median(proofs), "slowest": proofs[-1]} if proofs else {}
    return {
        "space": asdict(report.space),
        "rules": len(report.rules),
        "parallel": sum(map(_is_parallel, report.rules)),
        "counts": asdict(report.counts),
        "seconds": report.seconds,
        "proofs": times,
        "published": {"taso": TASO, "unity": UNITY},
    }

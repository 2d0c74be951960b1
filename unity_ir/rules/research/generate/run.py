"""
The whole of generating rewrite rules: enumerate, find candidates, minimise, prove, join, and make what is left general.

Each stage's outcome is kept in a state file, and a run begun again goes on after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from unity_ir.rules.check import attribute_defaults
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import AttrExpr, Input, Operation, ProofRecord, Substitution, Term
from unity_ir.rules.pattern import ResultOf as PatternResult
from unity_ir.rules.proof.verdict import Proof
from unity_ir.rules.research.generate.enumerate import Enumeration
from unity_ir.rules.research.generate.fingerprint import Values
from unity_ir.rules.research.generate.generalise import General, Pair, general, most_general
from unity_ir.rules.research.generate.join import Join, Joined, composite, has_several
from unity_ir.rules.research.generate.minimise import follows, order, superfluous
from unity_ir.rules.research.generate.packs import packed
from unity_ir.rules.research.generate.pool import Provers
from unity_ir.rules.research.generate.rewrite import Rewriting
from unity_ir.rules.research.generate.space import BASES, Space
from unity_ir.rules.research.generate.state import load, pack_terms, save, unpack_terms
from unity_ir.rules.research.generate.terms import Terms
from unity_ir.rules.text import rule_text
from unity_ir.rules.trust import digest

BATCH = 8
"""Equations proved at once; the same for any number of processes, so that the outcome is, too."""

SAVE = 10.0
"""Seconds between two states of minimising."""

StageProgress = Callable[[str, int, int], None]
"""Called with the name of the current step, how many things it has done, and how many there are."""


@dataclass
class StageCounts:
    """How many terms, equations or rules were left after each step of generating rules, in the order of the steps."""

    terms: int = 0
    """Terms computed."""
    candidates: int = 0
    """Terms equal to an earlier term."""
    compared: int = 0
    """Candidates that are no renamings of others."""
    other_sizes: int = 0
    """Those that are equal at the other sets of sizes, too."""
    canonical: int = 0
    """Those with variables numbered in order of use, each once."""
    general: int = 0
    """Those without common subgraphs, and without repeated variables that need not be the same, each once."""
    minimal: int = 0
    """Those that smaller proved ones do not imply."""
    generalised: int = 0
    """Those that have a form with symbols for sizes."""
    proved: int = 0
    almost_everywhere: int = 0
    """Values are proved equal; gradients are, but perhaps at ties."""
    forward_only: int = 0
    """Values are proved equal, gradients are not."""
    undecided: int = 0
    refuted: int = 0
    superfluous: int = 0
    """Proved, but implied by others that were found later."""
    joined: int = 0
    """Proved rules of several results."""
    ranks: int = 0
    """Rules that hold for any number of leading dims."""

    def add(self, proof: Proof) -> None:
        """Add one to the count that is named after the proof's verdict, such as `proved` or `forward_only`."""
        name = proof.verdict.replace(" ", "_")
        setattr(self, name, getattr(self, name) + 1)


@dataclass
class GenerationReport:
    """
    The result of generating rules: the rules found, those of one result first, and the counts and seconds of the steps.
    """

    space: Space
    rules: list[Substitution] = field(default_factory=list[Substitution])
    counts: StageCounts = field(default_factory=StageCounts)
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each main step, by its name; a run that goes on from a stopped one adds to that one's."""
    proofs: list[float] = field(default_factory=list[float])
    """Seconds of each proof."""


def generate(
    space: Space, state: Path | None = None, jobs: int = 1, progress: StageProgress = lambda stage, done, total: None
) -> GenerationReport:
    """
    Generate the rewrite rules over a space of terms: all equalities between terms that the others do not imply, proved
    for all sizes and degrees. Return them with counts and seconds of each step.

    `state` is the file in which what was found so far is kept, so that a run that was stopped can go on (None:
    nowhere); `jobs` is the number of processes that prove. `progress` is called with (the name of the current step,
    such as `candidates`; how many things it has done; how many there are). The rules are the same for the same space,
    whatever `jobs` is. Raises `UnityError` for a state file of another space.
    """
    return _Run(space, state, jobs, progress).report()


class _Run:
    def __init__(self, space: Space, state: Path | None, jobs: int, progress: StageProgress):
        self.space, self.state, self.jobs, self.progress = space, state, jobs, progress
        self.stages: dict[str, Any] = load(state, asdict(space))
        self.terms = Terms()
        self.values = [Values(space.seed, i) for i in range(len(BASES))]
        self.counts = StageCounts(**self.stages.get("counts", {}))
        self.seconds: dict[str, float] = self.stages.get("seconds", {})
        self.proofs: list[float] = self.stages.get("proofs", [])

    def report(self) -> GenerationReport:
        """Run all stages, and return the report."""
        if "rules" not in self.stages:
            pairs, joined = self._timed("enumerate", self._candidates)
            with Provers(self.jobs, self.space.seed) as provers:
                kept = self._timed("minimise and prove", lambda: self._minimal(pairs, provers))
                rules = self._timed("join and generalise", lambda: self._finished(kept, joined, provers))
            self.stages = {"rules": "\n".join(map(rule_text, _named(rules)))}
            self._save()
        rules = list(parse_rules(self.stages["rules"], "the state"))
        return GenerationReport(self.space, rules, self.counts, self.seconds, self.proofs)

    def _timed(self, stage: str, run: Callable[[], Any]) -> Any:
        self._stage, self._begin, self._before = stage, perf_counter(), self.seconds.get(stage, 0.0)
        found = run()
        self._clock()
        return found

    def _clock(self) -> None:
        self.seconds[self._stage] = self._before + perf_counter() - self._begin

    def _save(self) -> None:
        own = {"counts": asdict(self.counts), "seconds": self.seconds, "proofs": self.proofs}
        save(self.state, asdict(self.space), {**self.stages, **own})

    # -- candidates

    def _candidates(self) -> tuple[list[Pair], list[Joined]]:
        if "pairs" in self.stages:
            pairs = [(a, b) for a, b in unpack_terms(self.stages["pairs"], self.terms)]
            flat = unpack_terms(self.stages["joined"], self.terms)
            return pairs, [(t[: len(t) // 2], t[len(t) // 2 :]) for t in flat]
        enumeration = Enumeration(self.space)
        enumeration.run(lambda size, done, total: self.progress(f"terms of size {size}", done, total))
        self.counts.terms, self.counts.candidates = enumeration.terms, enumeration.found
        join = Join()
        canonical: dict[Pair, None] = {}
        for i, pair in enumerate(enumeration.candidates(self.terms)):
            self._tell("candidates", i, enumeration.kept)
            self.counts.compared += 1
            if all(v.equal(*pair) for v in self.values[1:]):
                self.counts.other_sizes += 1
                join.add(pair)
                left, right = self.terms.renamed(*pair)
                canonical[left, right] = None
        del enumeration
        self.counts.canonical = len(canonical)
        found: dict[Pair, None] = {}
        for i, pair in enumerate(canonical):
            self._tell("common subgraphs", i, len(canonical))
            left, right = most_general(pair, self.terms, self.values[0])
            if left is not right:
                found[left, right] = None
        pairs, joined = sorted(found, key=order), join.joined(self.terms, self.values[0])
        self.counts.general = len(pairs)
        self.stages["pairs"] = pack_terms(pairs)
        self.stages["joined"] = pack_terms([(*a, *b) for a, b in joined])
        self._clock()
        self._save()
        return pairs, joined

    def _tell(self, stage: str, done: int, total: int) -> None:
        if done % 256 == 0:
            self.progress(stage, done, total)

    # -- the minimal set

    def _minimal(self, pairs: list[Pair], provers: Provers) -> list[tuple[Pair, General]]:
        """Return the pairs that earlier ones do not imply, proved."""
        rules = Rewriting(self.terms, len(BASES), self.space.degree)
        kept: list[tuple[Pair, General]] = []
        accepted: list[tuple[int, float]] = [(int(n), float(s)) for n, s in self.stages.get("accepted", [])]
        for number, seconds in accepted:
            made = self._general(pairs[number])
            assert made is not None, "what was accepted is general"
            rules.add(made.rule)
            kept.append((pairs[number], _proved(made, Proof("proved", seconds=seconds))))
        at, saved = int(self.stages.get("at", 0)), perf_counter()
        while at < len(pairs):
            batch: list[tuple[int, General]] = []
            while at < len(pairs) and len(batch) < BATCH:
                self._tell("minimise and prove", at, len(pairs))
                if not follows(pairs[at], rules):
                    self.counts.minimal += 1
                    made = self._general(pairs[at])
                    if made is not None:
                        self.counts.generalised += 1
                        batch.append((at, made))
                at += 1
            for (number, made), proof in zip(batch, provers([m.rule for _, m in batch]), strict=True):
                # Those of the same batch may imply it.
                if follows(pairs[number], rules):
                    self.counts.minimal -= 1
                    self.counts.generalised -= 1
                    continue
                self.proofs.append(proof.seconds)
                self.counts.add(proof)
                if proof.forward:
                    rules.add(made.rule)
                    accepted.append((number, proof.seconds))
                    kept.append((pairs[number], _proved(made, proof)))
            if perf_counter() - saved > SAVE:
                self.stages |= {"accepted": accepted, "at": at}
                self._clock()
                self._save()
                saved = perf_counter()
        return kept

    def _general(self, pair: Pair) -> General | None:
        return general("", pair[:1], pair[1:], self.space.degree)

    # -- what is handed out

    def _finished(self, kept: list[tuple[Pair, General]], joined: list[Joined], provers: Provers) -> list[Substitution]:
        """
        Return the rules that others do not imply, with those of several results, for any number of dims where possible.
        """
        self.progress("superfluous rules", 0, 1)
        drop = superfluous([(p, g.rule) for p, g in kept], self.terms, len(BASES), self.space.degree)
        self.counts.superfluous = len(drop)
        made = [g for i, (_, g) in enumerate(kept) if i not in drop]
        wide = self._not_composite(joined, [g.rule for g in made])
        proofs = provers([g.rule for g in wide])
        proved = [_proved(g, p) for g, p in zip(wide, proofs, strict=True) if p.forward]
        self.counts.joined = len(proved)
        self.proofs += [p.seconds for p in proofs]
        return list(self._any_rank([*made, *proved], provers))

    def _not_composite(self, joined: list[Joined], rules: list[Substitution]) -> list[General]:
        """Return the rules of several results that smaller rules do not compose."""
        single = Rewriting(self.terms, len(BASES), self.space.degree)
        for rule in rules:
            if not any(has_several(o.op) for o in rule.operations((*rule.source, *rule.target))):
                single.add(rule)
        wide: list[General] = []
        for i, of in enumerate(joined):
            self.progress("rules of several results", i, len(joined))
            if not composite(of, [g.rule for g in wide], single):
                made = general("", *of, self.space.degree)
                wide += [] if made is None else [made]
        return wide

    def _any_rank(self, rules: Sequence[General], provers: Provers) -> Iterator[Substitution]:
        """Yield each rule, in its form for any number of leading dims where that is proved, too."""
        tried = [(i, r) for i, g in enumerate(rules) for r in packed(g.rule, g.shape)]
        self.progress("any number of dims", 0, len(tried))
        found: dict[int, Substitution] = {}
        for (i, rule), proof in zip(tried, provers([r for _, r in tried]), strict=True):
            if proof.forward:
                found.setdefault(i, replace(rule, proof=_record(proof)))
        self.counts.ranks = len(found)
        yield from (found.get(i, g.rule) for i, g in enumerate(rules))


def _record(proof: Proof) -> ProofRecord:
    """Return the record of a proof; its digest is added once the rule has its last form."""
    return ProofRecord(proof.verdict, round(proof.seconds, 3))


def _proved(of: General, proof: Proof) -> General:
    return replace(of, rule=replace(of.rule, proof=_record(proof)))


def _named(rules: Sequence[Substitution]) -> list[Substitution]:
    """
    Return the rules named after their operators, outermost first: `relu-concat`, `relu-concat-2`.

    Attributes at their defaults are left out.
    """
    counts: dict[str, int] = {}
    out: list[Substitution] = []
    for rule in map(_directed, rules):
        ops = [o.op.replace("_", "-") for o in rule.operations(rule.source)][::-1] or ["identity"]
        name = "-".join(ops)
        counts[name] = counts.get(name, 0) + 1
        rule = _without_defaults(rule)
        proof = rule.proof and replace(rule.proof, digest=digest(rule))
        out.append(replace(rule, name=name if counts[name] == 1 else f"{name}-{counts[name]}", proof=proof))
    return out


def _directed(rule: Substitution) -> Substitution:
    """
    Return the rule from the side that a match can find: one that is no input and has all inputs of the other side.
    """
    if any(isinstance(t, Input) for t in rule.source) or not _inputs(rule.target) <= _inputs(rule.source):
        return replace(rule, source=rule.target, target=rule.source)
    return rule


def _inputs(side: Sequence[Term]) -> set[Input]:
    found: set[Input] = set()
    for term in side:
        found |= {term} if isinstance(term, Input) else _inputs(term.operation.operands)
    return found


def _without_defaults(rule: Substitution) -> Substitution:
    made: dict[int, Operation] = {}

    def term(of: Term) -> Term:
        if not isinstance(of, PatternResult):
            return of
        o = of.operation
        if id(o) not in made:
            made[id(o)] = Operation(o.op, tuple(map(term, o.operands)), _own_attributes(o))
        return PatternResult(made[id(o)], of.index)

    return replace(rule, source=tuple(map(term, rule.source)), target=tuple(map(term, rule.target)))


def _own_attributes(of: Operation) -> tuple[tuple[str, AttrExpr], ...]:
    defaults = attribute_defaults(of.op)
    return tuple((name, value) for name, value in of.attributes if defaults.get(name) != value)

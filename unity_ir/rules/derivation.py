"""
Derivations: sequences of applications of rewrite rules that lead from one graph to another, as text that can be
replayed. A line such as `fuse-activation at relu#4` names the rule and the operator it is applied at, here the relu
that is node 4 of the graph in topological order.

    @mlp
    fuse-activation at relu#4, relu#9, relu#14
    merge-matmuls at matmul#3.2
    divide-matmul.sum at matmul#4 with d=2
    stripe-sequence with stripes=8,block=128

A step a line: the rule, the operators it is applied at, and values for symbols that no match determines. `matmul#3` is
the operator that is node 3 of the graph at that step, and `.2` the second match there. At several operators it is
applied at once: all are of the graph before, and of each it is the first match. A line `@name` says to which function
the lines after it belong; lines before the first `@name` belong to every function. `//` begins a comment.

`stripe-sequence` is no rule but a transformation of the whole graph (`pcg.striped`), and has no operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.striped import striped
from unity_ir.rules.library import find
from unity_ir.rules.pattern import Bindings
from unity_ir.rules.rule import Rule
from unity_ir.rules.trust import check_trusted


@dataclass(frozen=True, slots=True)
class RuleApplication:
    """
    One application of a rule: the name of the rule, and the operators it is applied at, as in the text: `relu#4`, or
    `relu#4, relu#9` for two at once; or of `STRIPE`, at no operator, "".
    """

    rule: str
    at: str
    given: tuple[tuple[str, int], ...] = ()
    """Values for symbols no match gives, such as the degree to divide by."""

    def __str__(self) -> str:
        given = ",".join(f"{name}={value}" for name, value in self.given)
        return self.rule + (f" at {self.at}" if self.at else "") + (f" with {given}" if given else "")


STRIPE = "stripe-sequence"
"""The step that puts the tokens of a graph in striped order."""


def stripe_step(stripes: int, block: int) -> RuleApplication:
    """Return the step that puts tokens in striped order, of this many stripes, and of blocks of this many tokens."""
    return RuleApplication(STRIPE, "", (("stripes", stripes), ("block", block)))


def parse_given(text: str) -> tuple[tuple[str, int], ...]:
    """
    Parse the values given for symbols of a rule that no match determines (`with d=2,e=4` in a derivation's line): given
    `d=2,e=4`, returns `(("d", 2), ("e", 4))`, and () for an empty text.

    Raises `UnityError` for any other text, a symbol given twice, and a value below 1.
    """
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d{0,17})\s*", part, re.ASCII)
        if match is None:
            raise UnityError(f"{text!a} gives no values; write d=2,e=4, with numbers from 1")
        if match[1] in found:
            raise UnityError(f"{text!a} gives {match[1]} twice; leave one out")
        found[match[1]] = int(match[2])
    return tuple(found.items())


Derivations = Mapping[str, Sequence[RuleApplication]]
"""Rule applications by function name; those for every function are under the empty name."""

_LINE = re.compile(
    rf"((?P<rule>[A-Za-z_][\w.-]*) at (?P<at>\w+#\d+(\.\d+)?|\w+#\d+(, *\w+#\d+)+)|{STRIPE})( with (?P<given>.+))?",
    re.ASCII,
)


def parse_derivations(text: str, where: str) -> Derivations:
    """
    Parse the derivations in the text of a file; return, by function name, the rule applications of each in order (""
    has those of lines before the first `@function`). `where` is the file's name, for messages.

    Raises `UnityError` naming the line that cannot be read.
    """
    found: dict[str, list[RuleApplication]] = {}
    function = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("//")[0].strip()
        if not line:
            continue
        if line.startswith("@"):
            function = line[1:]
            found.setdefault(function, [])
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UnityError(f"{where}:{number}: `{line[:60]}` is no step of a derivation; write `rule at operator#3`")
        try:
            given = parse_given(match["given"] or "")
        except UnityError as error:
            raise UnityError(f"{where}:{number}: {error}") from error
        found.setdefault(function, []).append(RuleApplication(match["rule"] or STRIPE, match["at"] or "", given))
    return found


def apply_at(graph: Graph, rule: Rule, at: str, given: Bindings | None = None) -> Graph:
    """
    Apply a rewrite rule to a graph, at one operator or at several at once; return the new graph.

    `at` is text. It names an operator by its number in topological order, from 0: `matmul#3`, or `matmul#3.2` for the
    second of several ways to apply the rule there. Several operators are joined by commas, `matmul#3, matmul#8`; all
    numbers are those in `graph`. `given` has values by name for symbols that no match determines, such as `{"d": 2}`.

    Raises `UnityError` if the rule does not apply at `at`; the message lists operators at which it does.
    """
    several = [place.strip() for place in at.split(",")]
    if len(several) > 1 and (after := rule.at_once(graph, several, given)) is not None:
        return after
    places: list[str] = []
    for place, after in rule.applications(graph, given):
        if place == at:
            return after
        places.append(place)
    shown = ", ".join(places[:6]) + ", .." * (len(places) > 6)
    hint = f"it applies at {shown}" if places else "it applies nowhere"
    said = at if len(several) == 1 else next((p for p in several if p not in places), f"{len(several)} places at once")
    raise UnityError(f"{rule.name}: does not apply at {said} of @{graph.name}; {hint}")


def replay(
    graph: Graph, steps: Iterable[RuleApplication], known: dict[str, Rule] | None = None, unproved: bool = False
) -> Graph:
    """
    Apply all steps of a derivation to a graph, in order; return the last graph.

    Rules are looked up by name in `known`, by default in the library. `unproved` allows rules without a proof. Raises
    `UnityError` for unknown rules, for rules without a proof that are not allowed, for steps that do not apply, and
    always for rules that may change gradients while the graph is still to be differentiated.
    """
    for number, step in enumerate(steps, 1):
        try:
            if step.rule == STRIPE and not step.at:
                graph = _striped(graph, dict(step.given))
                continue
            rule = find(step.rule, known)
            check_trusted(rule, unproved, graph)
            graph = apply_at(graph, rule, step.at, dict(step.given))
        except UnityError as error:
            raise UnityError(f"step {number}: {error}") from error
    return graph


def _striped(graph: Graph, given: Mapping[str, int]) -> Graph:
    if "stripes" not in given or not given.keys() <= {"stripes", "block"}:
        raise UnityError(f"{STRIPE}: takes stripes, and perhaps block; write {STRIPE} with stripes=8,block=128")
    return striped(graph, given["stripes"], given.get("block"))

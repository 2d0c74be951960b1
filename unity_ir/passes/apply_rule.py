"""`apply-rule`: one substitution, at one operator or everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.passes.graph_pass import GraphPass, ModuleMachine, Switch
from unity_ir.pcg.graph import Graph
from unity_ir.rules.rule import Rule


@dataclass(frozen=True)
class ApplyRule(GraphPass):
    """
    Apply a rule of the library, or of a file.

    rewrite: source -> target, as the rule has it: matmul(x, a), matmul(x, b) -> split(matmul(x, concat(a, b)))
    """

    name = "apply-rule"

    rule: str
    """The name of the rule, or of one of its cases: `fuse-activation`, `fuse-activation.relu`."""

    at: str | None = None
    """The operator that makes the first replaced value, `"matmul#3"`; by default everywhere, as long as it applies."""

    function: str | None = None
    """The only function to apply the rule in; by default all."""

    file: str | None = None
    """A file to look up the rule in, instead of the library."""

    given: str = ""
    """Values for symbols that a match does not bind: `"d=2,e=4"`."""

    unproved: Switch = False
    """Apply the rule even if it is not proved; the function's attribute `UNPROVED` then names it."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the graph after the pass's rule is applied at the operator that its option `at` names. Without `at`, the
        rule is applied wherever it matches, again and again until it matches nowhere, but at most `rule.MOST_AT_ONCE`
        times. Returns `graph` itself if the option `function` names another function. `machine` is not used.

        Raises `UnityError` if the rule matches nowhere, is unknown, or is not proved (unless the option `unproved`
        allows it).
        """
        from unity_ir.rules.check import free
        from unity_ir.rules.derivation import apply_at, parse_given
        from unity_ir.rules.trust import check_trusted

        if self.function not in (None, graph.name):
            return graph
        rule = self._rule()
        check_trusted(rule, self.unproved is not False, graph)
        given = dict(parse_given(self.given))
        if self.at is not None:
            return apply_at(graph, rule, self.at, given)
        places, after = rule.everywhere(graph, given)
        if not places:
            missing = {s: None for case in rule.cases for s in free(case) if s not in given}
            hint = (
                f'; give a value for {" and ".join(missing)}, as in given="{next(iter(missing))}=2"' if missing else ""
            )
            raise UnityError(f"{rule.name}: applies nowhere in @{graph.name}{hint}")
        return after

    def unproved_rules(self) -> tuple[str, ...]:
        """
        Return the names of those cases of the rule (the patterns that share its name, such as `fuse-activation.relu`)
        that are not proved, if the pass's option `unproved` allows them; else ().
        """
        from unity_ir.rules.trust import unproved

        return unproved(self._rule()) if self.unproved is not False else ()

    def _rule(self) -> Rule:
        from unity_ir.rules.library import find, group_cases, read_rules

        return find(self.rule, None if self.file is None else group_cases(read_rules(self.file)))

"""`apply-derivation`: the rule applications of a file, such as a search has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.passes.graph_pass import GraphPass, ModuleMachine, Switch
from unity_ir.pcg.graph import Graph
from unity_ir.rules.derivation import Derivations
from unity_ir.rules.rule import Rule


@dataclass(frozen=True)
class ApplyDerivation(GraphPass):
    """
    Replay a derivation: apply its rules in order, each at its operator (see `unity_ir.rules.derivation`).

    rewrite: relu(matmul(x, w)) -> matmul(x, w) {act = "relu"}, for a step that applies fuse-activation
    """

    name = "apply-derivation"

    file: str
    """One `rule at operator#3` per line, as `unity-opt --search --derivation-out FILE` writes it."""

    rules: str | None = None
    """A file of rules to look up steps in, besides the library; of rules of one name, the file's is applied."""

    unproved: Switch = False
    """Apply rules even if they are not proved; the function's attribute `UNPROVED` then names them."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the graph after the rule applications that the pass's `file` lists: first those listed for every
        function, then those for this graph's function, in order. `machine` is not used.

        Raises `UnityError` for a step that does not apply, a rule that is unknown or not proved (unless the option
        `unproved` allows it), and a file that is no derivation; `OSError` if it cannot be read.
        """
        from unity_ir.rules.derivation import replay

        found = self._steps()
        return replay(
            graph, (*found.get("", ()), *found.get(graph.name, ())), self._known(), self.unproved is not False
        )

    def unproved_rules(self) -> tuple[str, ...]:
        """
        Return the names of the rules in the pass's `file` that are not proved, if its option `unproved` allows them;
        else ().
        """
        from unity_ir.rules.library import find
        from unity_ir.rules.trust import unproved

        if self.unproved is False:
            return ()
        names = dict.fromkeys(step.rule for steps in self._steps().values() for step in steps)
        return tuple(case for name in names for case in unproved(find(name, self._known())))

    def _steps(self) -> Derivations:
        from unity_ir.rules.derivation import parse_derivations

        try:
            text = Path(self.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnityError(f"{self.file}: byte {error.start} is not UTF-8 text") from error
        return parse_derivations(text, self.file)

    def _known(self) -> dict[str, Rule] | None:
        from unity_ir.rules.library import group_cases, read_rules, rules

        return None if self.rules is None else rules() | group_cases(read_rules(self.rules))

"""`apply-derivation`: the rule applications of a file, such as a search has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.graph import Graph


@dataclass(frozen=True)
class ApplyDerivation(GraphPass):
    """
    Apply rules in the order a derivation has them: see `unity_ir.rules.derivation`.

    rewrite: relu(matmul(x, w)) -> matmul(x, w) {act = "relu"}, and whatever else its steps say
    """

    name = "apply-derivation"

    file: str
    """One `rule at operator#3` per line, as `unity-opt --search --derivation-out FILE` writes it."""

    rules: str | None = None
    """A file of rules to find them in, instead of the library."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        from unity_ir.rules.derivation import parse_derivations, replay
        from unity_ir.rules.library import group, read

        try:
            text = Path(self.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnityError(f"{self.file}: byte {error.start} is not UTF-8 text") from error
        found = parse_derivations(text, self.file)
        known = None if self.rules is None else group(read(self.rules))
        return replay(graph, (*found.get("", ()), *found.get(graph.name, ())), known)

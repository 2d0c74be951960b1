"""
Find the dim of each input along which the samples of a batch run: tables have none, and ids of several tables may have
it second.

Dims that share an index variable in any operator form one class. The samples' class occurs in no weight, and no
operator has two variables of it (as where rows of all samples are sorted or picked by data), and it occurs in an input
that is no table of an import. Of the classes left it is one that occurs in all such inputs. If there is none, but the
outermost dims of all these inputs are of one class, it is that one, though an operator may have two variables of it. Of
several it is the one that occurs in the most operators; of equals, the outermost.

Where the outermost dims of all inputs are of size 1, there is one sample: reshapes leave such a dim out, so that
classes do not show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value

Dim = tuple[Value, int]


class _Classes:
    """Disjoint sets of dims."""

    def __init__(self) -> None:
        self._above: dict[Dim, Dim] = {}

    def of(self, dim: Dim) -> Dim:
        """Return the representative of a dim's class."""
        while (above := self._above.get(dim, dim)) != dim:
            self._above[dim] = self._above.get(above, above)
            dim = above
        return dim

    def join(self, one: Dim, other: Dim) -> None:
        """Merge the classes of two dims."""
        self._above[self.of(one)] = self.of(other)


@lru_cache(maxsize=16)
def batch_dims(graph: Graph) -> Mapping[Value, int]:
    """
    Return the batch dim of each input: the number of the dim along which the samples run. Inputs without samples are
    left out. If no input has a dim that can be one, or the outermost dims of all are of size 1, returns dim 0 of every
    input that is no scalar, nor a table.

    Given tokens [b, s] and a table of angles [s, e], returns 0 for the tokens and nothing for the table. Memoised.
    """
    classes = _Classes()
    variables = {node: _variables(node) for node in graph.nodes() if node.is_compute}
    for by_variable in variables.values():
        for first, *others in by_variable.values():
            for other in others:
                classes.join(other, first)
    operators, twice = Counter[Dim](), set[Dim]()
    for by_variable in variables.values():
        found = Counter(classes.of(dims[0]) for dims in by_variable.values())
        operators.update(found.keys())
        twice.update(each for each, count in found.items() if count > 1)
    of_weights = {classes.of((n.result, i)) for n in graph.weights() for i in range(len(n.result.shape))}
    inputs = [(n.result, i) for n in graph.inputs for i in range(len(n.result.shape))]
    # An import gives tables names with dots, which parameters of a `forward` cannot have.
    own = [dim for dim in inputs if "." not in dim[0].node.name] or inputs
    barred = twice | of_weights
    may = [dim for dim in own if classes.of(dim) not in barred and operators[classes.of(dim)] > 0]
    outermost = [dim for dim in own if dim[1] == 0]
    inputs_of = {dim: {value for value, i in own if classes.of((value, i)) == classes.of(dim)} for dim in may}
    everywhere = [dim for dim in may if len(inputs_of[dim]) == len(outermost)]
    first = {classes.of(dim) for dim in outermost}
    is_first = not everywhere and len(first) == 1 and first.isdisjoint(of_weights)
    if not may or is_first or all(value.shape[0] == 1 for value, _ in outermost):
        return dict(outermost)
    may = everywhere or may
    samples = classes.of(max(may, key=lambda dim: operators[classes.of(dim)]))
    # Reversed, so that the outermost of an input's dims overwrites the others.
    return {value: i for value, i in reversed(inputs) if classes.of((value, i)) == samples}


def _variables(node: Node) -> dict[str, list[Dim]]:
    """Return the dims of operands and results that each index variable of an operator runs along."""
    found: dict[str, list[Dim]] = {}
    analysis = node.analysis
    for parameter, value in zip(analysis.bound.operands, node.operands, strict=True):
        for i, variable in enumerate(analysis.operand_dims.get(parameter.name, ())):
            if variable is not None:
                found.setdefault(variable, []).append((value, i))
    for value, dims in zip(node.results, analysis.result_dims, strict=True):
        for i, variable in enumerate(dims):
            if variable is not None:
                found.setdefault(variable, []).append((value, i))
    return found


def sample_dims(graph: Graph) -> Mapping[str, int]:
    """
    Return `batch_dims` by the input's name instead of its value: the number of the dim along which the samples run.
    Inputs without samples are left out; if no dim can be one, every input that is no scalar has dim 0.
    """
    return {value.node.name: dim for value, dim in batch_dims(graph).items()}

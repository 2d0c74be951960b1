"""Print the serial forward in plain PyTorch, which `--check` differentiates by autograd; repeated layers are loops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from unity_ir.kernels.pytorch.code import torch_reference
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.lowering.emit.repeats import LEAST, Repeat, numbered, pattern, repeats
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value

Place = tuple[int, int]
"""A result of a node in a loop: the node's index in its part, below 0 in the part before, and the result's number."""


@dataclass(frozen=True, slots=True)
class _Loop:
    """A repeat of nodes as a loop; `operands` has the operands of each node of a part, valid for every part."""

    run: Repeat
    operands: tuple[tuple[str | Value | Place, ...], ...]
    """Each is a weight's text by the part's number, a value from before the loop, or the place of one made in it."""
    carried: Mapping[Place, Value]
    """Values from before the loop that the first part reads where others read a result of the part before."""


def reference_text(
    graph: Graph,
    identifier: Callable[[str], str],
    taken: set[str],
    running: Mapping[str, Value] = MappingProxyType({}),
) -> str:
    """
    Return the Python text of the function `reference(weights, batch)`, the serial forward `graph` in plain PyTorch,
    which returns the loss. `running` has the graph's values that are the next values of running statistics, by name; if
    there are any, the function is `reference(weights, batch, kept)`, and puts them into the dict `kept`.

    `taken` has the identifiers in use. `identifier`, called with a name, returns an unused identifier like it, and adds
    that to `taken`. Equal layers, three or more in a row, are one loop:

        for layer in range(24):
            matmul = relu @ weights[f'layer.{layer}.w']
            relu = torch.relu(matmul)
    """
    return _Writer(graph, identifier, taken, running).text()


class _Writer:
    def __init__(self, graph: Graph, identifier: Callable[[str], str], taken: set[str], running: Mapping[str, Value]):
        self.graph = graph
        self.running = running
        self.identifier = identifier
        self.taken = taken
        self.nodes = [n for n in graph.nodes() if n.op != "weight"]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.last_read: dict[Node, int] = dict.fromkeys((v.node for v in graph.outputs), len(self.nodes))
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                self.last_read[v.node] = max(i, self.last_read.get(v.node, 0))
        self.names: dict[Value, str] = {}
        self.layer = identifier("layer")
        self.out: list[str] = []

    def text(self) -> str:
        kept = ", kept" if self.running else ""
        what = "; puts new running statistics into `kept`" if self.running else ""
        self.out = [
            f"def reference(weights, batch{kept}):",
            f'    """The same forward on whole tensors in plain PyTorch{what}."""',
        ]
        done = 0
        loops: dict[Repeat, _Loop] = {}

        def alike(run: Repeat) -> int:
            for count in range(run.count, LEAST - 1, -1):
                found = self._loop(replace(run, count=count))
                if found is not None:
                    loops[found.run] = found
                    return count
            return 0

        for run in repeats([self._key(n) for n in self.nodes], alike):
            self._straight(self.nodes[done : run.start])
            self._print(loops[run])
            done = run.end
        self._straight(self.nodes[done:])
        if self.running:
            made = ", ".join(f"{name!r}: {self._name(value)}" for name, value in self.running.items())
            self.out.append(f"    kept.update({{{made}}})")
        return "\n".join([*self.out, f"    return {self._name(self.graph.outputs[0])}"]) + "\n"

    def _key(self, node: Node) -> Hashable:
        """Return a key that is equal for nodes that may be one line of a loop."""
        if node.is_leaf:
            return node
        operands = [(v.index, pattern(v.node.name) if v.node.op == "weight" else None, v.type) for v in node.operands]
        return node.op, node.attributes, tuple(operands)

    # -- loops

    def _loop(self, run: Repeat) -> _Loop | None:
        """Return a repeat's loop; None if its parts' operands do not match, or one but the last is read after it."""
        parts = [self.nodes[run.start + i * run.period :][: run.period] for i in range(run.count)]
        if any(self.last_read.get(n, 0) >= run.end for part in parts[:-1] for n in part):
            return None
        carried: dict[Place, Value] = {}
        operands: list[tuple[str | Value | Place, ...]] = []
        for nodes in zip(*parts, strict=True):
            mine: list[str | Value | Place] = []
            for values in zip(*(n.operands for n in nodes), strict=True):
                found = self._alike(run, values, carried)
                if found is None:
                    return None
                mine.append(found)
            operands.append(tuple(mine))
        return _Loop(run, tuple(operands), carried)

    def _alike(self, run: Repeat, values: Sequence[Value], carried: dict[Place, Value]) -> str | Value | Place | None:
        """Return an operand as in `_Loop.operands`, given its `values` in each part; None if they do not correspond."""
        first, second = values[:2]
        if first.node.op == "weight":
            name = numbered([v.node.name for v in values], self.layer)
            return None if name is None else f"weights[{name}]"
        before = self.place[first.node] < run.start
        if before and all(v == first for v in values):
            return first
        places = [self.place[v.node] - run.start - i * run.period for i, v in enumerate(values)]
        if any(p != places[1] for p in places[1:]) or not -run.period <= places[1] < run.period:
            return None
        if places[1] >= 0:
            return None if places[0] != places[1] else (places[0], first.index)
        at = places[1], second.index
        return at if before and carried.setdefault(at, first) == first else None

    def _print(self, loop: _Loop) -> None:
        run, carried = loop.run, loop.carried
        part = self.nodes[run.start : run.start + run.period]
        own = {(q, v.index): self.identifier(n.op) for q, n in enumerate(part) for v in n.results}
        after: list[str] = []
        for (q, index), value in carried.items():
            made = own[q + run.period, index]
            read = max(r for r, operands in enumerate(loop.operands) if (q, index) in operands)
            # A value for the next part is assigned to its name at once, unless the old one is still to be read.
            late = read > q + run.period - (len(part[q].results) > 1)
            own[q, index] = self.identifier(part[q].op) if late else made
            self.out.append(f"    {own[q, index]} = {self._name(value)}")
            if late:
                after.append(f"        {own[q, index]} = {made}")
        self.out.append(f"    for {self.layer} in range({run.count}):")
        for q, (node, operands) in enumerate(zip(part, loop.operands, strict=True)):
            read_as = [o if isinstance(o, str) else own[o] if isinstance(o, tuple) else self._name(o) for o in operands]
            self._line(node, read_as, [own[q, v.index] for v in node.results], "        ")
        self.out += after
        for q, node in enumerate(self.nodes[run.end - run.period : run.end]):
            self.names.update({v: own[q, v.index] for v in node.results})

    # -- lines

    def _straight(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.is_leaf:
                name = self.names[node.result] = self.identifier(node.name if node.op == "input" else node.op)
                text = f"batch[{node.name!r}]" if node.op == "input" else _constant(node)
                self.out.append(f"    {name} = {text}")
                continue
            own = [self.identifier(node.op) for _ in node.results]
            self._line(node, [self._name(v) for v in node.operands], own, "    ")
            self.names.update(zip(node.results, own, strict=True))

    def _line(self, node: Node, operands: Sequence[str], results: Sequence[str], indent: str) -> None:
        # Names that statements define are not used after them, so they may be used again.
        lines, texts = torch_reference(node.analysis.bound, operands, self.taken)
        self.out += [f"{indent}{line}" for line in lines]
        for name, text in zip(results, texts, strict=True):
            # The line of `detach` is the identity, so its text does not stop the gradient.
            self.out.append(f"{indent}{name} = {text}{'.detach()' if node.op == 'detach' else ''}")

    def _name(self, value: Value) -> str:
        return f"weights[{value.node.name!r}]" if value.node.op == "weight" else self.names[value]


def _constant(node: Node) -> str:
    (type,) = node.types
    # The weights say in which precision the reference computes.
    dtype = "next(iter(weights.values())).dtype" if type.is_floating else TORCH_DTYPES[type.dtype]
    value = node.attribute("value")
    return f"torch.full({type.shape!r}, {value!r}, dtype={dtype}, device=next(iter(batch.values())).device)"

"""Make the tables of docs/dialect.md anew: `python docs/update_dialects.py`. Tests keep them and its examples true."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

from xdsl.ir import Attribute
from xdsl.irdl import IRDLOperation, OptPropertyDef, OptRegionDef

from unity_ir.dialects.certificate import BOUND, DERIVATION
from unity_ir.dialects.convert import NAME, OPTIMIZER, PIPELINE, VIEW
from unity_ir.dialects.imported import IMPORTED
from unity_ir.dialects.machine import MACHINE
from unity_ir.dialects.pcg import COMPUTE_OPS, PARALLEL_OPS, PCG
from unity_ir.dialects.spmd import EXCHANGES, SPMD, ExchangeOp, MoveOp
from unity_ir.dialects.subst import SUBST
from unity_ir.errors import UnityError
from unity_ir.pcg.parallel import PARALLEL_OPERATORS, ParallelOperator, ParallelStep
from unity_ir.pcg.reshard import move_kind
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, pinned_at
from unity_ir.pcg.types import InTime, TensorType, tensor_type

PATH = Path(__file__).parent / "dialect.md"

FUNCTION_ATTRIBUTES = {
    VIEW: "of an argument: where it rests",
    NAME: "of an argument: its full name, where that is no name in MLIR, and in the generic form",
    OPTIMIZER: "what the plan is made to be trained with",
    PIPELINE: "how a step in stages is run: `order` of the schedule, `ranks` (parts of the machine), `chunks` per rank",
    DERIVATION: "the rule applications from the source graph to this one",
    BOUND: "a lower bound (seconds) on every placement of this graph",
    IMPORTED: "that it comes from PyTorch, and under what names",
}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def summary(doc: str | None) -> str:
    """The first paragraph of a docstring."""
    return (doc or "").strip().split("\n\n")[0]


def properties(operation: type[IRDLOperation]) -> str:
    """The names of an operation's properties, optional ones with a question mark, and of its regions."""
    definition = operation.get_irdl_definition()
    named = [f"`{n}`{'?' * isinstance(p, OptPropertyDef)}" for n, p in definition.properties.items()]
    named += [f"region `{n}`{'?' * isinstance(r, OptRegionDef)}" for n, r in definition.regions]
    return ", ".join(named)


ROLES = {"dim 0": 0, "dim 1": 1, "sum": SUM, "copy": COPY, "repeat": REPEAT, "at 0": pinned_at(0), "at 1": pinned_at(1)}
"""Every role of a mesh axis; two where a move may go between two of the same kind."""


def moves(kind: str) -> str:
    """The pairs of roles that a kind of move goes between, as text: `sum -> copy, repeat`."""
    pairs: dict[str, dict[str, None]] = {}
    for (before, source), (after, target) in permutations(ROLES.items(), 2):
        if move_kind(source, target) == kind:
            pairs.setdefault(before.rstrip("01 "), {})[after.rstrip("01 ")] = None
    return "; ".join(f"{before} -> {', '.join(after)}" for before, after in pairs.items())


def meaning(operation: type[IRDLOperation]) -> str:
    if issubclass(operation, MoveOp):
        kind = operation.name.removeprefix("spmd.")
        return f"`spmd.{kind} %x along [0] : type -> type`: {moves(kind)}"
    if issubclass(operation, ExchangeOp):
        done = "exchange their borders" if operation is EXCHANGES["halo"] else "add up each other's borders"
        return f"`{operation.name} %x along [0] : type -> type`: neighbours along a dim {done}"
    return summary(operation.__doc__)


def described(operations: Iterable[type]) -> str:
    found = [o for o in operations if issubclass(o, IRDLOperation)]
    body = [(f"`{o.name}`", meaning(o), properties(o)) for o in found]
    return rows(("operation", "example and meaning", "attributes (? optional)"), body)


def attributes(kinds: Iterable[type[Attribute]]) -> str:
    return rows(("type or attribute", "example and meaning"), [(f"`{k.name}`", summary(k.__doc__)) for k in kinds])


def steps(found: Sequence[ParallelStep]) -> str:
    return "; ".join(" ".join((name, *(f"{k} {v}" for k, v in values))) for name, values in found)


EXAMPLES: tuple[TensorType, ...] = (
    tensor_type((8, 8), "f32"),
    tensor_type((8, 8), "f32", (2, 1)),
    tensor_type((8, 8), "f32", sum=2),
    tensor_type((8, 8), "f32", copy=2),
    tensor_type((8, 8), "f32", (2, 1), halo_sum=((1, 1), (0, 0))),
    tensor_type((8, 8), "f32", (2, 1), time=InTime(0, 2)),
    tensor_type((8, 8), "f32", sum=2, time=InTime("sum", 2)),
)
"""Operands to show parallel operators on: of each the first that it takes."""


def parallel(rule: ParallelOperator) -> tuple[str, str, str, str, str]:
    """An operator's row, its attributes set to small numbers."""
    values = {name: {"dim": 0, "source": 0, "by": 2}.get(name, 1) for name in rule.attributes}
    written = "".join(f"{', ' * (name == 'dim')}{' ' * (name != 'dim')}{name} {v}" for name, v in values.items())
    for operand in EXAMPLES:
        try:
            result = rule.type(operand, values)
        except UnityError:
            continue
        before, after = (str(t).removeprefix("!pcg.tensor") for t in (operand, result))
        chain = steps(rule.chain(values)) if rule.chain else ""
        return f"`pcg.{rule.name} %x{written}`", f"`{before}`", f"`{after}`", steps(rule.backward(values)), chain
    raise ValueError(f"no example for {rule.name}")


def tables() -> dict[str, str]:
    """Every made table, by the name that `<!-- made: name -->` has."""
    own = [o for o in PCG.operations if o not in (*COMPUTE_OPS.values(), *PARALLEL_OPS.values())]
    head = ("parallel operator", "from", "to", "gradient's steps", "stands for")
    made = {
        "pcg attributes": attributes(PCG.attributes),
        "pcg operations": described(own),
        "parallel operators": rows(head, map(parallel, PARALLEL_OPERATORS.values())),
        "function attributes": rows(("attribute", "meaning"), [(f"`{k}`", v) for k, v in FUNCTION_ATTRIBUTES.items()]),
    }
    for dialect in (MACHINE, SUBST, SPMD):
        made[f"{dialect.name} attributes"] = attributes(dialect.attributes)
        made[f"{dialect.name} operations"] = described(dialect.operations)
    return made


def table() -> str:
    """The document with its tables made anew."""
    text = PATH.read_text()
    for name, made in tables().items():
        start = f"<!-- made: {name} -->\n"
        before, _, after = text.partition(start)
        text = before + start + made + after[after.index("<!-- end -->") :]
    return text


if __name__ == "__main__":
    PATH.write_text(table())

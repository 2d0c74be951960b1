"""Print the plan of a program: mesh, process groups, and the shape and layout of every input and weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from unity_ir.cost.throughput import batch_count
from unity_ir.cost.work import model_flops
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES
from unity_ir.lowering.emit.repeats import LEAST, Repeat, numbered, pattern, repeats
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import ParameterGroup
from unity_ir.pcg.origin import Origin
from unity_ir.pcg.sharding import is_shard, role_name
from unity_ir.plan.instructions import Register
from unity_ir.plan.program import Program
from unity_ir.tdl.syntax import Access, Bound, Call, Expr, Name, children

_COARSE = ("bool", "i32", "i64", "f64", "f32", "f16", "bf16")
"""Element types by precision, the coarsest last."""

_SPEC = '''

@dataclass(frozen=True)
class Spec:
    """A whole tensor and what each mesh axis does: divides a dim, or "copy", "sum", "repeat", "at i"."""

    shape: tuple
    dtype: torch.dtype
    roles: tuple
    below: int | None = None  # integers are from 0 to below this
    time: int | None = None  # dim along which micro-batches divide it
    cast: torch.dtype | None = None  # of a weight: in which type its cast is kept from step to step
    frozen: bool = False  # a weight that is not trained: without gradient, update and moments
    at_host: bool = False  # of a weight: whether it rests in the memory of the host


'''


def plan_text(
    program: Program,
    reference: Graph,
    groups: Sequence[tuple[int, ...]],
    links: Sequence[str],
    origin: Origin | None = None,
    peaks: Mapping[str, float] = MappingProxyType({}),
    on_host: str | None = None,
    window: int | None = None,
) -> str:
    """
    Return the text of the plan in an emitted program: constants for the mesh, the process groups, and inputs and
    weights. The program must have an optimizer.

    `reference` is the serial forward. `groups` has the mesh axes, by number, of each process group; `links` the name of
    the link that each mesh axis crosses. `origin` has the tables and tied names of an imported model's checkpoint
    (None: the model is not imported). `peaks` has the most FLOP/s of all devices together, by element type (empty: the
    program reports no MFU). `on_host` is a text for users: why the host takes part in a step, which therefore cannot be
    a CUDA graph; None if it can. `window` is how many bytes of the optimizer's state come from the host at once; None
    if it rests on the devices. The weights of repeated layers are one entry.
    """
    optimizer = program.optimizer
    assert optimizer is not None
    coarsest = max((t.dtype for t in program.tensors.values()), key=_COARSE.index, default="f32")
    bounds = _integer_bounds(reference)
    inputs = [
        f"    {leaf.name!r}: {spec_text(program, leaf.result, bounds.get(leaf.name))},"
        for leaf in program.leaves("input")
    ]
    # In the model's order, in which layers repeat.
    order = {node.name: i for i, node in enumerate(reference.weights())}
    leaves = sorted(((leaf.name, leaf.result) for leaf in program.leaves("weight")), key=lambda leaf: order[leaf[0]])
    casts = {leaf.name: program.tensors[leaf.result].dtype for leaf in program.leaves("cast")}
    frozen = {node.name for node in reference.weights() if not node.is_trained}
    weights = [
        (n, spec_text(program, i, cast=casts.get(n), frozen=n in frozen, at_host=i in program.at_host))
        for n, i in leaves
    ]
    kept = {each.leaf.name: each.initial for each in program.running if each is not None}
    tables = tables_of(program, origin)
    head = [
        "# --- the plan\n",
        f"NAME = {program.name!r}",
        f"MESH = {program.mesh.sizes[: program.axes]!r}  # sizes of the mesh axes, outermost first",
        f"WORLD = {program.devices}",
        f"MICRO_BATCHES = {program.micro_batches}",
        f"LINKS = {tuple(links)!r}  # what each mesh axis is over",
        f"GROUPS = {tuple(groups)!r}  # mesh axes along which ranks talk",
        f"OPTIMIZER = ({optimizer.name!r}, {dict(optimizer.settings)!r})",
        f"STATE = {optimizer.line.state!r}  # what it keeps of each weight from step to step",
        *([] if window is None else [f"STATE_WINDOW = {window}  # bytes of it that come from the host at once"]),
        f"PARAMETER_GROUPS = {_parameter_groups(optimizer.groups, reference)!r}  # own settings, by patterns of names",
        f"CLIP = {optimizer.clip!r}  # most the norm of the whole gradient may be; 0.0 for no limit",
        f"ON_HOST = {on_host!r}  # why a step needs the host, and is no CUDA graph; None if it does not",
        f"COUNTED = {batch_count(reference, tables)!r}  # how many, and of what, a step takes",
        f"FLOPS, PEAK = {model_flops(reference)!r}, {peaks.get(coarsest)!r}  # of a step; per second, of all devices",
    ]
    if origin is None:
        head.append(f"IMPORTED, TABLES, NAMES = False, {tables!r}, {{}}")
    else:
        head += [
            "IMPORTED = True  # with weights, which initial ones are not",
            f"TABLES = {tables!r}  # inputs that come with the weights",
            f"NAMES = {dict(origin.names)!r}  # further names in files, and of what",
        ]
    head.append(f"RUNNING = {kept!r}  # tables that a step replaces, with what they are initially")
    counters = {} if origin is None else dict(origin.counters)
    head.append(f"COUNTERS = {counters!r}  # tables that are no inputs, with what a step adds to them")
    specs = ["INPUTS = {", *inputs, "}", "WEIGHTS = {", *_table(weights), "}"]
    specs.append(f"LOSS = {spec_text(program, program.outputs[0])}")
    specs.append(f"COARSEST = {TORCH_DTYPES[coarsest]}  # floating point numbers that it computes with")
    return "\n".join(head) + _SPEC + "\n".join(specs) + "\n"


def tables_of(program: Program, origin: Origin | None) -> tuple[str, ...]:
    """
    Return the names of the program's inputs that are no part of a batch: the tables of an imported model's checkpoint
    `origin` (None: there is none) that the program reads, then its running statistics.
    """
    read = {leaf.name for leaf in program.leaves("input")}
    known = () if origin is None else (t for t in origin.tables if t in read)
    return tuple(dict.fromkeys((*known, *program.replaced)))


def spec_text(
    program: Program,
    register: Register,
    below: int | None = None,
    cast: str | None = None,
    frozen: bool = False,
    at_host: bool = False,
) -> str:
    """
    Return the text of the call `Spec(..)` that describes a register's whole shape, element type and layout. If `below`
    is given, the register has integers less than it. `cast` is the element type of a weight's kept cast, None if it has
    none; `frozen` says that a weight is not trained, `at_host` that it rests in the memory of the host.
    """
    tensor = program.tensors[register]
    roles = tuple(r if is_shard(r) else role_name(r) for r in tensor.layout[: program.axes])
    extra = "" if below is None else f", {below}"
    if program.micro_batches > 1 and is_shard(time := tensor.layout[-1]):
        extra += f", time={time}"
    extra += "" if cast is None else f", cast={TORCH_DTYPES[cast]}"
    extra += (", frozen=True" if frozen else "") + (", at_host=True" if at_host else "")
    return f"Spec({tensor.shape!r}, {TORCH_DTYPES[tensor.dtype]}, {roles!r}{extra})"


def _parameter_groups(groups: Iterable[ParameterGroup], reference: Graph) -> tuple[tuple[str, dict[str, float]], ...]:
    """Return groups of weights as pairs of a pattern of names, or `@vectors`, and settings."""
    found: list[tuple[str, dict[str, float]]] = []
    for group in groups:
        names = _embeddings(reference) if group.pattern == "@embeddings" else [group.pattern]
        found += [(name, dict(group.settings)) for name in names]
    return tuple(found)


def _embeddings(reference: Graph) -> list[str]:
    """Return patterns that only the names of weights match of which an `embedding` reads rows."""
    tables = {n.operands[1].node for n in reference.nodes() if n.is_compute and n.op == "embedding"}
    for node in reversed(list(reference.nodes())):
        if node in tables and node.op != "weight" and node.operands:
            tables.add(node.operands[0].node)
    return [re.sub(r"([*?[])", r"[\1]", node.name) for node in reference.weights() if node in tables]


def _table(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of a dict of these names and texts, in order; runs of them are comprehensions."""

    def names(run: Repeat) -> list[str | None]:
        """Return each entry's name in all parts of a repeat, as an expression."""
        last = run.start + run.count * run.period
        return [
            numbered([name for name, _ in entries[q : last : run.period]], "layer")
            for q in range(run.start, run.start + run.period)
        ]

    def alike(run: Repeat) -> int:
        counts = range(run.count, LEAST - 1, -1)
        return next((c for c in counts if None not in names(Repeat(run.start, run.period, c))), 0)

    out: list[str] = []
    done = 0
    for run in repeats([(pattern(name), text) for name, text in entries], alike):
        out += [f"    {name!r}: {text}," for name, text in entries[done : run.start]]
        out += [
            "    **{",
            "        name: spec",
            f"        for layer in range({run.count})",
            "        for name, spec in (",
        ]
        parts = zip(names(run), entries[run.start :], strict=False)
        out += [f"            ({name}, {text})," for name, (_, text) in parts]
        out += ["        )", "    },"]
        done = run.end
    return out + [f"    {name!r}: {text}," for name, text in entries[done:]]


def _integer_bounds(reference: Graph) -> dict[str, int]:
    """Return, for every integer input, the number of classes that operators compare its values with."""
    found: dict[str, int] = {}
    for node in reference.nodes():
        if node.is_compute:
            bound = node.analysis.bound
            for parameter, value in zip(bound.operands, node.operands, strict=True):
                if parameter.integer and value.node.op == "input":
                    sizes = [s for r in bound.results for s in compared(r.expr, parameter.name, bound)]
                    if sizes:
                        found[value.node.name] = min([*sizes, found.get(value.node.name, sizes[0])])
    return found


def compared(expr: Expr, parameter: str, bound: Bound) -> Iterable[int]:
    """
    Yield the extent of index variable v for each comparison `v == x[..]` in `expr`, a TDL expression of the bound line
    `bound`, where x is the operand named `parameter`.

    Given a loss that compares class ids with the class variable, yields the number of classes, which bounds valid ids.
    """
    match expr:
        case Call("eq", (Name(variable), Access(tensor))) if tensor == parameter:
            yield bound.extents[variable]
        case _:
            for child in children(expr):
                yield from compared(child, parameter, bound)

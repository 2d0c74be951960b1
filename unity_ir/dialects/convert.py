"""
Convert graphs between xDSL functions of the pcg dialect (parallel computation graphs), which are read, printed and
lowered, and the core's compact `Graph`. The core is the compiler's own data structures (`unity_ir.pcg`), which do
without xDSL.

A function of pcg operations is the text of a `Graph`; `to_graph(from_graph(g)) == g`, with the same nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    UnitAttr,
    f64,
    i64,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from unity_ir.dialects.machine import ViewAttr
from unity_ir.dialects.names import check_name, name_text, ssa_name
from unity_ir.dialects.pcg.generated import COMPUTE_OPS, PARALLEL_OPS
from unity_ir.dialects.pcg.operators import ComputeOp, ParallelOp
from unity_ir.dialects.pcg.ops import (
    ConstantOp,
    NodeOp,
    PcgOp,
    UpdateOp,
    WeightOp,
    check_weights,
    core_type,
    input_node,
    optimizer_attributes,
    tensor_types,
    to_optimizer,
)
from unity_ir.dialects.pcg.types import PcgTensorType, pcg_tensor
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import OFFLOADS, Graph, Pipeline, Update
from unity_ir.pcg.node import Node, Value, apply, parallel
from unity_ir.pcg.optimizer import Optimizer

VIEW = "pcg.view"
"""The argument attribute that holds an input's view."""

NAME = "pcg.name"
"""The argument attribute that holds an input's name, where the SSA name cannot."""

OPTIMIZER = "pcg.optimizer"
"""The function attribute that holds the optimizer of a graph whose updates are still to come."""

RING_ATTENTION = "pcg.ring_attention"
"""The function attribute that says that the keys and values of attention go around a ring."""

EXCHANGE_ROWS = "pcg.exchange_rows"
"""The function attribute that says that devices exchange the rows of experts without a capacity."""

IMBALANCE = "pcg.imbalance"
"""The function attribute that says how many times an even share of such rows a device may receive."""

OFFLOAD = "pcg.offload"
"""The function attribute that says what rests in the memory of the host, if anything."""

STAYING = "pcg.staying"
"""The function attribute that says how many bytes of saved values stay on each device, where others go to the host."""

BUCKET = "pcg.bucket"
"""The function attribute that says below how many bytes gathers of weights and sums of gradients share calls."""

LOSS_PIECES = "pcg.loss_pieces"
"""The function attribute that holds the number of pieces of the tokens in which a step makes its loss, if not 1."""

PIPELINE = "pcg.pipeline"
"""The function attribute that says how a step is run whose operators are in stages."""

HOW = OPTIMIZER, RING_ATTENTION, EXCHANGE_ROWS, IMBALANCE, OFFLOAD, STAYING, BUCKET, LOSS_PIECES, PIPELINE
"""The function attributes that say how the step of a graph is run."""


def pcg_functions(module: ModuleOp) -> list[FuncOp]:
    """Return the functions of a module that have a body and use `!pcg.tensor` values or pcg operations."""

    def is_pcg(func: FuncOp) -> bool:
        types = (t for block in func.body.blocks for t in block.arg_types)
        return any(isinstance(t, PcgTensorType) for t in types) or any(isinstance(op, PcgOp) for op in func.walk())

    return [op for op in module.walk() if isinstance(op, FuncOp) and not op.is_declaration and is_pcg(op)]


# From text


def to_graph(func: FuncOp) -> Graph:
    """
    Return a function of pcg operations as a graph. Operations that contribute to no result and no weight update are
    dropped.

    Raises `UnityError` for declarations, functions of several blocks, operations that are not pcg, and functions that
    are no valid graph, such as one that uses a value before it is made.
    """
    name = func.sym_name.data
    check_name("func.func", name)
    where = f"@{name}"
    blocks = list(func.body.blocks)
    if len(blocks) != 1:
        what = f"has {len(blocks)} blocks" if blocks else "is a declaration"
        raise UnityError(f"{where}: {what}; a graph is one block of pcg operations")
    (block,) = blocks
    values: dict[SSAValue, Value] = {}
    inputs = _inputs(func, block, where)
    for argument, node in zip(block.args, inputs, strict=True):
        values[argument] = node.result
    check_weights(op for op in block.ops if isinstance(op, WeightOp))

    def operands(op: Operation) -> list[Value]:
        for value in op.operands:
            if value not in values:
                raise UnityError(f"{where}: {op.name} uses %{value.name_hint or '?'} before it is made; reorder them")
        return [values[v] for v in op.operands]

    outputs: tuple[Value, ...] = ()
    updates: list[Update] = []
    optimizers: list[Optimizer | None] = []
    for op in block.ops:
        if isinstance(op, NodeOp):
            _check_counts(op, where)
        match op:
            case WeightOp() | ConstantOp():
                node = op.node()
            case ParallelOp():
                node = parallel(op.operator_name(), operands(op)[0], op.core_view, **op.degrees)
            case ComputeOp():
                time = core_type(op.results[0]).time
                node = apply(op.operator_name(), operands(op), op.values, op.core_view, time)
            case UpdateOp():
                op.check()
                updates.append(Update(*operands(op)))
                optimizers.append(op.core_optimizer)
                continue
            case ReturnOp():
                outputs = tuple(operands(op))
                continue
            case _:
                raise UnityError(f"{where}: {op.name} is not an operator of pcg; a graph has no other operations")
        values.update(zip(op.results, node.results, strict=True))
    pipeline = to_pipeline(f"@{name}: {PIPELINE}", func.attributes.get(PIPELINE))
    pieces = _count(func, LOSS_PIECES, 1, "an integer of 2 or more")
    staying = _count(func, STAYING, 0, "a number of bytes, 1 or more")
    how = _optimizer(func, optimizers), pieces, pipeline, _is_set(func, RING_ATTENTION), _offload(func), staying
    bucket = _count(func, BUCKET, 0, "a number of bytes, 1 or more")
    return Graph(name, inputs, outputs, tuple(updates), *how, _exchange_rows(func), bucket)


def _check_counts(op: NodeOp, where: str) -> None:
    """Raise `UnityError` if an operation that was never verified lacks its operand or its result."""
    lacks = "result" if not op.results else "operand" if isinstance(op, ParallelOp) and not op.operands else None
    if lacks is not None:
        raise UnityError(f"{where}: {op.name} has no {lacks}; verify the module first")


def _inputs(func: FuncOp, block: Block, where: str) -> tuple[Node, ...]:
    attributes = _argument_attributes(func)
    names = _spoken([a.name_hint or "" for a in block.args])
    nodes: list[Node] = []
    for argument, own, spoken in zip(block.args, attributes, names, strict=True):
        name, view = own.get(NAME, StringAttr(spoken)), own.get(VIEW)
        if not isinstance(view, ViewAttr | None):
            raise UnityError(f"{where}: {VIEW} is {view}; it must be a #machine.view")
        nodes.append(
            input_node(where, name_text(where, name), core_type(argument), None if view is None else view.data)
        )
    _check_inputs(nodes, where)
    return tuple(nodes)


def _check_inputs(inputs: Sequence[Node], where: str) -> None:
    name, count = next(iter(Counter(n.name for n in inputs).most_common(1)), ("", 0))
    if count > 1:
        raise UnityError(f"{where}: {count} inputs are named {name!a}; rename all but one")


def _argument_attributes(func: FuncOp) -> list[dict[str, Attribute]]:
    if func.arg_attrs is None:
        return [{} for _ in func.args]
    found = [dict(attributes.data) for attributes in func.arg_attrs]
    if len(found) != len(func.args):
        raise UnityError(f"@{func.sym_name.data}: {len(func.args)} arguments, but attributes for {len(found)}")
    return found


def _spoken(hints: Sequence[str]) -> list[str]:
    """
    Return the names that arguments are printed with; an input has its argument's, unless an attribute gives another.

    Given hints `x`, `x`, none, returns `x`, `x_1`, `arg2`.
    """
    seen: Counter[str] = Counter()
    names: list[str] = []
    for i, text in enumerate(hints):
        text = text or f"arg{i}"
        names.append(f"{text}_{seen[text]}" if seen[text] else text)
        seen[text] += 1
    return names


def _optimizer(func: FuncOp, optimizers: Sequence[Optimizer | None]) -> Optimizer | None:
    """
    Return the optimizer that all updates name; if there are no updates, the one that the function's attribute names.
    """
    if len(set(optimizers)) > 1:
        raise UnityError(f"@{func.sym_name.data}: its updates have different optimizers; give them one")
    if optimizers:
        return optimizers[0]
    attribute = func.attributes.get(OPTIMIZER)
    if attribute is None:
        return None
    if not isinstance(attribute, DictionaryAttr):
        raise UnityError(f"@{func.sym_name.data}: {OPTIMIZER} is {attribute}; it must be a dictionary")
    return to_optimizer(OPTIMIZER, attribute.data)


def _count(func: FuncOp, name: str, default: int, said: str) -> int:
    """Return the integer of a function attribute, above `default`, which is for none. `said` is what it must be."""
    attribute = func.attributes.get(name)
    if attribute is None:
        return default
    if not isinstance(attribute, IntegerAttr) or attribute.value.data <= default:
        raise UnityError(f"@{func.sym_name.data}: {name} is {attribute}; it must be {said}")
    return attribute.value.data


def _is_set(func: FuncOp, name: str) -> bool:
    attribute = func.attributes.get(name)
    if not isinstance(attribute, UnitAttr | None):
        raise UnityError(f"@{func.sym_name.data}: {name} is {attribute}; it takes no value")
    return attribute is not None


def _exchange_rows(func: FuncOp) -> float:
    is_set, imbalance = _is_set(func, EXCHANGE_ROWS), func.attributes.get(IMBALANCE)
    return exchange_of(f"@{func.sym_name.data}: {IMBALANCE}", is_set, imbalance)


def _offload(func: FuncOp) -> str:
    attribute = func.attributes.get(OFFLOAD)
    if attribute is None:
        return "none"
    kinds = [kind for kind in OFFLOADS if kind != "none"]
    if not isinstance(attribute, StringAttr) or attribute.data not in kinds:
        raise UnityError(f"@{func.sym_name.data}: {OFFLOAD} is {attribute}; it must be {' or '.join(kinds)}")
    return attribute.data


def exchange_of(where: str, is_set: bool, imbalance: Attribute | None) -> float:
    """
    Return `Graph.exchange_rows` of two attributes: whether rows are exchanged, and how many times an even share a
    device may receive (None: as many as may come). Raises `UnityError`, which begins with `where`, for a bad factor,
    and for one without exchange.
    """
    if imbalance is None:
        return inf if is_set else 0.0
    if not isinstance(imbalance, FloatAttr) or not 1 <= imbalance.value.data < inf:
        raise UnityError(f"{where} is {imbalance}; it must be a number of 1.0 or more")
    if not is_set:
        raise UnityError(f"{where} is {imbalance}, but no rows are exchanged; add exchange_rows, or leave it out")
    return imbalance.value.data


def to_pipeline(where: str, attribute: Attribute | None) -> Pipeline | None:
    """
    Read a pipeline schedule, and how many ranks and chunks it has, from a dictionary attribute such as `{order =
    "1f1b", ranks = 4}`; without a `chunks` entry there is 1 chunk per rank. Returns None for None.

    Raises `UnityError`, in a message that begins with `where`, for any other attribute.
    """
    if attribute is None:
        return None
    found = dict(attribute.data) if isinstance(attribute, DictionaryAttr) else {}
    order, chunks = found.pop("order", None), found.pop("chunks", IntegerAttr(1, i64))
    ranks = found.pop("ranks", None)
    if (
        not isinstance(order, StringAttr)
        or not isinstance(ranks, IntegerAttr)
        or not isinstance(chunks, IntegerAttr)
        or ranks.value.data < 1
        or chunks.value.data < 1
        or found
    ):
        raise UnityError(f'{where} is {attribute}; it must be a dictionary such as {{order = "1f1b", ranks = 4}}')
    return Pipeline(order.data, ranks.value.data, chunks.value.data)


def from_pipeline(pipeline: Pipeline) -> DictionaryAttr:
    """
    Return a pipeline schedule as a dictionary attribute such as `{order = "1f1b", ranks = 4}`, which `to_pipeline`
    reads. It has an entry `chunks` only if there is more than 1 chunk per rank.
    """
    chunks = {} if pipeline.chunks == 1 else {"chunks": IntegerAttr(pipeline.chunks, i64)}
    return DictionaryAttr({"order": StringAttr(pipeline.order), "ranks": IntegerAttr(pipeline.ranks, i64), **chunks})


# To text


def from_graph(graph: Graph) -> FuncOp:
    """
    Return a graph as a function: one operation per node, in topological order, with SSA values named after their
    operators.

    Raises `UnityError` for names that are empty or have invisible characters, and for inputs that the graph uses but
    does not list.
    """
    check_name("func.func", graph.name)
    where = f"@{graph.name}"
    _check_inputs(graph.inputs, where)
    block = Block(arg_types=tensor_types([n.types[0] for n in graph.inputs]))
    values: dict[Value, SSAValue] = {}
    for node, argument in zip(graph.inputs, block.args, strict=True):
        check_name(where, node.name)
        values[node.result] = argument
    for node in graph.nodes():
        if node.op == "input":
            if node.result not in values:
                raise UnityError(f"{where}: input {node.name!a} is used, but is not among the graph's inputs")
            continue
        op = _operation(node, [values[v] for v in node.operands])
        values.update(zip(node.results, op.results, strict=True))
        block.add_op(op)
    check_weights(op for op in block.ops if isinstance(op, WeightOp))
    for update in graph.updates:
        block.add_op(UpdateOp(values[update.weight], values[update.grad], graph.optimizer))
    block.add_op(ReturnOp(*(values[v] for v in graph.outputs)))
    _set_hints(block, [n.name for n in graph.inputs])
    types = ([a.type for a in block.args], [values[v].type for v in graph.outputs])
    func = FuncOp(graph.name, types, Region(block), arg_attrs=_arg_attrs(graph.inputs, block))
    if graph.optimizer is not None and not graph.updates:
        func.attributes[OPTIMIZER] = DictionaryAttr(optimizer_attributes(graph.optimizer))
    if graph.loss_pieces > 1:
        func.attributes[LOSS_PIECES] = IntegerAttr(graph.loss_pieces, i64)
    if graph.ring_attention:
        func.attributes[RING_ATTENTION] = UnitAttr()
    if graph.exchange_rows:
        func.attributes[EXCHANGE_ROWS] = UnitAttr()
    if 0 < graph.exchange_rows < inf:
        func.attributes[IMBALANCE] = FloatAttr(graph.exchange_rows, f64)
    if graph.offload != "none":
        func.attributes[OFFLOAD] = StringAttr(graph.offload)
    if graph.staying:
        func.attributes[STAYING] = IntegerAttr(graph.staying, i64)
    if graph.bucket:
        func.attributes[BUCKET] = IntegerAttr(graph.bucket, i64)
    if graph.pipeline is not None:
        func.attributes[PIPELINE] = from_pipeline(graph.pipeline)
    return func


def _operation(node: Node, operands: Sequence[SSAValue]) -> Operation:
    attributes = dict(node.attributes)
    view = None if node.view is None else ViewAttr(node.view)
    if node.op in PARALLEL_OPS:
        return PARALLEL_OPS[node.op].make(operands, attributes, view)
    if node.op in COMPUTE_OPS:
        return COMPUTE_OPS[node.op].make(operands, attributes, view, time=node.types[0].time)
    value = node.attribute("name" if node.op == "weight" else "value")
    own: dict[str, Attribute] = {} if view is None else {"view": view}
    if "master" in attributes:
        own["master"] = StringAttr(node.master)
    if "frozen" in attributes:
        own["frozen"] = UnitAttr()
    leaf = (
        WeightOp.create(properties={"name": StringAttr(value), **own}, result_types=[pcg_tensor(node.types[0])])
        if node.op == "weight"
        else ConstantOp.create(
            properties={"value": FloatAttr(float(value), f64), **own}, result_types=[pcg_tensor(node.types[0])]
        )
    )
    leaf.node()
    return leaf


def _set_hints(block: Block, inputs: Sequence[str]) -> None:
    """Name arguments after the `inputs`, results after their weights or operators: `%x`, `%fc1.weight`, `%matmul0`."""
    for i, (argument, name) in enumerate(zip(block.args, inputs, strict=True)):
        argument.name_hint = ssa_name(name, f"arg{i}")
    counts: Counter[str] = Counter()
    for op in block.ops:
        kind = op.name.removeprefix("pcg.")
        text = ssa_name(op.text, "weight") if isinstance(op, WeightOp) else f"{kind}{counts[kind]}"
        counts[kind] += 1
        for result in op.results:
            result.name_hint = text


def name_values(func: FuncOp) -> None:
    """
    Name the SSA values of a function as `from_graph` names them, in place: useful for text from tools that number
    values, such as `mlir-opt`. An argument keeps its attribute `pcg.name` only if the input's name cannot be an SSA
    name. Raises as `to_graph`.
    """
    names = [node.name for node in to_graph(func).inputs]
    write_names(func)
    _set_hints(func.body.block, names)
    drop_names(func)


def write_names(func: FuncOp) -> None:
    """
    Write the name of each input of a function into the attribute `pcg.name` of its argument, in place: tools such as
    `mlir-opt` do not keep SSA names.
    """
    spoken = _spoken([a.name_hint or "" for a in func.args])
    _set_argument_attributes(
        func,
        [{NAME: StringAttr(name), **own} for name, own in zip(spoken, _argument_attributes(func), strict=True)],
    )


def drop_names(func: FuncOp) -> None:
    """Remove the attribute `pcg.name` from each argument of a function whose SSA name is the same, in place."""
    spoken = _spoken([a.name_hint or "" for a in func.args])
    found = _argument_attributes(func)
    for own, name in zip(found, spoken, strict=True):
        if own.get(NAME) == StringAttr(name):
            del own[NAME]
    _set_argument_attributes(func, found)


def _set_argument_attributes(func: FuncOp, found: Sequence[dict[str, Attribute]]) -> None:
    func.arg_attrs = ArrayAttr(map(DictionaryAttr, found)) if any(found) else None


def _arg_attrs(inputs: Sequence[Node], block: Block) -> ArrayAttr[DictionaryAttr] | None:
    def own(node: Node, spoken: str) -> Iterator[tuple[str, Attribute]]:
        if node.name != spoken:
            yield NAME, StringAttr(node.name)
        if node.view is not None:
            yield VIEW, ViewAttr(node.view)

    names = _spoken([a.name_hint or "" for a in block.args])
    found = [dict(own(node, spoken)) for node, spoken in zip(inputs, names, strict=True)]
    return ArrayAttr(DictionaryAttr(f) for f in found) if any(found) else None


def replace_function(func: FuncOp, graph: Graph) -> FuncOp:
    """
    Replace `func` in its module by `graph` as a function; return the new function. `func` is erased.

    The new one keeps the visibility and the attributes of `func`, except those that say how the step is run (`HOW`),
    which are the graph's. Raises as `from_graph`.
    """
    new = from_graph(graph)
    kept = {name: attribute for name, attribute in func.attributes.items() if name not in HOW}
    new.attributes.update(kept)
    if func.sym_visibility is not None:
        new.sym_visibility = func.sym_visibility
    block = func.parent
    assert block is not None, "a function outside a module cannot be replaced"
    block.insert_op_before(new, func)
    func.detach()
    func.erase()
    return new

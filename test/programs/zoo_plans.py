"""Plans of the zoo's models, shrunken so that eight ranks have something to divide, and their programs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from models import machine
from pinned import pinned
from staged import staged
from zoo import SMALL

from unity_ir.api.options import search_options
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import Machine
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, Pipeline, rewrite
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.micro_batches import in_micro_batches, micro_batch
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Node, Value, parallel, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, Mesh
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run
from unity_ir.search.baselines.batch_dims import sample_dims

_DECODER = {"batch": 8, "sequence": 4, "hidden": 16, "layers": 1, "vocabulary": 16}
SIZES: dict[str, dict[str, int]] = {
    "alexnet": {**SMALL["alexnet"], "batch": 8, "hidden": 8, "classes": 8},
    "bert_large": {**_DECODER, "heads": 4, "layers": 2},
    "candle_uno": {**SMALL["candle_uno"], "batch": 8, "hidden": 8},
    "deepseek_v3": {
        **{**SMALL["deepseek_v3"], **_DECODER, "layers": 2, "head": 8, "rotary": 8, "q_rank": 16, "kv_rank": 16},
        **{"dense_intermediate": 16, "intermediate": 16},
    },
    "dlrm": {**SMALL["dlrm"], "batch": 8, "rows": 16, "features": 8, "dense": 4, "bottom": 8, "top": 8},
    "gpt2": {**_DECODER, "heads": 4, "layers": 2},
    "inception_v3": {**SMALL["inception_v3"], "batch": 8},
    "lenet": {**SMALL["lenet"], "batch": 8, "classes": 8},
    "llama3_8b": {**SMALL["llama3_8b"], **_DECODER, "intermediate": 16},
    "lstm_stack": {**SMALL["lstm_stack"], "batch": 8, "hidden": 8, "features": 4, "classes": 8},
    "mlp": {**SMALL["mlp"], "batch": 8, "hidden": 16, "classes": 8},
    "moe": {**SMALL["moe"], **_DECODER, "intermediate": 16, "experts": 8},
    "nmt": {**SMALL["nmt"], "batch": 8, "hidden": 8, "vocabulary": 16},
    "qwen3_moe": {**SMALL["qwen3_moe"], **_DECODER, "intermediate": 16, "head": 8, "experts": 8},
    "resnet101": {**SMALL["resnet101"], "batch": 8, "classes": 8},
    "resnext50": {**SMALL["resnext50"], "batch": 8, "classes": 8},
    "rnnlm": {**SMALL["rnnlm"], "batch": 8, "hidden": 8, "vocabulary": 16},
    "rnntc": {**SMALL["rnntc"], "batch": 8, "hidden": 8, "vocabulary": 16, "classes": 8},
    "wresnet": {**SMALL["wresnet"], "batch": 8, "classes": 8},
    "xdl": {**SMALL["xdl"], "batch": 8, "rows": 16, "features": 8, "hidden": 8},
}
"""Their keys. Eight ranks divide the batch, and mostly hidden sizes, vocabularies, tables and experts."""

_PACKED = "separator=1,sequence=8,vocabulary=8"
_SLOTS = "sequence=8,capacity=75,balance=500"
VARIANTS = (
    *("moe,dispatch=sparse", f"gpt2,{_PACKED}", f"llama3_8b,{_PACKED}", f"moe,dispatch=sparse,{_SLOTS}"),
    *(f"qwen3_moe,batch=16,{_SLOTS},group=16", f"deepseek_v3,{_SLOTS},group=4"),
)
"""Models with other keys than these."""


def sized(text: str) -> tuple[str, dict[str, int | str]]:
    """Given `moe,dispatch=sparse` returns `moe`, and its keys here with that one set."""
    name, *settings = text.split(",")
    pairs = (setting.split("=") for setting in settings)
    return name, SIZES[name] | {key: int(value) if value.isdecimal() else value for key, value in pairs}


MACHINES = {1: "ideal:1", 2: "ideal:2", 4: "ideal:2x2", 8: "ideal:2x2x2"}


def of_type(graph: Graph, dtype: str) -> Graph:
    """A serial graph computed in another type; `mixed` is bf16 with weights of f32."""
    return mixed_precision(graph, "bf16") if dtype == "mixed" else with_dtype(graph, dtype)


def recomputed(graph: Graph, seed: int) -> Graph:
    """A placed graph in which half of the operators are done again in the backward."""
    random = Random(seed)

    def marked(node: Node, operands: tuple[Value, ...]) -> list[Value]:
        new = rebuild(node, operands, node.view)
        if not node.is_compute or node is graph.outputs[0].node or random.random() < 0.5:
            return list(new.results)
        return [parallel("recompute", v).result for v in new.results]

    return rewrite(graph, marked)


def divided(graph: Graph, wanted: tuple[str, ...], mesh: Mesh) -> Graph:
    """The plan in which every mesh axis divides the variable wanted of it, wherever an operator allows that."""

    def assignment(node: Node) -> Assignment:
        extents, found = node.analysis.bound.extents, list[str | int]()
        for what, size in zip(wanted, mesh.sizes, strict=True):
            left = extents.get(what, 1)
            for other, by in zip(found, mesh.sizes, strict=False):
                left //= by if other == what else 1
            found.append(what if what in node.analysis.splittable and left % size == 0 else REPEAT)
        return tuple(found)

    return materialise(graph, {n: assignment(n) for n in graph.nodes() if n.is_compute}, mesh)


def by_heads(graph: Graph, mesh: Mesh) -> Graph:
    """
    The plan in which all mesh axes divide the queries of attention; of what heads are split of, the last axis divides
    heads, the others the sequence.
    """

    def assignment(node: Node) -> Assignment:
        if node.op.startswith("attention"):
            return ("i",) * len(mesh.sizes)
        if node.op != "split_heads":
            return (REPEAT,) * len(mesh.sizes)
        _, heads, sequence, _ = node.analysis.result_dims[0]
        assert heads is not None
        assert sequence is not None
        return (*(sequence,) * (len(mesh.sizes) - 1), heads)

    return materialise(graph, {n: assignment(n) for n in graph.nodes() if n.is_compute}, mesh)


def planned(graph: Graph, plan: str, world: int, optimizer: Optimizer) -> Program:
    """
    The program of a serial graph's plan: a strategy's; a random one, `random-3`; one with half of it recomputed,
    `recompute-3`; one with operators on a half of the ranks, `pinned-3`; one with images in parts, `spatial`; one in
    which the experts of a sparse mixture are divided, `experts`; one in which positions of queries are, `queries`; one
    in which they are, but keys and values come with heads divided as well, and go around a ring, `heads`; or
    one of degrees, `degrees,tp=2,zero=1,sp=true`. With `again+` before it, half of it is recomputed. With `/4` after
    it, of 4 micro-batches; with `/4i`, of which each moves weights and sums their gradients. With `*2` at the end, its
    loss is made in 2 pieces. With `1f1b,2:` before it, it is in 2 stages, the plan that of each; with `zb-v,2,2:` in 2
    stages on each of 2 parts of the ranks.
    """
    plan, _, pieces = plan.partition("*")
    stages, _, plan = plan.rpartition(":")
    order, ranks, chunks = (*stages.split(","), "1")[:3] if stages else ("", "1", "1")
    plan, _, loop = plan.partition("/")
    count = int(loop.rstrip("i") or 1)
    dims = sample_dims(graph)
    part = micro_batch(graph, dims, count) if count > 1 else graph
    placed, on = _placed(part, plan, world // int(ranks), optimizer)
    placed = replace(placed, loss_pieces=int(pieces or 1))
    if stages:
        on = machine(MACHINES[world])
        placed = staged(placed, Pipeline(order, int(ranks), int(chunks)), on)
    if count > 1:
        placed = in_micro_batches(placed, dims, count, lambda weight: loop.endswith("i"))
    return lower(fuse_collectives(differentiate(placed, optimizer, on.mesh)), on)


def _placed(graph: Graph, plan: str, world: int, optimizer: Optimizer) -> tuple[Graph, Machine]:
    """A plan by its name, without micro-batches, and the machine it is for."""
    if plan.startswith("again+"):
        placed, on = _placed(graph, plan.removeprefix("again+"), world, optimizer)
        return recomputed(placed, 3), on
    kind, _, seed = plan.rpartition("-") if plan[-1].isdigit() else (plan, "", "0")
    on = machine(MACHINES[world])
    match kind:
        case "pinned":
            placed, on = pinned(graph, int(seed), inner=world // 2)
        case "experts":
            placed = divided(graph, {2: ("v",), 4: ("t0", "v"), 8: ("v", "t1", "v")}[world], on.mesh)
        case "spatial":
            placed = divided(graph, {2: ("y",), 4: ("y", "z"), 8: ("n", "y", "z")}[world], on.mesh)
        case "queries":
            placed = divided(graph, {2: ("i",), 4: ("i", "h"), 8: ("b", "i", "h")}[world], on.mesh)
        case "heads":
            placed = replace(by_heads(graph, on.mesh), ring_attention=True)
        case "recompute":
            placed = recomputed(run(graph, on, "random", optimizer, {"seed": int(seed)}).graph, int(seed))
        case _ if plan.startswith("degrees"):
            options = search_options(plan)
            placed = run(graph, on, str(options.pop("strategy")), optimizer, options).graph
        case _:
            placed = run(graph, on, kind, optimizer, {"seed": int(seed)} if kind == "random" else None).graph
    return placed, on


def program(
    graph: Graph, plan: str, world: int, optimizer: Optimizer, double: bool = False, kernels: str = "torch"
) -> str:
    """
    The text of a plan's program. In `double` precision it is the same lines and moves, all in PyTorch, and a difference
    from PyTorch that is not rounding stands out.
    """
    text = emit(plan_step(planned(graph, plan, world, optimizer), PlanOptions(kernels=kernels)), graph).text
    return text.replace("torch.float32", "torch.float64") if double else text

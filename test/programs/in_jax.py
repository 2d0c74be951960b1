"""
Run steps of plans in JAX on 8 CPU devices, in a process of its own, and compare them with PyTorch.

The process is not that of the tests: JAX has threads there, after which no process should be forked off it.
"""

from __future__ import annotations

import multiprocessing
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from case import Case
from dtensor_models import built, by_pytorch
from operator_graphs import arrays, plain, serial, with_backward
from parallelized import apart
from ranks import PRELOADED

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import topological
from unity_ir.pcg.node import Value
from unity_ir.plan.program import Program
from unity_ir.tdl.evaluate import evaluate

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
"""Collectives of StableHLO."""


@dataclass(frozen=True)
class Planned:
    """A plan as it is sent to the process: the program of its step, its machine, and the model's tables as arrays."""

    program: Program
    machine: Machine
    tables: Mapping[str, Any]


class Apart:
    """A process that runs functions of this module, one at a time."""

    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of this module returns. Raises `AssertionError` with its traceback if it fails."""
        self._here.send((function, arguments))
        while not self._here.poll(1):
            assert self._process.is_alive(), "the process with JAX died"
        is_well, found = self._here.recv()
        assert is_well, found
        return found

    def close(self) -> None:
        self._here.send(None)
        self._process.join(5)


def _serve(connection: Any) -> None:
    import jax

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jax.config.update("jax_num_cpu_devices", 8)
    while (job := connection.recv()) is not None:
        function, arguments = job
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def counted(text: str) -> dict[str, int]:
    """
    Each kind of collective in a text of StableHLO, or of what XLA compiles, and of how many arrays there are such.
    (XLA makes one all-reduce of several arrays, and an all-to-all has an array for each device.)
    """
    found = Counter(re.findall(rf'"stablehlo\.({"|".join(KINDS)})"', text))
    names = {kind.replace("_", "-"): kind for kind in KINDS}
    for kind, operands in re.findall(rf"[\])}}] ({'|'.join(names)})\(([^)]*)\)", text):
        found[names[kind]] += 1 if kind == "all-to-all" else operands.count(",") + 1
    return dict(found)


def compared(model: str, planned: Planned, form: str) -> dict[str, Any]:
    """
    How far a step of a model in JAX is from PyTorch's, relative to the largest entries: `loss`, `gradients` and next
    `buffers` by name; and `counts` of collectives, in the lowered text and in what XLA compiles of it.
    """
    from unity_ir.interop.jax.step import JaxStep

    module, inputs, loss = built(model)
    module.train()
    state = {n: x.detach().clone() for n, x in (*module.named_parameters(), *module.named_buffers())}
    want = by_pytorch(module, inputs, loss)
    want.backward()
    step = JaxStep(planned.program, planned.machine, planned.tables, form=form)
    weights = step.place({n: state[n] for n in step.weights})
    buffers = step.place({n: state[n] for n in step.buffers if n in state})
    found = step(weights, inputs, buffers)
    lowered = step.lower()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    after = dict(module.named_buffers())

    def off(array: Any, tensor: torch.Tensor | None) -> float:
        return apart(torch.from_numpy(np.array(array)), tensor)

    return {
        "loss": off(found.loss, want),
        "gradients": {n: off(g, grads[n]) for n, g in found.gradients.items()},
        "missing": sorted(grads.keys() - found.gradients.keys()),
        "buffers": {n: off(b, after[n]) for n, b in found.buffers.items()},
        "placed": all(
            found.gradients[n].sharding.is_equivalent_to(weights[n].sharding, weights[n].ndim) for n in found.gradients
        ),
        "counts": (counted(lowered.as_text()), counted(lowered.compile().as_text())),
    }


def trained(model: str, planned: Planned) -> dict[str, float]:
    """
    How far weights and running statistics are from PyTorch's after three steps of SGD with momentum, in shards that
    stay where they are, and whether what is placed is left as it is.
    """
    import jax

    from unity_ir.interop.jax.step import JaxStep

    module, inputs, loss = built(model)
    module.train()
    step = JaxStep(planned.program, planned.machine, planned.tables)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    weights = step.place({n: state[n] for n in step.weights})
    buffers = step.place({n: state[n] for n in step.buffers if n in state})
    batch = step.place(inputs)
    assert all(step.place(batch)[n] is batch[n] for n in batch)
    with jax.enable_x64(True):
        speed = jax.tree.map(lambda x: x * 0, weights)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        by_pytorch(module, inputs, loss).backward()
        optimizer.step()
        found = step(weights, batch, buffers)
        with jax.enable_x64(True):
            speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, found.gradients)
            weights = jax.tree.map(lambda w, v: w - 0.1 * v, weights, speed)
        buffers |= found.buffers
    made = {**weights, **{n: buffers[n] for n in found.buffers}}
    return {n: apart(torch.from_numpy(np.array(x)), state[n]) for n, x in made.items()}


def jitted(model: str, planned: Planned) -> dict[str, float]:
    """
    How far the weights after two steps of gradient descent in one jitted scan are from those of steps by themselves,
    relative to the largest entries; the mesh has explicit axes.
    """
    import jax

    from unity_ir.interop.jax.step import JaxStep

    module, inputs, _ = built(model)
    plain = JaxStep(planned.program, planned.machine, planned.tables)
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh(plain.mesh.axis_sizes, plain.mesh.axis_names, axis_types=(kind,) * len(plain.mesh.axis_names))
    step = JaxStep(planned.program, planned.machine, planned.tables, mesh)
    with jax.enable_x64(True):
        batch = {n: np.asarray(x) for n, x in inputs.items()}

        def descend(weights: Any, _: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, step(weights, batch).gradients), None

        first = step.place(dict(module.named_parameters()))
        found = jax.jit(lambda weights: jax.lax.scan(descend, weights, None, 2)[0])(first)
        # Nothing of the trace is left in the step.
        assert np.isfinite(step(first, batch).loss)
        want = plain.place(dict(module.named_parameters()))
        for _ in range(2):
            want = jax.tree.map(lambda w, g: w - 0.1 * g, want, plain(want, batch).gradients)
    return {n: apart(torch.from_numpy(np.array(found[n])), torch.from_numpy(np.array(want[n]))) for n in want}


def in_halves(plan_text: str) -> dict[str, float]:
    """
    How far loss and gradients of a step in mixed precision, on random inputs, are from those of the same plan in
    float32, relative to the largest entries. The texts of both plans are in `plan_text`, after each other.
    """
    import unity_ir as ui

    found: list[Any] = []
    for text in plan_text.split("// -----"):
        step = ui.plan(text, search=None).jax()
        random = np.random.default_rng(0)
        arrays: dict[str, Any] = {}
        for name in sorted(step.shapes):
            of = step.shapes[name]
            ids = random.integers(0, 4, of.shape)
            numbers = random.standard_normal(of.shape) / 4
            arrays[name] = numbers.astype(np.float32) if of.dtype.kind in "fV" else ids
        found.append(step({n: arrays[n] for n in step.weights}, {n: arrays[n] for n in step.inputs}))
    plain, short = found
    tensors = [(plain.loss, short.loss), *((plain.gradients[n], short.gradients[n]) for n in plain.gradients)]
    names = ["loss", *plain.gradients]
    return {
        name: apart(torch.from_numpy(np.array(b, np.float32)), torch.from_numpy(np.array(a, np.float32)))
        for name, (a, b) in zip(names, tensors, strict=True)
    }


def refused(model: str, planned: Planned) -> dict[str, str]:
    """The messages of what is refused: batches, weights and meshes that are not the plan's."""
    import jax

    from unity_ir.errors import UnityError
    from unity_ir.interop.jax.step import JaxStep

    module, inputs, _ = built(model)
    weights = dict(module.named_parameters())
    said: dict[str, str] = {}

    def keep(what: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except UnityError as error:
            said[what] = str(error)

    step = JaxStep(planned.program, planned.machine, planned.tables)
    first = next(iter(inputs))
    keep("few", step, weights, {})
    keep("weights", step, {}, inputs)
    keep("unknown", step, weights, {**inputs, "other": 1})
    keep("shape", step, weights, {**inputs, first: inputs[first][:4]})
    keep("list", step, weights, [inputs])
    keep("ragged", step.place, {"target": [[1], [1, 2]]})
    keep("text", step.place, {"target": "1"})
    keep("platform", step.lower, "gpu")
    keep("numbers", step.place, {"target": np.zeros(8)})
    keep("text for mesh", JaxStep, planned.program, planned.machine, planned.tables, "annotated")
    abstract = jax.sharding.AbstractMesh(step.mesh.axis_sizes, step.mesh.axis_names)
    lowers = JaxStep(planned.program, planned.machine, planned.tables, abstract)
    assert "sdy.manual_computation" in lowers.lower("tpu").as_text()
    keep("no devices", lowers, weights, inputs)
    keep("no platform", lowers.lower)
    mesh = jax.make_mesh((4, 1), ("a", "b"))
    keep("mesh", JaxStep, planned.program, planned.machine, planned.tables, mesh)
    return said


def by_evaluation(name: str, case: Case) -> None:
    """Compare every line of an operator's forward and backward in JAX with its reference in NumPy."""
    import jax

    from unity_ir.interop.jax.lines import DTYPES, compute

    outputs = with_backward(serial(name, case), plain)
    nodes = topological(outputs)
    held = arrays([n.result for n in nodes if n.op == "input"], case, 0)
    found: dict[Value, Any] = {}
    for node in nodes:
        if node.is_leaf:
            is_input = node.op == "input"
            found[node.result] = held[node.name] if is_input else np.full(node.result.shape, node.attribute("value"))
            continue
        if node.is_parallel:
            found[node.result] = found[node.operands[0]]
            continue
        given, line = [found[v] for v in node.operands], node.analysis.bound
        with jax.enable_x64(True), np.errstate(all="ignore"):
            made = jax.jit(lambda *xs, line=line: compute(line, xs, {}))(
                *(jax.numpy.asarray(x, DTYPES[v.type.dtype]) for x, v in zip(given, node.operands, strict=True))
            )
            want = evaluate(line, given)
        for value, got, wanted in zip(node.results, made, want, strict=True):
            assert got.dtype == DTYPES[value.type.dtype], f"{node}: {got.dtype}"
            tolerance = 1e-2 if value.type.dtype in ("f32", "f16", "bf16") else 1e-9
            got, found[value] = np.asarray(got, np.float64), wanted
            np.testing.assert_allclose(got, np.asarray(wanted, np.float64), tolerance, tolerance, err_msg=str(node))


def stepped_loss(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Plan a loss of JAX on four devices; compare its step with `jax.value_and_grad`, and two steps of gradient descent
    inside of `jax.jit` with those of the loss.
    """
    import jax
    import jax.numpy as jnp
    from jax_models import MODELS as LOSSES

    import unity_ir as ui

    with jax.enable_x64(True):
        loss, arguments = LOSSES[name]()
        weights, *batch = jax.tree.map(jnp.asarray, arguments)
        step: Any = ui.plan(loss, (weights, *batch), machine="box:4", **options).jax()
        placed = step.place(weights)
        reference = jax.jit(jax.value_and_grad(loss))
        found, wanted = step(placed, *batch), reference(weights, *batch)

        def descended(weights: Any, gradients: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        @jax.jit
        def trained(weights: Any) -> Any:
            for _ in range(2):
                weights = descended(weights, step(weights, *batch).gradients)
            return weights

        for _ in range(2):
            weights = descended(weights, reference(weights, *batch)[1])
        gradients, after = step.restore(found.gradients), step.restore(trained(placed))
        off = [
            float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (gradients, wanted[1])), strict=True)
        ]
        late = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (after, weights)), strict=True)]
        shardings = zip(*map(jax.tree.leaves, (placed, found.gradients)), strict=True)
        return {
            "loss": abs(float(found.loss) - float(wanted[0])),
            "gradients": off,
            "trained": max(late),
            "alike": all(w.sharding.is_equivalent_to(g.sharding, w.ndim) for w, g in shardings),
        }


def unusual_weights() -> dict[str, Any]:
    """
    Step a plan of a loss whose weights are stacked, or integers; return the gradient of the integers, and what is said
    of arrays that do not fit by what they are.
    """
    import jax
    import jax.numpy as jnp

    import unity_ir as ui
    from unity_ir.errors import UnityError

    def loss(weights: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights["layers"])
        return jnp.mean(y * weights["counts"])

    weights = {"layers": np.ones((3, 4, 4), np.float32), "counts": np.arange(4)}
    x = np.ones((8, 4), np.float32)
    step: Any = ui.plan(loss, (weights, x), machine="box:4", search="fsdp").jax()
    found: dict[str, Any] = {"counts": np.asarray(step(step.place(weights), x).gradients["counts"])}
    for what, layers in {"number": np.float32(1), "shape": jax.ShapeDtypeStruct((3, 4, 4), "float32")}.items():
        try:
            step.place(weights | {"layers": layers})
        except UnityError as error:
            found[what] = str(error)
    return found


def in_program() -> tuple[float, str]:
    """
    Plan a loss of JAX on one device; return how far the loss of its program in PyTorch is from it, and what a program
    without the values of weights says.
    """
    import jax
    import jax.numpy as jnp

    import unity_ir as ui

    def loss(weights: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ weights["w"]) - batch["y"]) ** 2)

    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((12, 4)).astype(np.float32)}
    batch = {n: random.standard_normal((8, size)).astype(np.float32) for n, size in (("x", 12), ("y", 4))}
    plan = ui.plan(loss, (weights, batch), machine="box:1")
    with plan.program(kernels="torch", lr=1e-3) as step:
        off = abs(float(step({n: torch.from_numpy(x) for n, x in batch.items()})) - float(loss(weights, batch)))
    shapes = {"w": jax.ShapeDtypeStruct((12, 4), jnp.float32)}
    try:
        ui.plan(loss, (shapes, batch), machine="box:1").program(kernels="torch", lr=1e-3)
    except ui.UnityError as error:
        return off, str(error)
    return off, ""

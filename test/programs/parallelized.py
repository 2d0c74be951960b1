"""Functions that ranks call (`ranks`): run a module by a plan in DTensors, and compare it with PyTorch."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
from dtensor_models import built, by_pytorch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache

from unity_ir.errors import UnityError
from unity_ir.interop.dtensor.described import mesh_dims
from unity_ir.interop.dtensor.module import PlannedStep, parallelize
from unity_ir.interop.dtensor.pieces import placements

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""The name in a plan of each collective that PyTorch counts."""


def run_by(
    step: PlannedStep, model: str, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A model, the same run by a plan, and its inputs. Constants of the plan are arrays, as ranks are sent them."""
    warnings.simplefilter("ignore")
    # What PyTorch remembers of placements has meshes in it, whose process groups were another job's.
    _clear_sharding_prop_cache()
    module, inputs, _ = built(model)
    step = replace(step, constants={n: torch.from_numpy(x) for n, x in step.constants.items()})
    return copy.deepcopy(module).train(), parallelize(module.train(), step, mesh), inputs


def counted(mode: CommDebugMode) -> dict[str, int]:
    """The calls of collectives, by their names in a plan."""
    found = {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items() if n}
    return {COLLECTIVES[op]: n for op, n in found.items()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def apart(found: torch.Tensor, wanted: torch.Tensor | None) -> float:
    """How far tensors are apart, relative to the largest entry."""
    assert wanted is not None
    assert found.shape == wanted.shape
    wanted = wanted.detach()
    return float((whole(found.detach()) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))


def gradients_apart(found: nn.Module, wanted: nn.Module) -> dict[str, float]:
    """How far gradients are apart, by name; a parameter has one in both, or in none."""
    want = {n: p.grad for n, p in wanted.named_parameters()}
    made = {n: p.grad for n, p in found.named_parameters()}
    assert [n for n, g in made.items() if g is None] == [n for n, g in want.items() if g is None]
    return {n: apart(g, want[n]) for n, g in made.items() if g is not None}


def compared(program: object, model: str, step: PlannedStep) -> dict[str, Any]:
    """
    How far a step of a model run by a plan is from PyTorch's, relative to the largest entries: `loss`, `gradients` and
    next `buffers` by name; `counts` of collectives in the forward and in the backward; `placements` of parameters.
    """
    del program
    plain, module, inputs = run_by(step, model)
    loss = built(model)[2]
    want = by_pytorch(plain, inputs, loss)
    want.backward()
    with CommDebugMode() as forward:
        found = module(**inputs)
    with CommDebugMode() as backward:
        found.backward()
    buffers = dict(plain.named_buffers())
    return {
        "loss": apart(found, want),
        "gradients": gradients_apart(module, plain),
        "buffers": {n: apart(b, buffers[n]) for n, b in module.named_buffers()},
        "counts": (counted(forward), counted(backward)),
        "placements": {n: list(map(str, p.placements)) for n, p in module.named_parameters() if isinstance(p, DTensor)},
    }


def trained(program: object, model: str, step: PlannedStep, shape: tuple[int, ...] | None) -> dict[str, float]:
    """
    How far, after two steps of SGD with momentum and clipping, weights and buffers are from PyTorch's, and then the
    loss in evaluation; and the loss of further ways to call the module. With a `shape`, on a mesh of that.
    """
    del program
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[: len(shape)]))
    plain, module, inputs = run_by(step, model, mesh)
    loss = built(model)[2]
    found: dict[str, float] = {}
    runs = [(each, torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (plain, module)]
    for _ in range(2):
        for each, optimizer in runs:
            optimizer.zero_grad()
            # Of gradients that are added up, each is scaled.
            for scale in (0.5, 0.25):
                made = by_pytorch(each, inputs, loss) if each is plain else each(**inputs)
                (made * scale).backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            found["norm"] = float(whole(norm)) - found.get("norm", 0.0) if each is module else float(norm)
            optimizer.step()
    state = plain.state_dict()
    found |= {n: apart(x, state[n]) for n, x in module.state_dict().items()}
    for each in (plain, module):
        each.eval()
    evaluated = module(**inputs)
    assert not evaluated.requires_grad
    found["evaluated"] = apart(evaluated, by_pytorch(plain, inputs, loss))
    # Without the targets, and with inputs that are divided already.
    names = list(inputs)
    dims = mesh_dims(step.program, step.machine)
    dims = dims if mesh is None else dims.like(shape or (), None) or dims
    on = next(p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    leaf = step.named(names[0])
    at = placements(dims, step.program.tensors[leaf.result].layout)
    first = module(inputs[names[0]])(inputs[names[1]])
    divided = torch.distributed.tensor.distribute_tensor(inputs[names[0]], on, at)
    found["apart"] = apart(first, whole(evaluated))
    found["divided"] = apart(module(divided, inputs[names[1]]), whole(evaluated))
    return found


def refused(program: object, model: str, step: PlannedStep) -> dict[str, str]:
    """The messages of what is refused, on a mesh that does not fit, of other modules, and of batches."""
    del program
    found: dict[str, str] = {}

    def keep(what: str, call: Any, *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except UnityError as error:
            found[what] = str(error)

    def fresh() -> nn.Module:
        return built(model)[0]

    keep("mesh", parallelize, fresh(), step, init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=("a", "b", "c")))
    keep("module", parallelize, nn.Linear(2, 2), step, None)
    keep("dtype", parallelize, fresh().float(), step, None)
    _, module, inputs = run_by(step, model)
    keep("again", parallelize, module, step, None)
    keep("few", module)
    keep("many", module, *inputs.values(), 1)
    keep("unknown", module, **inputs, other=1)
    keep("shape", module, **{n: x[:4] for n, x in inputs.items()})
    keep("kind", module, **dict.fromkeys(inputs, 1))
    keep("targets", module(inputs["input"]))
    on = next(p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    wrong = torch.distributed.tensor.distribute_tensor(inputs["input"], on)
    keep("placements", module, wrong, inputs["target"])
    return found


def of_too_few(program: object, model: str, step: PlannedStep) -> str:
    """The message where there are fewer ranks than devices."""
    del program
    try:
        run_by(step, model)
    except UnityError as error:
        return str(error)
    return ""

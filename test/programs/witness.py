"""The gradients of a stack of layers by torch.distributed.pipelining, on the ranks of a program in stages."""

from __future__ import annotations

from typing import Any


def against_torch_pipelining(program: Any, name: str, layers: int, indices: list[list[int]], count: int) -> list[float]:
    """
    How far the program's gradients of the layers on this rank are from those of torch's schedule `name`, as a part of
    the largest. `indices` are the stages of each rank; each has as many of the layers `w0`, `w1`, ..
    """
    import torch
    import torch.distributed.pipelining.schedules as schedules
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    batch = program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    _, grads = program.forward_backward(ctx, weights, local)
    ours = program.wholes(ctx, {n: grads.get(n) for n in program.WEIGHTS}, program.WEIGHTS)

    class Layers(nn.Module):
        def __init__(self, numbers: range):
            super().__init__()
            self.numbers = numbers
            made = {f"w{i}": program.initial(f"w{i}", program.WEIGHTS[f"w{i}"], 0) for i in numbers}
            self.own = nn.ParameterDict({n: nn.Parameter(w.double()) for n, w in made.items()})

        def forward(self, x: Any) -> Any:
            for i in self.numbers:
                x = x @ self.own[f"w{i}"]
                x = torch.tanh(x) if i + 1 < layers else x
            return x

    stages = sum(map(len, indices))
    each = layers // stages
    modules = [Layers(range(i * each, (i + 1) * each)) for i in indices[ctx.rank]]
    made = [PipelineStage(m, i, stages, ctx.device) for m, i in zip(modules, indices[ctx.rank], strict=True)]
    kind = getattr(schedules, name)
    is_single = name in ("ScheduleGPipe", "Schedule1F1B")
    schedule = kind(made[0] if is_single else made, count, loss_fn=nn.functional.mse_loss)
    given = (batch["x"].double(),) if 0 in indices[ctx.rank] else ()
    target = {"target": batch["y"].double()} if stages - 1 in indices[ctx.rank] else {}
    schedule.step(*given, **target)
    found = [(ours[n][0].double(), w.grad) for m in modules for n, w in m.own.items()]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in found]

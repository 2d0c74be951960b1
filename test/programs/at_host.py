"""Run the update of a program whose optimizer state is at the host, and record the order of its copies and updates."""

from __future__ import annotations

from typing import Any


def order_of_update(program: Any) -> tuple[list[tuple[str, int]], int]:
    """
    Return the copies of state and the updates of a step, in the order in which this rank starts them, as (kind,
    elements); and the bytes of its windows on the device.
    """
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    _, grads = program.forward_backward(ctx, weights, _local(program, ctx))
    rest = {m.untyped_storage().data_ptr() for own in moments.values() for m in own}
    found: list[tuple[str, int]] = []
    slots: list[int] = []
    name = f"{program.OPTIMIZER[0]}_torch"
    copy, slot, update = program.HostCopy, program.Slot, getattr(program, name)

    def copied(targets: Any, sources: Any, stream: Any = None) -> Any:
        is_from = all(x.untyped_storage().data_ptr() in rest for x in sources)
        found.append(("from_host" if is_from else "to_host", sum(x.numel() for x in sources)))
        return copy(targets, sources, stream)

    def made(device: Any, size: int) -> Any:
        slots.append(size)
        return slot(device, size)

    def updated(weight: Any, *rest: Any, **more: Any) -> None:
        found.append(("update", weight.numel()))
        update(weight, *rest, **more)

    program.HostCopy, program.Slot = copied, made
    setattr(program, name, updated)
    program.update(weights, grads, moments, 1)
    return found, sum(slots)


def _local(program: Any, ctx: Any) -> dict[str, Any]:
    batch = program.Data().batch(0)
    return {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}

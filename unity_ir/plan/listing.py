"""List the lines of a step's plan as text, for `--print-plan`."""

from __future__ import annotations

from collections.abc import Iterable

from unity_ir.plan.deadlock import register_names
from unity_ir.plan.host_state import StateCopy, StatePart, UpdateAction, WindowUpdate, state_bytes
from unity_ir.plan.instructions import Compute, Leaf, Register, TimeStep, UpdateWeight, ValueMove, communicates
from unity_ir.plan.plan import Plan
from unity_ir.plan.scheduled import Action, Bucket, Wait


def listing(plan: Plan) -> str:
    """
    Return the plan as text, a line of text per scheduled line, in order: what it does, what it reads and makes, and
    what it frees.

        start   all_gather along 0 of w         %4 -> %9: [64, 32] f32, repeat
        wait                                    %9
        kernel  matmul + relu by triton         %1, %9 -> %12: [64, 32] f32, dim 0; frees %1, %9

    `kernel` is an operator or a group of them, `local` a move on the device itself, `start` a collective, of which
    several may share a call. Leaves are listed where they are first read. With micro-batches, `first:` and `last:` mark
    lines that only the first or the last of them runs, and `early:` lines of a loop over micro-batches before the main
    one. `piece:` marks lines of the loop over the pieces of the loss. The head counts kernels, collectives and updates;
    updates come last. With state at the host, `from_host` and `to_host` copy it in windows, each of which says its
    bytes and the elements of weights it has; of values at the host they say the value and its bytes, and that they are
    waited for in lines of their own. For a step in stages, the actions of each rank come first, then the
    listing of each part.
    """
    if plan.pipeline is not None:
        schedule = plan.pipeline.schedule
        order = (f"  rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(schedule.ranks))
        parts = (f"part {part.name} of {listing(own)}" for part, own in plan.parts)
        return "\n".join([f"@{_printable(plan.program.name)}: {schedule.name}", *order]) + "\n" + "".join(parts)
    program = plan.program
    kernels = sum(isinstance(line.action, Compute) for line in plan.schedule.lines)
    calls = sum(_what(line.action) == "start" for line in plan.schedule.lines)
    updates = [i for i in program.body if isinstance(i, UpdateWeight)]
    counts = [_count(kernels, "kernel"), _count(calls, "collective"), _count(len(updates), "update")]
    loop = f", in a loop over {program.micro_batches} micro-batches" if program.micro_batches > 1 else ""
    loop += f", the loss in {program.loss_pieces} pieces" if program.loss_pieces > 1 else ""
    out = [f"@{_printable(program.name)} on {_count(program.devices, 'device')}: {', '.join(counts)}{loop}"]
    names = register_names(program)
    for line in plan.schedule.lines:
        reads, makes = plan.schedule.reads_and_makes(line.action)
        text = f"{_registers(reads)}{' -> ' * bool(reads and makes)}{_registers(makes)}"
        types = dict.fromkeys(str(program.tensors[r]) for r in makes)
        text += f": {'; '.join(types)}" if makes else ""
        frees = f"; frees {_registers(line.dies)}" if line.dies else ""
        frees += f"; frees {_registers(line.dies_last)} in the last" if line.dies_last else ""
        only = "piece: " if line.in_pieces else "" if line.when == "every" else f"{line.when}: "
        what, of = _what(line.action), only + _of(plan, line.action, names)
        width = max(len(what), 7)
        out.append(f"  {what:{width}} {of:{47 - width}} {text}{frees}".rstrip())
    optimizer = program.optimizer.name if program.optimizer is not None else ""
    if updates and program.optimizer is not None and program.optimizer.clip:
        out.append(f"  {'norm':7} {f'of all gradients, at most {program.optimizer.clip:g}'}")
    out += [_update(plan, line, names, optimizer) for line in plan.updates]
    return "\n".join(out) + "\n"


def _update(plan: Plan, line: UpdateAction, names: dict[Register, str], optimizer: str) -> str:
    match line:
        case StateCopy(kind, number, parts):
            size = sum(state_bytes(plan.program, part) for part in parts)
            return f"  {kind:9} {f'window {number} of state, {size} bytes':38} {_parts(parts, names)}"
        case WindowUpdate(number, parts):
            return f"  {'update':9} {f'window {number} by {optimizer}':38} {_parts(parts, names)}"
        case UpdateWeight(weight, grad, cast):
            written = f" -> {_registers((cast,))}" if cast is not None else ""
            return f"  {'update':7} {f'{names[weight]} by {optimizer}':40} {_registers((weight, grad))}{written}"


def _parts(parts: Iterable[StatePart], names: dict[Register, str]) -> str:
    return ", ".join(f"{_printable(names[p.weight])}[{p.begin}:{p.end}]" for p in parts)


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


def _what(action: Action) -> str:
    match action:
        case Leaf():
            return "leaf"
        case Compute():
            return "kernel"
        case Wait():
            return "wait"
        case Bucket():
            return "start"
        case TimeStep():
            return "local"
        case ValueMove(_, _, kind):
            return kind
        case _:
            return "start" if communicates(action) else "local"


def _of(plan: Plan, action: Action, names: dict[Register, str]) -> str:
    match action:
        case Leaf(op, _, name):
            return f"{op} {_printable(name)}".rstrip()
        case Compute(operator):
            return f"{operator} by {plan.implementations[action]}"
        case Wait():
            return ""
        case TimeStep():
            by = ", by its kernel" if action.is_added else ""
            return f"{action.kind} of {_printable(names[action.operand])}{by}"
        case ValueMove(operand):
            return f"{_printable(names[operand])}, {plan.program.bytes[operand]} bytes"
        case Bucket(moves):
            return f"{moves[0].kind} along {_axes(moves[0].axes)} of {len(moves)} values"
        case _:
            return f"{action.kind} along {_axes(action.axes)} of {_printable(names[action.operand])}"


def _registers(registers: Iterable[Register]) -> str:
    return ", ".join(f"%{r}" for r in registers)


def _axes(axes: Iterable[int]) -> str:
    return ", ".join(map(str, axes))


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)

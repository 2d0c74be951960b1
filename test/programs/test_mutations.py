"""
The check catches what a wrong program would do: any one collective gone or misplaced, any gradient scaled.

Every third of such programs in `make test`, where `test_every_collective.py` does the same to every move; all in
`make zoo`.
"""

from __future__ import annotations

import re

import pytest
from extent import sample
from models import MODELS, machine
from ranks import Ranks, check
from test_programs import program

COLLECTIVE = re.compile(
    r"^    (\w+) = (all_reduce|all_gather|reduce_scatter|all_to_all|zero_pad|keep_part)\(ctx, (.*\))\)(\.wait\(\))?",
    re.M,
)
SAME_SHAPE = {"all_reduce"}

DONE = """
class Done:
    def __init__(self, value):
        self.value = value

    def wait(self):
        return self.value

"""


def step_of(text: str) -> tuple[int, int]:
    start = text.index("def forward_backward(")
    return start, text.index("\n\n\n", start)


def dropped(text: str) -> list[tuple[str, str]]:
    """The program without one collective, for each whose result has its operand's shape."""
    start, end = step_of(text)
    out: list[tuple[str, str]] = []
    for found in COLLECTIVE.finditer(text, start, end):
        name, kind, rest, wait = found.groups()
        operand = rest.rpartition(", (")[0]
        if kind in SAME_SHAPE:
            # What is waited for later has to be something that can be.
            whole = f"    {name} = {operand if wait else f'Done({operand})'}"
            changed = text[: found.start()] + whole + text[found.end() :]
            changed = changed.replace("\ndef forward_backward(", f"\n{DONE}\n\ndef forward_backward(", 1)
            out.append((f"{kind} of {operand} dropped", changed))
    return out


def unbucketed(text: str) -> list[tuple[str, str]]:
    """The program with one bucket of gradients not summed."""
    start, end = step_of(text)
    out: list[tuple[str, str]] = []
    for found in re.finditer(
        r"^    ([\w, ]+) = all_reduce_many\(ctx, \((.*)\), \([\d, ]*\)\)(\.wait\(\))?.*$", text[start:end], re.M
    ):
        names, operands, wait = found.groups()
        kept = text.replace(found.group(0), f"    {names} = {operands}" if wait else "", 1)
        out.append((f"{names} left out", kept if wait else kept.replace(f"{names}.wait()", f"({operands})", 1)))
    return out


def regrouped(text: str, axes: int) -> list[tuple[str, str]]:
    """The program with one all-reduce along other axes."""
    start, end = step_of(text)
    out: list[tuple[str, str]] = []
    for found in COLLECTIVE.finditer(text, start, end):
        name, kind, rest, wait = found.groups()
        operand, at = rest[: rest.rindex(", (")], rest[rest.rindex("(") :]
        others = [(a,) for a in range(axes) if f"({a},)" != at]
        if kind == "all_reduce" and axes > 1:
            for other in others:
                changed = f"    {name} = all_reduce(ctx, {operand}, {other}){wait or ''}"
                new = text[: found.start()] + changed + text[found.end() :]
                new = re.sub(
                    r"^GROUPS = .*$",
                    f"GROUPS = {(*((a,) for a in range(axes)), tuple(range(axes)))}",
                    new,
                    flags=re.M,
                )
                out.append((f"all_reduce of {operand} along {other} instead of {at}", new))
    return out


def shifted(text: str) -> list[tuple[str, str]]:
    """The program with a collective's part taken by the wrong rank."""
    out: list[tuple[str, str]] = []
    start, end = step_of(text)
    if "keep_part(ctx" in text[start:end]:
        out.append(
            (
                "parts kept by other ranks",
                text.replace("[ctx.index(axes)].contiguous()", "[-1 - ctx.index(axes)].contiguous()"),
            )
        )
    if " = all_gather(ctx" in text[start:end]:
        out.append(
            (
                "pieces gathered in another order",
                text.replace("*shape).unbind(0), dim)", "*shape).flip(0).unbind(0), dim)").replace(
                    "out.view(_ways(axes) * shape[0]",
                    "out.view(_ways(axes), -1).flip(0).reshape(_ways(axes) * shape[0]",
                ),
            )
        )
    if " = reduce_scatter(ctx" in text[start:end]:
        wrong = "out = torch.empty_like(parts[0])\n    parts = parts.flip(0)"
        out.append(("parts scattered in another order", text.replace("out = torch.empty_like(parts[0])", wrong)))
    return [(what, new) for what, new in out if new != text]


def padded(text: str) -> list[tuple[str, str]]:
    """The program in which every rank, not only the first, adds its copy to a sum."""
    new = text.replace("return x if ctx.index(axes) == 0 else torch.zeros_like(x)", "return x")
    start, end = step_of(text)
    return [("every rank adds its copy", new)] if ", None, (" in text[start:end] else []


def scaled(text: str) -> list[tuple[str, str]]:
    """The program with one gradient too large."""
    start, end = step_of(text)
    last = text.rindex("    return ", start, end)
    return [
        (
            f"gradient {found.group(1)} doubled",
            text[:last] + text[last:end].replace(found.group(0), f"{found.group(0)} * 2") + text[end:],
        )
        for found in re.finditer(r"'([^']+)': \w+", text[last:end])
    ]


def no_update(text: str) -> list[tuple[str, str]]:
    """The program with one weight never updated."""
    start = text.index("def update(")
    end = text.index("\n\n\n", start)
    lines = [line for line in text[start:end].splitlines() if line.startswith("    ") and '"""' not in line]
    some = lines[0].replace("trained(weights).items()", "list(trained(weights).items())[1:]")
    assert some != lines[0]
    return [("without one update", text.replace(lines[0], some))]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "where", "plan"),
    [
        ("mlp", "ideal:2", "joint"),
        ("mlp", "ideal:2x2", "joint"),
        ("residual", "ideal:2x2", "data-parallel"),
        ("residual", "ideal:2x2", "random-2"),
        ("shapes", "ideal:2x2", "random-3"),
    ],
)
def test_every_mutant_is_caught(ranks: Ranks, model: str, where: str, plan: str):
    build, optimizer = MODELS[model][0], "adam" if model == "mlp" else "sgd"
    # Moves are the same whatever computes between them; Triton's interpreter is slow.
    text = program(build(), where, plan, optimizer, bucket=0, kernels="torch")
    on = machine(where)
    world, axes = on.devices, len(on.mesh.sizes)
    assert ranks.run(text, world, check, 2) == [[]] * world
    mutants = shifted(text) + scaled(text) + no_update(text)
    if not plan.startswith("random"):
        # A random plan takes detours: it may sum what is zero on all ranks but one, or what nobody reads.
        mutants += dropped(text) + regrouped(text, axes) + padded(text)
        mutants += unbucketed(program(build(), where, plan, optimizer, kernels="torch"))
    assert mutants
    survivors = [what for what, mutant in sample(mutants, 3) if not any(ranks.run(mutant, world, check, 2))]
    assert not survivors

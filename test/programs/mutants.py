"""Every move of a program's step done wrong, one at a time: what of it the gradients tell."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.deadlock import CollectiveCall, Place, calls, check_order
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import schedule


@dataclass(frozen=True)
class Site:
    """A call in the step that moves something along axes."""

    line: int
    number: int
    """Which of the calls in its line."""
    kind: str
    operands: str
    axes: tuple[int, ...]
    pinned: bool
    sums: tuple[int, ...]
    """Axes over which what it makes is yet to be summed."""


@dataclass(frozen=True)
class Mutant:
    """A site's move is `dropped` (each rank makes do with what it has), its result `doubled`, or along other axes."""

    site: Site
    change: str | tuple[int, ...]

    def __str__(self) -> str:
        what = self.change if isinstance(self.change, str) else f"along {self.change}"
        return f"{self.site.kind} of {self.site.operands} along {self.site.axes}: {what}"


def sites(text: str) -> list[Site]:
    """The moves of a program's step."""
    lines = text.splitlines()
    step = next(s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef) and s.name == "forward_backward")
    found: list[Site] = []
    for statement in step.body:
        code, _, comment = lines[statement.lineno - 1].partition("  # ")
        roles = comment.partition("], ")[2].partition(", was ")[0].split(", ")
        sums = {i for i, role in enumerate(roles) if role == "sum"}
        # The comment says where the last move's result is; from there back.
        for number, call in reversed(list(enumerate(_moves(statement)))):
            kind, axes = ast.unparse(call.func), ast.literal_eval(call.args[-1])
            operands = ", ".join(map(ast.unparse, call.args[1:-1]))
            if axes:
                found.append(
                    Site(statement.lineno, number, kind, operands, axes, " if at_" in code, tuple(sorted(sums)))
                )
            if kind in ("all_reduce", "reduce_scatter", "reduce", "all_reduce_many", "reduce_scatter_many"):
                sums |= set(axes)
            elif kind in ("zero_pad", "zero_elsewhere"):
                sums -= set(axes)
    return found


def _moves(of: ast.AST) -> Iterator[ast.Call]:
    """The calls of moves in the order in which they are made: what is inside first."""
    for child in ast.iter_child_nodes(of):
        yield from _moves(child)
    if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id in DROPPED:
        yield of


def mutants(text: str, mesh: tuple[int, ...]) -> list[Mutant]:
    """All the ways in which one move may be wrong. What only some ranks do has no other group that all of are there."""
    every = [axes for n in range(1, len(mesh) + 1) for axes in combinations(range(len(mesh)), n)]
    found: list[Mutant] = []
    for site in sites(text):
        found += [Mutant(site, "dropped"), Mutant(site, "doubled")]
        ways = prod(mesh[a] for a in site.axes)
        others = [a for a in every if a != site.axes and prod(mesh[i] for i in a) == ways]
        if site.kind in ("all_reduce", "all_reduce_many"):
            others = [a for a in every if a != site.axes]
        if not site.pinned:
            found += [Mutant(site, axes) for axes in others]
    return found


def of_every_rank(program: Program) -> dict[Place, list[CollectiveCall]]:
    """What each rank of the mesh calls, in order; those that do the same things one by one, too."""
    found = calls(program, schedule(program))
    apart = sorted({axis for t in program.tensors.values() for axis, _ in pins_of(t.layout)})
    places = list(product(*(range(size) for size in program.mesh.sizes)))

    def group(place: Place, call: CollectiveCall) -> tuple[Place, ...]:
        return tuple(p for p in places if all(a == b or i in call.axes for i, (a, b) in enumerate(zip(p, place))))

    return {p: [replace(c, group=group(p, c)) for c in found[tuple(p[i] for i in apart)]] for p in places}


def swaps_let_pass(program: Program) -> list[tuple[CollectiveCall, CollectiveCall]]:
    """Neighbouring calls that one rank could do the other way round without the order check telling."""
    found = of_every_rank(program)
    check_order("", found)
    passed: list[tuple[CollectiveCall, CollectiveCall]] = []
    for place, mine in found.items():
        for i in range(len(mine) - 1):
            swapped = [*mine[:i], mine[i + 1], mine[i], *mine[i + 2 :]]
            try:
                check_order("", {**found, place: swapped})
            except UnityError:
                continue
            passed.append((mine[i], mine[i + 1]))
    return passed


# --- on a rank


def _repeated(program: Any, ctx: Any, x: Any, dim: int, axes: Any) -> Any:
    import torch

    return torch.cat([x] * program._ways(axes), dim)


def _some(x: Any, shape: Any, dtype: Any) -> Any:
    """Zeros where a rank has nothing of its own."""
    import torch

    return torch.zeros(tuple(shape), dtype=dtype)


def _part(program: Any, ctx: Any, x: Any, dim: int, axes: Any) -> Any:
    return x.chunk(program._ways(axes), dim)[ctx.index(axes)].contiguous()


def _scattered(program: Any, ctx: Any, x: Any, dim: int, root: int, shape: Any, dtype: Any, axes: Any) -> Any:
    if ctx.index(axes) == root:
        return _part(program, ctx, x, dim, axes)
    ways = program._ways(axes)
    return _some(x, [s // ways if i == dim else s for i, s in enumerate(shape)], dtype)


def _bordered(program: Any, ctx: Any, x: Any, dim: int, low: int, high: int, axes: Any) -> Any:
    import torch

    borders = [x.new_zeros([n if i == dim else s for i, s in enumerate(x.shape)]) for n in (low, high)]
    return torch.cat([borders[0], x, borders[1]], dim)


def _exchanged(program: Any, ctx: Any, x: Any, source: int, target: int, axes: Any) -> Any:
    import torch

    return torch.cat(x.chunk(program._ways(axes), target), source)


def _evenly(program: Any, e: Any, axes: Any) -> Any:
    """As many rows to each rank, wherever their experts are."""
    ways = program._ways(axes)
    each = [e.shape[1] // ways + (rank < e.shape[1] % ways) for rank in range(ways)]
    return each, each


def _fitted(x: Any, rows: int) -> Any:
    """A rank's own rows, as many as it would have of all."""
    import torch

    return torch.cat([x, torch.zeros_like(x[:, :1]).expand(-1, max(rows - x.shape[1], 0), *x.shape[2:])], 1)[:, :rows]


def _elsewhere(program: Any, ctx: Any, x: Any, dim: int | None, axes: Any) -> Any:
    """Added in the place of the next rank, or by all."""
    if dim is None:
        return x.clone()
    shape = [s * program._ways(axes) if i == dim else s for i, s in enumerate(x.shape)]
    out, ways = x.new_zeros(shape), program._ways(axes)
    out.narrow(dim, (ctx.index(axes) + 1) % ways * x.shape[dim], x.shape[dim]).copy_(x)
    return out


DROPPED: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda p, c, x, axes: x.clone(),
    "all_reduce_many": lambda p, c, xs, axes: tuple(x.clone() for x in xs),
    "all_gather": _repeated,
    "all_gather_many": lambda p, c, xs, dims, axes: tuple(_repeated(p, c, x, d, axes) for x, d in zip(xs, dims)),
    "reduce_scatter": _part,
    "reduce_scatter_many": lambda p, c, xs, dims, axes: tuple(_part(p, c, x, d, axes) for x, d in zip(xs, dims)),
    "all_to_all": _exchanged,
    "broadcast": lambda p, c, x, root, shape, dtype, axes: x if c.index(axes) == root else _some(x, shape, dtype),
    "scatter": _scattered,
    "gather": lambda p, c, x, dim, root, axes: _repeated(p, c, x, dim, axes) if c.index(axes) == root else None,
    "reduce": lambda p, c, x, root, axes: x.clone() if c.index(axes) == root else None,
    "send": lambda p, c, x, root, to, shape, dtype, axes: _some(x, shape, dtype) if c.index(axes) == to else None,
    "halo": _bordered,
    "halo_reduce": lambda p, c, x, dim, low, high, axes: x.narrow(dim, low, x.shape[dim] - low - high).clone(),
    "ring_shift": lambda p, c, x, axes: x.clone(),
    "count_rows": lambda p, c, e, experts, rows, layer, axes: _evenly(p, e, axes),
    "send_rows": lambda p, c, x, counts, rows, axes: _fitted(x, rows),
    "return_rows": lambda p, c, x, counts, axes: _fitted(x, sum(counts[0])),
    "zero_elsewhere": lambda p, c, x, root, shape, dtype, axes: _some(x, shape, dtype),
    # All have the first part: of parts in turn the sum would be the same.
    "keep_part": lambda p, c, x, dim, axes: x.chunk(p._ways(axes), dim)[0].contiguous(),
    "zero_pad": _elsewhere,
    "constant": lambda p, c, value, shape, dtype, axes: p.constant(c, value, shape, dtype, ()),
}
"""What a rank would have without a move, of the right shape; of a local step, what is in the wrong place."""


class Done:
    def __init__(self, value: Any):
        self.value = value

    def wait(self) -> Any:
        return self.value


def _doubled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_doubled, value))
    return value * 2 if value is not None and value.is_floating_point() else value


def _differs(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, tuple):
        return any(map(_differs, a, b))
    if isinstance(a, list):
        return a != b
    if a is None or not a.is_floating_point():
        return a is not None and not torch.equal(a, b)
    # The mean of distances to the mean, which batch norm takes, is rounding alone.
    return not torch.allclose(a, b, rtol=1e-11, atol=1e-12)


def _summed(ctx: Any, x: Any, axes: Any) -> Any:
    """Of addends only the sum matters, not who has which."""
    import torch.distributed as dist

    if isinstance(x, tuple):
        return tuple(_summed(ctx, each, axes) for each in x)
    if axes:
        x = x.clone()
        dist.all_reduce(x, group=ctx.groups[axes])
    return x


def _poisoned(right: Any, wrong: Any) -> Any:
    """What is right, and any number where the other is something else."""
    import torch

    if isinstance(right, tuple):
        return tuple(map(_poisoned, right, wrong))
    if right is None:
        return wrong
    if not right.is_floating_point():
        # Integers pick something: any that are among the right ones do.
        return torch.where(right == wrong, right, right.flatten()[torch.randint(right.numel(), right.shape)])
    return torch.where(torch.isclose(right, wrong, rtol=1e-11, atol=1e-300), right, torch.randn_like(right))


def _has_operands(kind: str, ctx: Any, axes: Any, x: Any, *rest: Any) -> bool:
    """Whether a rank has what it would give along other axes: of pinned values only their place has any."""
    root = {"broadcast": 0, "scatter": 1, "send": 0}.get(kind)
    return x is not None or (root is not None and ctx.index(axes) != rest[root])


def _everywhere(flag: bool) -> bool:
    import torch
    import torch.distributed as dist

    number = torch.tensor(int(flag))
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return bool(number)


class Changed:
    """The program's moves, of which one at a time is done wrong."""

    def __init__(self, program: Any):
        self.program = program
        self.mutant: Mutant | None = None
        self.differs = False
        """Whether the wrong move has made something else of what it was given, ..."""
        self.poison = False
        """... and whether in the place of that there are to be random numbers."""
        self.crashes = False
        """Whether it could not be made, since some rank has nothing to give, or would have nothing to go on with."""
        self.made: Counter[int] = Counter()
        """How many moves of each line have been made."""
        for kind in DROPPED:
            if hasattr(program, kind):
                setattr(program, kind, self._wrapped(kind, getattr(program, kind)))

    def _wrapped(self, kind: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(ctx: Any, *args: Any) -> Any:
            line = sys._getframe(1).f_lineno
            self.made[line] += 1
            # An all-reduce is done in place, and what is wrong starts from the same operand.
            given = (args[0].clone(), *args[1:]) if kind == "all_reduce" and args[0] is not None else args
            result = right(ctx, *args)
            args = given
            if self.mutant is None or (line, self.made[line] - 1) != (self.mutant.site.line, self.mutant.site.number):
                return result
            change, waited = self.mutant.change, hasattr(result, "wait")
            want = result.wait() if waited else result
            if change == "dropped":
                got = DROPPED[kind](self.program, ctx, *args)
            elif change == "doubled":
                got = _doubled(want)
            else:
                if not _everywhere(_has_operands(kind, ctx, change, *args)):
                    self.crashes = True
                    return Done(want) if waited else want
                got = right(ctx, *args[:-1], change)
                got = got.wait() if hasattr(got, "wait") else got
                if not _everywhere((got is None) == (want is None)):
                    self.crashes = True
                    return Done(want) if waited else want
            if want is not None:
                site = self.mutant.site
                self.differs = _differs(*(x if site.pinned else _summed(ctx, x, site.sums) for x in (want, got)))
            if self.poison:
                got = _poisoned(want, got)
            return Done(got) if waited else got

        return call


def told(program: Any, wrong: list[Mutant], want_loss: float, want: dict[str, Any]) -> list[str]:
    """
    What becomes of every mutant: loss or gradients of one step are `wrong`; its move makes the `same` as the right one
    (of zeros but for rounding, of copies, of integers doubled, of addends of the same sum); what it makes else is
    `idle`, since random numbers in its place do nothing either; or it has `survived`.
    """
    import torch

    mesh = program.MESH
    program.GROUPS = tuple(axes for n in range(1, len(mesh) + 1) for axes in combinations(range(len(mesh)), n))
    ctx = program.build("gloo")
    changed = Changed(program)
    batch = program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    right = {n: program.piece(ctx, torch.tensor(want[n]), s) for n, s in program.WEIGHTS.items()}
    weights = program.init_weights(ctx)

    def is_right() -> bool:
        """Whether everybody has the right gradients."""
        changed.made.clear()
        loss, grads = program.forward_backward(ctx, weights, local)
        off = abs(float(program.whole(ctx, loss, program.LOSS)[0]) - want_loss)
        found = off <= 1e-9 * abs(want_loss)
        for n, grad in grads.items():
            if grad is not None:
                found &= bool((grad - right[n]).norm() <= 1e-9 * right[n].norm() + 1e-12)
        return _everywhere(found)

    def becomes(mutant: Mutant) -> str:
        changed.mutant, changed.differs, changed.poison, changed.crashes = mutant, False, False, False
        if not is_right() or changed.crashes:
            return "wrong"
        if _everywhere(not changed.differs):
            return "same"
        changed.poison = True
        # Copies stay copies, whatever the ranks have drawn before: programs of fewer of them, for one.
        torch.manual_seed(0)
        return "idle" if is_right() else "survived"

    assert is_right(), "the program itself is wrong"
    return [becomes(mutant) for mutant in wrong]

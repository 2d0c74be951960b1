"""Compares, on each rank, the collectives of `quick_collectives.py` with gloo's own."""

from __future__ import annotations

from typing import Any

from quick_collectives import quick_collectives


def disagreements(program: Any) -> list[str]:
    """Return the names of the collectives whose results differ from gloo's on this rank."""
    with quick_collectives():
        return _disagreements()


def _disagreements() -> list[str]:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as gloo

    replaced: Any = dist
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    found = ["nothing is replaced"] if replaced.all_reduce is gloo.all_reduce else []

    def same(what: str, mine: Any, theirs: Any) -> None:
        if not all(map(torch.equal, mine, theirs)):
            found.append(what)

    for group, ways in ((None, world), (pairs[rank // 2], 2)):
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            # Sums of few small integers are the same in every order.
            x = torch.randint(-9, 9, (ways, 2, 3), generator=torch.Generator().manual_seed(rank)).to(kind)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
                mine, theirs = x.mT.clone(), x.mT.contiguous()
                replaced.all_reduce(mine, op, group)
                gloo.all_reduce(theirs, op, group)
                same(f"{op} of {kind}", [mine], [theirs])
                halves = x.new_empty((2, 2, 3))
                replaced.reduce_scatter_single(halves[0].view(-1), x.view(-1), op, group, async_op=True).wait()
                gloo.reduce_scatter_single(halves[1].view(-1), x.view(-1), op, group)
                same(f"{op} of parts of {kind}", [halves[0]], [halves[1]])
        for kind in (torch.float32, torch.bool, torch.int64):
            x = torch.randint(-9, 9, (6,), generator=torch.Generator().manual_seed(rank)).to(kind)
            wholes = x.new_empty((2, ways * 6))
            replaced.all_gather_single(wholes[0], x, group=group, async_op=True).wait()
            gloo.all_gather_single(wholes[1], x, group=group)
            same(f"pieces of {kind}", [wholes[0]], [wholes[1]])
            lists = [[torch.empty_like(x) for _ in range(ways)] for _ in range(2)]
            replaced.all_gather(lists[0], x, group)
            gloo.all_gather(lists[1], x, group)
            same(f"list of {kind}", lists[0], lists[1])
    return found

"""Read token files on a rank in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def wrong_pieces(program: Any, path: str, layouts: list[tuple[tuple[int | str, ...], int | None]]) -> list[str]:
    """
    In which layouts (roles, dim in time) this rank's pieces of three batches are not those of the whole batches, or
    other ids of the file were read than those of the pieces.
    """
    import torch

    ctx = program.build("gloo")
    wrong: list[str] = []
    plain, micro_batches = dict(program.INPUTS), program.MICRO_BATCHES
    for roles, time in layouts:
        program.MICRO_BATCHES = 1 if time is None else 2
        for name, spec in plain.items():
            program.INPUTS[name] = replace(spec, roles=roles, time=time)
        batches, data = program.Data(path, 3), program.Data(path, 3)
        # The first step that a run asks for may be any, as may the next.
        for t in (1, 2, 0):
            # What is read ahead of the step before is read by then.
            data.tokens.thread.submit(lambda: None).result()
            ids = data.tokens.ids = Recorded(batches.tokens.ids)
            found = data.tokens.thread.submit(data.tokens._pieces, ctx, t).result()
            at = sorted({i for one in ids.read for i in one.ravel().tolist()})
            got = data.pieces(ctx, t)
            rows = batches.batch(t)
            for name, spec in program.INPUTS.items():
                want = program.piece(ctx, rows[name], spec)
                if want is None:
                    wrong += [] if got[name] is None is found[name] else [f"{roles} {time}: {name} is not None"]
                elif not torch.equal(want, got[name]) or not torch.equal(want, found[name]):
                    wrong.append(f"{roles} {time}: {name} of step {t}")
            # A label is the id after its token.
            spec = program.INPUTS["tokens"]
            own = [program.positions(ctx, spec, dim).tolist() for dim in (0, 1)] if ctx.at(program.pins(spec)) else None
            taken = batches.tokens._taken(t).tolist()
            wanted = sorted({taken[i] * 6 + j + k for i in own[0] for j in own[1] for k in (0, 1)}) if own else []
            wrong += [] if at == wanted else [f"{roles} {time}: read {at}, not {wanted}"]
        data.tokens.thread.shutdown()
    program.INPUTS.update(plain)
    program.MICRO_BATCHES = micro_batches
    return wrong


def first_batch(program: Any, path: str) -> dict[str, Any]:
    """The first batch of a file, whole, as numpy arrays."""
    return {name: ids.numpy() for name, ids in program.Data(path).batch(0).items()}


def packed_samples(program: Any, path: str, document_end: int) -> dict[str, Any]:
    """Return where each sample begins if samples begin with documents, and the first batch in order."""
    data = program.Data(path, is_shuffled=False, document_end=document_end)
    return {"starts": data.tokens.starts.tolist(), **{n: ids.numpy() for n, ids in data.batch(0).items()}}


class Recorded:
    """A file's ids that note where they are read."""

    def __init__(self, ids: Any):
        self.ids, self.read = ids, list[Any]()

    def __getitem__(self, at: Any) -> Any:
        self.read.append(at)
        return self.ids[at]

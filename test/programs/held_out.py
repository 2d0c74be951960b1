"""Train and evaluate a program on a rank, and evaluate the same model by plain PyTorch."""

from __future__ import annotations

from typing import Any

from ranks import run_main


def evaluated(
    program: Any, options: list[str], folder: str, batches: int, ignored: int | None = None
) -> tuple[list[str], float]:
    """
    Lines of a run, and the mean loss of plain PyTorch in double precision on the weights that it leaves: of all batches
    or, if labels may be `ignored`, of all others in all batches.
    """
    from safetensors.torch import load_file

    lines = run_main(program, [*options, "--weights-out", f"{folder}/w.safetensors"], None, folder)
    plain = {n: w.double() for n, w in load_file(f"{folder}/w.safetensors").items()}
    held_out = program.Data(f"{folder}/held_out.npz", 0, None, False)
    total = number = 0.0
    for t in range(batches):
        batch = {n: b.double() if b.is_floating_point() else b for n, b in held_out.batch(t).items()}
        count = 1 if ignored is None else int((batch["labels"] != ignored).sum())
        total += count * float(program.reference(plain, batch)) if count else 0.0
        number += count
    return lines, total / number

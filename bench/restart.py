"""
Kill ranks of a training run at random and see that it ends with the same bits.

    python bench/restart.py [--kills 20] [--json FILE]

A small GPT of the zoo on 4 gloo ranks under `torchrun --max-restarts`, with a checkpoint every few steps. Each kill is
a SIGKILL to a rank drawn at random, right after a step drawn at random (so sometimes while a checkpoint is written);
torchrun starts all ranks again, and they go on from the last complete checkpoint. The final parameters must equal those
of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from models import processor

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MODEL = "gpt2,batch=8,sequence=16,layers=2,hidden=32,heads=4,vocabulary=32"
RANKS, STEPS, EVERY = 4, 200, 5


def emit(folder: Path) -> Path:
    path = folder / "train.py"
    command = [str(BIN / "unity-opt"), f"--model={MODEL}", "--search=data-parallel", f"--machine=box:{RANKS}"]
    subprocess.run([*command, "-t", "triton{kernels=torch optimizer=adam lr=0.001}", "-o", str(path)], check=True)
    return path


def torchrun(path: Path, ranks: int, restarts: int, *options: str) -> subprocess.Popen[str]:
    """Its output is one pipe."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return subprocess.Popen(
        [*command, "--monitor-interval", "0.1", str(path), "--backend", "gloo", "--deterministic", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def workers(path: Path) -> Iterator[tuple[int, int]]:
    """Rank and process of everything that runs a program."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            found = re.search(rb"(?:^|\0)RANK=(\d+)\0", (process / "environ").read_bytes())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if found and words[-1] == b"" and str(path).encode() in words[:4]:
            yield int(found[1]), int(process.name)


def disturbed(path: Path, ranks: int, steps: int, kills: int, random: Random, *options: str) -> tuple[int, list[str]]:
    """
    A run in which ranks are killed; how many were, and its losses by step.

    The steps at which they are lie apart, so that between two kills there is at least one more checkpoint.
    """
    run = torchrun(path, ranks, kills + 2, "--steps", str(steps), *options)
    width = steps // kills
    at = [k * width + random.randrange(1, max(2, width)) for k in range(kills)]
    losses: dict[int, str] = {}
    done, tail = 0, []
    assert run.stdout is not None
    try:
        for line in run.stdout:
            tail = [*tail[-30:], line]
            found = re.match(r"step (\d+) loss (\S+)", line)
            if not found:
                continue
            step = int(found[1])
            # A step that is done again has the loss it had.
            if losses.setdefault(step, found[2]) != found[2]:
                raise SystemExit(f"step {step} had loss {losses[step]}, and {found[2]} when it was done again")
            if done < kills and step >= at[done]:
                time.sleep(random.random() * 0.05)
                victim = random.randrange(ranks)
                for rank, process in workers(path):
                    if rank == victim:
                        os.kill(process, signal.SIGKILL)
                        done += 1
    finally:
        if run.poll() is None and sys.exc_info()[0] is not None:
            run.kill()
        code = run.wait()
        run.stdout.close()
    if code:
        raise SystemExit("".join(tail) + f"torchrun ended with {code} after {done} kills")
    return done, [losses[s] for s in sorted(losses)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = emit(folder)
        begin = time.perf_counter()
        plain = torchrun(path, RANKS, 0, "--steps", str(STEPS), "--weights-out", str(folder / "plain"))
        text, _ = plain.communicate()
        if plain.returncode:
            raise SystemExit(text)
        between = time.perf_counter()
        saving = ("--save", str(folder / "c"), "--save-every", str(EVERY), "--weights-out", str(folder / "killed"))
        kills, losses = disturbed(path, RANKS, STEPS, options.kills, Random(options.seed), *saving)
        end = time.perf_counter()
        equal = (folder / "plain").read_bytes() == (folder / "killed").read_bytes()
        same = losses == re.findall(r"^step \d+ loss (\S+)", text, re.M)
    figures = {
        "model": MODEL,
        "ranks": RANKS,
        "steps": STEPS,
        "save every": EVERY,
        "kills": kills,
        "parameters equal bit for bit": equal,
        "losses equal": same,
        "seconds undisturbed": round(between - begin, 1),
        "seconds with kills": round(end - between, 1),
        "processor": processor(),
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if equal and same and kills == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())

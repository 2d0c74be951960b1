"""
Train the digits classifier on 1, 2 and 4 ranks and test each result in plain PyTorch.

    python examples/digits.py            needs scikit-learn, for the images

One rank runs the serial graph, two divide the batch, four run the plan placed by hand in digits_2x2.pcg. All start from
the same weights and see the same batches, so they end at the same accuracy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent

PLANS = {
    1: ["digits.pcg"],
    2: ["digits.pcg", "--search=data-parallel", "--machine=box:2"],
    4: ["digits_2x2.pcg"],
}
"""By number of ranks, what unity-opt is given."""


def data(folder: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """The training set as a file, and images and labels of the test set: every fifth image."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    test = np.arange(len(images)) % 5 == 0
    path = folder / "digits.npz"
    np.savez(path, x=images[~test], labels=labels[~test])
    return path, torch.from_numpy(images[test]), torch.from_numpy(labels[test])


def train(ranks: int, steps: int, training_set: Path, folder: Path) -> Path:
    """Emit the program for so many ranks, run it, and return its last checkpoint."""
    program, checkpoints = folder / f"digits_{ranks}.py", folder / f"checkpoints_{ranks}"
    source, *search = PLANS[ranks]
    emit = [BIN / "unity-opt", HERE / source, *search, "-t", "triton{lr=0.5}", "-o", program]
    subprocess.run(list(map(str, emit)), check=True)
    run = [BIN / "torchrun", "--standalone", "--nproc-per-node", ranks, program]
    run += ["--backend", "gloo", "--steps", steps, "--data", training_set, "--save", checkpoints]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(list(map(str, run)), check=True, capture_output=True, text=True, env=environment).stdout
    print(f"{ranks} rank{'s' * (ranks > 1)}: {output.strip().splitlines()[-1]}", end=", ", flush=True)
    return max(checkpoints.iterdir())


def accuracy(checkpoint: Path, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the images a checkpoint classifies rightly, in plain PyTorch."""
    plain = checkpoint.parent.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, plain)
    w = {name.removeprefix("weights."): value for name, value in torch.load(plain).items()}
    hidden = torch.relu(images @ w["hidden.weight"] + w["hidden.bias"])
    logits = hidden @ w["output.weight"] + w["output.bias"]
    return float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=PLANS)
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training_set, images, labels = data(options.out)
    found: list[float] = []
    for ranks in options.ranks:
        checkpoint = train(ranks, options.steps, training_set, options.out)
        found.append(accuracy(checkpoint, images, labels))
        print(f"test accuracy {found[-1]:.4f}")
    if min(found) < 0.95 or max(found) - min(found) > 0.01:
        sys.exit("the accuracies are not what they should be: at least 0.95, and the same to 0.01")


if __name__ == "__main__":
    main()

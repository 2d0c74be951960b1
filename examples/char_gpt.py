"""
A small GPT in plain PyTorch, and a text to train it on: the names of characters in Unicode 3.2, a line each.

    python examples/char_gpt.py data       writes data/text.npy and data/held_out.npy

`model` is what `unity-opt --from-torch=examples.char_gpt:model` imports: a module that returns its loss, and one batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unicodedata import ucd_3_2_0

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS, LAYERS, CHARACTERS = 16, 32, 64, 4, 2, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.characters(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the module with its initial weights, and a batch as an example of its inputs."""
    torch.manual_seed(0)
    ids = torch.randint(0, CHARACTERS, (BATCH, LENGTH))
    return CharGPT(), {"tokens": ids, "labels": ids}


def text() -> np.ndarray:
    """Return the text as ids of characters: 0 to 94 are those of ASCII from the space on, 95 is the end of a line."""
    names = (ucd_3_2_0.name(chr(i), "") for i in range(0x3400))
    return np.array([95 if c == "\n" else ord(c) - 32 for name in names if name for c in name + "\n"])


def write(path: Path, ids: np.ndarray) -> None:
    np.save(path, ids)
    print(f"{path}: {len(ids)} characters")


if __name__ == "__main__":
    folder, ids = Path(sys.argv[1]), text()
    folder.mkdir(exist_ok=True)
    write(folder / "text.npy", ids[: len(ids) * 9 // 10])
    write(folder / "held_out.npy", ids[len(ids) * 9 // 10 :])

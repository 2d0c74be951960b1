"""Modules of which the recipes of `test_recipe_imported.py` are made: as users write them, with sizes that divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, SEQUENCE, HIDDEN, HEADS, LAYERS, VOCABULARY = 8, 16, 64, 8, 2, 128

Made = tuple[nn.Module, Any, Any]
"""A module, its example inputs, and its loss, if it does not return it itself."""


class Attention(nn.Module):
    """Self-attention of one product for queries, keys and values, or of three; by PyTorch's operator or written out."""

    def __init__(self, fused: bool, written: bool):
        super().__init__()
        self.fused, self.written = fused, written
        self.qkv: nn.Module | None = nn.Linear(HIDDEN, 3 * HIDDEN) if fused else None
        self.parts = None if fused else nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        parts = self.qkv(x).split(HIDDEN, dim=2) if self.qkv is not None else [p(x) for p in self.parts or ()]
        q, k, v = (p.view(b, s, HEADS, h // HEADS).transpose(1, 2) for p in parts)
        if self.written:
            scores = q @ k.transpose(-2, -1) / (h // HEADS) ** 0.5
            mask = torch.tril(torch.ones(s, s, dtype=torch.bool))
            # Which a softmax may see, so that no attention is recognised.
            y = F.softmax(scores.masked_fill(~mask, -1e4), dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class Block(nn.Module):
    def __init__(self, fused: bool, written: bool):
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(fused, written)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """A decoder of language, as in nanoGPT."""

    def __init__(self, fused: bool, written: bool = False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block(fused, written) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class Network(nn.Module):
    """Convolutions with batch norm and a residual, and a classifier of two dense layers, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.same = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.dense = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(image), 2)
        x = F.relu(x + self.same(x))
        return self.dense(torch.flatten(self.pool(x), 1))


class Recommender(nn.Module):
    """As DLRM: tables of sparse features, a perceptron of dense ones, their dot products, and a perceptron on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 16) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        dots = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, dots], dim=1))


def tokens() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))


def transformer(fused: bool, written: bool = False) -> Made:
    return Transformer(fused, written), {"tokens": tokens(), "labels": tokens()}, None


class Adapted(nn.Module):
    """A frozen dense layer with a trained adapter of low rank (LoRA)."""

    def __init__(self, dense: nn.Linear, rank: int = 8):
        super().__init__()
        self.dense = dense.requires_grad_(False)
        self.down = nn.Linear(dense.in_features, rank, bias=False)
        self.up = nn.Linear(rank, dense.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) + self.up(self.down(x)) * 2.0


def adapted() -> Made:
    """The fused transformer with adapters of its products for queries, keys and values."""
    module, inputs, loss = transformer(True)
    for attention in module.modules():
        if isinstance(attention, Attention):
            assert isinstance(attention.qkv, nn.Linear)
            attention.qkv = Adapted(attention.qkv)
    return module, inputs, loss


def network() -> Made:
    inputs = (torch.randn(BATCH, 3, 16, 16), torch.randint(0, 16, (BATCH,)))
    return Network(), inputs, nn.CrossEntropyLoss()


def recommender() -> Made:
    inputs = (torch.randn(BATCH, 8), torch.randint(0, 64, (BATCH, 3)), torch.rand(BATCH, 1))
    return Recommender(), inputs, nn.MSELoss()


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
        **{"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 1},
        use_cache=False,
    )
    both = tokens()
    return GPT2LMHeadModel(config), {"input_ids": both, "labels": both}, None


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": 4, "use_cache": False},
    )
    return LlamaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}, None


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
        **{"intermediate_size": 4 * HIDDEN, "max_position_embeddings": SEQUENCE},
        **{"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    )
    return BertForMaskedLM(config), {"input_ids": tokens(), "labels": tokens()}, None


MODULES = {
    "fused": lambda: transformer(True),
    "adapted": adapted,
    "separate": lambda: transformer(False),
    "written": lambda: transformer(False, written=True),
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "network": network,
    "recommender": recommender,
}

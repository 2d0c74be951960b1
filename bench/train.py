"""
Train on real data on 4 gloo ranks, and compare every step's loss with plain PyTorch.

    python bench/train.py [digits] [gpt] [mixed] [recipe] [mixture] [--steps 200] [--json FILE]

digits: LeNet-5 of the zoo on scikit-learn's images of handwritten digits (8 x 8, every pixel as 4 x 4), SGD.
gpt:    GPT-2 of the zoo, two layers, on the characters of Python's own documentation (`pydoc_data`), Adam.
mixed:  the same in bf16 with weights in f32, AdamW; PyTorch in f32.
recipe: gpt in 4 micro-batches, AdamW without decay of vectors, gradients clipped, warm-up and cosine; stopped half way,
        and gone on from its checkpoint. PyTorch takes the batch at once, without a stop.
mixture: by the same recipe, a mixture of 8 experts that drop tokens, divided over the 4 ranks, with a balance loss, on
        samples packed of documents, which are paragraphs of that text, from a token file; a rank is killed on the way.

PyTorch's side is written by hand below. It starts from the weights that the program writes before its first step, and
reads the same batches. Of the mixture both are in double precision: in single precision a token goes to another expert
for a rounding sooner or later, and losses are others from there on. Cases that are not run stay as they are in the
file of `--json`. Exits with code 1 if a loss differs from PyTorch's by a relative error above 1e-3 (mixed: 2e-2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from models import processor
from restart import disturbed
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim import lr_scheduler

BIN = Path(sys.executable).parent
RANKS = 4
WITHIN = 1e-3
WITHIN_BF16 = 2e-2
GPT = {"batch": 16, "sequence": 32, "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 96}
MIXTURE = {
    **{"batch": 16, "sequence": 64, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96},
    **{"experts": 8, "chosen": 2, "capacity": 100, "balance": 100, "vocabulary": 96, "separator": 95},
}
"""Its separator is the end of a paragraph."""
Tensors = Mapping[str, Tensor]


# --- the same models in PyTorch


def lenet(w: Tensors, x: Tensor, labels: Tensor) -> Tensor:
    for name in ("conv1", "conv2"):
        x = F.avg_pool2d(torch.tanh(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"])), 2)
    x = x.flatten(1)
    for name in ("fc1", "fc2"):
        x = torch.tanh(x @ w[f"{name}.weight"] + w[f"{name}.bias"])
    return F.cross_entropy(x @ w["fc3.weight"] + w["fc3.bias"], labels)


def gpt(w: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    x = F.embedding(tokens, w["wte.weight"]) + w["wpe.weight"]
    for i in range(GPT["layers"]):
        qkv = linear(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)).chunk(3, -1)
        heads = (t.unflatten(-1, (GPT["heads"], -1)).transpose(1, 2) for t in qkv)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"h.{i}.attn.c_proj", mixed)
        x = x + linear(f"h.{i}.mlp.c_proj", F.gelu(linear(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))))
    return F.cross_entropy((norm("ln_f", x) @ w["wte.weight"].T).flatten(0, 1), labels.flatten())


def mixture(w: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    """With a balance loss of 0.01 per layer. Experts take the first tokens of each sample, first choices first."""
    heads, experts, chosen = MIXTURE["heads"], MIXTURE["experts"], MIXTURE["chosen"]
    length = tokens.shape[1]
    most = math.ceil(MIXTURE["capacity"] / 100 * length * chosen / experts)
    ends = tokens == MIXTURE["separator"]
    document = ends.cumsum(1) - ends.long()
    seen = (document[:, :, None] == document[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-5)

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = places[:, None, :, None] * 1e6 ** (-torch.arange(half, dtype=x.dtype) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    x, balances = F.embedding(tokens, w["model.embed_tokens.weight"]), torch.zeros(())
    places = (seen.sum(-1) - 1).to(x.dtype)
    for i in range(MIXTURE["layers"]):
        name = f"model.layers.{i}"
        h = norm(f"{name}.input_layernorm", x)
        q, k, v = (
            (h @ w[f"{name}.self_attn.{part}_proj.weight"]).unflatten(-1, (n, -1)).transpose(1, 2)
            for part, n in (("q", heads), ("k", MIXTURE["kv_heads"]), ("v", MIXTURE["kv_heads"]))
        )
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, seen[:, None], enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{name}.self_attn.o_proj.weight"]
        h = norm(f"{name}.post_attention_layernorm", x)
        name = f"{name}.block_sparse_moe"
        gates = (h @ w[f"{name}.gate.weight"]).softmax(-1)
        values, picked = gates.topk(chosen)
        each = F.one_hot(picked, experts)
        before = each.transpose(1, 2).flatten(1, 2).cumsum(1).unflatten(1, (chosen, length)).transpose(1, 2) - each
        kept = (before * each).sum(-1) < most
        shares = torch.where(kept, values / values.sum(-1, keepdim=True), 0.0)
        shares = (shares[..., None] * each).sum(2)
        for e in range(experts):
            w1, w2, w3 = (w[f"{name}.experts.w{n}.weight"][e] for n in (1, 2, 3))
            x = x + shares[..., e, None] * ((F.silu(h @ w1) * (h @ w3)) @ w2)
        parts = each.sum((1, 2)) * experts / (chosen * length)
        balances = balances + (parts * gates.mean(1)).sum(-1).mean()
    logits = norm("model.norm", x) @ w["lm_head.weight"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + MIXTURE["balance"] * 1e-4 * balances


# --- data


def digits_data() -> dict[str, Any]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).repeat(4, 1).repeat(4, 2)[:, None]
    return {"x": images.astype(np.float32), "labels": found.target.astype(np.int64)}


def topics_text() -> str:
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))[:400_000]


def text_data(length: int) -> dict[str, Any]:
    """
    Return rows of `length` characters of text, and the same shifted by one; characters that are not plain ASCII become
    spaces.
    """
    text = topics_text()
    codes = np.array([ord(c) - 32 if " " <= c <= "~" else 95 if c == "\n" else 0 for c in text], dtype=np.int64)
    rows = (len(codes) - 1) // length
    end = rows * length
    return {"tokens": codes[:end].reshape(rows, -1), "labels": codes[1 : end + 1].reshape(rows, -1)}


def documents_data() -> np.ndarray[Any, Any]:
    """Return the ids of that text, in which the id 95 ends a paragraph and nothing else; ends of lines are spaces."""
    text = topics_text()
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    codes = [[ord(c) - 32 if " " <= c < "\x7f" else 0 for c in part] + [95] for part in paragraphs if part]
    return np.concatenate([np.array(each, dtype=np.int64) for each in codes])


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str
    lr: float
    plain: Callable[..., Tensor]
    data: Callable[[], Any]
    """Arrays by input name or, with `document_end`, the ids of a token file."""
    options: tuple[str, ...] = ()
    machine: str = f"box:{RANKS}"
    within: float = WITHIN
    recipe: str = ""
    """More of the target's options: clipping and groups of weights, with a schedule of the learning rate."""
    plan: str = "data-parallel"
    """The strategy, as `--search` takes it."""
    document_end: int | None = None
    """The last id of each document, of which samples are packed."""
    is_double: bool = False
    """Whether both sides are in double precision: the program with `float64` for `float32` wherever it says so."""
    is_killed: bool = False
    """Whether a rank is killed, and all begin again from their last checkpoint; else the run is stopped half way."""


GPT2 = "gpt2," + ",".join(f"{k}={v}" for k, v in GPT.items())
CASES = {
    "digits": Case("lenet,batch=64,image=32", "sgd", 0.1, lenet, digits_data),
    "gpt": Case(GPT2, "adam", 0.001, gpt, partial(text_data, GPT["sequence"])),
    "mixed": Case(
        GPT2,
        "adamw",
        0.001,
        gpt,
        partial(text_data, GPT["sequence"]),
        ("--mixed-precision=bf16",),
        f"pcie:{RANKS}",
        WITHIN_BF16,
    ),
}
RECIPE = 'clip=1 groups="@vectors weight_decay=0"'
CASES["recipe"] = replace(CASES["gpt"], optimizer="adamw", lr=0.003, options=("--micro-batches=4",), recipe=RECIPE)
CASES["mixture"] = replace(
    CASES["recipe"],
    model="moe,dispatch=sparse," + ",".join(f"{k}={v}" for k, v in MIXTURE.items()),
    plain=mixture,
    data=documents_data,
    document_end=MIXTURE["separator"],
    plan="degrees,ep=4,zero=2",
    is_double=True,
    is_killed=True,
)
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


# --- both sides


def torchrun(path: Path, *options: str) -> str:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(RANKS), str(path), "--backend", "gloo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    """Return a rise of the learning rate in a tenth of the steps, and half a cosine down to 0 after."""
    warmup = steps // 10
    rises = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    return lr_scheduler.SequentialLR(
        optimizer, [rises, lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup)], [warmup]
    )


def plain_losses(case: Case, path: Path, weights: Path, data: Path, steps: int) -> list[float]:
    """Return PyTorch's losses, from the same weights on the same batches."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    program: Any = module_from_spec(spec)
    spec.loader.exec_module(program)
    w = {n: t.requires_grad_() for n, t in load_file(weights).items()}
    vectors, others = ([p for p in w.values() if (p.dim() < 2) == few] for few in (True, False))
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others}] if case.recipe else [{"params": w.values()}]
    optimizer = OPTIMIZERS[case.optimizer](groups, lr=case.lr)
    rate = schedule(optimizer, steps) if case.recipe else None
    batches, out = program.Data(data, document_end=case.document_end), []
    for t in range(steps):
        optimizer.zero_grad()
        loss = case.plain(w, **batches.batch(t))
        loss.backward()
        if rate is not None:
            torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        optimizer.step()
        if rate is not None:
            rate.step()
        out.append(loss.item())
    return out


def data_options(case: Case, data: Path) -> list[str]:
    """Return the options by which a program reads a case's data."""
    return ["--data", str(data), *([] if case.document_end is None else ["--document-end", str(case.document_end)])]


def write_data(case: Case, folder: Path, name: str) -> Path:
    """Write a case's data, a token file or arrays by input name; return the file."""
    made = case.data()
    path = folder / f"{name}.{'npz' if case.document_end is None else 'npy'}"
    if case.document_end is None:
        np.savez(path, **made)
    else:
        np.save(path, made)
    return path


def program_losses(case: Case, path: Path, data: Path, steps: int) -> list[float]:
    """Return the program's losses; with a recipe, of a run that was stopped half way, or killed."""
    options = [*data_options(case, data), "--steps", str(steps)]
    if not case.recipe:
        text = torchrun(path, *options)
    else:
        options += ["--schedule", "cosine", "--warmup", str(steps // 10), "--schedule-steps", str(steps)]
        saved = str(path.with_suffix(""))
        if case.is_killed:
            killed, losses = disturbed(
                path, RANKS, steps, 1, Random(0), *options, "--save", saved, "--save-every", str(steps // 4)
            )
            if killed != 1:
                raise SystemExit("no rank was killed")
            return list(map(float, losses))
        text = torchrun(path, *options, "--steps", str(steps // 2), "--save", saved)
        text += torchrun(path, *options, "--load", saved)
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", text, re.M)]


def run(name: str, steps: int, folder: Path, search: str | None = None) -> dict[str, Any]:
    """Return both losses of every step, and their largest relative difference; `search` in place of the case's plan."""
    case = CASES[name]
    search = search or case.plan
    path, weights = folder / f"{name}.py", folder / f"{name}.safetensors"
    target = f"triton{{kernels=torch optimizer={case.optimizer} lr={case.lr} {case.recipe}}}"
    emit = [str(BIN / "unity-opt"), f"--model={case.model}", f"--search={search}", f"--machine={case.machine}"]
    subprocess.run([*emit, *case.options, "-t", target, "-o", str(path)], check=True)
    if case.is_double:
        path.write_text(path.read_text().replace("torch.float32", "torch.float64"))
    data = write_data(case, folder, name)
    torchrun(path, "--steps", "0", "--weights-out", str(weights))
    begin = time.perf_counter()
    losses = program_losses(case, path, data, steps)
    seconds = time.perf_counter() - begin
    plain = plain_losses(case, path, weights, data, steps)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
    return {
        "model": case.model,
        "plan": search,
        "options": " ".join(case.options),
        "ranks": RANKS,
        "optimizer": case.optimizer,
        "lr": case.lr,
        "steps": steps,
        "largest relative difference": apart,
        "first loss": losses[0],
        "last loss": losses[-1],
        "seconds": round(seconds, 1),
        "losses": losses,
        "plain": [round(loss, 6) for loss in plain],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Losses of real training beside PyTorch's.")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--search")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"processor": processor(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            found[name] = result = run(name, options.steps, Path(folder), options.search)
            shown = {k: v for k, v in result.items() if not isinstance(v, list)}
            print(name, json.dumps(shown), flush=True)
    if options.json:
        others = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**others, **found}, indent=1) + "\n")
    return int(any(found[name]["largest relative difference"] > CASES[name].within for name in options.cases))


if __name__ == "__main__":
    sys.exit(main())

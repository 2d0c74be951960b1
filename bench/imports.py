"""
Import models as people write them, and compare each with its module: the loss and every gradient by name, in float64.

    python bench/imports.py [--only gpt2,t5] [--causes] [--json bench/results/imports.json]

Models are small: those of transformers, and of timm if it is installed, have random weights, others are written by
hand; none is downloaded. Each runs
once in PyTorch and once in the reference interpreter, from the same weights and inputs; what PyTorch draws at random is
replaced by the compiler's numbers, seed by seed. With `--only`, rows of other models in the file stay. Exits with 1
unless all models are equal, but for those whose shapes depend on data.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from import_torch import machine
from imports_handwritten import MODELS as BY_HAND
from imports_timm import MODELS as TIMM
from imports_transformers import MODELS as TRANSFORMERS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from unity_ir.errors import UnityError
from unity_ir.frontends.report import one_line
from unity_ir.frontends.torch import from_torch
from unity_ir.frontends.torch.export import ModuleWithLoss, bind
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.tdl.functions import philox

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test" / "helpers"))
from torch_models import InDouble

MODELS: Mapping[str, Callable[[], tuple[Any, ...]]] = {**TRANSFORMERS, **TIMM, **BY_HAND}
DATA_DEPENDENT = {"rows_by_mask", "mixtral_eager"}
"""Models that must be refused, as shapes in them depend on data."""
AS_THEY_ARE = {"deberta_v2"}
"""Models that are not told to compute in float64 what they cast to float32, as torch.export refuses them then."""
IN_FLOAT32 = {"mobilenetv3_small_050": 1e-7, "ghostnet_050": 1e-7}
"""`CLOSE` of models whose gradients PyTorch rounds to float32: hardsigmoid's backward has 1/6 as `1.0f / 6.0f`."""
CLOSE = 1e-8
"""Largest difference of losses and gradients, relative to the largest element, that is rounding in float64."""


class Drawn(TorchFunctionMode):
    """Replaces the numbers that PyTorch draws by the compiler's, with seeds 0, 1, 2, .. in order of calls."""

    def __init__(self):
        super().__init__()
        self.seed = -1

    def uniform(self, shape: Any) -> Tensor:
        self.seed += 1
        places = np.arange(math.prod(shape), dtype=np.uint64)
        return torch.tensor(philox(np.uint64(self.seed), places)).reshape(tuple(shape))

    def normal(self, shape: Any) -> Tensor:
        a, b = self.uniform(shape), self.uniform(shape)
        return (-2 * (1 - a).log()).sqrt() * (2 * math.pi * b).cos()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        draw = getattr(self, f"on_{name}", None)
        if draw is None or (name == "dropout" and not (kwargs["p"] and kwargs["training"])):
            return func(*args, **kwargs)
        return draw(*args, **kwargs)

    def on_randn_like(self, x: Tensor, **_: Any) -> Tensor:
        return self.normal(x.shape).to(x.dtype)

    def on_rand_like(self, x: Tensor, **_: Any) -> Tensor:
        return self.uniform(x.shape).to(x.dtype)

    def on_randint(self, *bounds: Any, **_: Any) -> Tensor:
        *low, high, shape = bounds
        start = low[0] if low else 0
        return (start + (high - start) * self.uniform(shape)).floor().long()

    def on_bernoulli_(self, x: Tensor, p: float = 0.5) -> Tensor:
        return x.copy_(self.uniform(x.shape) < p)

    def on__grouped_mm(self, x: Tensor, weights: Tensor, offs: Tensor, **_: Any) -> Tensor:
        """PyTorch's own does not take float64."""
        ends = [0, *offs.tolist()]
        return torch.cat([x[a:b] @ w for a, b, w in zip(ends, ends[1:], weights, strict=False)])

    def on_dropout(self, x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
        return torch.where(self.uniform(x.shape) < p, 0.0, x / (1 - p))


def in_pytorch(module: nn.Module, inputs: Any, loss: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of a module on inputs, and the gradients of the parameters that have one, by name."""
    args, kwargs, targets = bind(module, inputs, loss)
    with Drawn():
        value = ModuleWithLoss(module, loss, targets)(*args, **kwargs)
    value.backward()
    return value.item(), {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}


def imported(module: nn.Module, inputs: Any, loss: Any) -> tuple[float, dict[str, np.ndarray], float]:
    """Return the same of the imported graph, by the reference interpreter, and the seconds that its import took."""
    start = time.perf_counter()
    found = from_torch(module, inputs, loss)
    seconds = time.perf_counter() - start
    args, kwargs, _ = bind(module, inputs, loss)
    given = kwargs | {f"args_{i}": v for i, v in enumerate(args)} | dict(found.tables)
    arrays = {n: v.detach().numpy() for n, v in given.items() if isinstance(v, Tensor)}
    graph = differentiate(found.graph, Optimizer())
    values = interpret(graph, arrays, {n: w.numpy() for n, w in found.weights.items()})
    grads = {u.weight.node.name: values[u.grad] for u in graph.updates}
    return float(values[graph.outputs[0]]), grads, seconds


def compared(name: str) -> dict[str, Any]:
    """Return the row of a model: what came of its import, and how far it is from its module."""
    torch.manual_seed(0)
    module, inputs, *more = MODELS[name]()
    module.double().train()
    inputs = tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    loss = more[0] if more else None
    row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in module.parameters())}
    with nullcontext() if name in AS_THEY_ARE else InDouble():
        try:
            value, grads, seconds = imported(module, inputs, loss)
        except UnityError as error:
            return {**row, "result": "refused", "causes": causes(str(error))}
        except Exception as error:
            return {**row, "result": "failed", "causes": [f"{type(error).__name__}: {one_line(error)}"]}
        want, wanted = in_pytorch(module, inputs, loss)
    row["seconds"] = round(seconds, 2)
    row["loss_error"] = abs(value - want) / max(abs(want), 1e-30)
    worst = {n: 0.0 for n in wanted}
    for n in wanted.keys() | grads.keys():
        there = next(g for g in (wanted.get(n), grads.get(n)) if g is not None)
        a, b = wanted.get(n, np.zeros_like(there)), grads.get(n, np.zeros_like(there))
        worst[n] = float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6))
    farthest = max(worst, key=lambda n: worst[n])
    row["gradient_error"], row["farthest"] = worst[farthest], farthest
    close = max(row["loss_error"], worst[farthest]) < IN_FLOAT32.get(name, CLOSE)
    return {**row, "result": "equal" if close else "different"}


def causes(message: str) -> list[str]:
    """Return each cause of a refusal once, without places in sources."""
    first, *lines = re.sub(r"that \S+:\d+ reads", "that is read", message).splitlines()
    found = [re.sub(r" \([^()]*:\d+[^()]*\)$", "", line.strip()) for line in lines or [first]]
    return sorted(set(found))


def report(rows: Mapping[str, Mapping[str, Any]], where: str, with_causes: bool) -> None:
    """Print a line for each model, then each cause of a refusal once, with its models."""
    table = Table(title="Models as people write them", caption=where)
    for heading in ("model", "parameters", "result", "import (s)", "loss", "worst gradient", "causes"):
        table.add_column(heading)
    for row in rows.values():
        figures = [f"{row[k]:.0e}" if k in row else "" for k in ("loss_error", "gradient_error")]
        said = "; ".join(row.get("causes", [])) or (row.get("farthest", "") if row["result"] == "different" else "")
        table.add_row(
            row["model"], f"{row['parameters']:,}", row["result"], str(row.get("seconds", "")), *figures, said
        )
    console = Console(width=160)
    console.print(table)
    found = Counter(cause for row in rows.values() for cause in row.get("causes", []))
    if with_causes and found:
        of_cause = Table(title="Causes of refusals, each once")
        for heading in ("models", "cause"):
            of_cause.add_column(heading)
        for cause, count in found.most_common():
            of_cause.add_row(str(count), cause)
        console.print(of_cause)
    results = Counter(row["result"] for row in rows.values())
    console.print(f"{len(rows)} models: " + ", ".join(f"{n} {result}" for result, n in results.most_common()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of models, with commas")
    parser.add_argument("--causes", action="store_true", help="print each cause of a refusal once, with its count")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.only or [] if name not in MODELS]
    if unknown:
        parser.error(f"there is no model {unknown[0]}; known are {', '.join(MODELS)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    where = f"{machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    rows: dict[str, dict[str, Any]] = {}
    if options.only and options.json and options.json.exists():
        rows = {row["model"]: row for row in json.loads(options.json.read_text())["rows"]}
    for name in options.only or MODELS:
        rows[name] = compared(name)
        print(f"{name}: {rows[name]['result']}", file=sys.stderr, flush=True)
    rows = {name: rows[name] for name in MODELS if name in rows}
    report(rows, where, options.causes)
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "rows": list(rows.values())}, indent=2) + "\n")
    bad = [n for n, row in rows.items() if row["result"] != ("refused" if n in DATA_DEPENDENT else "equal")]
    print(f"not as wanted: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""
Programs of the zoo's models, small, on 2, 4 and 8 ranks: over three steps losses, gradients by name and Adam's moments,
and the weights after them, equal those of the model written by hand in PyTorch and trained by autograd and torch.optim.

A sample by default, in which every model, kind of plan and number of ranks occurs. With ZOO=all (`make zoo`) every
model runs on 1, 2, 4 and 8 ranks and with every kind of plan, and every kind of plan on each of these numbers of ranks.
A model's other pairs of a plan and a number of ranks are left out: a plan of a model is lowered by mesh axes, of which
two tell as much as three, and what the third adds to a kind of plan does not depend on the model.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from by_hand import differences
from extent import ALL
from ranks import Ranks, trained
from zoo import SMALL
from zoo import by_hand as zoo_by_hand
from zoo_plans import VARIANTS, of_type, program, sized

from unity_ir.models import build
from unity_ir.ops.optimizers import OPTIMIZERS
from unity_ir.pcg.optimizer import Optimizer

OPTIMIZERS = {name: Optimizer(name, 1e-2, weight_decay=0.1) for name in OPTIMIZERS}
WORLDS = (2, 4, 8)
VISION = ("alexnet", "inception_v3", "lenet", "resnet101", "resnext50", "wresnet")


@dataclass(frozen=True)
class Case:
    model: str
    plan: str
    world: int
    optimizer: str = "adam"
    dtype: str = "f64"
    kernels: str = "torch"

    def __str__(self) -> str:
        kernels = "-triton" if self.kernels == "triton" else ""
        return f"{self.model}-{self.plan}-{self.world}-{self.optimizer}-{self.dtype}{kernels}"


def product() -> list[Case]:
    """
    Data-parallel as it is shipped, searched, two random plans, of which one does half of the operators again in the
    backward; all but the first in double precision. Each on another number of ranks for the next model. In 2 and 4
    micro-batches those that no statistics of the whole batch keep from it.
    """
    found: list[Case] = []
    worlds = (1, *WORLDS)
    for number, model in enumerate([*sorted(SMALL), *VARIANTS]):
        seed = number * len(WORLDS)
        first, second, third, fourth = (worlds[(number + i) % len(worlds)] for i in range(len(worlds)))
        found += [
            Case(model, "data-parallel", first, "sgd", "f32"),
            Case(model, "joint", second),
            Case(model, f"random-{seed}", third, "sgd"),
            Case(model, f"recompute-{seed + 100}", fourth),
        ]
        if model not in VISION or model in ("alexnet", "lenet"):
            found += [Case(model, "data-parallel/2", 1), Case(model, "joint/4i", 1), Case(model, "joint/2i", 4)]
            found += [Case(model, "data-parallel/4", 2), Case(model, f"random-{number}/2", 2)]
            found += [Case(model, f"recompute-{number}/2i", 4, "sgd")]
    return found


def beyond() -> list[Case]:
    """Operators on some of the ranks only, images in parts, half precision, Triton's kernels in the interpreter."""
    found = [Case(model, f"pinned-{i}", 4 if i % 2 else 8) for i, model in enumerate(sorted(SMALL))]
    found += [Case(model, "spatial", WORLDS[i % 3], "sgd") for i, model in enumerate(VISION)]
    for model in ("bert_large", "dlrm", "gpt2", "llama3_8b", "mlp", "rnntc", "xdl"):
        found += [Case(model, "data-parallel", 4, "sgd", "bf16"), Case(model, "random-5", 2, "sgd", "bf16")]
        found += [Case(model, "joint", 4, "adamw", "mixed"), Case(model, "fsdp", 2, "adamw", "mixed")]
    plans = ("degrees,zero=2,shards=2", "degrees,tp=2,zero=1", "degrees,tp=4,sp=true", "degrees,tp=2,zero=3/2i")
    for plan in plans:
        found += [Case(model, plan, 4, "adamw", "mixed") for model in ("bert_large", "gpt2")]
    found += [Case("xdl", "pinned-2/2", 8), Case("bert_large", "joint/2i", 2, "sgd", "f32", "triton")]
    found += [Case("moe,dispatch=sparse", "experts", world) for world in WORLDS]
    found += [Case("moe,dispatch=sparse", "experts", 4, "adamw", "mixed")]
    found += [Case(model, "experts", 4) for model in ("deepseek_v3", "qwen3_moe")]
    found += [Case(model, "queries", world) for model in ("llama3_8b", *VARIANTS[1:3]) for world in WORLDS]
    found += [Case(VARIANTS[2], "queries", 2, "sgd", "f32", "triton"), Case(VARIANTS[2], "degrees,tp=2,sp=true", 4)]
    found += [Case("gpt2,sequence=16", "1f1b,2:degrees,cp=2,stripes=true/4", 4, "sgd")]
    found += [Case("gpt2,sequence=16", "degrees,cp=2,stripes=true", 4, "adamw", "mixed")]
    found += [Case(f"{model},sequence=16", "degrees,cp=4,stripes=true*2", 4) for model in ("llama3_8b", VARIANTS[0])]
    found += [Case("deepseek_v3,sequence=16", "degrees,cp=2,tp=2,stripes=true", 4)]
    rings = (
        "1f1b,2:degrees,cp=2,ring=true/4",
        "degrees,cp=4,ring=true*2",
        "degrees,cp=2,tp=2,sp=true,ring=true,zero=3/2i",
    )
    found += [Case(f"{model},sequence=16", plan, 4) for model in ("gpt2", "llama3_8b", "bert_large") for plan in rings]
    found += [Case("gpt2,sequence=16", "degrees,cp=8,stripes=true,ring=true", 8, "adamw", "mixed")]
    found += [Case(VARIANTS[2], "degrees,cp=2,ring=true", 2, "sgd", "f32", "triton")]
    found += [Case("bert_large,sequence=16", "heads", 8)]
    exchanging = ("degrees,ep=2,zero=2", "degrees,ep=4,zero=3/2i", "degrees,tp=2,ep=2")
    found += [Case(model, plan, 4) for model in VARIANTS[3:] for plan in exchanging]
    found += [Case(VARIANTS[3], "degrees,ep=8", 8), Case(VARIANTS[3], "degrees,ep=4", 4, "adamw", "mixed")]
    # With a capacity, rows queue in the order of tokens, so that these cannot be striped.
    found += [Case(f"{VARIANTS[3]},batch=4", plan, 4) for plan in ("joint/4", "degrees,cp=4,ring=true/4i")]
    found += [Case("moe,dispatch=sparse,sequence=8,batch=4", "degrees,cp=4,stripes=true,ring=true/4i", 4)]
    for model in ("bert_large", "candle_uno", "dlrm", "gpt2", "llama3_8b", "mlp", "moe", "rnnlm", "xdl", *VARIANTS):
        found += [Case(model, "random-6", 4, "sgd", "f32", "triton"), Case(model, "joint", 2, "sgd", "f32", "triton")]
    return found


SAMPLE = [
    Case("alexnet", "recompute-1", 4),
    Case("candle_uno", "data-parallel", 8, "sgd", "f32"),
    Case("gpt2", "degrees,tp=2,zero=1,sp=true", 4),
    Case("gpt2", "joint", 4, "adamw", "mixed"),
    Case("gpt2,sequence=16", "degrees,cp=2,stripes=true", 2),
    Case("gpt2,sequence=16", "degrees,cp=4", 4),
    Case("gpt2,sequence=16", "degrees,cp=2,tp=2,sp=true,stripes=true,zero=1/2i", 4),
    Case("llama3_8b,sequence=16", "degrees,cp=4,stripes=true,zero=3/2", 4),
    Case("gpt2,sequence=16", "degrees,cp=4,ring=true", 4),
    Case("llama3_8b,sequence=16", "degrees,cp=4,stripes=true,ring=true,zero=3/2", 4),
    Case("llama3_8b,sequence=128", "degrees,cp=2,stripes=true,ring=true", 2, "sgd", "f32", "triton"),
    Case("bert_large,sequence=16", "degrees,cp=2,tp=2,sp=true,ring=true", 4, "sgd"),
    Case(VARIANTS[1], "degrees,cp=4,ring=true", 4),
    Case("gpt2,sequence=16", "heads", 4),
    Case("gpt2", "fsdp/2i", 4, "adamw", "mixed"),
    Case("gpt2", "tofu", 8),
    Case("bert_large", "recompute-3/2", 2),
    Case("deepseek_v3", "data-parallel", 2),
    Case("dlrm", "joint/4", 2),
    Case("mlp", "data-parallel/4", 1),
    Case("mlp", "joint/2", 2, "sgd", "f32", "triton"),
    Case("moe,dispatch=sparse", "random-5/2i", 4, "sgd"),
    Case("xdl", "pinned-2/2", 8),
    Case("inception_v3", "data-parallel", 2, "sgd"),
    Case("lenet", "spatial", 4, "sgd"),
    Case("llama3_8b", "random-4", 4),
    Case(VARIANTS[1], "joint", 2),
    Case(VARIANTS[2], "queries", 4),
    Case(VARIANTS[2], "joint", 2, "sgd", "f32", "triton"),
    Case(VARIANTS[3], "degrees,ep=4,zero=3/2i", 4),
    Case(VARIANTS[4], "joint", 4),
    Case(VARIANTS[5], "degrees,ep=2,zero=2", 4),
    Case("lstm_stack", "random-3", 4, "sgd"),
    Case("mlp", "random-5", 4, "sgd", "bf16"),
    Case("moe", "recompute-4", 4),
    Case("moe,dispatch=sparse", "experts", 4),
    Case("moe,dispatch=sparse", "experts", 2, "sgd", "f32", "triton"),
    Case("moe,dispatch=sparse", "degrees,ep=2,exchange=true", 2, "sgd", "f32", "triton"),
    Case("qwen3_moe", "degrees,ep=4,exchange=true,zero=3", 4, "adamw", "mixed"),
    Case("nmt", "data-parallel", 2, "sgd", "f32"),
    Case("qwen3_moe", "random-2", 4),
    Case("resnet101", "data-parallel", 2, "sgd", "f32"),
    Case("resnext50", "random-1", 2, "sgd"),
    Case("rnnlm", "random-7", 4, "sgd"),
    Case("rnntc", "recompute-2", 4),
    Case("wresnet", "data-parallel", 2),
]
MORE = [
    Case("deepseek_v3", "joint", 4),
    Case("lenet", "joint", 8),
    Case("llama3_8b,sequence=128", "degrees,cp=2,stripes=true", 2, "sgd", "f32", "triton"),
    Case(f"{VARIANTS[5]},batch=4", "degrees,cp=4,ring=true/4", 4),
]
"""Others that were found worth running, but take long."""
CASES = [*{str(case): case for case in (*product(), *beyond(), *SAMPLE, *MORE)}.values()] if ALL else SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_pytorch(ranks: Ranks, case: Case):
    torch.set_num_threads(1)
    (name, keys), optimizer = sized(case.model), OPTIMIZERS[case.optimizer]
    graph = of_type(build(name, **keys), "f32" if case.dtype == "f64" else case.dtype)
    text = program(graph, case.plan, case.world, optimizer, case.dtype == "f64", case.kernels)
    steps = 1 if case.dtype in ("bf16", "mixed") else 3
    found = ranks.run(text, case.world, trained, steps, case.dtype == "f32")[0]
    assert differences(found, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), optimizer, case.dtype) == []


def test_the_sample_has_everything():
    plans = Counter(re.sub(r"-\d+$|,.*", "", re.sub(r"/.*", "", case.plan)) for case in SAMPLE)
    assert {case.plan.partition("/")[2] for case in SAMPLE} == {"", "2", "2i", "4"}
    kinds = {"data-parallel", "degrees", "experts", "fsdp", "joint", "pinned", "random", "recompute", "spatial", "tofu"}
    assert plans.keys() == {*kinds, "queries", "heads"}
    assert {re.sub(r",(sequence=16|sequence=128|batch=4)$", "", case.model) for case in SAMPLE} == {*SMALL, *VARIANTS}
    assert {case.world for case in SAMPLE} == {1, *WORLDS}

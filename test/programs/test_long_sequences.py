"""
Attention of sequences in pieces on 2, 4 and 8 ranks: losses, gradients by name and three steps equal PyTorch's, in
double precision, of samples packed of documents, too.

Keys and values are gathered, go around a ring, or are exchanged for heads (Ulysses: an all-to-all before attention, and
one after); or rings of the outer levels of the machine have heads divided over the inner ones. Documents begin at
borders of pieces, cross them, and are tokens of their own, so that there are pieces of which a query sees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import TOLERANCES, differences
from extent import ALL
from given import become, told_on, trained_on
from models import machine
from mutants import Mutant, sites
from ranks import Ranks
from zoo import by_hand
from zoo_plans import MACHINES

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase_with
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Mesh, place
from unity_ir.pcg.striped import striped
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search.baselines.recipe import Degrees, recipe

LENGTH, SEPARATOR, CLASSES = 16, 1, 8
SIZES = {"batch": 4, "sequence": LENGTH, "layers": 1, "hidden": 32, "heads": 8, "vocabulary": CLASSES}
LLAMA = {**SIZES, "kv_heads": 4, "intermediate": 16}
KEYS = {"bert_large": SIZES, "gpt2": SIZES, "llama3_8b": LLAMA}
ADAM = Optimizer("adam", 1e-2)
HOW = {
    "gathered": {"all_gather"},
    "ring": {"ring_shift"},
    "ulysses": {"all_to_all"},
    "mixed": {"ring_shift", "all_to_all"},
}
"""Ways of attention, and the collectives by which its keys and values come."""


@dataclass(frozen=True)
class Case:
    model: str
    how: str
    world: int
    packed: bool = False
    striped: bool = False

    def __str__(self) -> str:
        return "-".join([self.model, self.how, str(self.world), *["packed"] * self.packed, *["striped"] * self.striped])


SAMPLE = [
    Case("bert_large", "mixed", 8),
    Case("bert_large", "ulysses", 4),
    Case("gpt2", "gathered", 8, packed=True),
    Case("gpt2", "ring", 8, packed=True),
    Case("gpt2", "ring", 2, striped=True),
    Case("gpt2", "ulysses", 8, packed=True),
    Case("llama3_8b", "mixed", 4, striped=True),
    Case("llama3_8b", "mixed", 8, packed=True),
    Case("llama3_8b", "ring", 4, packed=True),
    Case("llama3_8b", "ulysses", 2, packed=True),
    Case("llama3_8b", "ulysses", 4),
]
EVERY = [
    Case(model, how, world, packed, striped)
    for model in KEYS
    for how in HOW
    for world in (2, 4, 8)
    for packed, striped in ((False, False), (True, False), (False, True))
    if not (model == "bert_large" and (packed or striped))
    and not (model == "llama3_8b" and how == "ulysses" and world == 8)  # has 4 heads of keys
    and not (how == "mixed" and world == 2)
    and not (how == "ulysses" and striped)  # needs no balance
]
CASES = EVERY if ALL else SAMPLE


def by_heads(plan: Graph, mesh: Mesh, axes: range) -> Graph:
    """Return a plan with heads of attention in place of queries divided over mesh axes with the numbers in `axes`."""
    serial, serials = erase_with(plan)
    assignments = {serials[node]: each for node, each in place(plan, mesh).assignments.items() if node.is_compute}
    for node, each in assignments.items():
        if node.op.startswith("attention"):
            heads = node.analysis.result_dims[0][1]
            assert heads is not None
            assignments[node] = tuple(heads if axis in axes else role for axis, role in enumerate(each))
    return materialise(serial, assignments, mesh)


def keys_of(case: Case) -> dict[str, Any]:
    return {**KEYS[case.model], **({"separator": SEPARATOR} if case.packed else {})}


def text_of(case: Case) -> str:
    """Return a case's program in double precision."""
    on = machine(MACHINES[case.world])
    graph = build(case.model, **keys_of(case))
    axes = len(on.mesh.sizes)
    inner = {"ulysses": 0, "mixed": axes - 1}.get(case.how, axes)
    # A stripe for each device of the ring.
    model = striped(graph, 2**inner) if case.striped else graph
    plan = by_heads(recipe(model, on, Degrees(cp=case.world)), on.mesh, range(inner, axes))
    plan = replace(plan, ring_attention=case.how in ("ring", "mixed"))
    step = lower(fuse_collectives(differentiate(plan, ADAM, on.mesh)), on)
    text = emit(plan_step(step, PlanOptions(kernels="torch")), graph).text
    return text.replace("torch.float32", "torch.float64")


def batch_of(case: Case) -> dict[str, Any]:
    """
    Return tokens of four samples and labels. The samples are one document; documents that end where pieces of two
    tokens do; documents that cross the borders of all pieces; and documents of one token.
    """
    random = np.random.default_rng(0)
    names = ("tokens", "segments", "labels") if case.model == "bert_large" else ("tokens", "labels")
    batch = {name: random.integers(0, 2 if name == "segments" else CLASSES, (4, LENGTH)) for name in names}
    ends: list[list[int]] = [[], [*range(1, LENGTH, 2)], [2, 9, 10], [*range(LENGTH)]]
    tokens = batch["tokens"]
    tokens[tokens == SEPARATOR] = SEPARATOR + 1
    for sample, places in enumerate(ends):
        tokens[sample, places] = SEPARATOR
    return batch


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_in_pieces_equals_pytorch(ranks: Ranks, case: Case):
    torch.set_num_threads(1)
    text = text_of(case)
    forward = text.partition("def forward_backward")[2].partition("# --- backward")[0]
    kinds = {"all_gather", "all_to_all", "ring_shift"} - ({"all_gather"} if case.how != "gathered" else set())
    assert {kind for kind in kinds if f" {kind}(" in forward} >= HOW[case.how]
    found = ranks.run(text, case.world, trained_on, 3, {}, batch_of(case))[0]
    keys = keys_of(case)
    assert differences(found, lambda w, inputs: by_hand(case.model, keys, w, inputs), ADAM, "f64") == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "mixed"])
def test_documents_told_apart_wrongly_are_told(ranks: Ranks, how: str):
    """Move a mask by a document or by a token, or let positions go on: loss or gradients differ from PyTorch's."""
    torch.set_num_threads(1)
    case = Case("gpt2", how, 4, packed=True)
    wrong = ("document before", "one document", "token after")
    changes = [{"documents": change} for change in ("right", *wrong)]
    (right, grads), *others = ranks.run(text_of(case), 4, become, changes, {}, batch_of(case))[0]
    for loss, gradients in others:
        assert abs(loss - right) > 1e-4 * abs(right)
        assert any(
            np.linalg.norm(gradients[n] - grads[n]) > 1e3 * TOLERANCES["f64"] * np.linalg.norm(grads[n]) for n in grads
        )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_rotation_left_out_is_told(ranks: Ranks, packed: bool):
    """Pieces that a rank does not hand on, one at a time: keys, values and their gradients, of grouped queries."""
    torch.set_num_threads(1)
    case = Case("llama3_8b", "ring", 4, packed)
    text, batch = text_of(case), batch_of(case)
    found = ranks.run(text, 4, trained_on, 1, {}, batch)[0]
    rotations = [Mutant(site, "dropped") for site in sites(text) if site.kind == "ring_shift"]
    assert len(rotations) == 4 * 3 + 2 * 4
    became = ranks.run(text, 4, told_on, batch, rotations, float(found["losses"][0]), found["gradients"][0])[0]
    assert became == ["wrong"] * len(rotations)

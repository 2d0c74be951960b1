"""
Every move of a program's step, done wrong one at a time, makes loss or gradients other than PyTorch's: dropped, its
result doubled, along the wrong mesh axes. Done by one rank in another order, the order check at emission tells. Of the
programs that ZOO=all adds (`make zoo`) two of the moves that are alike in kind and axes are done wrong in each way.

What is not told is equivalent, and that is tested, too (`mutants.told`): the move makes the same, or random numbers in
the place of what it makes else change nothing. Random plans and those with pins have such moves, since they
take detours; of plans of degrees, integers are sliced, which `doubled` leaves as they are. Data-parallel and searched
plans have none but those of `batch_mean`, about which mean and variance are taken to keep their digits: any number
does.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from extent import ALL
from models import by_hand
from mutants import Mutant, Site, mutants, sites, swaps_let_pass, told
from ranks import Ranks, gradients, run_main
from zoo import by_hand as zoo_by_hand
from zoo_plans import SIZES, planned, program

from unity_ir.models import build
from unity_ir.pcg.collectives import AMONG_ALL
from unity_ir.pcg.optimizer import Optimizer

SAMPLE = [
    ("mlp", "joint", 2),
    ("mlp", "random-0", 4),
    ("mlp", "pinned-0", 4),
    ("lenet", "spatial", 2),
    ("bert_large", "data-parallel", 4),
    ("gpt2", "degrees,cp=4,ring=true", 4),
]
MORE = [
    *((model, "joint", 4) for model in ("bert_large", "dlrm", "llama3_8b", "moe", "resnext50", "rnntc")),
    *(("dlrm", "random-1", 4), ("lenet", "random-0", 4), ("lenet", "spatial", 8), ("moe", "random-2", 2)),
    *(
        ("rnntc", "random-3", 2),
        ("dlrm", "pinned-2", 4),
        ("lenet", "pinned-1", 4),
        ("mlp", "joint", 8),
        ("mlp", "recompute-1", 4),
    ),
]
CASES = [*SAMPLE, *MORE] if ALL else SAMPLE
NUMERICAL = (("idle", "batch_mean"), ("same", "batch_stats"))
"""Moves that change nothing when done wrong: what `told` says of them, and the operator whose result they move."""
DETOURS = ("random", "recompute", "pinned", "degrees")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world"), CASES)
def test_what_is_wrong_is_told(ranks: Ranks, model: str, plan: str, world: int):
    torch.set_num_threads(1)
    text = program(build(model, **SIZES[model]), plan, world, Optimizer(), double=True)
    weights, batch, _, _ = ranks.run(text, world, gradients)[0]
    loss, want = by_hand(lambda w, inputs: zoo_by_hand(model, SIZES[model], w, inputs), weights, batch)
    found = re.search(r"^MESH = (\(.*?\))", text, re.MULTILINE)
    assert found is not None
    wrong = mutants(text, literal_eval(found[1]))
    if (model, plan, world) in MORE:
        wrong = two_of_each(wrong)
    became = ranks.run(text, world, told, wrong, loss, want)[0]
    assert [str(m) for m, what in zip(wrong, became, strict=True) if what == "survived"] == []
    equivalent = [(what, m) for m, what in zip(wrong, became, strict=True) if what in ("same", "idle")]
    assert "wrong" in became
    if plan.startswith(DETOURS):
        assert len(equivalent) <= len(wrong) / 4
    else:
        lines = text.splitlines()
        assert [
            f"{what}: {m}" for what, m in equivalent if (what, moved(lines[m.site.line - 1])) not in NUMERICAL
        ] == []


def two_of_each(wrong: list[Mutant]) -> list[Mutant]:
    """Keep the first and the last of the mutants that make the same change to moves of the same kind and axes."""
    alike = defaultdict[object, list[Mutant]](list)
    for mutant in wrong:
        alike[mutant.site.kind, mutant.site.axes, mutant.site.pinned, mutant.change].append(mutant)
    kept = {each[i] for each in alike.values() for i in (0, -1)}
    return [mutant for mutant in wrong if mutant in kept]


def moved(line: str) -> str:
    """The operator that makes what a line's moves move, as its comment says."""
    found = re.search(r" of (\w+) \[", line.partition("  # ")[2])
    return found[1] if found else ""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world"), CASES)
def test_another_order_on_one_rank_is_told(model: str, plan: str, world: int):
    """Calls of different groups may be done the other way round where nobody waits in a circle for that."""
    passed = swaps_let_pass(planned(build(model, **SIZES[model]), plan, world, Optimizer()))
    assert [pair for pair in passed if set(pair[0].group) == set(pair[1].group)] == []


@pytest.mark.slow
def test_a_profile_has_every_move(ranks: Ranks, tmp_path: Path):
    """Several of a line, and those inside of each other, too."""
    text = program(build("mlp", **SIZES["mlp"]), "random-0", 4, Optimizer())
    assert re.search(r" = \w+\(ctx, \w+\(ctx, ", text), "no move is inside of another"
    ranks.run(text, 4, run_main, ["--steps", "1", "--profile", "p.json"], {}, str(tmp_path))
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    found = re.search(r"^LINKS = (\(.*?\))", text, re.MULTILINE)
    assert found is not None
    links = literal_eval(found[1])
    want = Counter(s.kind.removesuffix("_many") for s in sites(text) for _ in {links[a] for a in s.axes} if crosses(s))
    for rank in range(4):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] > 0]
        assert Counter(e["name"].partition(" of ")[0] for e in spans) == want
        assert all(e["dur"] >= 0 for e in spans)


def crosses(site: Site) -> bool:
    kinds = *AMONG_ALL, "halo", "halo_reduce", "ring_shift", "count_rows", "send_rows", "return_rows"
    return site.kind.removesuffix("_many") in kinds

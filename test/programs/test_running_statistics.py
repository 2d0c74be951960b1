"""Running statistics of batch norms: trained, kept, written and evaluated by as PyTorch does, on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import machine
from ranks import Ranks, checked, refused, run_main
from safetensors.torch import load_file, save_file
from torch import nn

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.imported import Imported, from_torch
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.forward import forward_of
from unity_ir.plan.instructions import Compute, ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run

TORCH = PlanOptions(kernels="torch")
BATCH, STEPS = 8, 3


class Network(nn.Module):
    """Batch norms of different momenta: one used twice, one of vectors, one frozen, one that keeps no statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.again, self.twice = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.frozen, self.own = nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False)
        self.head, self.flat = nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=0.75, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for _ in range(2):
            x = torch.relu(self.twice(self.again(x)))
        return self.flat(self.head(self.own(self.frozen(x)).mean((2, 3))))


def network(seed: int = 0) -> Network:
    """One whose statistics are not what they are at first."""
    torch.manual_seed(seed)
    made = Network()
    for name, buffer in made.named_buffers():
        buffer.copy_(torch.rand_like(buffer) + 0.5 if buffer.is_floating_point() else torch.tensor(len(name)))
    made.train()
    made.frozen.eval()
    return made


def batches(count: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random, rows = np.random.default_rng(seed), count * BATCH
    x = 3 * random.standard_normal((rows, 3, 6, 6), dtype="float32") + 1
    return {"x": x, "target": random.integers(0, 4, rows)}


ROWS = """
import numpy

def batch(step):
    rows = numpy.load("d.npz")
    return {n: rows[n][8 * step : 8 * step + 8] for n in ("x", "target")}
"""


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


@pytest.fixture(scope="module")
def imported() -> Imported:
    example = {n: torch.from_numpy(a) for n, a in batches(1, 0).items()}
    return from_torch(network(), example, cross_entropy)


@pytest.fixture
def folder(imported: Imported, tmp_path: Path) -> Path:
    imported.save(tmp_path / "w.safetensors")
    np.savez(tmp_path / "d.npz", **batches(5, 1))
    np.savez(tmp_path / "e.npz", **batches(2, 2))
    (tmp_path / "image_rows.py").write_text(ROWS)
    return tmp_path


def step_of(imported: Imported, where: str, plan: str, optimizer: Optimizer = Optimizer("sgd", 0.1)) -> Program:
    on = machine(where)
    strategy, _, seed = plan.partition("-") if plan.startswith("random") else (plan, "", "")
    placed = run(imported.graph, on, strategy, optimizer, {"seed": int(seed)} if seed else {}).graph
    return lower(fuse_collectives(differentiate(placed, optimizer, on.mesh)), on)


def text_of(imported: Imported, where: str, plan: str, optimizer: Optimizer = Optimizer("sgd", 0.1)) -> str:
    program = step_of(imported, where, plan, optimizer)
    forward = plan_step(forward_of(program, machine(where)), TORCH)
    return emit(plan_step(program, TORCH), imported.graph, origin=imported.origin, forward=forward).text


def trained(steps: int = STEPS) -> Network:
    """Train the network in PyTorch for this many steps; return what it holds then."""
    made, rows = network(), {n: torch.from_numpy(a) for n, a in batches(5, 1).items()}
    sgd = torch.optim.SGD(made.parameters(), 0.1)
    for t in range(steps):
        x, target = (rows[n][BATCH * t : BATCH * (t + 1)] for n in ("x", "target"))
        sgd.zero_grad()
        cross_entropy(made(x), target).backward()
        sgd.step()
    return made


def evaluated(made: Network) -> float:
    """The mean loss of the two batches held out, in evaluation."""
    made.eval()
    rows = {n: torch.from_numpy(a).split(BATCH) for n, a in batches(2, 2).items()}
    with torch.no_grad():
        return float(np.mean([cross_entropy(made(*pair[:1]), pair[1]) for pair in zip(*rows.values(), strict=True)]))


CHECK = ["--weights", "w.safetensors", "--data", "image_rows:batch", "--steps", "2", "--check"]


GIVEN = ["--weights", "w.safetensors", "--data", "image_rows:batch", "--steps", str(STEPS)]


def assert_equal(path: Path, want: Network) -> None:
    found = load_file(path)
    Network().load_state_dict(found, strict=True)
    for name, value in want.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}")


def sharded(program: Program) -> bool:
    """Whether channels of a running statistic are divided."""
    kept = [each.leaf.result for each in program.running if each is not None]
    return any(0 in program.tensors[r].layout for r in kept)


PLANS = [
    ("ideal:1", "data-parallel"),
    ("ideal:2", "data-parallel"),
    ("ideal:2x2", "joint"),
    ("ideal:2", "random-1"),
    ("ideal:2x2", "random-2"),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("where", "plan"), PLANS)
def test_statistics_are_pytorch_s_by_name(imported: Imported, ranks: Ranks, folder: Path, where: str, plan: str):
    text, world = text_of(imported, where, plan), machine(where).devices
    options = [*GIVEN, "--weights-out", "o.safetensors", "--eval-data", "e.npz"]
    lines = ranks.run(text, world, run_main, options, None, str(folder))[0]
    want = trained()
    assert_equal(folder / "o.safetensors", want)
    assert float(lines[-1].rpartition(" ")[2]) == pytest.approx(evaluated(want), rel=2e-5)


@pytest.mark.slow
def test_some_plan_divides_channels(imported: Imported):
    """Its statistics are sharded over devices, and gathered to be written."""
    assert any(sharded(step_of(imported, *each)) for each in PLANS)


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended(imported: Imported, ranks: Ranks, folder: Path):
    options = ["--eval-data", "e.npz", "--eval-every", "2", "--weights-out"]
    more = ["--data", "image_rows:batch", "--steps", "5", *options]
    text = text_of(imported, "ideal:2", "data-parallel")
    whole = ranks.run(text, 2, run_main, [*GIVEN[:2], *more, "whole.safetensors"], None, str(folder))[0]
    ranks.run(text, 2, run_main, [*GIVEN, "--save", "c", "--save-async"], None, str(folder))
    # The plan that goes on may be another, on other ranks.
    other = text_of(imported, "ideal:2x2", "random-2")
    rest = ranks.run(other, 4, run_main, ["--load", "c", *more, "rest.safetensors"], None, str(folder))[0]
    assert [line.split()[:2] for line in rest] == [line.split()[:2] for line in whole[-len(rest) :]]
    assert_equal(folder / "whole.safetensors", trained(5))
    assert_equal(folder / "rest.safetensors", trained(5))


@pytest.mark.slow
def test_the_program_checks_itself(imported: Imported, ranks: Ranks, folder: Path):
    text = text_of(imported, "ideal:2", "data-parallel", Optimizer("sgd", 0.1, clip=0.5))
    assert ranks.run(text, 2, run_main, CHECK, None, str(folder))[0] == [
        "check passed: 2 steps, loss, gradients and weights equal PyTorch's"
    ]


def changed(text: str, function: str, old: str, new: str) -> str:
    """The text with a change in one of its functions."""
    start = text.index(f"def {function}")
    assert old in text[start:], old
    return text[:start] + text[start:].replace(old, new, 1)


MUTANTS: Sequence[tuple[str, str, str]] = [
    ("running_stats_", "* 288 / 287", ""),
    ("running_stats_", "0.9 *", "0.1 *"),
    ("step_on", "local[name].copy_(grads[name])", "local[name].add_(grads[name])"),
]
"""Variance with its bias, the momentum's weights the other way round, what is added up instead of kept."""


@pytest.mark.slow
def test_mutants_are_told(imported: Imported, ranks: Ranks, folder: Path):
    text, want = text_of(imported, "ideal:1", "data-parallel"), trained()
    options = [*GIVEN, "--weights-out", "o.safetensors"]
    for function, old, new in MUTANTS:
        mutant = changed(text, function, old, new)
        ranks.run(mutant, 1, run_main, options, None, str(folder))
        with pytest.raises(AssertionError, match="running_"):
            assert_equal(folder / "o.safetensors", want)
        if function != "step_on":
            (said,) = ranks.run(mutant, 1, checked, str(folder), "w.safetensors", "image_rows:batch")
            assert any(line.startswith("step 0: running statistic norm.running_") for line in said), said


@pytest.mark.slow
def test_files_and_initial_statistics(imported: Imported, ranks: Ranks, folder: Path):
    text = text_of(imported, "ideal:1", "data-parallel")
    lacking = {n: t for n, t in load_file(folder / "w.safetensors").items() if n != "twice.running_var"}
    save_file(lacking, folder / "lacking.safetensors")
    given = ["--weights", str(folder / "lacking.safetensors"), "--steps", "1"]
    code, said = ranks.run(text, 1, refused, given, {})[0]
    assert (code, said.count("\n")) == (1, 1)
    assert "it has no running statistic 'twice.running_var'" in said
    # Means of 0, variances of 1 and no batches are what PyTorch begins with.
    tables = {n: t for n, t in load_file(folder / "w.safetensors").items() if n.startswith("frozen.running")}
    save_file(tables, folder / "tables.safetensors")
    anew = ["--random-weights", "--tables", "tables.safetensors", "--steps", "0", "--weights-out", "o.safetensors"]
    ranks.run(text, 1, run_main, anew, None, str(folder))
    found, fresh = load_file(folder / "o.safetensors"), Network().state_dict()
    for name in (n for n in fresh if n.partition(".")[0] in ("norm", "twice", "flat") and "_" in n):
        assert torch.equal(found[name], fresh[name]), name


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_statistics_alone(imported: Imported, ranks: Ranks, folder: Path):
    text = text_of(imported, "ideal:1", "data-parallel", Optimizer("sgd", 0.1, clip=0.5))
    rows = batches(5, 1)
    rows["x"][:BATCH] = np.nan
    np.savez(folder / "d.npz", **rows)
    options = [*GIVEN[:4], "--steps", "1", "--weights-out", "o.safetensors"]
    ranks.run(text, 1, run_main, options, None, str(folder))
    assert_equal(folder / "o.safetensors", network())


def test_micro_batches_are_refused(imported: Imported):
    """Their statistics would be those of a part of the batch each."""
    with pytest.raises(UnityError, match=r"^(?=.*batch_stats|.*batch_mean)"):
        run(imported.graph, machine("ideal:2"), "data-parallel", micro_batches=2)


def test_evaluation_has_no_statistics_of_batches(imported: Imported):
    step = step_of(imported, "ideal:2x2", "data-parallel")
    operators = [i.operator for i in forward_of(step, machine("ideal:2x2")).body if isinstance(i, Compute)]
    assert operators.count("running_batch_norm") == 5
    # Of the layer that keeps no statistics.
    assert (operators.count("batch_stats"), operators.count("batch_norm")) == (1, 1)
    assert "running_stats" not in operators
    assert not any(isinstance(i, ReshardMove) and i.kind == "all_gather" for i in step.body)


def test_statistics_that_no_batch_norm_reads_are_refused(imported: Imported, monkeypatch: pytest.MonkeyPatch):
    step = step_of(imported, "ideal:1", "data-parallel")
    body = tuple(i for i in step.body if not (isinstance(i, Compute) and i.operator == "batch_norm"))
    monkeypatch.setattr(Program, "running", ())
    object.__setattr__(step, "body", body)
    with pytest.raises(UnityError, match=r"^triton: evaluate: no batch norm has the running statistic 'norm.running_m"):
        forward_of(step, machine("ideal:1"))


@pytest.mark.slow
def test_mixed_precision_keeps_them_in_f32(imported: Imported, ranks: Ranks, folder: Path):
    graph = mixed_precision(imported.graph, "bf16")
    kept = [v for v in graph.outputs[1:]]
    assert {v.dtype for v in kept} == {"f32"}
    half = Imported(graph, imported.weights, imported.tables, imported.names, imported.counters)
    text = text_of(half, "ideal:2", "data-parallel")
    options = [*GIVEN[:4], "--steps", "1", "--weights-out", "o.safetensors", "--eval-data", "e.npz"]
    lines = ranks.run(text, 2, run_main, options, None, str(folder))[0]
    found, want = load_file(folder / "o.safetensors"), trained(1)
    for name, value in want.named_buffers():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02)
    assert float(lines[-1].rpartition(" ")[2]) == pytest.approx(evaluated(want), rel=0.05)

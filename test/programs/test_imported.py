"""Programs of imported models: tables come once, from the file of weights; tied weights have all of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from extent import sample
from ranks import Ranks, check, refused, run_main
from safetensors.torch import load_file, save_file
from torch import nn
from torch_recipes import MODULES

from unity_ir.frontends.torch.imported import Imported, from_torch
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, recipe


class Model(nn.Module):
    """Rotary positions, a constant; a frozen layer; a head tied to the table of embeddings."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.frozen = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.tensor([0.5, 2.0]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        turned = torch.outer(torch.arange(3.0), self.angles)
        h = x * torch.cat([turned.cos(), turned.sin()], 1)
        return self.head(torch.tanh(self.frozen(self.inner(h))))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def module() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def imported(module: Model) -> Imported:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    return from_torch(module, (ids, ids), loss)


@pytest.fixture(scope="module")
def text(imported: Imported) -> str:
    on, sgd = load("box:1"), Optimizer("sgd", 0.1)
    step = fuse_collectives(differentiate(run(imported.graph, on, "data-parallel").graph, sgd, on.mesh))
    return emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), imported.graph, origin=imported.origin).text


@pytest.fixture(scope="module")
def files(imported: Imported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    imported.save(folder / "w.safetensors")
    random = np.random.default_rng(0)
    np.savez(folder / "d.npz", ids=random.integers(0, 8, (12, 3)), labels=random.integers(0, 8, (12, 3)))
    (folder / "rows.py").write_text(
        "import numpy, pathlib\n"
        "def batch(step):\n"
        "    rows = numpy.load(pathlib.Path(__file__).with_name('d.npz'))\n"
        "    return {n: rows[n][4 * step : 4 * step + 4] for n in ('ids', 'labels')}\n"
    )
    return folder


Main = Callable[..., list[str]]


@pytest.fixture
def main(ranks: Ranks, text: str, files: Path) -> Main:
    return lambda *options: ranks.run(text, 1, run_main, list(options), {}, str(files))[0]


@pytest.fixture
def refusal(ranks: Ranks, text: str) -> Callable[..., str]:
    def said(*options: str) -> str:
        ((code, written),) = ranks.run(text, 1, refused, list(options), {})
        assert (code, written.count("\n")) == (1, 1)
        return written

    return said


def test_what_is_a_table_and_what_is_tied_is_known(imported: Imported, text: str):
    assert len(imported.tables) == 1
    assert imported.origin.tables == tuple(imported.tables)
    assert imported.names == {"head.weight": "table.weight"}
    assert "IMPORTED = True" in text


def test_tables_come_from_the_weights_whatever_the_data_are(
    main: Main, files: Path, module: Model, ranks: Ranks, text: str
):
    weights = ("--weights", str(files / "w.safetensors"), "--steps", "1")
    (line,) = main(*weights, "--data", "rows:batch")
    with np.load(files / "d.npz") as rows:
        batch = {n: torch.tensor(rows[n][:4]) for n in ("ids", "labels")}
    assert float(line.split()[-1]) == pytest.approx(loss(module(batch["ids"]), batch["labels"]).item(), abs=2e-6)
    assert main(*weights, "--data", str(files / "d.npz"))
    assert main(*weights)
    assert ranks.run(text, 1, check) == [[]]
    assert main("--check", *weights)[-1].startswith("check passed")


def test_tables_may_be_in_the_data_once(main: Main, files: Path, imported: Imported, tmp_path: Path):
    with np.load(files / "d.npz") as rows:
        np.savez(tmp_path / "d.npz", **rows, **{n: t.numpy() for n, t in imported.tables.items()})
    found = main("--random-weights", "--data", str(tmp_path / "d.npz"), "--steps", "1")
    (tables := tmp_path / "t.safetensors").write_bytes((files / "w.safetensors").read_bytes())
    assert found == main("--random-weights", "--tables", str(tables), "--data", str(files / "d.npz"), "--steps", "1")


def test_what_was_forgotten_is_said(refusal: Callable[..., str], files: Path):
    assert "was imported with weights: start from them by --weights FILE" in refusal("--steps", "1")
    said = refusal("--steps", "1", "--random-weights", "--data", str(files / "d.npz"))
    assert "is a table of the model, which comes with its weights" in said


def test_trained_weights_load_strictly_and_go_on(main: Main, files: Path, tmp_path: Path, imported: Imported):
    out = tmp_path / "out.safetensors"
    data = ("--data", str(files / "d.npz"))
    whole = main("--weights", str(files / "w.safetensors"), *data, "--steps", "4", "--weights-out", str(out))
    found = load_file(out)
    model = Model()
    model.load_state_dict(found)
    assert torch.equal(model.head.weight, found["table.weight"])
    assert torch.equal(model.frozen.weight, imported.weights["frozen.weight"])
    # Checkpoints hold the tables, so that a run goes on by itself.
    folder = str(tmp_path / "c")
    main("--weights", str(files / "w.safetensors"), *data, "--steps", "2", "--save", folder)
    assert main("--load", folder, *data, "--steps", "4") == whole[2:]
    # Trained weights, and the tables that are no part of the model's state.
    assert main("--weights", str(out), "--tables", str(files / "w.safetensors"), *data, "--steps", "1")


def test_tied_weights_that_differ_are_refused(refusal: Callable[..., str], main: Main, files: Path, tmp_path: Path):
    path = tmp_path / "w.safetensors"
    found = load_file(files / "w.safetensors")
    assert torch.equal(found["head.weight"], found["table.weight"])
    save_file({**found, "head.weight": found["head.weight"] + 1}, path)
    assert "table.weight and head.weight are one weight here, but differ there" in refusal("--weights", str(path))
    # Either name is enough.
    save_file({n: t for n, t in found.items() if n != "table.weight"}, path)
    assert main("--weights", str(path), "--steps", "1")


RECIPES = {"fused": {"tp": 2, "zero": 2, "sp": True}, "recommender": {"tp": 2, "zero": 1}, "network": {"tp": 4}}


@pytest.mark.slow
@pytest.mark.parametrize("name", sample([*RECIPES], 2))
def test_recipes_of_imported_modules_train_as_pytorch_does(name: str, ranks: Ranks, tmp_path: Path):
    torch.manual_seed(0)
    module, inputs, loss = MODULES[name]()
    found = from_torch(module, inputs, loss=loss)
    on, sgd = load("box:4"), Optimizer("sgd", 0.1)
    step = fuse_collectives(differentiate(recipe(found.graph, on, Degrees(**RECIPES[name])), sgd, on.mesh))
    text = emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), found.graph, origin=found.origin).text
    given = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    own = [n.name for n in found.graph.inputs if n.name not in found.tables]
    found.save(tmp_path / "w.safetensors")
    np.savez(tmp_path / "d.npz", **{n: t.numpy() for n, t in zip(own, given, strict=True)})
    options = ["--weights", str(tmp_path / "w.safetensors"), "--data", str(tmp_path / "d.npz"), "--steps", "1"]
    (line, *_), *_ = ranks.run(text, 4, run_main, [*options, "--weights-out", str(tmp_path / "o.safetensors")], {})
    module.train()
    expected = module(**inputs) if loss is None else loss(module(*given[:-1]), given[-1])
    expected.backward()
    assert float(line.split()[-1]) == pytest.approx(expected.item(), abs=1e-5)
    made = load_file(tmp_path / "o.safetensors")
    for key, weight in module.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(made[key], weight.detach() - 0.1 * weight.grad, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A layer between RMS norms that are computed in float32 and rounded before their weights, as Llama's are."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(256) + 0.5) for _ in range(2))
        self.inner, self.head = nn.Linear(256, 256, bias=False), nn.Linear(256, 64, bias=False)

    def norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.norms[number] * (wide * root).to(x.dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x.bfloat16()
        h = h + self.inner(self.norm(h, 0))
        return (self.head(self.norm(h, 1)).float() - y).square().mean()


def test_norms_of_a_model_in_bf16_train_as_pytorch_s_do(ranks: Ranks, tmp_path: Path):
    """The operator rounds once where the module rounds twice: 20 losses differ by less than 0.2%."""
    torch.manual_seed(0)
    module = Residual().to(torch.bfloat16)
    x, y = torch.randn(32, 256), torch.randn(32, 64)
    found = from_torch(module, (x, y))
    assert [n.types[0].dtype for n in found.graph.nodes() if n.op == "rms_norm"] == ["bf16"] * 2
    on, sgd = load("dgx-h100:1x2"), Optimizer("sgd", 0.1)
    step = fuse_collectives(differentiate(run(found.graph, on, "fsdp").graph, sgd, on.mesh))
    text = emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), found.graph, origin=found.origin).text
    found.save(tmp_path / "w.safetensors")
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=y.numpy())
    options = ["--weights", str(tmp_path / "w.safetensors"), "--data", str(tmp_path / "d.npz"), "--steps", "20"]
    lines, _ = ranks.run(text, 2, run_main, options, {})
    updates, losses = torch.optim.SGD(module.parameters(), 0.1), list[float]()
    for _ in lines:
        updates.zero_grad()
        value = module(x, y)
        value.backward()
        updates.step()
        losses.append(value.item())
    assert [float(line.split()[-1]) for line in lines] == pytest.approx(losses, rel=2e-3)
    assert losses[-1] < 0.4 * losses[0]

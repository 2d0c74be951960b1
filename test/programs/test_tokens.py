"""Token files: samples are consecutive ids, each rank reads its own pieces, and a run can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import MODELS, data, machine, weight
from ranks import Ranks, refused, run_main
from test_imported import Model
from test_imported import loss as loss_of
from test_programs import program as program_of
from token_files import first_batch, packed_samples, wrong_pieces

from unity_ir.frontends.torch.imported import from_torch
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.forward import forward_of
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run

SAMPLES, LENGTH, CLASSES = 8, 6, 20


def language(first: str = "tokens", second: str = "labels", tokens_first: bool = True) -> Graph:
    """A table of embeddings and a head, for inputs of these names; of which are the tokens says `tokens_first`."""
    inputs = [data(name, SAMPLES, LENGTH, dtype="i64") for name in (first, second)]
    tokens, labels = (v.result for v in (inputs if tokens_first else reversed(inputs)))
    h = apply("embedding", [tokens, weight("table", CLASSES, 12)]).result
    h = apply("matmul", [apply("tanh", [h]).result, weight("head", 12, CLASSES)]).result
    scores = apply("class_score", [apply("log_softmax", [h]).result, labels]).result
    loss = apply("neg", [apply("reduce_mean", [scores], {"dim": 0, "count": 2}).result]).result
    return Graph("language", tuple(inputs), (loss,))


def text_of(graph: Graph, where: str = "ideal:2", plan: str = "data-parallel", micro_batches: int = 1) -> str:
    on, adam, torch_only = machine(where), Optimizer("adam", 0.05), PlanOptions(kernels="torch")
    placed = run(graph, on, plan, adam, micro_batches=micro_batches).graph
    step = lower(fuse_collectives(differentiate(placed, adam, on.mesh)), on)
    return emit(plan_step(step, torch_only), graph, forward=plan_step(forward_of(step, on), torch_only)).text


def ids_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, CLASSES, count)


LAYOUTS: list[tuple[tuple[int | str, ...], int | None]] = [
    (("copy", "copy"), None),
    ((0, 0), None),
    ((0, 1), None),
    ((1, 0), None),
    ((1, "repeat"), None),
    (("at 1", 0), None),
    ((0, 1), 0),
    ((1, 0), 0),
    ((0, 1), 1),
]


@pytest.mark.slow
def test_each_rank_reads_its_own_pieces_and_no_more(ranks: Ranks, tmp_path: Path):
    np.save(tmp_path / "tokens.npy", ids_of(3 * SAMPLES * LENGTH + 5))
    text = text_of(language(), "ideal:2x2")
    assert ranks.run(text, 4, wrong_pieces, str(tmp_path / "tokens.npy"), LAYOUTS) == [[]] * 4


FUNCTION = """
import numpy, torch

def batch(t):
    ids = torch.from_numpy(numpy.fromfile("tokens.bin", numpy.uint16).astype("int64"))
    there = (len(ids) - 1) // {length}
    epoch, within = divmod(t, there // {samples})
    order = torch.randperm(there, generator=torch.Generator().manual_seed({seed} * 1_000_003 + epoch))
    starts = [{length} * int(i) for i in order[{samples} * within : {samples} * within + {samples}]]
    tokens, labels = (torch.stack([ids[i + k : i + k + {length}] for i in starts]) for k in (0, 1))
    return {{"tokens": tokens, "labels": labels}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "plan", "count"), [("ideal:2", "fsdp", 2), ("ideal:2x2", "random", 1)])
def test_a_run_takes_the_samples_of_the_file(ranks: Ranks, tmp_path: Path, where: str, plan: str, count: int):
    """A run reads the same samples from .npy and .bin files, over an epoch's end and after a checkpoint."""
    ids, other = ids_of(3 * SAMPLES * LENGTH + 1), ids_of(2 * SAMPLES * LENGTH + 2 * LENGTH + 3, 1)
    np.save(tmp_path / "held_out.npy", other)
    rows = 2 * SAMPLES * LENGTH
    by_row = {n: other[k : k + rows].reshape(-1, LENGTH) for k, n in enumerate(("tokens", "labels"))}
    np.savez(tmp_path / "held_out.npz", **by_row)
    np.save(tmp_path / "tokens.npy", ids.astype(np.int32))
    ids.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    (tmp_path / "samples.py").write_text(FUNCTION.format(samples=SAMPLES, length=LENGTH, seed=4))
    text, world, folder = text_of(language(), where, plan, count), machine(where).devices, str(tmp_path)

    def lines(source: str, *options: str) -> list[str]:
        given = ["--seed", "4", "--data", source, *options]
        return ranks.run(text, world, run_main, given, None, folder)[0]

    want = lines("samples:batch", "--steps", "5")
    assert len({line.partition("loss")[2] for line in want}) == 5
    assert lines("tokens.bin", "--steps", "5") == want
    assert lines("tokens.npy", "--steps", "2", "--save", "saved") == want[:2]
    again = ["--steps", "5", "--load", "saved", "--eval-data"]
    left, *found = lines("tokens.npy", *again, "held_out.npy")
    assert left == "held_out.npy: 2 rows fill no last batch and are left out"
    assert found[:-1] == want[2:]
    assert found == lines("tokens.npy", *again, "held_out.npz")
    # A run that has no step to do evaluates what it has loaded.
    assert lines("tokens.npy", "--steps", "2", "--load", "saved", "--eval-data", "held_out.npz")[0].startswith(
        "step 2 ev"
    )


@pytest.mark.parametrize(
    ("names", "tokens_first"),
    [(("tokens", "labels"), True), (("labels", "input_ids"), False), (("targets", "x"), False), (("x", "y"), True)],
)
def test_labels_are_found_by_name_or_else_by_order(
    ranks: Ranks, tmp_path: Path, names: tuple[str, str], tokens_first: bool
):
    np.save(tmp_path / "tokens.npy", np.arange(SAMPLES * LENGTH + 1) % CLASSES)
    found = ranks.run(text_of(language(*names, tokens_first)), 2, first_batch, str(tmp_path / "tokens.npy"))[0]
    tokens, labels = names if tokens_first else names[::-1]
    np.testing.assert_array_equal(found[labels], (found[tokens] + 1) % CLASSES)


DOCUMENTS = [2, 3, 6, 4, 4, 15, 1, 1, 3, 2, 5, 6]
"""Lengths of documents, each of which ends with the id 0."""
STARTS = [0, 5, 11, 15, 19, 25, 31, 36, 41]
"""The first id of each sample of 6 ids: the sample at 25 continues the document of 15 ids that begins at 19."""


def of_documents() -> Any:
    return np.concatenate([[*range(1, size), 0] for size in DOCUMENTS])


@pytest.mark.slow
def test_samples_begin_with_documents(ranks: Ranks, tmp_path: Path):
    """Packed of whole documents; one longer than a sample goes on in the next, where others follow its last part."""
    ids = of_documents()
    np.save(tmp_path / "ids.npy", ids)
    options = ["--data", "ids.npy", "--document-end", "0", "--steps", "2"]
    lines = ranks.run(text_of(language()), 2, run_main, options, None, str(tmp_path))[0]
    said = "12 documents in 9 samples of 6; 1 are longer, and cut into parts of that; 13.0% of ids are there twice"
    assert lines[0] == f"ids.npy: {said}"
    found = ranks.run(text_of(language()), 2, packed_samples, str(tmp_path / "ids.npy"), 0)[0]
    assert found["starts"] == STARTS
    np.testing.assert_array_equal(found["tokens"], [ids[at : at + LENGTH] for at in STARTS[:SAMPLES]])
    np.testing.assert_array_equal(found["labels"], [ids[at + 1 : at + 1 + LENGTH] for at in STARTS[:SAMPLES]])
    # Each document that fits is whole in a sample, but for those after the last.
    begins = np.cumsum([0, *DOCUMENTS[:-1]])
    for begin, size in zip(begins, DOCUMENTS, strict=True):
        fits = size > LENGTH or begin + size > STARTS[-1] + LENGTH
        assert fits or any(at <= begin and begin + size <= at + LENGTH for at in STARTS)


@pytest.mark.slow
def test_documents_that_cannot_be_packed_are_refused_in_one_line(ranks: Ranks, tmp_path: Path):
    text, path = text_of(language()), str(tmp_path / "ids.npy")
    np.save(path, of_documents())
    for options, message in (
        (["--data", path, "--document-end", "19"], "no document ends, as none of its 52 ids is 19; leave"),
        (["--data", path, "--document-end", "-1"], "no document ends, as none of its 52 ids is -1; leave"),
        (["--document-end", "0"], "--document-end is of token files, .npy or .bin, in --data or --eval-data"),
    ):
        code, said = ranks.run(text, 2, refused, options, {})[0]
        assert (code, said.count("\n")) == (1, 1), said
        assert message in said
    np.save(path, of_documents()[:40])
    code, said = ranks.run(text, 2, refused, ["--data", path, "--document-end", "0"], {})[0]
    assert (code, said.count("\n")) == (1, 1), said


@pytest.mark.slow
def test_a_program_is_checked_on_a_token_file(ranks: Ranks, tmp_path: Path):
    np.save(tmp_path / "tokens.npy", ids_of(100))
    options = ["--check", "--data", str(tmp_path / "tokens.npy"), "--steps", "2"]
    assert "check passed" in ranks.run(text_of(language()), 2, run_main, options)[0][0]


@pytest.mark.slow
def test_a_raw_file_of_many_ids_has_four_bytes_for_each(ranks: Ranks, tmp_path: Path):
    np.arange(SAMPLES * LENGTH + 1, dtype=np.uint32).tofile(tmp_path / "tokens.bin")
    large = text_of(language()).replace("torch.int64, (0,), 20)", "torch.int64, (0,), 70000)")
    assert "70000)" in large
    found = ranks.run(large, 2, first_batch, str(tmp_path / "tokens.bin"))[0]
    assert sorted(found["tokens"].flatten()) == [*range(SAMPLES * LENGTH)]


IDS = ids_of(100)
CASES: dict[str, tuple[Any, str]] = {
    "short.npy": (IDS[:48], "it has 48 ids; a batch takes 49: 8 samples of 6, and one more"),
    "short.bin": (IDS[:10].astype(np.uint16), "it has 10 ids; a batch takes 49"),
    "beyond.npy": (IDS + CLASSES, "is outside 0 to 19, of "),
    "beyond.bin": (IDS.astype(np.uint16) + 300, "is outside 0 to 19, of "),
    "negative.npy": (IDS - 100, "is outside 0 to 19, of "),
    "square.npy": (IDS.reshape(10, 10), "it is [10, 10], int64; token ids are integers in one dim"),
    "floats.npy": (IDS.astype(np.float32), "it is [100], float32; token ids are integers in one dim"),
    "objects.npy": (IDS.astype(object), "cannot read"),
    "odd.bin": (np.zeros(101, np.uint8), "cannot read"),
    "empty.bin": (np.zeros(0, np.uint8), "cannot read"),
    "damaged.npy": (None, "cannot read"),
    "archive.npy": (None, "cannot read"),
    "missing.npy": (None, "cannot read"),
}


@pytest.mark.slow
def test_files_that_are_no_tokens_are_refused_in_one_line(ranks: Ranks, tmp_path: Path):
    text = text_of(language())
    (tmp_path / "damaged.npy").write_bytes(b"\x93NUMPY cut short")
    np.savez(tmp_path / "archive.npz", ids=IDS)
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name, (array, message) in CASES.items():
        path = tmp_path / name
        if array is not None and name.endswith(".bin"):
            array.tofile(path)
        elif array is not None:
            np.save(path, array)
        code, said = ranks.run(text, 2, refused, ["--data", str(path)], {})[0]
        assert (code, said.count("\n")) == (1, 1), said
        assert message in said, name
        assert name in said


@pytest.mark.slow
def test_models_without_tokens_and_labels_are_refused_in_one_line(ranks: Ranks, tmp_path: Path):
    np.save(tmp_path / "tokens.npy", IDS)
    for model in ("mlp", "mixed"):
        text = program_of(MODELS[model][0](), "ideal:2", "data-parallel", kernels="torch")
        code, said = ranks.run(text, 2, refused, ["--data", str(tmp_path / "tokens.npy")], {})[0]
        assert (code, said.count("\n")) == (1, 1), said
        assert "a token file is for two inputs of ids, both [samples, length]; here are x, " in said


@pytest.mark.slow
def test_an_imported_model_s_tables_come_with_its_weights(ranks: Ranks, tmp_path: Path):
    torch.manual_seed(0)
    example = torch.zeros(4, 3, dtype=torch.int64)
    imported = from_torch(Model(), (example, example), loss_of)
    imported.save(tmp_path / "w.safetensors")
    on, sgd, torch_only = machine("ideal:2"), Optimizer("sgd", 0.1), PlanOptions(kernels="torch")
    step = lower(fuse_collectives(differentiate(run(imported.graph, on, "data-parallel").graph, sgd, on.mesh)), on)
    forward = plan_step(forward_of(step, on), torch_only)
    text = emit(plan_step(step, torch_only), imported.graph, origin=imported.origin, forward=forward).text
    ids = np.random.default_rng(2).integers(0, 8, 25)
    np.save(tmp_path / "tokens.npy", ids)
    rows = {n: ids[k : k + 24].reshape(8, 3) for k, n in enumerate(n.name for n in imported.graph.inputs[:2])}
    np.savez(tmp_path / "rows.npz", **rows)

    def lines(source: str, evaluated: str) -> list[str]:
        given = ["--weights", "w.safetensors", "--data", source, "--eval-data", evaluated, "--eval-every", "2"]
        return ranks.run(text, 2, run_main, [*given, "--steps", "4"], None, str(tmp_path))[0]

    want = lines("rows.npz", "rows.npz")
    assert len([line for line in want if "eval" in line]) == 2
    assert lines("tokens.npy", "tokens.npy") == want

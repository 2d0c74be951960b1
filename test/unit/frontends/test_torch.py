"""Imported modules compute what PyTorch does: the loss and every gradient, by name, in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_convolutions
import torch_models
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.errors import UnityError
from unity_ir.frontends.torch import Imported, from_torch
from unity_ir.frontends.torch.export import bind, loss_in
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import place
from unity_ir.search.baselines.batch_dims import batch_dims
from unity_ir.search.baselines.data_parallel import fsdp


def in_pytorch(module: nn.Module, inputs: Any, loss: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradients of the parameters that have one."""
    args, kwargs, targets = bind(module, inputs, loss)
    goals = [kwargs.pop(name) for name in targets]
    output = module(*args, **kwargs)
    value = loss_in(output) if loss is None else loss(output, *goals)
    value.backward()
    return value.item(), {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}


def run(imported: Imported, module: nn.Module, inputs: Any, loss: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The same of the imported graph, by the reference interpreter."""
    args, kwargs, _ = bind(module, inputs, loss)
    given = kwargs | {f"args_{i}": v for i, v in enumerate(args)}
    arrays = {n: v.detach().numpy() for n, v in {**given, **imported.tables}.items() if isinstance(v, torch.Tensor)}
    graph = differentiate(imported.graph, Optimizer())
    values = interpret(graph, arrays, {n: w.numpy() for n, w in imported.weights.items()})
    return float(values[graph.outputs[0]]), {u.weight.node.name: values[u.grad] for u in graph.updates}


def check(module: nn.Module, inputs: Any, loss: Any = None, mode: TorchFunctionMode | None = None) -> Imported:
    """Import, compare with PyTorch, which runs in `mode`, and see that the text reads back."""
    module.double().train()
    inputs = torch.utils._pytree.tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, inputs
    )
    imported = from_torch(module, inputs, loss)
    value, grads = run(imported, module, inputs, loss)
    with mode or nullcontext():
        want, wanted = in_pytorch(module, inputs, loss)
    assert value == pytest.approx(want, rel=1e-9)
    # A parameter the loss only seems to depend on may have a gradient of zero on one side and none on the other.
    assert set(wanted) - set(grads) == {n for n, g in wanted.items() if n not in grads and not g.any()}
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted.get(name, np.zeros_like(grad)), atol=1e-9, err_msg=name)
    func = from_graph(imported.graph)
    func.verify()
    assert to_graph(func) == imported.graph
    return imported


def operators(imported: Imported) -> set[str]:
    return {n.op for n in imported.graph.nodes() if n.is_compute}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_perceptron():
    imported = check(*torch_models.mlp())
    assert operators(imported) == {"matmul_nt", "add", "relu", "gelu", "cross_entropy"}
    assert list(imported.weights) == ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", torch_models.TRANSFORMERS)
def test_transformer(name: str):
    build, attention = torch_models.TRANSFORMERS[name]
    with torch_models.InDouble():
        imported = check(*build(attention))
    if name.startswith("bert_masked"):
        # Its mask is an input, which the attention operator has not.
        return
    assert {"attention", "split_heads", "merge_heads"} <= operators(imported)
    own = {"gpt2": {"gelu_tanh", "layer_norm"}, "llama": {"rms_norm", "silu"}}
    assert own.get(name.partition("_")[0], set()) <= operators(imported)
    assert not operators(imported) & {"softmax", "reduce_mean", "square", "pow_scalar", "expand"}


@pytest.mark.slow
def test_capped_scores():
    module, inputs, loss = torch_models.gemma2()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch_models.InDouble():
        imported = check(module, inputs, loss)
    found = [n for n in imported.graph.nodes() if n.op.startswith("attention")]
    assert [(n.op, n.attribute("causal"), n.attribute("cap")) for n in found] == [
        ("attention_capped_ranges", 1, 0.5),
        ("attention_capped", 1, 0.5),
    ]
    assert all(n.attribute("scale") == pytest.approx(0.5) for n in found)
    assert not operators(imported) & {"softmax", "batch_matmul", "batch_matmul_nt"}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "llama4"])
def test_mixtures(name: str, batch: int):
    """Each token has a row for each of its experts, and none is sorted; samples are the first dim."""
    module, inputs, loss = getattr(torch_models, name)(batch)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch_models.InDouble():
        imported = check(module, inputs, loss, torch_models.GroupedInDouble())
    tokens = batch * torch_models.SEQUENCE
    products = [n for n in imported.graph.nodes() if n.op.startswith("routed_matmul")]
    assert [n.types[0].shape[:2] for n in products] == [(tokens, 2)] * (4 if name == "mixtral" else 2)
    found = {n.op for n in imported.graph.nodes()}
    assert {"attention", "silu", "topk", "rms_norm"} <= found
    assert not found & {"index_select", "batch_matmul", "floor", "square"} - ({"square"} if name == "llama4" else set())
    assert sum(n.op == "embedding" for n in imported.graph.nodes()) == 1
    experts = [n for n, p in module.named_parameters() if ".experts." in n and p.grad is not None and p.grad.any()]
    assert len(experts) == len(products)
    assert {v.node.name: dim for v, dim in batch_dims(imported.graph).items() if "." not in v.node.name} == {
        "input_ids": 0,
        "labels": 0,
    }
    machine = load("cpu:2")
    if batch == 1:
        with pytest.raises(UnityError, match=r"^fsdp: input input_ids has batch 1, which 2 devices do not divide"):
            fsdp(imported.graph, machine)
        return
    plan = place(fsdp(imported.graph, machine), machine.mesh)
    roles = [role for n, (role, *_) in plan.assignments.items() if n.op.startswith(("routed_matmul", "topk"))]
    assert all(isinstance(role, str) for role in roles), "tokens are not divided"


class WiderNorm(nn.Module):
    """A norm that is computed in a wider type than that of its weights, as models in bf16 do in float32."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * (1 + self.bias[:1])
        if self.kind == "rms_norm":
            z = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        else:
            centred = x - x.mean(-1, keepdim=True)
            root = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
            z = centred * root * self.weight.to(x.dtype) + self.bias
        return ((z - y) ** 2).mean()


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms_of_narrower_weights(kind: str):
    module = WiderNorm(kind)
    inputs = tuple(torch.randn(5, 6, dtype=torch.float64) for _ in range(2))
    imported = from_torch(module, inputs)
    # What is left of the mean has an RMS norm, too.
    assert "rms_norm" in operators(imported)
    value, grads = run(imported, module, inputs, None)
    want, wanted = in_pytorch(module, inputs, None)
    assert value == pytest.approx(want, rel=1e-9)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-5, err_msg=name)


def _root(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)


ROUNDED_NORMS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], set[str]]] = {
    "Llama": (lambda x, w: w * (x.double() * _root(x)).to(x.dtype), {"f32"}),
    "T5": (lambda x, w: w * (x * _root(x)).to(w.dtype), {"f32"}),
    "weight last": (lambda x, w: (x.double() * _root(x)).float() * w, {"f32"}),
    "quotient": (lambda x, w: w * (x.double() / _root(x).reciprocal()).float(), set()),
    "weight in the wider type": (lambda x, w: w.double() * (x.double() * _root(x)).float(), set()),
    "rounded after the weight": (lambda x, w: (w.double() * (x.double() * _root(x))).float(), {"f64"}),
    "of another": (lambda x, w: w * (x.double() * _root(x + 1)).float(), set()),
    "weight of rows": (lambda x, w: w[:5, None] * (x.double() * _root(x)).float(), set()),
    "squared": (lambda x, w: w * (x.double() * x.double() * _root(x)).float(), set()),
}


@pytest.mark.parametrize("name", ROUNDED_NORMS)
def test_norms_that_are_rounded_before_their_weight(name: str):
    """As models in bf16 compute them in float32: one operator in the narrow type, but of the same numbers."""
    of, dtypes = ROUNDED_NORMS[name]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((of(x * self.scale, self.weight) - y) ** 2).float().mean()

    module, inputs = Module(), (torch.randn(5, 6), torch.randn(5, 6))
    imported = from_torch(module, inputs)
    assert {n.types[0].dtype for n in imported.graph.nodes() if n.op == "rms_norm"} == dtypes
    value, grads = run(imported, module, inputs, None)
    want, wanted = in_pytorch(module, inputs, None)
    assert value == pytest.approx(want, rel=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", torch_convolutions.NETWORKS)
def test_convolutional_network(name: str):
    module, *rest = torch_convolutions.NETWORKS[name]()
    imported = check(module, *rest)
    assert {"conv2d", "batch_stats", "batch_norm", "running_stats"} <= operators(imported)
    kept = {name for name, _ in module.named_buffers()}
    assert kept <= imported.tables.keys()
    assert imported.counters == {name: 1 for name in kept if name.endswith("num_batches_tracked")}


class Tied(nn.Module):
    """A table that is its own decoder, one frozen layer, one that nothing uses, and dropout in two places."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.table.weight
        self.dropout = nn.Dropout(p)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.dropout(self.frozen(self.dropout(self.table(ids)))))


TIED = (torch.tensor([[1, 2], [0, 6]]), torch.tensor([[2, 3], [1, 0]]))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_tied_weights_are_one_and_frozen_ones_are_weights():
    imported = check(Tied(), TIED, loss)
    assert {n.name: n.is_trained for n in imported.graph.weights()} == {
        "table.weight": True,
        "frozen.weight": False,
        "frozen.bias": False,
    }
    assert set(imported.weights) == {"table.weight", "frozen.weight", "frozen.bias"}
    assert imported.tables == {}
    assert [n.name for n in imported.graph.inputs] == ["ids", "labels"]


def test_every_dropout_has_a_seed_of_its_own():
    imported = from_torch(Tied(0.25), TIED, loss)
    found = [n for n in imported.graph.nodes() if n.op == "dropout"]
    assert [(n.attribute("p"), n.attribute("seed")) for n in found] == [(0.25, 0), (0.25, 1)]


def test_a_module_in_evaluation_is_imported_as_it_trains():
    imported = from_torch(Tied(0.25).eval(), TIED, loss)
    assert "dropout" in operators(imported)


@pytest.mark.parametrize("inputs", [TIED, {"ids": TIED[0], "labels": TIED[1]}, [*TIED]])
def test_inputs_are_named_as_the_module_and_the_loss_name_them(inputs: Any):
    imported = from_torch(Tied(), inputs, loss, name="tied")
    assert imported.graph.name == "tied"
    assert [n.name for n in imported.graph.inputs][:2] == ["ids", "labels"]


def test_importing_leaves_the_module_as_it_is():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    from_torch(module, (torch.randn(3, 4), torch.tensor([0, 1, 1])), nn.CrossEntropyLoss())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


@pytest.mark.slow
def test_half_precision_stays_so():
    with torch.device("cpu"):
        module, inputs, _ = torch_models.llama("sdpa")
    imported = from_torch(module.to(torch.bfloat16), inputs)
    assert {n.types[0].dtype for n in imported.graph.weights()} == {"bf16"}
    assert "cast" in operators(imported)


def test_weights_are_saved_whole_or_not_at_all(tmp_path: Path):
    imported = from_torch(Tied(), TIED, loss)
    path = tmp_path / "tied.safetensors"
    imported.save(path)
    saved = load_file(path)
    # Tied weights by both names, as strict loading wants them.
    assert set(saved) == {"table.weight", "decoder.weight", "frozen.weight", "frozen.bias"}
    left_out = Tied().load_state_dict(saved, strict=False)
    assert (left_out.missing_keys, left_out.unexpected_keys) == (["unused.weight", "unused.bias"], [])
    assert torch.equal(saved["table.weight"], imported.weights["table.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["tied.safetensors"]
    before = path.read_bytes()
    on_meta = from_torch(Tied().to("meta"), tuple(t.to("meta") for t in TIED), loss)
    with pytest.raises(UnityError, match="weight is on the meta device"):
        on_meta.save(path)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="none"):
        imported.save(tmp_path / "there" / "is" / "none")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None


LOSS, LOGITS, COUNT = torch.tensor(2.0), torch.ones(2, 3), torch.tensor(3)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        (LOSS, LOGITS),
        (LOGITS, LOSS),
        [LOGITS, COUNT, {"rest": LOSS}],
        {"logits": LOGITS, "loss": LOSS, "auxiliary": torch.tensor(1.0)},
        Output(LOGITS, LOSS),
        (Output(LOGITS, LOSS), LOGITS),
    ],
)
def test_the_loss_is_found_in_the_output(output: Any):
    assert loss_in(output) is LOSS


@pytest.mark.parametrize(
    "output", [LOGITS, (LOGITS, LOSS, LOSS), {"logits": LOGITS, "loss": None}, Output(LOGITS, None)]
)
def test_what_is_no_one_scalar_is_not_taken_for_the_loss(output: Any):
    assert loss_in(output) is LOGITS


@pytest.mark.parametrize(
    ("module", "inputs", "of", "message"),
    [
        (nn.Linear(4, 3), 3, None, "the example inputs are int; they must be a tensor, tuple or dict"),
        (nn.Linear(4, 3), (torch.ones(2, 4),), loss, "Linear.forward: missing a required argument: 'input'"),
        (nn.Linear(4, 3), (), loss, "0 example inputs, but the loss alone needs labels"),
        (nn.Linear(4, 3), {"input": torch.ones(2, 4)}, loss, "the loss needs labels, which the example inputs"),
        (nn.Linear(4, 3), torch.ones(2, 4), 3, "the loss is int; it must be a function of outputs and targets"),
        (nn.Linear(4, 3), torch.ones(2, 4), lambda y: y, "the loss is a tensor of [2, 3]; it must be a scalar"),
        (nn.Identity(), torch.ones(2, 4), lambda y: 3, "the loss is int; it must be a scalar"),
    ],
)
def test_wrong_arguments_are_refused(module: nn.Module, inputs: Any, of: Any, message: str):
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        from_torch(module, inputs, of)
    assert message in str(error.value)


@dataclass
class _Row:
    """A module of one linear layer, whose loss is a function of its result and of its input."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def module(self) -> nn.Module:
        of = self.loss

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(6, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return of(self.linear(x), x[:, :3])

        return Model()


NOT_FINITE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nan_to_num": lambda y, x: torch.nan_to_num((y.abs() + 1) / x.relu(), posinf=2.0).square().mean(),
    "nan_to_num of both": lambda y, x: torch.nan_to_num(y.detach() / x.relu(), 0.5, 2.0, -3.0).mul(y).sum(),
    "isfinite": lambda y, x: torch.where(torch.isfinite(y / x.relu()), y, 0).square().mean(),
    "isinf": lambda y, x: torch.where(torch.isinf(y / x.relu()), y, 0).square().mean(),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_told_apart(name: str):
    check(_Row(NOT_FINITE[name]).module(), torch.randn(4, 6))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rows_that_a_softmax_masks_whole_are_not_nan(wide: torch.dtype):
    """Nor where it is computed in a wider type, as in bf16 models."""
    masked = _Row(
        lambda y, x: torch.nan_to_num(y.masked_fill(x < 0, -torch.inf).softmax(-1, dtype=wide).float()).square().mean()
    )
    with pytest.raises(UnityError, match=r"masked whole are uniform, not nan; choose 0 for them by torch\.where"):
        from_torch(masked.module(), torch.randn(4, 6))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_after_the_first_that_is_missing_do_not_count(reduction: str):
    """PyTorch's own way to take this loss apart counts them."""
    labels = torch.tensor([[0, -1, 2], [2, 1, -1], [0, 1, 2], [-1, 1, 0]])
    criterion = nn.MultiLabelMarginLoss(reduction=reduction)
    check(nn.Linear(6, 3), (torch.randn(4, 6), labels), lambda y, t: criterion(y, t))

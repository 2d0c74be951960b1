"""Imported losses of JAX compute what JAX does: the loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax_models import MODELS, normal, tokens  # noqa: E402

from unity_ir.dialects.convert import from_graph, to_graph  # noqa: E402
from unity_ir.errors import UnityError  # noqa: E402
from unity_ir.frontends.jax import ImportedLoss, from_jax  # noqa: E402
from unity_ir.frontends.jax.imported import input_name  # noqa: E402
from unity_ir.pcg.differentiate import differentiate  # noqa: E402
from unity_ir.pcg.interpret import interpret  # noqa: E402
from unity_ir.pcg.optimizer import Optimizer  # noqa: E402
from unity_ir.tools import unity_opt  # noqa: E402


@pytest.fixture(autouse=True)
def _wide() -> Generator[None]:
    with jax.enable_x64(True):
        yield


def operators(imported: ImportedLoss) -> set[str]:
    return {n.op for n in imported.graph.nodes() if n.is_compute}


def check(loss: Callable[..., Any], arguments: tuple[Any, ...], close: float = 1e-12) -> ImportedLoss:
    """Import, compare with JAX, and see that the text reads back."""
    imported = from_jax(loss, arguments)
    assert imported.trace is not None
    graph = differentiate(imported.graph, Optimizer())
    batch = {input_name(leaf): np.asarray(leaf.array) for leaf in imported.trace.batch}
    inputs = {n.name for n in graph.inputs}
    given = {n: x for n, x in batch.items() if n in inputs} | {n: x.numpy() for n, x in imported.tables.items()}
    values = interpret(graph, given, {n: w.numpy() for n, w in imported.weights.items()})
    arrays = jax.tree.map(jnp.asarray, arguments)
    reference = jax.value_and_grad(lambda *a: jax.tree.leaves(loss(*a))[0], allow_int=True)
    want, wanted = jax.jit(reference)(*arrays)
    np.testing.assert_allclose(values[graph.outputs[0]], want, rtol=close, atol=close)
    found = {u.weight.node.name: values[u.grad] for u in graph.updates}
    for leaf, gradient in zip(imported.trace.weights, jax.tree.leaves(wanted), strict=True):
        for at, name in enumerate(leaf.names):
            part = gradient[at] if leaf.stacked else gradient
            if name in found:
                np.testing.assert_allclose(found.pop(name).reshape(part.shape), part, rtol=0, atol=close, err_msg=name)
            else:
                assert part.dtype == jax.dtypes.float0 or not np.any(part), name
    assert not found
    func = from_graph(imported.graph)
    func.verify()
    assert to_graph(func) == imported.graph
    return imported


KNOWN = {
    "perceptron": {"matmul", "add", "relu", "cross_entropy", "neg"},
    "gpt": {"matmul", "split_heads", "add", "layer_norm", "split", "attention", "merge_heads", "gelu_tanh", "neg"}
    | {"embedding", "matmul_nt", "cross_entropy"},
    "flax_attention": {"reshape", "matmul", "add", "transpose", "scale", "attention", "merge_heads", "square"}
    | {"reduce_mean"},
}
"""All operators that these become; others could be one where they are several."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_jax_does(name: str):
    # JAX's own attention has its softmax in float32.
    imported = check(*MODELS[name](), close=1e-6 if name == "llama" else 1e-12)
    assert operators(imported) == KNOWN.get(name, operators(imported))
    if name == "llama":
        assert {"attention", "rms_norm", "silu", "cross_entropy"} < operators(imported)
        assert "softmax" not in operators(imported)


def test_weights_have_the_names_of_their_paths():
    def loss(weights: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w["kernel"]), None), x, weights["layers"])
        return jnp.sum(y @ weights["head"][0]) + 0 * jnp.sum(weights["unused"])

    weights = {"layers": {"kernel": normal(3, 4, 4)}, "head": [normal(4, 2)], "unused": normal(2)}
    imported = check(loss, (weights, normal(2, 4)))
    assert {*imported.weights} == {"layers.kernel.0", "layers.kernel.1", "layers.kernel.2", "head.0", "unused"}
    assert [n.name for n in imported.graph.inputs] == ["x"]


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": 0, "y": 0}, {"x", "y"}),
        ((0, 0), {"batch_0", "batch_1"}),
        (0, {"batch"}),
        ({"in": 0, "a-b": [0]}, {"input_in", "a_b_0"}),
    ],
)
def test_names_of_inputs(batch: Any, names: set[str]):
    def loss(weights: Any, batch: Any) -> Any:
        return sum(jnp.sum(weights * x) for x in jax.tree.leaves(batch))

    batch = jax.tree.map(lambda _: normal(3), batch)
    assert {n.name for n in check(loss, (normal(3), batch)).graph.inputs} == names


def test_several_arguments_and_other_results():
    def loss(weights: Any, x: Any, targets: Any) -> Any:
        y = x @ weights
        return jnp.mean((y - targets["y"]) ** 2), {"prediction": y}

    imported = check(loss, (normal(3, 2), normal(4, 3), {"y": normal(4, 2)}))
    assert {n.name for n in imported.graph.inputs} == {"x", "targets_y"}


def test_shapes_are_enough():
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(x @ weights["w"])

    arguments = ({"w": jax.ShapeDtypeStruct((3, 2), "float32")}, jax.ShapeDtypeStruct((4, 3), "float32"))
    imported = from_jax(loss, arguments)
    assert imported.weights["w"].is_meta
    assert str(imported.graph.inputs[0].result.type) == "tensor<[4, 3], f32>" or imported.graph.inputs[0].result.shape


def test_stop_gradient_and_known_values():
    def loss(weights: Any, x: Any) -> Any:
        positions = jnp.sin(jnp.arange(4.0)) + jax.random.normal(jax.random.key(3), (4,))
        y = x * weights + positions
        rounded = y + lax.stop_gradient(jnp.round(y) - y)
        return jnp.sum(rounded * jnp.where(jnp.arange(4) % 2 == 0, 1.0, -1.0))

    imported = check(loss, (normal(4), normal(4)))
    assert not {"sin", "floor"} & {n.op for n in imported.graph.nodes() if not n.operands}


def test_loops_and_branches_that_are_known():
    def loss(weights: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            i, y = carry
            return i + 1, jnp.tanh(y @ weights)

        _, y = lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))
        y = lax.fori_loop(0, 2, lambda i, h: h * (1 + i), y)
        return jnp.sum(lax.cond(True, jnp.sin, jnp.cos, y))

    imported = from_jax(loss, (normal(3, 3), normal(2, 3)))
    assert sum(n.op == "matmul" for n in imported.graph.nodes()) == 3
    assert "cos" not in operators(imported)


def test_keys_of_the_batch_draw_new_numbers():
    def loss(weights: Any, x: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        kept = jax.random.bernoulli(first, 0.8, x.shape)
        y = jnp.where(kept, x @ weights / 0.8, 0.0) + 0.1 * jax.random.normal(second, x.shape)
        return jnp.mean(y**2)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        imported = from_jax(loss, (normal(4, 4), normal(8, 4), key))
        assert [n.name for n in imported.graph.inputs] == ["x"]
        assert imported.tables == {}


def test_gradients_of_their_own():
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    @jax.custom_jvp
    def safe_log(x: Any) -> Any:
        return jnp.log(x * x + 1)

    @safe_log.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return safe_log(x), 2 * x / (x * x + 1) * t

    check(lambda weights, x: jnp.sum(safe_log(weights * x)), (normal(4), normal(4)))
    with pytest.raises(UnityError, match="its own gradient is not that of what it computes; write it with"):
        from_jax(lambda weights, x: jnp.sum(clipped(weights * x)), (normal(4), normal(4)))


def test_experts_and_segments_by_scatter():
    def loss(weights: Any, x: Any, ids: Any) -> Any:
        counts = jnp.zeros((5, 3), x.dtype).at[ids].add(x * weights)
        return jnp.sum(counts.at[ids, 1].set(2.0) ** 2) + jnp.sum(counts[ids, jnp.argmax(x, -1)])

    check(loss, (normal(3), normal(4, 3), np.array([4, 0, 2, 3])))


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda w, x: x @ w, "returns float64[4,2]; it must return a scalar loss, or (loss, other)"),
    (lambda w, x: jnp.sum(jnp.fft.fft(x @ w).real), "fft: no mapping (test/unit/frontends/test_jax.py:"),
    (lambda w, x: jnp.sum(jnp.where(x[0, 0] > 0, w, 0)) if x[0, 0] > 0 else 0.0, "tracing lambda failed"),
    (lambda w, x: jnp.sum(lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, w)), "the branch depends on data"),
    (lambda w, x: jnp.sum(lax.fori_loop(0, x.shape[0], lambda i, h: h, w)), ""),
    (
        lambda w, x: lax.while_loop(lambda h: jnp.sum(h) < 9, lambda h: 2 * h, jnp.sum(w * w)),
        "how often it is run depends on data",
    ),
    (lambda w, x: jnp.sum(lax.psum(w, "i")), "tracing"),
    (lambda w, x: jnp.sum(x), "no trained parameter reaches the loss"),
]


@pytest.mark.parametrize(("loss", "message"), REFUSED)
def test_refused(loss: Callable[..., Any], message: str):
    if not message:
        from_jax(loss, (normal(3, 2), normal(4, 3)))
        return
    with pytest.raises(UnityError) as error:
        from_jax(loss, (normal(3, 2), normal(4, 3)))
    assert str(error.value).startswith("--from-jax: ")
    assert message in str(error.value)


def test_all_causes_are_named_at_once():
    def loss(weights: Any, x: Any) -> Any:
        y = lax.erf_inv(x.T @ x + weights.T @ weights)
        return jnp.sum(jnp.fft.fft(y).real) + lax.cond(x[0, 0] > 0, jnp.sum, jnp.max, y)

    with pytest.raises(UnityError) as error:
        from_jax(loss, (normal(3, 3), normal(4, 3)))
    first, *causes = str(error.value).splitlines()
    assert first == "--from-jax: loss cannot be imported, for 3 causes:"
    assert [cause.split(":")[0].strip() for cause in causes] == ["erf_inv", "fft", "cond"]
    assert all("test_jax.py:" in cause for cause in causes)


MODULE = """
import jax.numpy as jnp, numpy as np
def loss(weights, batch):
    return jnp.mean((batch["x"] @ weights["w"] - batch["y"]) ** 2)
def made():
    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}
    return loss, ({"w": np.ones((4, 2), np.float32)}, batch)
def other():
    return loss
"""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "losses_of_jax.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["--from-jax=losses_of_jax:made", "--weights-out=w.safetensors", "--search=fsdp", "--machine=2gpu"]
    assert unity_opt.main([*argv, "-o", "plan.pcg"]) == 0
    assert 'pcg.weight "w"' in (tmp_path / "plan.pcg").read_text()
    assert (tmp_path / "w.safetensors").exists()
    assert unity_opt.main(["--from-jax=losses_of_jax:other"]) == 1
    assert (
        "losses_of_jax:other() returned function; it must return (loss, (weights, batch, ..))"
        in capsys.readouterr().err
    )


def test_ids_are_not_made_positive():
    def loss(weights: Any, batch: Any) -> Any:
        x = weights["table"][batch["ids"]] + jnp.take(weights["table"], batch["ids"], axis=0)
        return jnp.mean(x[jnp.arange(6), batch["column"]])

    batch = {"ids": tokens(6, below=5), "column": tokens(6, below=4)}
    assert "lt" not in operators(check(loss, ({"table": normal(5, 4)}, batch)))

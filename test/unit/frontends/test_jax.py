"""Imported losses of JAX compute what JAX does: the loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax_models import MODELS, RANDOM, normal, tokens  # noqa: E402

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


@pytest.mark.sampled(2)
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


def test_own_gradients_are_compared_in_a_folder_called_jax():
    source = "def negated(x):\n    return x\n"
    names: dict[str, Any] = {}
    exec(compile(source, "/home/user/jax/losses.py", "exec"), names)
    negated = jax.custom_vjp(names["negated"])
    negated.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    with pytest.raises(UnityError, match="its own gradient is not that of what it computes"):
        from_jax(lambda weights, x: jnp.sum(negated(weights * x)), (normal(4), normal(4)))


def test_experts_and_segments_by_scatter():
    def loss(weights: Any, x: Any, ids: Any) -> Any:
        counts = jnp.zeros((5, 3), x.dtype).at[ids].add(x * weights)
        return jnp.sum(counts.at[ids, 1].set(2.0) ** 2) + jnp.sum(counts[ids, jnp.argmax(x, -1)])

    check(loss, (normal(3), normal(4, 3), np.array([4, 0, 2, 3])))


def weighted(y: Any) -> Any:
    """Return a number that depends on every element of `y` in its own way."""
    return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.size).reshape(y.shape)))


def keep(x: Any) -> Any:
    return jnp.mean(x, -1, keepdims=True)


NORMS: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum without gradient": lambda h, p: jnp.exp(h) / lax.stop_gradient(jnp.sum(jnp.exp(h), -1, keepdims=True)),
    "log without gradient": lambda h, p: h - lax.stop_gradient(jnp.log(jnp.sum(jnp.exp(h), -1, keepdims=True))),
    "mean without gradient": lambda h, p: (
        (h - lax.stop_gradient(keep(h))) / jnp.sqrt(keep((h - lax.stop_gradient(keep(h))) ** 2) + 1e-5) * p["w"]
        + p["b"]
    ),
    "variance without gradient": lambda h, p: (
        (h - keep(h)) / jnp.sqrt(lax.stop_gradient(keep((h - keep(h)) ** 2)) + 1e-5) * p["w"] + p["b"]
    ),
    "mean square without gradient": lambda h, p: h * lax.rsqrt(lax.stop_gradient(keep(jnp.square(h))) + 1e-5) * p["w"],
    "mean along columns": lambda h, p: (
        (h - jnp.mean(h, -1)) / jnp.sqrt(keep((h - jnp.mean(h, -1)) ** 2) + 1e-5) * p["w"] + p["b"]
    ),
    "variance along columns": lambda h, p: (
        (h - keep(h)) / jnp.sqrt(jnp.mean((h - keep(h)) ** 2, -1) + 1e-5) * p["w"] + p["b"]
    ),
    "mean square along columns": lambda h, p: h * lax.rsqrt(jnp.mean(jnp.square(h), -1) + 1e-5) * p["w"],
    "times the root": lambda h, p: (h - keep(h)) * jnp.sqrt(keep((h - keep(h)) ** 2) + 1e-5) * p["w"] + p["b"],
}
"""What is nearly a norm or a softmax."""

OF_DIFFERENCES = ("mean without gradient", "mean along columns")
"""Those that are RMS norms of what is left of a mean, and nearly layer norms."""


@pytest.mark.parametrize("name", NORMS)
def test_near_misses_of_norms(name: str):
    weights = {"m": normal(4, 4), "w": 1 + normal(4), "b": normal(4)}
    found = operators(check(lambda w, x: weighted(NORMS[name](x @ w["m"], w)), (weights, normal(4, 4)), close=1e-10))
    wanted = {"rms_norm"} if name in OF_DIFFERENCES else set[str]()
    assert found & {"softmax", "log_softmax", "layer_norm", "rms_norm"} == wanted


def test_cross_entropy_without_gradient_of_its_sum():
    def loss(weights: Any, x: Any, ids: Any) -> Any:
        scores = x @ weights
        logs = jnp.log(lax.stop_gradient(jnp.sum(jnp.exp(scores), -1)))
        return jnp.mean(logs - jnp.take_along_axis(scores, ids[:, None], -1)[:, 0])

    check(loss, (normal(4, 6), normal(5, 4), tokens(5, below=6)))


def test_cross_entropy_as_optax_has_it():
    def loss(weights: Any, x: Any, ids: Any) -> Any:
        scores = x @ weights
        picked = jnp.take_along_axis(scores, ids[:, None], -1).take(0, axis=-1)
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - picked)

    assert operators(check(loss, (normal(4, 6), normal(5, 4), tokens(5, below=6)))) == {"matmul", "cross_entropy"}


def test_queries_that_see_no_key():
    mask = np.tril(np.ones((4, 4), bool), -1)

    def loss(weights: Any, x: Any, mask: Any) -> Any:
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, weights[n]) for n in "qkv")
        known = jax.nn.dot_product_attention(q, k, v, mask=np.tril(np.ones((1, 1, 4, 4), bool), -1))
        return weighted(known + jax.nn.dot_product_attention(q, k, v, mask=mask[None, None]))

    weights = {"q": normal(8, 4, 2), "k": normal(8, 2, 2), "v": normal(8, 2, 2)}
    check(loss, (weights, normal(2, 4, 8), mask), close=1e-4)


INDEXED: Mapping[str, Callable[[Any, Any], Any]] = {
    "filled": lambda w, i: w["a"].at[i + 2].get(mode="fill", fill_value=7.0),
    "filled at known places": lambda w, i: w["a"].at[np.array([0, 9])].get(mode="fill", fill_value=7.0) * i[0],
    "clipped sum": lambda w, i: w["a"].at[i + 2].add(w["b"][:2], mode="clip"),
    "windows of samples": lambda w, i: jax.vmap(lambda a, b: lax.dynamic_slice(a, (b, 0), (2, 5)))(w["a"][:2], i),
    "rows of a table": lambda w, i: jax.vmap(lambda b: lax.dynamic_slice(w["a"][0], (b, 0), (1, 5)))(i),
    "every other": lambda w, i: w["a"].at[1:, ::2].set(w["b"][:2, :2]) * i[0],
    "a window and a position": lambda w, i: w["a"].at[:, i[0], 1:3].add(w["b"][:, 0, :2]),
    "difference": lambda w, i: w["a"].at[:, i].subtract(w["b"][:, :2]),
    "products": lambda w, i: w["a"].at[:, 1].multiply(w["b"][:, 0], unique_indices=True) * i[0],
    "maxima": lambda w, i: w["a"].at[:, np.array([3, 1])].max(w["b"][:, :2]) * i[0],
    "median": lambda w, i: jnp.median(w["a"], axis=0) * i[0],
}


@pytest.mark.parametrize("name", INDEXED)
def test_gathers_and_scatters(name: str):
    weights = {"a": 2 + normal(3, 4, 5), "b": 2 + normal(3, 4, 5)}
    check(lambda w, i: weighted(INDEXED[name](w, i)), (weights, np.array([2, 0])), close=1e-10)


def test_positions_out_of_range():
    for function in (
        lambda w, x: jnp.sum(jnp.take(w, np.array([0, 9]), axis=0) * x),
        lambda w, x: jnp.sum(w.at[np.array([0, 9])].add(x)),
    ):
        with pytest.raises(UnityError, match="position 9 is out of range of dim 0, which has 3"):
            from_jax(function, (normal(3), np.array(2.0)))


SMALL: Mapping[str, Callable[[Any, Any], Any]] = {
    "stack and tile": lambda w, x: jnp.tile(jnp.stack([w, w * x], 1), (2, 1, 1)),
    "sum of all products": lambda w, x: jnp.vdot(w, w) * w + w[0] @ w[1],
    "scan over numbers": lambda w, x: lax.scan(lambda h, i: (h * w[i], None), w[0], jnp.arange(3) % 2)[0],
    "branches by position": lambda w, x: lax.scan(
        lambda h, i: (lax.switch(i, [jnp.sin, jnp.cos], h), None), w, jnp.arange(3) % 2
    )[0],
    "maxima of truth values": lambda w, x: w * jnp.max(x > 0, axis=-1) * jnp.min(w > 0, axis=0),
    "log-softmax of a part": lambda w, x: jnp.where(
        np.arange(4) < 2, jax.nn.log_softmax(w, where=np.arange(4) < 2), 0.0
    ),
    "slopes that are weights": lambda w, x: jax.nn.leaky_relu(w * x[0], w[0, 0]) + jax.nn.elu(w, w[0, 1]),
    "moved": lambda w, x: jax.device_put(w) * x[0],
    "windows of all dims": lambda w, x: lax.reduce_window(w, 0.0, lax.add, (2, 2), (1, 2), "VALID"),
    "dilated windows": lambda w, x: lax.reduce_window(w, 0.0, lax.add, (1, 2), (1, 1), "SAME", None, (1, 2)),
    "windows of three dims": lambda w, x: lax.reduce_window(
        x[0] * w.reshape(1, 2, 2, 3, 1), 0.0, lax.add, (1, 2, 2, 2, 1), (1, 1, 1, 1, 1), "SAME"
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_primitives(name: str):
    check(lambda w, x: weighted(SMALL[name](w, x)), (normal(3, 4), normal(4)), close=1e-10)


def test_what_is_only_printed():
    def loss(weights: Any, x: Any) -> Any:
        jax.debug.print("{}", weights[0])
        return jnp.sum(weights * x)

    imported = from_jax(loss, (normal(4), normal(4)))
    assert operators(imported) == {"mul", "reduce_sum"}


def test_integers_among_the_weights_are_constants():
    def loss(weights: Any, x: Any) -> Any:
        y = jnp.where(weights["mask"], x @ weights["m"], 0.0) * weights["factors"]
        return weighted(y[:, weights["order"]])

    weights = {"m": normal(4, 4), "mask": np.array([True, False, True, True]), "factors": np.arange(4)}
    weights["order"] = np.array([3, 1])
    check(loss, (weights, normal(2, 4)))
    shapes = weights | {"factors": jax.ShapeDtypeStruct((4,), "int32")}
    with pytest.raises(UnityError, match="factors of the weights is int32: a constant; give its values"):
        from_jax(loss, (shapes, normal(2, 4)))
    keyed = weights | {"key": jax.random.key(0)}
    with pytest.raises(UnityError, match="key of the weights is a key of random numbers; give it with the batch"):
        from_jax(loss, (keyed, normal(2, 4)))


def sorted_by_two(w: Any, x: Any) -> Any:
    """The first key has equal elements, among which the second decides."""
    _, *others = lax.sort((jnp.round(x), w * x, w), num_keys=2, dimension=1)
    return jnp.sum(others[0] * x) + jnp.sum(others[1] ** 3 * x)


OF_ONE_OPERAND = {
    "sort_of_several_keys": sorted_by_two,
    "lexsort": lambda w, x: jnp.sum((w**3)[0][jnp.lexsort((x[1], jnp.round(x[0])))] * x[0]),
    "cummax": lambda w, x: jnp.sum(lax.cummax(w * x, axis=1) * x**2),
    "cummax_reverse": lambda w, x: jnp.sum(lax.cummax(w * x, axis=0, reverse=True) * x**2),
    "cummin": lambda w, x: jnp.sum(lax.cummin(w * x, axis=1) * x**2),
    "cumlogsumexp": lambda w, x: jnp.sum(lax.cumlogsumexp(w * x, axis=1) * x**2),
    "erf_inv": lambda w, x: jnp.sum(lax.erf_inv(jnp.tanh(w * x * 1.5)) * x**2),
}


@pytest.mark.parametrize("name", OF_ONE_OPERAND)
def test_primitives_compute_what_jax_does(name: str):
    check(OF_ONE_OPERAND[name], (normal(5, 11), normal(5, 11)), close=1e-9)


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-10), ("float32", 1e-6), ("bfloat16", 1e-2)])
def test_the_inverse_of_erf_in_every_precision(dtype: str, close: float):
    of = from_jax(lambda w, x: jnp.sum(lax.erf_inv(x + w)), (np.zeros((), dtype), np.zeros((), dtype))).graph
    for x in (0, 1e-9, -0.3, 0.5, 0.99, -0.9999, 1, -1):
        with np.errstate(divide="ignore", invalid="ignore"):
            values = interpret(of, {"x": np.asarray(x, dtype)}, {"weight": np.zeros((), dtype)})
        want = lax.erf_inv(jnp.asarray(x, dtype))
        np.testing.assert_allclose(values[of.outputs[0]].astype(float), np.asarray(want, float), rtol=close)


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
    (lambda w, x: jnp.sum(lax.digamma(x @ w)), "  digamma: no mapping (test/unit/frontends/test_jax.py:"),
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
        y = lax.digamma(x.T @ x + weights.T @ weights)
        return jnp.sum(jnp.fft.fft(y).real) + lax.cond(x[0, 0] > 0, jnp.sum, jnp.max, y)

    with pytest.raises(UnityError) as error:
        from_jax(loss, (normal(3, 3), normal(4, 3)))
    first, *causes = str(error.value).splitlines()
    assert first == "--from-jax: loss cannot be imported, for 3 causes:"
    assert [cause.split(":")[0].strip() for cause in causes] == ["digamma", "fft", "cond"]
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


def test_bytes_of_images():
    """Integers of 8 bits are held in 32: they may be moved and converted, but not computed with."""

    def loss(weights: Any, batch: Any) -> Any:
        x = batch["image"][:, ::-1].reshape(4, -1).astype(weights["w"].dtype) / 255 - batch["mean"]
        return jnp.mean(x @ weights["w"])

    image = RANDOM.integers(0, 256, (4, 3, 5)).astype(np.uint8)
    batch = {"image": image, "mean": np.arange(15, dtype=np.int8)}
    imported = check(loss, ({"w": normal(15, 2)}, batch))
    assert {n.name: n.result.type.dtype for n in imported.graph.inputs if n.name in batch} == dict.fromkeys(
        batch, "i32"
    )
    with pytest.raises(UnityError, match="add: integers of 8 or 16 bits, or without a sign, wrap around; convert"):
        from_jax(lambda w, x: jnp.sum(w * (x + 1)), (normal(5), image[0, 0]))


@pytest.mark.slow
def test_losses_in_bf16_are_recognised_as_others():
    """Weights that are cast before a scan are one for each layer, too, and sums that JAX makes in float32 are sums."""
    loss, (weights, batch) = MODELS["gpt"]()
    weights = jax.tree.map(lambda x: np.asarray(x, np.float32), weights)

    def half(weights: Any, batch: Any) -> Any:
        return loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights), batch).astype(jnp.float32)

    imported = from_jax(half, (weights, batch))
    assert {"attention", "cross_entropy"} < operators(imported)
    assert not {"slice", "softmax", "exp"} & operators(imported)
    assert "blocks.qkv.1" in imported.weights


def test_ids_are_not_made_positive():
    def loss(weights: Any, batch: Any) -> Any:
        x = weights["table"][batch["ids"]] + jnp.take(weights["table"], batch["ids"], axis=0)
        return jnp.mean(x[jnp.arange(6), batch["column"]])

    batch = {"ids": tokens(6, below=5), "column": tokens(6, below=4)}
    assert "lt" not in operators(check(loss, ({"table": normal(5, 4)}, batch)))

"""What model builders share: operators on values, and weights by full name."""

from __future__ import annotations

from unity_ir.ops import operator
from unity_ir.pcg.graph import Graph, Node, Value, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.syntax import AttrValue


class Builder:
    """Builds one serial graph; float tensors have element type `dtype`."""

    def __init__(self, name: str, dtype: str = "f32"):
        self.name = name
        self.dtype = dtype
        self._inputs: list[Node] = []

    def input(self, name: str, *shape: int, dtype: str | None = None) -> Value:
        """An argument of the step."""
        node = leaf("input", tensor_type(shape, dtype or self.dtype), name=name)
        self._inputs.append(node)
        return node.result

    def weight(self, name: str, *shape: int) -> Value:
        """A parameter by its full name."""
        return leaf("weight", tensor_type(shape, self.dtype), name=name).result

    def op(self, name: str, *operands: Value, **attributes: AttrValue) -> Value:
        """An operator of one result."""
        result = operator(name).one(*operands, **attributes)
        assert isinstance(result, Value)
        return result

    def results(self, name: str, *operands: Value, **attributes: AttrValue) -> list[Value]:
        """All the results of an operator."""
        return [v for v in operator(name)(*operands, **attributes) if isinstance(v, Value)]

    def zeros(self, *shape: int) -> Value:
        """A constant."""
        return leaf("constant", tensor_type(shape, self.dtype), value=0.0).result

    def split(self, x: Value, dim: int, sizes: tuple[int, ...]) -> list[Value]:
        """Neighbouring parts of a value along a dim."""
        return self.results("split", x, dim=dim, sizes=sizes)

    def linear(self, x: Value, name: str, size: int, bias: bool = True) -> Value:
        """`x @ weight + bias`; weights are `name.weight` [in, out] and `name.bias` [out]."""
        y = self.op("matmul", x, self.weight(f"{name}.weight", x.shape[-1], size))
        return self.op("add", y, self.weight(f"{name}.bias", size)) if bias else y

    def layer_norm(self, x: Value, name: str, eps: float = 1e-5) -> Value:
        """Layer normalisation of the last dim; weights are `name.weight` and `name.bias`."""
        size = x.shape[-1]
        weight, bias = self.weight(f"{name}.weight", size), self.weight(f"{name}.bias", size)
        return self.op("layer_norm", x, weight, bias, eps=eps)

    def attention(
        self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, causal: bool, rotary: float = 0
    ) -> Value:
        """
        Attention of [batch, sequence, size] values over heads; `rotary` is the base of rotary embedding, 0 for none.
        """
        q, k, v = (self.op("split_heads", x, heads=n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        if rotary:
            q, k = (self.op("rotary", x, base=rotary) for x in (q, k))
        scale = q.shape[-1] ** -0.5
        return self.op("merge_heads", self.op("attention", q, k, v, scale=scale, causal=int(causal)))

    def vocabulary_parallel_cross_entropy(self, logits: Value, labels: Value, parts: int) -> Value:
        """
        The mean cross-entropy of logits [.., classes] against class ids [..], whose classes can be divided by `parts`.

        The maximum only keeps exponentials in range; it has no influence on the value, so it carries no gradient.
        """
        largest = self.op("max_of_parts", self.op("detach", logits), parts=parts)
        shift = self.op("reduce_max", largest, dim=len(labels.shape))
        total = self.op("add", self.op("log", self.op("sum_exp", logits, shift)), shift)
        losses = self.op("sub", total, self.op("class_score", logits, labels))
        return self.op("reduce_mean", losses, dim=0, count=len(labels.shape))

    def graph(self, *outputs: Value) -> Graph:
        """The graph with these outputs, the loss first."""
        return Graph(self.name, tuple(self._inputs), outputs)

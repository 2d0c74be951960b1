"""Base class of model builders: operators on values, and weights by full name."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.ops import operator
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.syntax import AttrValue


class Builder:
    """
    Base class of model builders. One object builds one serial graph, called `name`; its floating point inputs and
    weights have element type `dtype`.
    """

    def __init__(self, name: str, dtype: str = "f32"):
        self.name = name
        self.dtype = dtype
        self._inputs: list[Node] = []

    def input(self, name: str, *shape: int, dtype: str | None = None) -> Value:
        """
        Add an input of this name and shape to the graph, and return its value. Its element type `dtype` is by default
        the builder's. Inputs keep the order in which they are added.
        """
        node = leaf("input", tensor_type(shape, dtype or self.dtype), name=name)
        self._inputs.append(node)
        return node.result

    def weight(self, name: str, *shape: int) -> Value:
        """Return the weight with this full name and shape; the same name and shape give the same weight."""
        return leaf("weight", tensor_type(shape, self.dtype), name=name).result

    def op(self, name: str, *operands: Value, **attributes: AttrValue) -> Value:
        """
        Apply the graph operator called `name`, which has one result, to operands; return that result. Raises
        `UnityError` for an unknown operator, and where operands or attributes do not fit.
        """
        result = operator(name).one(*operands, **attributes)
        assert isinstance(result, Value)
        return result

    def results(self, name: str, *operands: Value, **attributes: AttrValue) -> list[Value]:
        """
        Apply the graph operator called `name` to operands; return all its results, in order. Raises `UnityError` for an
        unknown operator, and where operands or attributes do not fit.
        """
        return [v for v in operator(name)(*operands, **attributes) if isinstance(v, Value)]

    def full(self, value: float, *shape: int) -> Value:
        """Return a constant of this shape that is `value` everywhere."""
        return leaf("constant", tensor_type(shape, self.dtype), value=value).result

    def split(self, x: Value, dim: int, sizes: tuple[int, ...]) -> list[Value]:
        """
        Return consecutive slices of `x` along dim number `dim`, of the sizes `sizes`, which must sum to the dim's.
        """
        return self.results("split", x, dim=dim, sizes=sizes)

    def linear(self, x: Value, name: str, size: int, bias: bool = True) -> Value:
        """
        Return `x @ weight + bias` [.., size] for `x` [.., in]; weights are called `{name}.weight` [in, size] and, with
        `bias`, `{name}.bias` [size].
        """
        y = self.op("matmul", x, self.weight(f"{name}.weight", x.shape[-1], size))
        return self.op("add", y, self.weight(f"{name}.bias", size)) if bias else y

    def low_rank(self, x: Value, y: Value, name: str, rank: int) -> Value:
        """
        Return `y` [.., size], what a linear layer makes of `x` [.., in], plus that of its adapter of this rank, 2 x A B
        (LoRA, Hu et al. 2021, with alpha = 2 rank); weights are called `{name}.lora_A.weight` [in, rank] and
        `{name}.lora_B.weight` [rank, size]. With rank 0 there is no adapter.
        """
        if not rank:
            return y
        down = self.linear(x, f"{name}.lora_A", rank, bias=False)
        return self.op("add", y, self.op("scale", self.linear(down, f"{name}.lora_B", y.shape[-1], bias=False), by=2.0))

    def layer_norm(self, x: Value, name: str, eps: float = 1e-5) -> Value:
        """
        Return the layer normalisation of `x` over its last dim; the weights, of the size of that dim, are called
        `{name}.weight` and `{name}.bias`.
        """
        size = x.shape[-1]
        weight, bias = self.weight(f"{name}.weight", size), self.weight(f"{name}.bias", size)
        return self.op("layer_norm", x, weight, bias, eps=eps)

    def documents(self, tokens: Value, separator: int, vocabulary: int) -> list[Value] | None:
        """
        Return what `attention` needs to know of samples packed of documents, each of which ends with the token
        `separator`, under a causal mask (the results of operator `documents`); None if `separator` is -1, which means
        that every sample is one document. Raises `UnityError` for a separator that is no token of the vocabulary.
        """
        if separator >= vocabulary:
            raise UnityError(f"--model: {self.name}: separator is {separator}; it must be a token, below {vocabulary}")
        return None if separator < 0 else self.results("documents", tokens, separator=separator)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        heads: int,
        kv_heads: int,
        causal: bool,
        rotary: float = 0,
        documents: list[Value] | None = None,
    ) -> Value:
        """
        Apply multi-head attention, with a causal mask if `causal`, to queries, keys and values [batch, sequence, size];
        return [batch, sequence, size].

        Queries have `heads` heads; keys and values have `kv_heads`, each shared by a group of query heads. `rotary` is
        the base of rotary position embedding, 0 for none. With `documents`, the three results of operator `documents`,
        positions count from the beginning of each document, and a query sees no other document; the mask is theirs.
        """
        q, k, v = (self.op("split_heads", x, heads=n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        if rotary:
            q, k = (self.rotary(x, rotary, documents) for x in (q, k))
        return self.attend(q, k, v, causal, documents)

    def rotary(self, x: Value, base: float, documents: list[Value] | None = None) -> Value:
        """
        Return `x` [batch, heads, sequence, size] with rotary position embedding of this base; with `documents`, the
        results of operator `documents`, positions count from the beginning of each document.
        """
        return (
            self.op("rotary", x, base=base) if documents is None else self.op("rotary_at", x, documents[2], base=base)
        )

    def attend(self, q: Value, k: Value, v: Value, causal: bool, documents: list[Value] | None = None) -> Value:
        """
        Return the attention of queries, keys and values [batch, heads, sequence, size], merged, [batch, sequence, heads
        x size]; causal if `causal`, or within `documents`, the results of operator `documents`.
        """
        scale = q.shape[-1] ** -0.5
        if documents is None:
            return self.op("merge_heads", self.op("attention", q, k, v, scale=scale, causal=int(causal)))
        first, end, _ = documents
        past = int(documents[0].node.attribute("causal"))
        return self.op("merge_heads", self.op("attention_ranges", q, k, v, first, end, scale=scale, causal=past))

    def gated_mlp(self, x: Value, name: str, intermediate: int) -> Value:
        """
        Return the gated MLP of `x` [.., hidden], [.., hidden], of width `intermediate`; its weights are called
        `{name}.gate_proj.weight`, `up_proj` and `down_proj`.
        """
        gate = self.op("silu", self.linear(x, f"{name}.gate_proj", intermediate, bias=False))
        h = self.op("mul", gate, self.linear(x, f"{name}.up_proj", intermediate, bias=False))
        return self.linear(h, f"{name}.down_proj", x.shape[-1], bias=False)

    def vocabulary_parallel_cross_entropy(self, logits: Value, labels: Value, parts: int) -> Value:
        """
        Return the mean cross-entropy of logits [.., classes] with class ids [..], built so that the classes can be
        sharded `parts` ways (Megatron-LM).

        The maximum of the logits is subtracted to keep exponentials in range; the loss does not depend on it, so no
        gradient flows through it.
        """
        largest = self.op("max_of_parts", self.op("detach", logits), parts=parts)
        shift = self.op("reduce_max", largest, dim=len(labels.shape))
        total = self.op("add", self.op("log", self.op("sum_exp", logits, shift)), shift)
        losses = self.op("sub", total, self.op("class_score", logits, labels))
        return self.op("reduce_mean", losses, dim=0, count=len(labels.shape))

    def graph(self, *outputs: Value) -> Graph:
        """
        Return the finished graph, with these outputs, the loss first; its inputs are in the order in which they were
        added.
        """
        return Graph(self.name, tuple(self._inputs), outputs)

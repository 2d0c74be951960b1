"""A mixture of experts: decoder with top-k routed gated MLPs, densely or sparsely; Mixtral's shape (Jiang, 2024)."""

from unity_ir.errors import UnityError
from unity_ir.models.builder import Builder
from unity_ir.models.experts import Mixture, chosen_experts, chosen_shares
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value


def build(
    batch: int = 1,
    sequence: int = 4096,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    intermediate: int = 14336,
    experts: int = 8,
    chosen: int = 2,
    vocabulary: int = 32000,
    separator: int = -1,
    dispatch: str = "dense",
    capacity: int = 0,
    group: int = 0,
    balance: int = 0,
) -> Graph:
    """
    Build a mixture-of-experts decoder up to its cross-entropy loss; each token goes to the `chosen` of `experts`
    experts of largest gate, whose gates are scaled to sum to 1. Inputs are ids [batch, sequence]: `tokens`, and
    `labels`, the next tokens.

    `kv_heads` are the heads of keys and values, `intermediate` is the width of an expert. With `dispatch="dense"`,
    every expert computes every token, and results of experts not chosen get weight 0: the experts are batched products
    over the expert dim, and take `experts / chosen` times the FLOPs of a sparse dispatch. With `dispatch="sparse"`,
    each token is computed by its experts only: the rows of a product gather their weights. In either, the expert dim
    can be sharded (expert parallelism), no token is dropped, and weights are the same. With a `separator`, samples are
    packed of documents, each of which ends with this token: attention stays within them.

    With a `capacity`, which is for sparse dispatch, each expert takes this many per cent of an even share of every
    `group` of tokens (0: of a sample's tokens), and no more: others are dropped. Devices that divide the experts then
    exchange tokens (all-to-all). `balance` is the weight of the balance loss of each layer, in ten-thousandths.

    Raises `UnityError` for another dispatch, and for a group that does not divide the tokens.
    """
    if dispatch not in ("dense", "sparse"):
        raise UnityError(f"--model: dispatch is {dispatch!a}; it must be dense or sparse")
    if capacity and dispatch == "dense":
        raise UnityError("--model: a capacity needs dispatch=sparse; with dense, experts compute every token")
    b = Builder("moe")
    tokens, labels = (b.input(name, batch, sequence, dtype="i64") for name in ("tokens", "labels"))
    documents = b.documents(tokens, separator, vocabulary)
    mixture = Mixture.of(b, tokens, capacity, group, balance)
    kv = hidden // heads * kv_heads
    x = b.op("embedding", tokens, b.weight("model.embed_tokens.weight", vocabulary, hidden))
    for i in range(layers):
        name = f"model.layers.{i}"
        h = b.op("rms_norm", x, b.weight(f"{name}.input_layernorm.weight", hidden))
        sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv}
        q, k, v = (b.linear(h, f"{name}.self_attn.{part}", size, bias=False) for part, size in sizes.items())
        h = b.attention(q, k, v, heads, kv_heads, causal=True, rotary=1000000.0, documents=documents)
        x = b.op("add", x, b.linear(h, f"{name}.self_attn.o_proj", hidden, bias=False))
        h = b.op("rms_norm", x, b.weight(f"{name}.post_attention_layernorm.weight", hidden))
        h = b.op("reshape", h, shape=(batch * sequence, hidden))
        name = f"{name}.block_sparse_moe"
        gates = b.op("softmax", b.linear(h, f"{name}.gate", experts, bias=False))
        indices, shares = chosen_shares(b, gates, chosen)
        mixture.balanced(gates, indices)
        if dispatch == "dense":
            h = _experts(b, h, indices, shares, f"{name}.experts", experts, intermediate)
        else:
            parts = "w1", "w3", "w2"
            h = chosen_experts(mixture, h, indices, shares, f"{name}.experts", experts, intermediate, parts)
        x = b.op("add", x, b.op("reshape", h, shape=x.shape))
    x = b.op("rms_norm", x, b.weight("model.norm.weight", hidden))
    loss = b.op("cross_entropy", b.linear(x, "lm_head", vocabulary, bias=False), labels)
    return b.graph(mixture.added_to(loss))


def _experts(b: Builder, x: Value, indices: Value, shares: Value, name: str, experts: int, intermediate: int) -> Value:
    """Return what `chosen_experts` does without a capacity, with every expert computing every token."""
    tokens, hidden = x.shape
    weights = b.op("scatter_add", b.full(0.0, tokens, experts), indices, shares, dim=1)
    weights = b.op("transpose", weights, perm=(1, 0))
    each = b.op("expand", x, dim=0, sizes=(experts,), degrees=(1,))

    def product(x: Value, part: str, size: int) -> Value:
        return b.op("batch_matmul", x, b.weight(f"{name}.{part}.weight", experts, x.shape[-1], size))

    h = b.op("mul", b.op("silu", product(each, "w1", intermediate)), product(each, "w3", intermediate))
    h = b.op("mul", product(h, "w2", hidden), b.op("reshape", weights, shape=(experts, tokens, 1)))
    return b.op("reduce_sum", h, dim=0)

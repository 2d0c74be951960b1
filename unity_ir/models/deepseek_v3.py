"""DeepSeek-V3 (DeepSeek, 2024): decoder with latent attention, 8 of 256 experts and a shared one; no MTP layer."""

from unity_ir.errors import UnityError
from unity_ir.models.builder import Builder
from unity_ir.models.experts import Mixture, chosen_experts, scaled_to_one
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value


def build(
    batch: int = 1,
    sequence: int = 4096,
    layers: int = 61,
    dense_layers: int = 3,
    hidden: int = 7168,
    heads: int = 128,
    head: int = 128,
    rotary: int = 64,
    q_rank: int = 1536,
    kv_rank: int = 512,
    dense_intermediate: int = 18432,
    intermediate: int = 2048,
    experts: int = 256,
    chosen: int = 8,
    groups: int = 8,
    chosen_groups: int = 4,
    vocabulary: int = 129280,
    separator: int = -1,
    capacity: int = 0,
    group: int = 0,
    balance: int = 0,
) -> Graph:
    """
    Build DeepSeek-V3, by default of 671B parameters, up to its cross-entropy loss; weights have the published
    checkpoint's names, those of a layer's experts stacked. Inputs are ids [batch, sequence]: `tokens`, and `labels`,
    the next tokens.

    Queries are made from `q_rank` numbers per token, keys and values from `kv_rank`, and from `rotary` more, which all
    heads share and which carry the position (the two halves are turned; the checkpoint has pairs side by side). `head`
    is the width of the rest of a head's keys, and of its values.

    The first `dense_layers` have an MLP of width `dense_intermediate`. In the others a token goes to the `chosen` of
    `experts` experts of largest score (a sigmoid, plus a bias that no gradient trains and that balances their loads),
    of the `chosen_groups` of `groups` whose two largest scores sum to most (node-limited routing). Its shares are the
    scores without the bias, scaled to sum to 2.5. Experts have width `intermediate`; a shared one is added. With a
    `separator`, samples are packed of documents, each of which ends with this token.

    With a `capacity`, each expert takes this many per cent of an even share of every `group` of tokens (0: of a
    sample's tokens), and no more; without, no token is dropped. `balance` is the weight of the balance loss of each
    layer, in ten-thousandths (the published one is 1).

    Raises `UnityError` where `groups` do not divide the experts, or have too few, and for a `group` that does not
    divide the tokens.
    """
    if experts % groups or experts < 2 * groups or chosen_groups > groups:
        raise UnityError(
            f"--model: deepseek_v3: {experts} experts are not {groups} equal groups of 2 or more, of which"
            f" {chosen_groups} can be chosen"
        )
    if chosen > chosen_groups * (experts // groups):
        raise UnityError(
            f"--model: deepseek_v3: chosen is {chosen}, but {chosen_groups} groups have"
            f" {chosen_groups * (experts // groups)} experts"
        )
    b = Builder("deepseek_v3")
    tokens, labels = (b.input(name, batch, sequence, dtype="i64") for name in ("tokens", "labels"))
    documents = b.documents(tokens, separator, vocabulary)
    mixture = Mixture.of(b, tokens, capacity, group, balance)
    x = b.op("embedding", tokens, b.weight("model.embed_tokens.weight", vocabulary, hidden))
    for i in range(layers):
        name = f"model.layers.{i}"
        h = _norm(b, x, f"{name}.input_layernorm")
        h = _attention(b, h, f"{name}.self_attn", heads, head, rotary, q_rank, kv_rank, documents)
        x = b.op("add", x, h)
        h = _norm(b, x, f"{name}.post_attention_layernorm")
        if i < dense_layers:
            x = b.op("add", x, b.gated_mlp(h, f"{name}.mlp", dense_intermediate))
            continue
        h = b.op("reshape", h, shape=(batch * sequence, hidden))
        scores, indices = _routed(b, h, f"{name}.mlp.gate", experts, chosen, groups, chosen_groups)
        mixture.balanced(scaled_to_one(b, scores), indices)
        shares = b.op("scale", scaled_to_one(b, b.op("gather", scores, indices, dim=1)), by=2.5)
        each = chosen_experts(mixture, h, indices, shares, f"{name}.mlp.experts", experts, intermediate)
        h = b.op("add", each, b.gated_mlp(h, f"{name}.mlp.shared_experts", intermediate))
        x = b.op("add", x, b.op("reshape", h, shape=x.shape))
    x = _norm(b, x, "model.norm")
    loss = b.op("cross_entropy", b.linear(x, "lm_head", vocabulary, bias=False), labels)
    return b.graph(mixture.added_to(loss))


def _norm(b: Builder, x: Value, name: str) -> Value:
    return b.op("rms_norm", x, b.weight(f"{name}.weight", x.shape[-1]), eps=1e-6)


def _attention(
    b: Builder,
    x: Value,
    name: str,
    heads: int,
    head: int,
    rotary: int,
    q_rank: int,
    kv_rank: int,
    documents: list[Value] | None,
) -> Value:
    """Return latent attention of `x` [batch, sequence, hidden], of the same shape."""
    batch, sequence, hidden = x.shape
    q = _norm(b, b.linear(x, f"{name}.q_a_proj", q_rank, bias=False), f"{name}.q_a_layernorm")
    q = b.op("split_heads", b.linear(q, f"{name}.q_b_proj", heads * (head + rotary), bias=False), heads=heads)
    q, turned = b.split(q, 3, (head, rotary))
    q = b.op("concat", q, b.rotary(turned, 10000.0, documents), dim=3)
    latent = b.linear(x, f"{name}.kv_a_proj_with_mqa", kv_rank + rotary, bias=False)
    latent, shared = b.split(latent, 2, (kv_rank, rotary))
    latent = _norm(b, latent, f"{name}.kv_a_layernorm")
    kv = b.op("split_heads", b.linear(latent, f"{name}.kv_b_proj", 2 * heads * head, bias=False), heads=heads)
    k, v = b.split(kv, 3, (head, head))
    shared = b.rotary(b.op("reshape", shared, shape=(batch, 1, sequence, rotary)), 10000.0, documents)
    shared = b.op("reshape", shared, shape=(batch, sequence, rotary))
    shared = b.op("expand", shared, dim=1, sizes=(heads,), degrees=(1,))
    h = b.attend(q, b.op("concat", k, shared, dim=3), v, True, documents)
    return b.linear(h, f"{name}.o_proj", hidden, bias=False)


def _routed(
    b: Builder, x: Value, name: str, experts: int, chosen: int, groups: int, chosen_groups: int
) -> tuple[Value, Value]:
    """Return each token's scores [tokens, experts] and the experts that it goes to [tokens, chosen]."""
    tokens = x.shape[0]
    scores = b.op("sigmoid", b.linear(x, name, experts, bias=False))
    biased = b.op("add", scores, b.weight(f"{name}.e_score_correction_bias", experts))
    biased = b.op("reshape", biased, shape=(tokens, groups, experts // groups))
    best, _ = b.results("topk", biased, k=2)
    _, best_groups = b.results("topk", b.op("reduce_sum", best, dim=2), k=chosen_groups)
    ones = b.full(1.0, tokens, chosen_groups)
    counts = b.op("scatter_add", b.full(0.0, tokens, groups), best_groups, ones, dim=1)
    seen = b.op("reshape", b.op("gt", counts, b.full(0.0, 1)), shape=(tokens, groups, 1))
    left = b.op("reshape", b.op("select", seen, biased, b.full(-1e30, 1)), shape=(tokens, experts))
    _, indices = b.results("topk", left, k=chosen)
    return scores, indices

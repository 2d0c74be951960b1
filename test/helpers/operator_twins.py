"""What operators of the zoo compute, written by hand in PyTorch: `TORCH` by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import window_cases
from operator_cases import DTYPES
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "relu": F.relu, "gelu": F.gelu}


def derivative(function: Callable[[Tensor], Tensor], g: Tensor, x: Tensor) -> Tensor:
    """g times the derivative of `function` at x."""
    at = x.clone().requires_grad_()
    return torch.autograd.grad(function(at), at, g)[0]


def torch_expand(x: Tensor, dim: int, sizes: Sequence[int], degrees: Sequence[int]) -> Tensor:
    del degrees
    for _ in sizes:
        x = x.unsqueeze(dim)
    return x.expand((*x.shape[:dim], *sizes, *x.shape[dim + len(sizes) :]))


def torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * q @ k.transpose(-1, -2)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -1e30)
    return scores.softmax(-1) @ v


def torch_attention_scores(q: Tensor, k: Tensor, scale: float, causal: int) -> Tensor:
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e30)
    return scores


def torch_attention_saving(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int, sums: str
) -> tuple[Tensor, Tensor]:
    assert sums == "f32"
    return torch_attention(q, k, v, scale, causal), torch_attention_scores(q, k, scale, causal).logsumexp(-1).float()


def torch_attention_saved_grad(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, logsum: Tensor, scale: float, causal: int
) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    whole_k, whole_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (torch_attention_scores(q, k, scale, causal) - logsum[..., None]).exp()
    ds = scale * p * (y @ whole_v.transpose(-1, -2) - (y * a).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ y
    return ds @ whole_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def torch_attention_grad(y: Tensor, q: Tensor, k: Tensor, v: Tensor, **attributes: Any) -> tuple[Tensor, ...]:
    operands = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(torch_attention(*operands, **attributes), operands, y.detach())


def torch_seen(k: Tensor, first: Tensor, end: Tensor) -> Tensor:
    column = torch.arange(k.shape[2])
    return ((column >= first[..., None]) & (column < end[..., None]))[:, None]


def torch_range_probabilities(q: Tensor, k: Tensor, first: Tensor, end: Tensor, scale: float) -> Tensor:
    seen = torch_seen(k, first, end)
    scores = torch_attention_scores(q, k, scale, 0).masked_fill(~seen, -torch.inf)
    return torch.where(seen, scores.softmax(-1), 0.0)


def torch_attention_ranges(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, causal: int = 0
) -> Tensor:
    return torch_range_probabilities(q, k, first, end, scale) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def torch_attention_ranges_saving(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, sums: str, causal: int = 0
) -> tuple[Tensor, Tensor]:
    assert sums == "f32"
    seen = torch_seen(k, first, end)
    logsum = torch_attention_scores(q, k, scale, 0).masked_fill(~seen, -torch.inf).logsumexp(-1)
    return torch_attention_ranges(q, k, v, first, end, scale), logsum.clamp(min=-1e20).float()


def torch_attention_ranges_grad(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, causal: int = 0
) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    p = torch_range_probabilities(q, k, first, end, scale)
    dp = y @ v.repeat_interleave(group, 1).transpose(-1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ y
    return ds @ k.repeat_interleave(group, 1), *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def torch_attention_ranges_saved_grad(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    a: Tensor,
    logsum: Tensor,
    scale: float,
    causal: int = 0,
) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    seen = torch_seen(k, first, end)
    scores = torch_attention_scores(q, k, scale, 0)
    p = torch.where(seen, (scores - logsum[..., None]).exp(), 0.0)
    dp = y @ v.repeat_interleave(group, 1).transpose(-1, -2)
    ds = scale * p * (dp - (y * a).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ y
    return ds @ k.repeat_interleave(group, 1), *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def torch_attention_part(*operands: Tensor, seen: float, **attributes: Any) -> tuple[Tensor, Tensor]:
    return torch_attention_ranges_saving(*operands, **attributes)


def torch_attention_part_grad(*operands: Tensor, seen: float, **attributes: Any) -> tuple[Tensor, ...]:
    return torch_attention_ranges_saved_grad(*operands, **attributes)


def torch_merge_parts(x: Tensor, p: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """As if each part were of a single key: weights by a softmax of both."""
    logarithms = torch.stack([p, q])
    weights = logarithms.softmax(0)[..., None]
    return (weights * torch.stack([x, y])).sum(0), logarithms.logsumexp(0)


def torch_causal_part(zeros: Tensor, turn: int, pieces: int, length: int, block: int) -> Tensor:
    """Count, for each query, the positions of the other piece's tokens that are not after its own."""
    rounds = length // block
    positions = torch.arange(pieces * length).view(rounds, pieces, block).transpose(0, 1).reshape(pieces, length)
    ends = [(positions[piece - turn] <= positions[piece][:, None]).sum(-1) for piece in range(pieces)]
    return zeros + torch.cat(ends)


def torch_ranges_part(first: Tensor, end: Tensor, turn: int, pieces: int, length: int) -> tuple[Tensor, ...]:
    start = (torch.arange(pieces).repeat_interleave(length) - turn) % pieces * length
    return tuple((x - start).clamp(0, length) for x in (first, end))


def torch_attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int, drop: float, seed: int
) -> Tensor:
    """Of the whole matrix of probabilities, dropout as by itself."""
    weights = torch_dropout(torch_attention_scores(q, k, scale, causal).softmax(-1), drop, seed)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def torch_attention_dropout_grad(y: Tensor, q: Tensor, k: Tensor, v: Tensor, **attributes: Any) -> tuple[Tensor, ...]:
    operands = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(torch_attention_dropout(*operands, **attributes), operands, y.detach())


def torch_attention_dropout_saving(
    q: Tensor, k: Tensor, v: Tensor, sums: str, **attributes: Any
) -> tuple[Tensor, Tensor]:
    assert sums == "f32"
    scores = torch_attention_scores(q, k, attributes["scale"], attributes["causal"])
    return torch_attention_dropout(q, k, v, **attributes), scores.logsumexp(-1).float()


def torch_attention_dropout_saved_grad(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    logsum: Tensor,
    scale: float,
    causal: int,
    drop: float,
    seed: int,
) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    whole_k, whole_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (torch_attention_scores(q, k, scale, causal) - logsum[..., None]).exp()
    z = torch_dropout(torch.ones_like(p), drop, seed)
    ds = scale * p * (z * (y @ whole_v.transpose(-1, -2)) - (y * a).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q, (p * z).transpose(-1, -2) @ y
    return ds @ whole_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def torch_capped_scores(q: Tensor, k: Tensor, cap: float, scale: float, seen: Tensor) -> Tensor:
    return (cap * (torch_attention_scores(q, k, scale, 0) / cap).tanh()).masked_fill(~seen, -torch.inf)


def torch_capped(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, scale: float, cap: float) -> Tensor:
    """Attention with capped scores of the keys that are `seen`; zeros where none is."""
    weights = torch.where(seen, torch_capped_scores(q, k, cap, scale, seen).softmax(-1), 0.0)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def torch_capped_grad(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor, seen: Tensor, scale: float, cap: float
) -> tuple[Tensor, ...]:
    """The gradients by definition, also of what is saved by another forward, `a` and the logarithms."""
    group = q.shape[1] // k.shape[1]
    whole_k, whole_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch_capped_scores(q, k, cap, scale, seen)
    dp = y @ whole_v.transpose(-1, -2)
    if saved:
        a, logsum = saved
        p, mean = (scores - logsum[..., None]).exp(), (y * a).sum(-1, keepdim=True)
    else:
        p = torch.where(seen, scores.softmax(-1), 0.0)
        mean = (p * dp).sum(-1, keepdim=True)
    ds = scale * p * (dp - mean) * (1 - (torch_attention_scores(q, k, scale, 0) / cap).tanh() ** 2)
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ y
    return ds @ whole_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def torch_capped_saving(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, scale: float, cap: float, sums: str
) -> tuple[Tensor, Tensor]:
    assert sums == "f32"
    logsum = torch_capped_scores(q, k, cap, scale, seen).logsumexp(-1).clamp(min=-1e20).float()
    return torch_capped(q, k, v, seen=seen, scale=scale, cap=cap), logsum


def causally(of: Any, keys: int = 1) -> Any:
    """Return the twin for a causal mask, if there is one; `keys` is the position of the keys among the operands."""

    def twin(*operands: Tensor, causal: int, **attributes: Any) -> Any:
        q, k = operands[keys - 1], operands[keys]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return of(*operands, seen=seen.tril() if causal else seen, **attributes)

    return twin


def in_ranges(of: Any, keys: int = 1) -> Any:
    """Return the twin whose operands after the values are the ranges of keys that queries see."""

    def twin(*operands: Tensor, causal: int = 0, **attributes: Any) -> Any:
        at = keys + 2
        seen = torch_seen(operands[keys], *operands[at : at + 2])
        return of(*operands[:at], *operands[at + 2 :], seen=seen, **attributes)

    return twin


def torch_embedding_grad(g: Tensor, ids: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    del degrees
    return torch.zeros(size, g.shape[-1], dtype=g.dtype).index_add(0, ids.reshape(-1), g.reshape(-1, g.shape[-1]))


def torch_routed_matmul(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    return (x[..., None, :] @ w[e]).squeeze(-2)


def torch_routed_matmul_tn(x: Tensor, y: Tensor, e: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    del degrees
    zeros = torch.zeros(size, x.shape[-1], y.shape[-1], dtype=x.dtype)
    return zeros.index_add(0, e.reshape(-1), (x[..., :, None] * y[..., None, :]).reshape(-1, *zeros.shape[1:]))


def torch_queue(e: Tensor) -> Tensor:
    """One element after the other."""
    flat = e.reshape(-1, e.shape[-1]).tolist()
    return torch.tensor([[row[:i].count(value) for i, value in enumerate(row)] for row in flat]).reshape(e.shape)


def torch_to_slots(x: Tensor, at: Tensor, s: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    """One group after the other."""
    del degrees
    out = torch.zeros(size, x.shape[0], x.shape[2], dtype=x.dtype)
    for g in range(x.shape[0]):
        each = s[g, :, :, None] * x[g]
        out[:, g] = out[:, g].index_add(0, at[g].flatten(), each.flatten(0, 1))
    return out


def torch_from_slots(y: Tensor, at: Tensor, s: Tensor) -> Tensor:
    return torch.stack([(s[g, :, :, None] * y[at[g], g]).sum(0) for g in range(len(at))])


def torch_slot_shares(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    return torch.stack([(x[g] * y[at[g], g]).sum(-1) for g in range(len(at))])


def torch_stripe(x: Tensor, dim: int, stripes: int, block: int) -> Tensor:
    return x.unflatten(dim, (-1, stripes, block)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def torch_unstripe(x: Tensor, dim: int, stripes: int, block: int) -> Tensor:
    return x.unflatten(dim, (stripes, -1, block)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def in_natural_order(twin: Callable[..., Any], dim: int, **more: Any) -> Callable[..., Any]:
    """An operator on operands and results whose dim `dim` is put into natural order before, and back after it."""

    def of(*operands: Tensor, stripes: int, rounds: int, block: int, **attributes: Any) -> Any:
        assert operands[0].shape[dim] == stripes * rounds * block

        def moved(x: Tensor, by: Callable[..., Tensor]) -> Tensor:
            return by(x, dim % x.dim() if dim < 0 else dim, stripes, block)

        found = twin(*(moved(x, torch_unstripe) for x in operands), **attributes, **more)
        return moved(found, torch_stripe) if isinstance(found, Tensor) else tuple(moved(x, torch_stripe) for x in found)

    return of


def torch_rotary(x: Tensor, base: float, direction: float) -> Tensor:
    """As transformers' Llama applies it."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), frequencies).repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + direction * turned * angles.sin()


def torch_rotary_at(x: Tensor, at: Tensor, base: float, direction: float) -> Tensor:
    """Each position by itself."""
    out = torch.empty_like(x)
    for b, positions in enumerate(at.tolist()):
        for s, position in enumerate(positions):
            long = x[b, ..., s, None, :].expand(*x.shape[1:-2], position + 1, x.shape[-1])
            out[b, ..., s, :] = torch_rotary(long, base, direction)[..., position, :]
    return out


def torch_documents(tokens: Tensor, separator: int, causal: int) -> tuple[Tensor, ...]:
    """One token after the other."""
    size = tokens.shape[-1]
    first, end = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, begins, ends in zip(*(t.reshape(-1, size) for t in (tokens, first, end)), strict=True):
        begin = 0
        for i, token in enumerate(row.tolist()):
            begins[i] = begin
            if token == separator:
                ends[begin : i + 1] = i + 1
                begin = i + 1
        ends[begin:] = size
    at = torch.arange(size).expand_as(tokens)
    return first, at + 1 if causal else end, at - first


def torch_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def of_result(inverse: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The gradient of a function given its result instead of its argument."""
    return lambda g, y: derivative(function, g, inverse(y.detach()))


def torch_cast(x: Tensor, to: str) -> Tensor:
    return x.to(DTYPES[to])


def torch_inside_grad(g: Tensor, x: Tensor, low: float, high: float, slope: float) -> Tensor:
    return slope * derivative(lambda y: F.hardtanh(y, low, high), g, x)


def of_dims(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reduction of `count` dims from `dim` on."""
    return lambda x, dim, count: function(x.flatten(dim, dim + count - 1), dim) if count else x


def torch_batch_mean(x: Tensor, groups: int) -> Tensor:
    return x.detach().unflatten(0, (groups, -1)).unsqueeze(-1).flatten(3).mean((1, 3)) + 0 * x.sum()


def torch_batch_stats(x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    off = x.unflatten(0, (center.shape[0], -1)).unsqueeze(-1).flatten(3) - center.detach()[:, None, :, None]
    return off.mean((1, 3)), off.square().mean((1, 3)) + 0 * center


def torch_batch_norm(
    x: Tensor, shift: Tensor, square: Tensor, center: Tensor, w: Tensor, b: Tensor, eps: float
) -> Tensor:
    each = x.unflatten(0, (shift.shape[0], -1)).movedim(2, -1).movedim(1, -2).movedim(0, -2)
    scale = torch.rsqrt(square - shift.square() + eps) + 0 * center
    out = (each - center.detach() - shift) * scale * w + b
    return out.movedim(-2, 0).movedim(-2, 1).movedim(-1, 2).flatten(0, 1)


def torch_running_stats(
    mean: Tensor, var: Tensor, shift: Tensor, square: Tensor, center: Tensor, count: int, momentum: float
) -> tuple[Tensor, Tensor]:
    unbiased = (square - shift.square()) * count / (count - 1)
    return torch.lerp(mean, (center + shift).mean(0), momentum), torch.lerp(var, unbiased.mean(0), momentum)


def torch_running_batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    # PyTorch's own is not differentiable by the statistics.
    return torch.addcmul(b, x.movedim(1, -1) - mean, w * torch.rsqrt(var + eps)).movedim(-1, 1)


def gradients(function: Callable[..., Any], g: Any, *operands: Tensor) -> tuple[Tensor, ...]:
    """The gradients of all operands, given those of the results."""
    at = [t.detach().clone().requires_grad_() for t in operands]
    return torch.autograd.grad(function(*at), at, g)


def torch_running_batch_norm_grad(y: Tensor, *operands: Tensor, eps: float) -> Any:
    shifted = (*operands, torch.zeros_like(operands[-1]))
    return gradients(lambda *t: torch_running_batch_norm(*t, eps=eps), y.detach(), *shifted)


def torch_batch_norm_grad(
    y: Tensor, x: Tensor, shift: Tensor, square: Tensor, center: Tensor, w: Tensor, eps: float
) -> Any:
    operands = (x, shift, square, center, w, torch.zeros_like(w))
    found = gradients(lambda *t: torch_batch_norm(*t, eps=eps), y.detach(), *operands)
    return found[:3] + found[4:]


def torch_batch_norm_weight_grad(y: Tensor, *operands: Tensor, eps: float) -> Any:
    w = torch.ones(y.shape[1], dtype=y.dtype)
    return torch_batch_norm_grad(y, *operands, w, eps=eps)[3:]


def torch_batch_norm_data_grad(y: Tensor, x: Tensor, *operands: Tensor, eps: float) -> Tensor:
    *stats, w, dw, db = operands
    through = torch_batch_norm(x, *stats, dw, db, eps) / (x.numel() // stats[0].numel())
    return torch_batch_norm_grad(y - through, x, *stats, w, eps=eps)[0]


def torch_batch_stats_grad(m: Tensor, q: Tensor, x: Tensor, center: Tensor) -> Tensor:
    return gradients(lambda z: torch_batch_stats(z, center), (m.detach(), q.detach()), x)[0]


def torch_reduce_extreme_grad(g: Tensor, x: Tensor, y: Tensor, dim: int, count: int) -> Tensor:
    for _ in range(count):
        g, y = g.unsqueeze(dim), y.unsqueeze(dim)
    equal = x == y
    number = equal.sum(tuple(range(dim, dim + count)), keepdim=True) if count else equal.to(x.dtype)
    # Nothing is equal to a number that was not drawn from the row.
    return torch.where(equal, g / number.clamp(min=1), 0.0)


def torch_embedding_bag(ids: Tensor, t: Tensor) -> Tensor:
    return F.embedding(ids, t).sum(-2)


def torch_embedding_bag_grad(g: Tensor, ids: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    del degrees
    return gradients(lambda t: torch_embedding_bag(ids, t), g, torch.zeros(size, g.shape[-1], dtype=g.dtype))[0]


def torch_along_grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of what picks along a dim, given the sizes it picked from."""

    def grad(g: Tensor, index: Tensor, dim: int, size: int, degrees: Sequence[int]) -> Tensor:
        del degrees
        x = torch.zeros(*g.shape[:dim], size, *g.shape[dim + 1 :], dtype=g.dtype)
        return gradients(lambda z: function(z, dim, index), g, x)[0]

    return grad


def torch_scatter_max_grad(g: Tensor, x: Tensor, index: Tensor, y: Tensor, m: Tensor, dim: int) -> tuple[Tensor, ...]:
    is_x, is_y = x == m, y == m.gather(dim, index)
    share = g / is_x.to(g.dtype).scatter_add(dim, index, is_y.to(g.dtype)).clamp(min=1)
    return torch.where(is_x, share, 0), torch.where(is_y, share.gather(dim, index), 0)


def torch_index_select_grad(g: Tensor, ids: Tensor, dim: int, size: int, degrees: Sequence[int]) -> Tensor:
    """Written so that it has a gradient, too."""
    del degrees
    zeros = torch.zeros(*g.shape[:dim], size, *g.shape[dim + 1 :], dtype=g.dtype)
    return zeros.index_add(dim, ids, g)


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Philox-4x32-10 as its authors write it, on words of 32 bits."""
    key, counter = list(key), list(counter)
    for _ in range(10):
        low, high = divmod(0xD2511F53 * counter[0], 2**32), divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high[0] ^ counter[1] ^ key[0], high[1], low[0] ^ counter[3] ^ key[1], low[1]]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def torch_lstm_cell(z: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """As torch.nn.LSTMCell's documentation says."""
    i, f, g, o = z.unbind(-2)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Element i is drawn by the first word at counter i under the seed, of which the upper 24 bits count."""
    words = [philox((seed % 2**32, seed >> 32), (i, 0, 0, 0))[0] for i in range(math.prod(shape))]
    return (torch.tensor(words, dtype=torch.int64).reshape(tuple(shape)) // 2**8).double() / 2**24


def torch_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    return torch.where(drawn(x.shape, seed) < p, 0.0, x / (1 - p))


def torch_max_of_parts_grad(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    each = x.unflatten(-1, (g.shape[-1], -1))
    return torch_reduce_extreme_grad(g, each, y, each.dim() - 1, 1).flatten(-2)


def torch_class_score(x: Tensor, t: Tensor) -> Tensor:
    return x.gather(-1, t.unsqueeze(-1)).squeeze(-1)


def torch_class_score_grad(g: Tensor, t: Tensor, size: int, degrees: Sequence[int]) -> Tensor:
    del degrees
    return F.one_hot(t, size) * g.unsqueeze(-1)


TORCH: Mapping[str, Callable[..., Any]] = {
    "batch_mean": torch_batch_mean,
    "batch_norm": torch_batch_norm,
    "batch_norm_data_grad": torch_batch_norm_data_grad,
    "batch_norm_grad": torch_batch_norm_grad,
    "batch_norm_weight_grad": torch_batch_norm_weight_grad,
    "batch_stats": torch_batch_stats,
    "running_batch_norm": torch_running_batch_norm,
    "running_batch_norm_grad": torch_running_batch_norm_grad,
    "running_stats": torch_running_stats,
    "batch_stats_grad": torch_batch_stats_grad,
    "bce": F.binary_cross_entropy,
    "bce_grad": lambda g, x, y: derivative(lambda z: F.binary_cross_entropy(z, y.detach()), g, x),
    "bce_target_grad": lambda g, x: derivative(lambda z: F.binary_cross_entropy(x.detach(), z), g, x),
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce_with_logits_grad": lambda g, x, y: derivative(
        lambda z: F.binary_cross_entropy_with_logits(z, y.detach()), g, x
    ),
    "bce_with_logits_target_grad": lambda g, x: -g * x / x.numel(),
    "class_score": torch_class_score,
    "class_score_grad": torch_class_score_grad,
    "cumsum": torch.cumsum,
    "cumsum_grad": lambda g, dim, size, degrees: g.flip(dim).cumsum(dim).flip(dim),
    "dropout": torch_dropout,
    "embedding_bag": torch_embedding_bag,
    "embedding_bag_grad": torch_embedding_bag_grad,
    "gate_matmul": lambda x, w: torch.einsum("...k,kqn->...qn", x, w),
    "gate_matmul_data_grad": lambda g, w: torch.einsum("...qn,kqn->...k", g, w),
    "gate_matmul_weight_grad": lambda x, g: torch.einsum(
        "mk,mqn->kqn", x.reshape(-1, x.shape[-1]), g.reshape(-1, *g.shape[-2:])
    ),
    "gather": lambda x, index, dim: torch.gather(x, dim, index),
    "gather_grad": torch_along_grad(torch.gather),
    "index_select": lambda x, ids, dim: torch.index_select(x, dim, ids),
    "index_select_grad": torch_index_select_grad,
    "int_add": torch.add,
    "int_mul": torch.mul,
    "lstm_cell": torch_lstm_cell,
    "lstm_cell_grad": lambda y, w, z, c: gradients(torch_lstm_cell, (y.detach(), w.detach()), z, c),
    "max_of_parts": lambda x, parts: x.unflatten(-1, (parts, -1)).amax(-1),
    "max_of_parts_grad": torch_max_of_parts_grad,
    "one_hot": lambda ids, classes: F.one_hot(ids, classes),
    "reduce_extreme_grad": torch_reduce_extreme_grad,
    "reduce_max": of_dims(torch.amax),
    "reduce_mean": of_dims(torch.mean),
    "reduce_mean_grad": lambda g, dim, sizes, degrees: torch_expand(g, dim, sizes, degrees) / math.prod(sizes),
    "reduce_min": of_dims(torch.amin),
    "reduce_prod": of_dims(torch.prod),
    "reduce_prod_grad": lambda g, x, dim, sizes: derivative(lambda z: of_dims(torch.prod)(z, dim, len(sizes)), g, x),
    "scatter_add": lambda x, index, y, dim: x.scatter_add(dim, index, y),
    "scatter_max": lambda x, index, y, dim: x.scatter_reduce(dim, index, y, "amax"),
    "scatter_max_grad": torch_scatter_max_grad,
    "uniform": lambda x, seed: x + drawn(x.shape, seed).to(x.dtype),
    "sum_exp": lambda x, m: (x - m.unsqueeze(-1)).exp().sum(-1),
    "sum_exp_grad": lambda g, x, m: g.unsqueeze(-1) * (x - m.unsqueeze(-1)).exp(),
    "topk": torch.topk,
    "topk_grad": lambda g, indices, size: torch.zeros(*g.shape[:-1], size, dtype=g.dtype).scatter_add(-1, indices, g),
    "broadcast_grad": lambda g, shape: g.sum_to_size(shape),
    "cast": torch_cast,
    "clamp": lambda x, low, high: x.clamp(low, high),
    "clamp_grad": lambda g, x, low, high: derivative(lambda y: y.clamp(low, high), g, x),
    "detach": lambda x: x.detach() + 0 * x,
    "elu": F.elu,
    "elu_grad": lambda g, x, alpha: derivative(lambda y: F.elu(y, alpha), g, x),
    "eq": torch.eq,
    "erf": torch.erf,
    "erf_grad": lambda g, x: derivative(torch.erf, g, x),
    "floor": torch.floor,
    "ge": torch.ge,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh_grad": lambda g, x: derivative(lambda y: F.gelu(y, approximate="tanh"), g, x),
    "gt": torch.gt,
    # The backward of PyTorch's own takes 1/6 in single precision.
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,
    "hardswish": F.hardswish,
    "hardswish_grad": lambda g, x: derivative(F.hardswish, g, x),
    "hardtanh": F.hardtanh,
    "inside_grad": torch_inside_grad,
    "le": torch.le,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "leaky_relu_grad": lambda g, x, slope: derivative(lambda y: F.leaky_relu(y, slope), g, x),
    "logical_and": torch.logical_and,
    "logical_not": torch.logical_not,
    "logical_or": torch.logical_or,
    "lt": torch.lt,
    "maximum": torch.maximum,
    "maximum_grad": lambda g, x, y: derivative(lambda z: torch.maximum(z, y.detach()), g, x.broadcast_to(g.shape)),
    "minimum": torch.minimum,
    "ne": torch.ne,
    "pow": torch.pow,
    "pow_exponent_grad": lambda g, x, y: derivative(lambda z: x.detach() ** z, g, y.broadcast_to(g.shape)),
    "pow_grad": lambda g, x, y: derivative(lambda z: z ** y.detach(), g, x.broadcast_to(g.shape)),
    "pow_scalar": torch.pow,
    "pow_scalar_grad": lambda g, x, exponent: derivative(lambda z: z**exponent, g, x),
    "reciprocal": torch.reciprocal,
    "reciprocal_grad": lambda g, y: -g * y * y,
    "relu6": F.relu6,
    "select": torch.where,
    "select_grad": lambda g, c, chosen: torch.where(c == bool(chosen), g, 0.0),
    "shift": lambda x, by: x + by,
    "sign": torch.sign,
    "softplus": F.softplus,
    "softplus_grad": lambda g, x: derivative(F.softplus, g, x),
    "square": torch.square,
    "square_grad": lambda g, x: derivative(torch.square, g, x),
    "abs": torch.abs,
    "abs_grad": lambda g, x: derivative(torch.abs, g, x),
    "add": torch.add,
    "attention": torch_attention,
    "attention_capped": causally(torch_capped),
    "attention_capped_grad": causally(torch_capped_grad, 2),
    "attention_capped_ranges": in_ranges(torch_capped),
    "attention_capped_ranges_grad": in_ranges(torch_capped_grad, 2),
    "attention_capped_ranges_saved_grad": in_ranges(torch_capped_grad, 2),
    "attention_capped_ranges_saving": in_ranges(torch_capped_saving),
    "attention_capped_saved_grad": causally(torch_capped_grad, 2),
    "attention_capped_saving": causally(torch_capped_saving),
    "attention_dropout": torch_attention_dropout,
    "attention_dropout_grad": torch_attention_dropout_grad,
    "attention_dropout_saved_grad": torch_attention_dropout_saved_grad,
    "attention_dropout_saving": torch_attention_dropout_saving,
    "attention_grad": torch_attention_grad,
    "attention_part": torch_attention_part,
    "attention_part_grad": torch_attention_part_grad,
    "attention_ranges": torch_attention_ranges,
    "attention_ranges_grad": torch_attention_ranges_grad,
    "attention_ranges_saved_grad": torch_attention_ranges_saved_grad,
    "attention_ranges_saving": torch_attention_ranges_saving,
    "attention_saved_grad": torch_attention_saved_grad,
    "attention_saving": torch_attention_saving,
    "attention_striped": in_natural_order(torch_attention, 2, causal=1),
    "attention_striped_grad": in_natural_order(torch_attention_grad, 2, causal=1),
    "attention_striped_saved_grad": in_natural_order(torch_attention_saved_grad, 2, causal=1),
    "attention_striped_saving": in_natural_order(torch_attention_saving, 2, causal=1),
    "batch_matmul": torch.matmul,
    "batch_matmul_nt": lambda x, y: x @ y.transpose(-1, -2),
    "batch_matmul_tn": lambda x, y: x.transpose(-1, -2) @ y,
    "cos": torch.cos,
    "causal_part": torch_causal_part,
    "merge_parts": torch_merge_parts,
    "ranges_part": torch_ranges_part,
    "documents": torch_documents,
    "div": torch.div,
    "div_grad": lambda g, x, y: -g * x / y.square(),
    "embedding": F.embedding,
    "embedding_grad": torch_embedding_grad,
    "exp": torch.exp,
    "layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    "layer_norm_grad": lambda g, x, w, eps: derivative(lambda z: F.layer_norm(z, w.shape, w.detach(), eps=eps), g, x),
    "layer_norm_weight_grad": lambda g, x, eps: g * F.layer_norm(x, x.shape[-1:], eps=eps),
    "log": torch.log,
    "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax_grad": lambda g, y: g - y.exp() * g.sum(-1, keepdim=True),
    "neg": torch.neg,
    "rms_norm": torch_rms_norm,
    "rms_norm_grad": lambda g, x, w, eps: derivative(lambda z: torch_rms_norm(z, w.detach(), eps), g, x),
    "rms_norm_weight_grad": lambda g, x, eps: g * torch_rms_norm(x, torch.ones(()), eps),
    "rotary": torch_rotary,
    "rotary_at": torch_rotary_at,
    "rotary_striped": in_natural_order(torch_rotary, -2),
    "routed_matmul": torch_routed_matmul,
    "routed_matmul_nt": lambda x, w, e: torch_routed_matmul(x, w.transpose(1, 2), e),
    "routed_matmul_tn": torch_routed_matmul_tn,
    "expert_matmul": lambda x, w: torch.einsum("e...k,ekn->e...n", x, w),
    "expert_matmul_nt": lambda x, w: torch.einsum("e...n,ekn->e...k", x, w),
    "expert_matmul_tn": lambda x, y: torch.einsum(
        "erk,ern->ekn", *(z.reshape(len(z), -1, z.shape[-1]) for z in (x, y))
    ),
    "from_slots": torch_from_slots,
    "in_slots": lambda s, n, capacity: torch.where(n < capacity, s, 0.0),
    "queue": torch_queue,
    "row_order": lambda e: e.argsort(dim=-1, stable=True),
    "row_tokens": lambda order, chosen: order // chosen,
    "rows_matmul": lambda x, w, e, live: torch_routed_matmul(x, w, e),
    "rows_matmul_nt": lambda x, w, e, live: torch_routed_matmul(x, w.transpose(1, 2), e),
    "rows_matmul_tn": lambda x, y, e, size, degrees, live: torch_routed_matmul_tn(x, y, e, size, degrees),
    "take_numbers": lambda e, at: e.gather(1, at),
    "take_rows": lambda x, at: x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])),
    "slot": lambda e, n, capacity: e * capacity + n.clamp(max=capacity - 1),
    "slot_shares": torch_slot_shares,
    "to_slots": torch_to_slots,
    "rsqrt": torch.rsqrt,
    "rsqrt_grad": of_result(lambda y: y**-2, torch.rsqrt),
    "scale": lambda x, by: by * x,
    "sigmoid": torch.sigmoid,
    "sigmoid_grad": lambda g, y: g * y * (1 - y),
    "silu": F.silu,
    "silu_grad": lambda g, x: derivative(F.silu, g, x),
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "softmax_grad": lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)),
    "sqrt": torch.sqrt,
    "sqrt_grad": of_result(torch.square, torch.sqrt),
    "stripe": torch_stripe,
    "unstripe": torch_unstripe,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "tanh_grad": lambda g, y: g * (1 - y * y),
    "concat": lambda *x, dim: torch.cat(x, dim),
    "cross_entropy": F.cross_entropy,
    "cross_entropy_saved_grad": lambda g, x, t, logsum: (
        g * ((x - logsum[:, None]).exp() - F.one_hot(t, x.shape[1])) / len(x)
    ),
    "cross_entropy_saving": lambda x, t, sums: (F.cross_entropy(x, t), x.logsumexp(1).float()),
    "cross_entropy_grad": lambda g, x, t: derivative(lambda y: F.cross_entropy(y, t), g, x),
    "expand": torch_expand,
    "gelu": F.gelu,
    "gelu_grad": lambda g, x: derivative(F.gelu, g, x),
    "float8_matmul": lambda x, w, all: x @ w,
    "float8_matmul_nt": lambda x, w, all: x @ w.T,
    "float8_matmul_tn": lambda x, y: x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1]),
    "matmul": lambda x, w, act: ACTIVATIONS[act](x @ w),
    "matmul_nt": lambda x, w: x @ w.T,
    "matmul_tn": lambda x, y: x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1]),
    "merge_heads": lambda x: x.transpose(1, 2).flatten(2),
    "mse": F.mse_loss,
    "mse_grad": lambda g, x, y: derivative(lambda z: F.mse_loss(z, y), g, x),
    "mul": torch.mul,
    "reduce_sum": lambda x, dim, count: x.flatten(dim, dim + count - 1).sum(dim) if count else x,
    "relu": F.relu,
    "relu_grad": lambda g, y: derivative(F.relu, g, y),
    "reshape": lambda x, shape: x.reshape(shape),
    "reshape_sample": lambda x, shape, dims: x.reshape(shape),
    "split": lambda x, dim, sizes: torch.split(x, sizes, dim),
    "split_heads": lambda x, heads: x.unflatten(2, (heads, -1)).transpose(1, 2),
    "transpose": lambda x, perm: x.permute(perm),
    **window_cases.TORCH,
}

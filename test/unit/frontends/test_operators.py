"""Every mapping on its own: loss and gradients of a function of two parameters against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_agree import agree, weighted

from unity_ir.errors import UnityError
from unity_ir.frontends.torch import from_torch

MASK = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
SEEN = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
WINDOW = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
NOTHING = torch.tensor([[True, True, False], [False, False, False], [False, True, True]])
IDS = torch.tensor([[2, 0, 1], [1, 1, 2]])


INDEX = (torch.tensor([[2, 0, 1, 1], [0, 1, 2, 0]])[:, None] + torch.tensor([0, 1])[:, None]) % 3
HALVES = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
"""Positions [2, 2, 4] along a dim of size 3, each different from its neighbour along it."""
TWICE = torch.zeros(2, 2, 4, dtype=torch.int64)


def _ids(a: Tensor) -> Tensor:
    """Indices [2, 2] below 2 that depend on data."""
    return (a[:, :2, 0] > 1).long()


def _put_apart(a: Tensor) -> Tensor:
    y = 2 * a
    y[torch.tensor([0, 1]), :, torch.tensor([3, 1])] = a[0, 0, :3]
    return y


def _in_place(a: Tensor) -> Tensor:
    y = a * 2
    y += 1
    y.relu_()
    return y


def _written_constant(a: Tensor) -> Tensor:
    places = torch.arange(4.0, dtype=a.dtype)
    y = a + places
    places += 1
    return y + 2 * places


def at(a: Tensor, value: float) -> Tensor:
    """Exactly `value` everywhere, with the gradient of `a`."""
    return a - a.detach() + value


def _no_grad(a: Tensor) -> Tensor:
    with torch.no_grad():
        factor = a.exp()
    return a * factor


def _written_mask(a: Tensor) -> Tensor:
    mask = torch.full((3, 4), -1.0, dtype=a.dtype)
    mask[:, 1:] = 0
    mask.triu_(1)
    return a + mask


A = {
    # a [2, 3, 4], positive
    "add_number": lambda a: a + 2,
    "radd_number": lambda a: 2 - a,
    "add_table": lambda a: a + torch.arange(4.0, dtype=a.dtype),
    "add_wide_table": lambda a: a + torch.arange(3.0, dtype=a.dtype)[:, None].expand(3, 4),
    "add_integers": lambda a: a + torch.arange(4),
    "mul_uniform": lambda a: a * torch.full((4,), 3.0, dtype=a.dtype),
    "div_number": lambda a: a / 3,
    "rdiv_number": lambda a: 3 / a,
    "div_floor": lambda a: a * torch.div(a, 0.3, rounding_mode="floor"),
    "div_floor_whole": lambda a: a * torch.div(at(a, 49.0), 49, rounding_mode="floor"),
    "rdiv_floor_whole": lambda a: a * torch.div(49.0, at(a, 49.0), rounding_mode="floor"),
    "square": lambda a: a**2,
    "cube": lambda a: a**3,
    "sqrt": torch.sqrt,
    "pow_half": lambda a: a**0.5,
    "pow_negative": lambda a: a**-0.5,
    "reciprocal": lambda a: a**-1,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "abs": lambda a: (a - 1).abs(),
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "neg": torch.neg,
    "rsqrt": torch.rsqrt,
    "relu": lambda a: F.relu(a - 1),
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log_sigmoid": F.logsigmoid,
    "softplus": lambda a: F.softplus(a, beta=2),
    "softplus_threshold": lambda a: F.softplus(a, 2, 2),
    "asinh_far_below": lambda a: (-1e9 * a).asinh(),
    "mish": F.mish,
    "elu": lambda a: F.elu(a - 1, 0.7),
    "selu": lambda a: F.selu(a - 1),
    "leaky_relu": lambda a: F.leaky_relu(a - 1, 0.2),
    "hardtanh": lambda a: F.hardtanh(a - 1, -0.3, 0.4),
    "hardtanh_at_its_bound": lambda a: F.hardtanh(at(a, 1.0)) + F.relu6(at(a, 0.0)) + F.hardtanh(at(a, 2.0), 0, 2),
    "hardtanh_to_six": lambda a: F.hardtanh(at(a, 0.0), 0, 6),
    "relu6": lambda a: F.relu6(4 * a - 1),
    "hardswish": lambda a: F.hardswish(4 * a - 4),
    "hardsigmoid": lambda a: F.hardsigmoid(4 * a - 4),
    "clamp": lambda a: a.clamp(0.5, 1.5),
    "clamp_min": lambda a: a.clamp(min=1.1),
    "clamp_max": lambda a: a.clamp_max(1.1),
    "where_mask": lambda a: torch.where(MASK, a, a.new_zeros(())),
    "where_data": lambda a: torch.where(a > 1, a, 0.5 * a),
    "compare_integers_with_a_float": lambda a: torch.where(a.long() < 0.5, a, -a),
    "compare_integers_with_floats": lambda a: torch.where(a.long() < torch.arange(4) / 2, a, -a),
    "compare_bools_with_a_number": lambda a: torch.where((a > 1) >= 2, a, -a),
    "masked_fill": lambda a: a.masked_fill(MASK, 0.25),
    "logic": lambda a: torch.where((a > 1) & ~(a > 1.5) | MASK, a, -a),
    "tril": lambda a: a.tril(),
    "triu": lambda a: a.triu(1),
    "view": lambda a: a.view(6, 4),
    "view_without_common_factors": lambda a: a.reshape(4, 6),
    "flatten": lambda a: a.flatten(1),
    "unflatten": lambda a: a.unflatten(-1, (2, 2)),
    "squeeze": lambda a: a.unsqueeze(1).squeeze(1).unsqueeze(-1),
    "transpose": lambda a: a.transpose(0, 2),
    "permute": lambda a: a.permute(2, 0, 1),
    "mT": lambda a: a.mT,
    "movedim": lambda a: a.movedim(0, -1),
    "expand": lambda a: a.unsqueeze(1).expand(-1, 5, -1, -1),
    "repeat": lambda a: a.repeat(2, 1, 3),
    "repeat_interleave": lambda a: a.repeat_interleave(3, dim=1),
    "contiguous": lambda a: a.transpose(0, 1).contiguous().clone(),
    "select": lambda a: a[:, 1],
    "slice": lambda a: a[..., 1:4:2],
    "narrow": lambda a: a.narrow(-1, 1, 2),
    "split": lambda a: a.split(3, -1)[0] * 2,
    "chunk": lambda a: a.chunk(2, -1)[1],
    "unbind": lambda a: a.unbind(1)[2],
    "cat": lambda a: torch.cat([a, 2 * a, torch.ones(2, 1, 4, dtype=a.dtype)], 1),
    "stack": lambda a: torch.stack([a, 2 * a], 1),
    "pad": lambda a: F.pad(a, (1, 2, 0, 1)),
    "pad_number": lambda a: F.pad(a, (1, 0), value=3.0),
    "pad_far": lambda a: F.pad(a, (1, 2, 1, 0), value=-1e15).clamp(min=-1),
    "norm_of_zeros": lambda a: (0 * a).norm(dim=-1) + F.normalize(at(a, 0.0), dim=-1).sum(-1) * 1e-12,
    "std_of_equals": lambda a: at(a, 1.0).std(-1),
    "norm_of_another_type": lambda a: torch.linalg.vector_norm(a, dtype=torch.float64),
    "sum_of_a_scalar": lambda a: a * a.sum().sum(0).mean(-1, keepdim=True),
    "written_constant": _written_constant,
    "attention_that_sees_nothing": lambda a: F.scaled_dot_product_attention(a, a, a, SEEN),
    "attention_that_sees_nothing_by_infinity": lambda a: F.scaled_dot_product_attention(
        a, a, a, torch.zeros(3, 3, dtype=a.dtype).masked_fill(~SEEN, -torch.inf)
    ),
    "attention_under_a_mask_of_data": lambda a: F.scaled_dot_product_attention(a, a, a, (a @ a.mT).cos() > 0),
    "nll_of_squares": lambda a: F.nll_loss(
        F.log_softmax(a.reshape(2, 2, 2, 3), -1).permute(0, 3, 1, 2).contiguous(),
        torch.tensor([[[0, 1], [2, 2]], [[1, 0], [0, 1]]]),
    ),
    "pad_infinite": lambda a: F.pad(a, (1, 1), value=-torch.inf).amax(-1),
    "masked_by_infinity": lambda a: a.masked_fill(MASK & ~MASK.all(-1, keepdim=True), -torch.inf).softmax(-1),
    "pad_negative": lambda a: F.pad(a, (-1, 2)),
    "roll": lambda a: a.roll((1, -1), (1, 2)),
    "pixel_shuffle": lambda a: F.pixel_shuffle(a.reshape(2, 4, 1, 3), 2),
    "index": lambda a: a[:, torch.tensor([[2, 0], [1, 1]])],
    "index_two": lambda a: a[torch.tensor([[0], [1]]), torch.tensor([0, 2])],
    "index_all": lambda a: a[torch.arange(2)[:, None], torch.arange(3)],
    "index_select": lambda a: a.index_select(1, torch.tensor([2, 2, 0])),
    "gather": lambda a: a.gather(1, IDS[:, :, None].expand(2, 3, 4)),
    "scatter_add": lambda a: torch.zeros(2, 3, 4, dtype=a.dtype).scatter_add(1, IDS[:, :, None].expand(2, 3, 4), a),
    "flip": lambda a: a.flip(1),
    "topk": lambda a: a.topk(2).values,
    "sum": lambda a: a.sum((0, 2)),
    "sum_all": lambda a: a.sum(),
    "mean_keepdim": lambda a: a - a.mean(1, keepdim=True),
    "mean_all": torch.mean,
    "amax": lambda a: a.amax((1, 2)),
    "amin": lambda a: a.amin(0),
    "max": lambda a: a.max(),
    "max_of_dim": lambda a: a.max(1).values,
    "prod": lambda a: a.prod(1),
    "var": lambda a: a.var((0, 2)),
    "var_biased": lambda a: a.var(1, unbiased=False, keepdim=True),
    "std": lambda a: a.std(1),
    "norm": lambda a: torch.linalg.vector_norm(a, dim=1),
    "max_of_table": lambda a: torch.max(a, torch.linspace(0.5, 1.5, 4, dtype=a.dtype)),
    "filled": lambda a: a * torch.zeros(2, dtype=a.dtype).fill_(a[0, 0, 0])[0],
    "zeroed": lambda a: a + (2 * a).zero_(),
    "reversed": lambda a: a.permute(*range(a.dim())[::-1]),
    "cumsum": lambda a: a.cumsum(1),
    "softmax": lambda a: a.softmax(1),
    "log_softmax": lambda a: a.log_softmax(-1),
    "layer_norm_of_two": lambda a: F.layer_norm(a, (3, 4)),
    "rms_norm": lambda a: F.rms_norm(a, (4,)),
    "group_norm": lambda a: F.group_norm(a.transpose(1, 2), 2, a[0, 0], a[1, 0]),
    "dropout_off": lambda a: F.dropout(a, 0.5, training=False),
    "detach": lambda a: a * a.detach(),
    "no_grad": _no_grad,
    "in_place": _in_place,
    "written_mask": _written_mask,
    "one_by_one": lambda a: F.conv1d(a, a[:, :, :1], padding=1, stride=2),
    "adaptive_avg_pool1d": lambda a: F.adaptive_avg_pool1d(a, 2),
    "avg_pool1d": lambda a: F.avg_pool1d(a, 2, 1),
    "avg_pool_divisor": lambda a: F.avg_pool2d(a, 2, divisor_override=3),
    "pad_reflect": lambda a: F.pad(a, (2, 1), mode="reflect"),
    "pad_replicate": lambda a: F.pad(a[None], (2, 1, 0, 1), mode="replicate"),
    "pad_circular": lambda a: F.pad(a, (2, 1), mode="circular"),
    "upsample": lambda a: F.interpolate(a[None], scale_factor=2, mode="nearest"),
    "slice_scatter": lambda a: torch.slice_scatter(a, 2 * a[:, 1:2], 1, 1, 2),
    "select_scatter": lambda a: torch.select_scatter(a, 2 * a[:, 1], 1, 0),
    "argmax": lambda a: a * a.argmax(1, keepdim=True),
    "argmax_of_integers": lambda a: a * (10 * a).long().argmax(1, keepdim=True),
    "sum_of_integers": lambda a: a * (10 * a).long().sum(1, keepdim=True),
    "cumsum_of_integers": lambda a: a * (10 * a).int().cumsum(1),
    "arithmetic_of_integers": lambda a: a * (3 - 2 * (10 * a).long() * (4 * a).long() - (4 * a).long()),
    "large_integers": lambda a: a * (((10 * a).long() * 30_000_001) == 240_000_008),
    "floor_of_integers": lambda a: a * ((10 * a).long() // -3) + a * ((10 * a).long() % 4),
    "trunc_of_integers": lambda a: a * torch.div((10 * a).long(), -3, rounding_mode="trunc"),
    "any_and_all": lambda a: a * (a > 1).any(1, keepdim=True) + a * (a > 0.6).all(),
    "slices_of_size_0": lambda a: torch.cat([a[:, :0], a, *a[..., 4:].split([0, 0], -1)[0].unbind(-1)], 1),
    "split_with_size_0": lambda a: torch.cat(a.split([0, 3, 1], -1)[1:], -1) * 2,
    "padded_integers": lambda a: a * F.pad((4 * a).long(), (1, 0), value=3)[..., :-1],
    "padded_integers_of_two_dims": lambda a: a * F.pad((4 * a).long(), (1, 0, 0, 1), value=3)[..., :-1, :-1],
    "scatter": lambda a: a.scatter(1, INDEX, 3 * a[:, :2]),
    "scatter_value": lambda a: a.scatter(1, INDEX, 2.5),
    "scatter_of_fewer": lambda a: a.scatter(1, INDEX[:1, :, :3], 2 * a[:1, :2, :3]),
    "scatter_add_of_fewer": lambda a: a.scatter_add(1, INDEX[:1, :, :3], a[:1, :2, :3]),
    "scatter_of_truths": lambda a: a * (a > 1).scatter(1, INDEX, a[:, :2] < 1),
    "scatter_of_integers": lambda a: a * (4 * a).long().scatter(1, INDEX, (9 * a[:, :2]).long()),
    "scatter_mean": lambda a: a.scatter_reduce(1, TWICE, a[:, :2], "mean"),
    "scatter_mean_exclusive": lambda a: a.scatter_reduce(1, TWICE, a[:, :2], "mean", include_self=False),
    "scatter_amax": lambda a: a.scatter_reduce(1, TWICE, 2 * a[:, :2], "amax"),
    "scatter_amin_exclusive": lambda a: a.scatter_reduce(1, TWICE, 2 * a[:, :2], "amin", include_self=False),
    "gather_of_fewer": lambda a: a.gather(1, INDEX[:1, :, :3]),
    "index_add": lambda a: a.index_add(1, torch.tensor([2, 0, 2]), a, alpha=2),
    "index_copy": lambda a: a.index_copy(1, torch.tensor([2, 0]), 3 * a[:, :2]),
    "index_fill": lambda a: a.index_fill(1, torch.tensor([2, 0]), 4.0),
    "index_put": lambda a: a.index_put((torch.tensor([1, 0]), torch.tensor([2, 0])), 2 * a[0, :2]),
    "index_put_accumulate": lambda a: a.index_put((_ids(a)[:, 0],), 2 * a, accumulate=True),
    "index_put_apart": _put_apart,
    "index_put_mask": lambda a: a.index_put((a > 1,), a.sum()),
    "index_put_mask_of_rows": lambda a: a.index_put((a[..., 0] > 1,), a[0, 0]),
    "index_by_data": lambda a: a[_ids(a)[:, 0], _ids(a)[:, 1]],
    "index_by_data_from_the_end": lambda a: a[_ids(a)[:, 0] - 2, :2] + a[:, _ids(a)[:, 1] - 2],
    "index_put_from_the_end": lambda a: a.index_put((_ids(a)[:, 0] - 2,), 2 * a, accumulate=True),
    "index_by_data_apart": lambda a: a[_ids(a)[:, 0], :, _ids(a)[:, 1]],
    "sort": lambda a: torch.sort(a, 1, descending=True)[0] + torch.sort(a, 1)[0] * torch.argsort(a, 1),
    "histc": lambda a: a * torch.histc(a.detach(), 4, 0.5, 1.5),
    "round": lambda a: a * (4 * a - 3).round() + a * at(a, 2.5).round() + a * a.round(decimals=1),
    "trunc": lambda a: a * (4 * a - 4).trunc() + (3 * a - 3).fmod(0.7),
    "clamp_by_tensors": lambda a: a.clamp(a.detach().flip(1), 1.4 + 0 * a),
    "norms": lambda a: sum(torch.linalg.vector_norm(a - 1, p, dim=1).sum() for p in (1, 3, torch.inf)) + a,
    "cdist": lambda a: torch.cdist(a, a.flip(1) + 1) + torch.cdist(a, a + 1, p=1.0),
    "conv3d": lambda a: F.conv3d(a[None, None], a[None, None, :, :2, :2], padding=1, stride=(1, 1, 2)),
    "conv_transpose1d": lambda a: F.conv_transpose1d(a, a.transpose(0, 1)[..., :3], a[0, 0, :2], stride=2, padding=1),
    "max_pool3d": lambda a: F.max_pool3d(F.pad(a, (0, 2, 0, 1))[None], 2, stride=1, padding=1),
    "avg_pool3d": lambda a: F.avg_pool3d(a[None], (1, 2, 2), stride=1),
    "max_pool_ceil": lambda a: F.max_pool2d(a, 2, ceil_mode=True),
    "avg_pool_ceil": lambda a: F.avg_pool2d(a, 2, 2, 1, ceil_mode=True, count_include_pad=False),
    "bilinear": lambda a: F.interpolate(a[None], size=(5, 7), mode="bilinear"),
    "bilinear_aligned": lambda a: F.interpolate(a[None], scale_factor=2.5, mode="bilinear", align_corners=True),
    "bilinear_smaller": lambda a: F.interpolate(a[None], size=(2, 3), mode="bilinear", antialias=True),
    "bicubic": lambda a: F.interpolate(a[None], scale_factor=1.6, mode="bicubic"),
    "linear1d": lambda a: F.interpolate(a, size=7, mode="linear"),
    "nearest_uneven": lambda a: F.interpolate(a[None], size=(4, 7), mode="nearest"),
    "logsumexp": lambda a: torch.logsumexp(a, 1),
    "cosine_similarity": lambda a: F.cosine_similarity(a, a.flip(1), dim=-1),
    "smooth_l1": lambda a: F.smooth_l1_loss(a, 2 * a.flip(0), reduction="none"),
    "kl_div": lambda a: F.kl_div(a.log_softmax(-1), a.detach().softmax(-1), reduction="batchmean"),
    "prelu": lambda a: F.prelu(a - 1, a[0, 0, :1]),
    "lerp": lambda a: torch.lerp(a, a.flip(1), 0.3),
    "pixel_unshuffle": lambda a: F.pixel_unshuffle(a[:, None, :2], 2),
    "max_with_index": lambda a: a.max(1)[0] * a.max(1)[1] + a.median(1)[0] * a.median(1)[1],
    "std_mean": lambda a: torch.cat([*torch.std_mean(a, 1), *torch.var_mean(a, 1)]),
    "logcumsumexp": lambda a: a.logcumsumexp(1),
    "searchsorted": lambda a: a * torch.searchsorted(HALVES, (2 * a).round() / 2),
    "searchsorted_right": lambda a: a * torch.searchsorted(HALVES, (2 * a).round() / 2, side="right"),
    "bucketize": lambda a: a * torch.bucketize(a, torch.tensor([0.7, 1.0, 1.4], dtype=a.dtype)),
    "adaptive_pools": lambda a: F.adaptive_max_pool1d(a, 2).sum() + F.adaptive_avg_pool3d(a[None], (1, 2, 3)),
    "grid_sample": lambda a: F.grid_sample(a[None], (a[:1, :, :2, None] - 1).mT.expand(1, 3, 1, 2), align_corners=True),
    "einsum_of_three": lambda a: torch.einsum("bij,kj,bi->bk", a, a[0], a[..., 0]),
    "einsum_with_ellipsis": lambda a: torch.einsum("...ij,kj->...ik", a, a[0]),
    "reversed_gradient": lambda a: Reversed.apply(a),
    "straight_through": lambda a: a * Rounded.apply(a),
    "fused": lambda a: Fused.apply(a, 2.0),
    "argmin": lambda a: a * a.argmin(),
    "log10": torch.log10,
    "tan": torch.tan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "atanh": lambda a: torch.atanh(a / 3),
    "asinh": torch.asinh,
    "acosh": lambda a: torch.acosh(a + 1),
    "ceil": lambda a: a * a.ceil(),
    "remainder": lambda a: a.remainder(0.4),
    "isnan": lambda a: torch.where(a.isnan(), 0, a),
    "xor": lambda a: torch.where((a > 1) ^ MASK, a, -a),
    "sdpa_three_dims": lambda a: F.scaled_dot_product_attention(a, 2 * a, 3 * a),
    "sdpa_float_mask": lambda a: F.scaled_dot_product_attention(a, a, a, torch.eye(3, dtype=a.dtype)),
    "sdpa_bool_mask": lambda a: F.scaled_dot_product_attention(a, a, a, torch.eye(3, dtype=torch.bool)),
    "sdpa_causal_across": lambda a: F.scaled_dot_product_attention(a[:, :2], a, a, is_causal=True),
    "sdpa_groups": lambda a: F.scaled_dot_product_attention(
        a.reshape(1, 6, 2, 2), a.reshape(1, 6, 2, 2)[:, :2], a.reshape(1, 6, 2, 2)[:, 2:4], enable_gqa=True
    ),
    "sdpa_causal_mask": lambda a: F.scaled_dot_product_attention(
        a[:, None], a[:, None], a[:, None], torch.full((1, 1, 3, 3), torch.finfo(a.dtype).min, dtype=a.dtype).triu(1)
    ),
    "sdpa_window": lambda a: F.scaled_dot_product_attention(a, a, a, WINDOW),
    "sdpa_window_by_numbers": lambda a: F.scaled_dot_product_attention(
        a[:, None],
        a[:, None],
        a[:, None],
        torch.zeros(1, 1, 3, 3, dtype=a.dtype).masked_fill(~WINDOW, torch.finfo(a.dtype).min),
    ),
    "sdpa_documents": lambda a: F.scaled_dot_product_attention(
        a[:, None], 2 * a[:, None], a[:, None], torch.stack([WINDOW, NOTHING])[:, None]
    ),
    "sdpa_one_dim": lambda a: F.scaled_dot_product_attention(a[0], a[0], a[0], WINDOW[1]),
    "sdpa_rows_of_large_numbers": lambda a: F.scaled_dot_product_attention(
        a, a, a, torch.zeros(3, 3, dtype=a.dtype).masked_fill(~NOTHING, torch.finfo(a.dtype).min)
    ),
    "sdpa_a_gap_between_keys": lambda a: F.scaled_dot_product_attention(a, a, a, SEEN),
    "sdpa_heads_under_different_masks": lambda a: F.scaled_dot_product_attention(
        a[None], a[None], a[None], torch.stack([WINDOW, NOTHING])[None]
    ),
}
"""Functions of one parameter."""
RANGES = ("sdpa_bool_mask", "sdpa_causal_across", "sdpa_documents", "sdpa_window", "sdpa_window_by_numbers")
RANGES += ("sdpa_one_dim",)
"""Those whose masks let each query see keys next to each other."""

AB = {
    # a [2, 3, 4] and b [3, 4]
    "add": lambda a, b: a + b,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "add_smaller_first": lambda a, b: b + a,
    "sub": lambda a, b: a - b,
    "sub_smaller_first": lambda a, b: b - a,
    "sub_broadcast_inside": lambda a, b: a - b[:, :1],
    "outer": lambda a, b: b[:, :1] * b[:1],
    "div": lambda a, b: a / b,
    "div_smaller_first": lambda a, b: b / a,
    "mul_column": lambda a, b: a[:, :1] * b,
    "pow": lambda a, b: a**b,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "linear": F.linear,
    "linear_vector": lambda a, b: F.linear(a[0, 0], b),
    "matmul": lambda a, b: a @ b.T,
    "matmul_vector": lambda a, b: a @ b[0],
    "vector_matmul": lambda a, b: b[0] @ a.mT,
    "matmul_broadcast": lambda a, b: b[None, None] @ a.mT,
    "mm": lambda a, b: a[0] @ b.T,
    "dot": lambda a, b: torch.dot(a[0, 0], b[1]),
    "bmm": lambda a, b: torch.bmm(a, a.mT),
    "addmm": lambda a, b: torch.addmm(b[:, :3], a[0], b.T, beta=2, alpha=3),
    "addmm_of_flat": lambda a, b: torch.addmm(b[0, :3], a.view(-1, 4), b.T).view(2, 3, 3),
    "einsum": lambda a, b: torch.einsum("bij,kj->bik", a, b),
    "einsum_batch": lambda a, b: torch.einsum("bij,bkj->ikb", a, a),
    "embedding": lambda a, b: F.embedding(IDS, b),
    "embedding_positions": lambda a, b: a + F.embedding(torch.arange(3)[None], b),
    "embedding_one_row": lambda a, b: a + F.embedding(torch.full((2, 3), 1), b),
    "embedding_part": lambda a, b: a[:, :2] + F.embedding(torch.tensor([[1, 2]]).expand(2, 2), b),
    "batch_norm_evaluated": lambda a, b: F.batch_norm(
        a, torch.arange(3.0, dtype=a.dtype), torch.ones(3, dtype=a.dtype), b[:, 0], b[:, 1], training=False
    ),
    "native_batch_norm": lambda a, b: torch.native_batch_norm(a, b[:, 0], b[:, 1], None, None, True, 0.1, 1e-5)[0],
    "conv2d": lambda a, b: F.conv2d(a[:, None], b[None, None, :2], b[0, :1], stride=(1, 2), padding=1, dilation=(2, 1)),
    "mse": lambda a, b: F.mse_loss(a[0], b),
    "mse_of_each": lambda a, b: F.mse_loss(a[0], b, reduction="none"),
    "bce_weighted": lambda a, b: F.binary_cross_entropy(torch.sigmoid(a[0]), torch.sigmoid(b.detach()), b.detach()),
    "bce_with_logits_weighted": lambda a, b: F.binary_cross_entropy_with_logits(
        a[0] - 1, torch.sigmoid(b.detach()), b.detach(), pos_weight=2 * b[0].detach(), reduction="none"
    ),
    "cross_entropy_weighted": lambda a, b: F.cross_entropy(
        b, torch.tensor([3, 0, 1]), a[0, 0].detach(), label_smoothing=0.2
    ),
    "cross_entropy_of_each": lambda a, b: F.cross_entropy(b, torch.tensor([3, -100, 1]), reduction="none"),
    "cross_entropy_smooth_ignored": lambda a, b: F.cross_entropy(b, torch.tensor([3, -100, 1]), label_smoothing=0.2),
    "cross_entropy_of_probabilities": lambda a, b: F.cross_entropy(
        a, a.detach().softmax(1), b[:, 0].detach(), label_smoothing=0.1
    ),
    "nll_over_another_dim": lambda a, b: F.nll_loss(a, torch.tensor([[2, 0, 1, 1], [1, 1, 2, 0]])),
    "mse_sum": lambda a, b: F.mse_loss(a[0], b, reduction="sum"),
    "l1": lambda a, b: F.l1_loss(a[0], b),
    "bce": lambda a, b: F.binary_cross_entropy(torch.sigmoid(a[0]), torch.sigmoid(b.detach())),
    "bce_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a[0], torch.sigmoid(b.detach())),
    "conv_transpose2d": lambda a, b: F.conv_transpose2d(
        a[None, :, :2], b[:2, :3].reshape(2, 1, 1, 3), stride=2, padding=(0, 1), output_padding=1, groups=2
    ),
    "embedding_bag_of_different_sizes": lambda a, b: F.embedding_bag(
        IDS.flatten()[:5], b, torch.tensor([0, 2, 2]), mode="mean", per_sample_weights=None
    ),
    "embedding_bag_by_weights": lambda a, b: F.embedding_bag(
        IDS.flatten()[:5],
        b,
        torch.tensor([0, 3, 5]),
        mode="sum",
        per_sample_weights=a[0, 0].repeat(2)[:5],
        include_last_offset=True,
    ),
    "embedding_known_padding": lambda a, b: F.embedding(IDS, b, padding_idx=1),
    "conv1d_of_table": lambda a, b: F.conv1d(torch.arange(12, dtype=a.dtype).reshape(1, 3, 4), b.reshape(2, 3, 2)),
    "group_norm_of_table": lambda a, b: F.group_norm(torch.arange(8, dtype=a.dtype).reshape(1, 4, 2), 2, b[0]),
    "bilinear_of_two": lambda a, b: F.bilinear(a[0], b, a[:1].mT @ a[:1]),
    "cross_entropy_known": lambda a, b: F.cross_entropy(b, torch.tensor([3, 0, 1])),
    "cross_entropy_middle": lambda a, b: F.cross_entropy(a, torch.tensor([[2, 0, 1, 1], [1, 1, 2, 0]])),
    "cross_entropy_sum": lambda a, b: F.cross_entropy(b, torch.tensor([3, 0, 1]), reduction="sum"),
    "cross_entropy_smooth": lambda a, b: F.cross_entropy(b, torch.tensor([3, 0, 1]), label_smoothing=0.1),
    "cross_entropy_ignored": lambda a, b: F.cross_entropy(b, torch.tensor([3, -100, 1])),
    "cross_entropy_ignored_sum": lambda a, b: F.cross_entropy(
        b, torch.tensor([3, -1, 1]), None, None, -1, reduction="sum"
    ),
    "embedding_bag": lambda a, b: F.embedding_bag(IDS, b, mode="sum"),
    "embedding_bag_mean": lambda a, b: F.embedding_bag(IDS, b, mode="mean"),
    "nll": lambda a, b: F.nll_loss(F.log_softmax(b, -1), torch.tensor([3, 0, 1])),
}
"""Functions of two."""

FUNCTIONS: dict[str, Callable[..., Tensor]] = {**A, **AB}


class Function(nn.Module):
    """A function's result as a loss."""

    def __init__(self, name: str):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) + 0.5)
        self.b = nn.Parameter(torch.rand(3, 4, generator=generator, dtype=torch.float64) + 0.5)
        self.of = FUNCTIONS[name]
        self.count = 1 if name in A else 2

    def forward(self, x: Tensor) -> Tensor:
        return weighted(self.of(*(self.a * x, self.b)[: self.count]))


class Lstm(nn.Module):
    """Outputs and last states of an LSTM as a loss."""

    def __init__(self, **more: object):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, **more).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs, (h, c) = self.lstm(x)
        return sum(map(weighted, (outputs, h, c)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False}]
)
def test_lstm(more: dict[str, object]):
    torch.manual_seed(0)
    agree(Lstm(**more), torch.randn(2, 5, 4, dtype=torch.float64))


class Recurrent(nn.Module):
    """Outputs and last states of a recurrent network of one state as a loss."""

    def __init__(self, kind: type[nn.RNNBase], **more: object):
        super().__init__()
        self.inner = kind(4, 3, **more).double()

    def forward(self, x: Tensor) -> Tensor:
        return sum(map(weighted, self.inner(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.GRU, {"bias": False, "batch_first": True}),
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    ],
)
def test_recurrent(kind: type[nn.RNNBase], more: dict[str, object]):
    torch.manual_seed(0)
    agree(Recurrent(kind, **more), torch.randn(2, 3, 4, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_pytorch(name: str):
    agree(Function(name), torch.full((), 1.25, dtype=torch.float64))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.startswith(("sdpa", "attention"))])
def test_which_masks_are_ranges(name: str):
    graph = from_torch(Function(name), torch.full((), 1.25, dtype=torch.float64)).graph
    ranged = any(node.op == "attention_ranges" for node in graph.nodes())
    assert ranged == (name in RANGES)


def _written(a: Tensor, of: Callable[[Tensor], Tensor], mask: Tensor = MASK[:, :3] & False) -> Tensor:
    """Attention [2, 1, 3, 4] by products, with a function of the scores, of which masked ones are far below 0."""
    x = a[:, None]
    far = torch.zeros(3, 3, dtype=a.dtype).masked_fill(mask, torch.finfo(a.dtype).min)
    return (of(x @ x.mT / 2) + far).softmax(-1) @ x


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "plain": (lambda a: _written(a, lambda s: s), "attention"),
    "window": (lambda a: _written(a, lambda s: s, ~WINDOW), "attention_ranges"),
    "sees_nothing": (lambda a: _written(a, lambda s: s, ~NOTHING), "softmax"),
    "sees_keys_apart": (lambda a: _written(a, lambda s: s, ~SEEN[[0, 2, 2]]), "softmax"),
    "capped": (lambda a: _written(a, lambda s: 0.5 * (s / 0.5).tanh()), "attention_capped"),
    "capped_window": (lambda a: _written(a, lambda s: 3 * (-s / 0.5).tanh(), ~WINDOW), "attention_capped_ranges"),
    "turned": (lambda a: _written(a, lambda s: -0.5 * (s / 0.5).tanh()), "softmax"),
    "capped_twice": (lambda a: _written(a, lambda s: s.tanh().tanh()), "softmax"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_written_out(name: str):
    """One operator of it where there is one, else a softmax between products; the numbers are PyTorch's."""
    function, wanted = WRITTEN[name]
    module = Function("neg")
    module.of = function
    agree(module, torch.full((), 1.25, dtype=torch.float64))
    found = {n.op for n in from_torch(module, torch.full((), 1.25, dtype=torch.float64)).graph.nodes()}
    assert found & {"softmax", *(n for n in found if n.startswith("attention"))} == {wanted}


CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
FAR = -torch.inf


def _by_hand(
    a: Tensor,
    scores: Callable[[Tensor, Tensor], Tensor] = lambda q, k: q @ k.mT / 2,
    masked: Callable[[Tensor], Tensor] = lambda s: s,
    weights: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1),
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """Attention [2, 2, 3, 2] as people write it: scores, masked, their softmax, and the product with values."""
    q, k, v = (x.view(2, 3, 2, 2).transpose(1, 2) for x in (a, a * a, 1 - a))
    return product(weights(masked(scores(q, k))), v)


def _flat(x: Tensor) -> Tensor:
    """Return [batch * heads, 3, .] of [batch, heads, 3, .]."""
    return x.reshape(-1, 3, x.shape[-1])


def _bmm(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(_flat(q), _flat(k).transpose(1, 2)) / 2


def _bmm_of_values(w: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(_flat(w), _flat(v)).view(2, 2, 3, 2)


def _baddbmm(q: Tensor, k: Tensor) -> Tensor:
    far = torch.zeros(1, 3, 3, dtype=q.dtype).masked_fill(~CAUSAL, torch.finfo(q.dtype).min)
    return torch.baddbmm(far, _flat(q), _flat(k).transpose(1, 2), alpha=0.5)


def _filled(seen: Tensor, by: float = FAR) -> Callable[[Tensor], Tensor]:
    return lambda s: s.masked_fill(~seen, by)


def _first_gpt(far: float, table: Tensor = CAUSAL) -> Callable[[Tensor], Tensor]:
    return lambda s: s * table.to(s.dtype) + far * (1 - CAUSAL.to(s.dtype))


def _first(x: Tensor) -> Tensor:
    return x[:, :1]


DOCUMENTS = torch.stack([WINDOW, WINDOW, CAUSAL, CAUSAL])
"""Masks [batch * heads, 3, 3], of each element of the batch its own."""

BY_HAND: dict[str, tuple[dict[str, Any], str]] = {
    "filled": ({"masked": _filled(CAUSAL)}, "attention {causal = 1}"),
    "filled_by_a_number": ({"masked": _filled(CAUSAL, -1e9)}, "attention {causal = 1}"),
    "filled_in_place": ({"masked": lambda s: s.masked_fill_(~CAUSAL, FAR)}, "attention {causal = 1}"),
    "filled_window": ({"masked": _filled(WINDOW)}, "attention_ranges {causal = 1}"),
    "filled_twice": ({"masked": lambda s: _filled(WINDOW)(_filled(CAUSAL)(s))}, "attention_ranges {causal = 1}"),
    "filled_little": ({"masked": _filled(CAUSAL, -1e4)}, "softmax"),
    "where_not": (
        {"masked": lambda s: torch.where(~CAUSAL, torch.tensor(FAR, dtype=s.dtype), s)},
        "attention {causal = 1}",
    ),
    "added": ({"masked": lambda s: (~CAUSAL) * -1e10 + s}, "attention {causal = 1}"),
    "taken_off": ({"masked": lambda s: s - 1e10 * (~CAUSAL).to(s.dtype)}, "attention {causal = 1}"),
    "added_after": ({"masked": lambda s: _filled(CAUSAL)(s) + torch.arange(3) / 8}, "softmax"),
    "first_gpt": ({"masked": _first_gpt(-1e10)}, "attention {causal = 1}"),
    "first_gpt_near": ({"masked": _first_gpt(-1e4)}, "softmax"),
    "first_gpt_other": ({"masked": _first_gpt(-1e10, WINDOW)}, "softmax"),
    "bmm": ({"scores": _bmm, "product": _bmm_of_values}, "attention {causal = 0}"),
    "bmm_filled": (
        {"scores": _bmm, "masked": _filled(CAUSAL[None]), "product": _bmm_of_values},
        "attention {causal = 1}",
    ),
    "bmm_documents": (
        {"scores": _bmm, "masked": _filled(DOCUMENTS), "product": _bmm_of_values},
        "attention_ranges {causal = 1}",
    ),
    "bmm_by_head": ({"scores": _bmm, "masked": _filled(DOCUMENTS[[0, 2, 1, 3]]), "product": _bmm_of_values}, "softmax"),
    "bmm_viewed": (
        {"scores": lambda q, k: _bmm(q, k).view(2, 2, 3, 3), "masked": _filled(CAUSAL), "product": _bmm_of_values},
        "attention {causal = 1}",
    ),
    "baddbmm": ({"scores": _baddbmm, "product": _bmm_of_values}, "attention {causal = 1}"),
    "einsum": (
        {
            "scores": lambda q, k: torch.einsum("bhid,bjhd->bhij", q, k.transpose(1, 2)) / 2,
            "masked": _filled(CAUSAL),
            "product": lambda w, v: torch.einsum("bhij,bjhd->bihd", w, v.transpose(1, 2)),
        },
        "attention {causal = 1}",
    ),
    "one_head_of_keys": (
        {"scores": lambda q, k: q @ _first(k).mT, "masked": _filled(CAUSAL), "product": lambda w, v: w @ _first(v)},
        "attention {causal = 1}",
    ),
    "in_float32": (
        {"masked": _filled(CAUSAL), "weights": lambda s: s.double().softmax(-1).type_as(s)},
        "attention {causal = 1}",
    ),
    "narrower": ({"scores": lambda q, k: (q @ k.mT).float().double() / 2}, "softmax"),
    "queries_cast_before": (
        {"scores": lambda q, k: q.float().double() @ k.float().double().mT},
        "attention {causal = 0}",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_attention_as_people_write_it(name: str):
    """One operator where there is one, else a softmax between products; the numbers are PyTorch's."""
    how, wanted = BY_HAND[name]
    module = Function("neg")
    module.of = lambda a: _by_hand(a, **how)
    agree(module, torch.full((), 1.25, dtype=torch.float64))
    found = from_torch(module, torch.full((), 1.25, dtype=torch.float64)).graph.nodes()
    said = {
        f"{n.op} {{causal = {n.attribute('causal')}}}" if n.op.startswith("attention") else n.op
        for n in found
        if n.op == "softmax" or n.op.startswith("attention")
    }
    assert said == {wanted}


@pytest.mark.parametrize(
    "how",
    [
        {"weights": lambda s: s.double().softmax(-1).type_as(s)},
        {"scores": lambda q, k: (q @ k.mT).double() / 2, "weights": lambda s: s.softmax(-1).float()},
        {"scores": lambda q, k: q.double() @ k.double().mT, "weights": lambda s: s.softmax(-1).float()},
        {"masked": lambda s: _filled(CAUSAL)(s.double()), "weights": lambda s: s.softmax(-1).float()},
    ],
)
def test_attention_whose_scores_are_in_a_wider_type(how: dict[str, Any]):
    module = Function("neg").float()
    module.of = lambda a: _by_hand(a, **how)
    found = {n.op for n in from_torch(module, torch.full((), 1.25)).graph.nodes()}
    assert "attention" in found
    assert "softmax" not in found


def _mean_of_squares(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-3


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _deviation(x: Tensor, unbiased: bool = False) -> Tensor:
    return torch.sqrt(x.var(-1, keepdim=True, unbiased=unbiased) + 1e-3)


def _logs(a: Tensor) -> Tensor:
    return (a[:, :2] @ a[0].mT).log_softmax(-1)


PIECES: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "rms_by_product": (lambda a, b: a * torch.rsqrt(_mean_of_squares(a)) * b[0], {"rms_norm"}),
    "rms_weight_first": (lambda a, b: b[0] * a * torch.rsqrt(_mean_of_squares(a)), {"rms_norm"}),
    "rms_by_quotient": (lambda a, b: a / _mean_of_squares(a).sqrt() * b[0], {"rms_norm"}),
    "rms_quotient_last": (lambda a, b: b[0] * a / _mean_of_squares(a).sqrt(), {"rms_norm"}),
    "rms_by_power": (lambda a, b: b[0] * a * _mean_of_squares(a).pow(-0.5), {"rms_norm"}),
    "rms_of_a_product": (lambda a, b: b[0] * (a * ((a * a).mean(-1, keepdim=True) + 1e-3).rsqrt()), {"rms_norm"}),
    "rms_without_eps": (lambda a, b: b[0] * (a * (a * a).mean(-1, keepdim=True).rsqrt()), {"rms_norm"}),
    "rms_of_another": (lambda a, b: b[0] * a / _mean_of_squares(a + 1).sqrt(), set()),
    "rms_over_rows": (lambda a, b: b[0] * a / (a.pow(2).mean(1, keepdim=True) + 1e-3).sqrt(), set()),
    "rms_by_rows": (lambda a, b: a / _mean_of_squares(a).sqrt() * b[:, :1], set()),
    "rms_of_products": (lambda a, b: b[0] * a / ((a * (a + 1)).mean(-1, keepdim=True) + 1e-3).sqrt(), set()),
    "rms_by_more": (lambda a, b: b[0] * a * a / _mean_of_squares(a).sqrt(), set()),
    "rms_twice_divided": (
        lambda a, b: b[0] * a / _mean_of_squares(a).sqrt() / _mean_of_squares(a).sqrt(),
        {"rms_norm"},
    ),
    "norm_by_variance": (lambda a, b: b[0] * _centred(a) / _deviation(a) + b[1], {"layer_norm"}),
    "norm_by_variance_first": (lambda a, b: _centred(a) / _deviation(a) * b[0] + b[1], {"layer_norm"}),
    "norm_by_squares": (
        lambda a, b: b[1] + b[0] * (_centred(a) * _mean_of_squares(_centred(a)).rsqrt()),
        {"layer_norm"},
    ),
    "norm_without_bias": (lambda a, b: b[0] * _centred(a) / _deviation(a), {"rms_norm"}),
    "norm_unbiased": (lambda a, b: b[0] * _centred(a) / _deviation(a, True) + b[1], set()),
    "norm_of_another": (lambda a, b: b[0] * _centred(a) / _deviation(a * a) + b[1], set()),
    "silu": (lambda a, b: torch.sigmoid(a) * a + b, {"silu"}),
    "swish_with_beta": (lambda a, b: torch.sigmoid(1.5 * a) * a + b, set()),
    "loss_of_viewed_logs": (lambda a, b: F.nll_loss(_logs(a).view(-1, 3), IDS.flatten()[:4]), {"cross_entropy"}),
    "loss_of_reshaped_classes": (lambda a, b: F.nll_loss(_logs(a).view(-1, 6), IDS.flatten()[:2]), {"log_softmax"}),
    "loss_of_one_hot": (lambda a, b: -(F.one_hot(_ids(a), 3) * _logs(a)).sum(-1).mean(), {"cross_entropy"}),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_as_people_write_them(name: str):
    """One operator where there is one that computes just this; the numbers are PyTorch's."""
    function, wanted = PIECES[name]
    module = Function("add")
    module.of = function
    agree(module, torch.full((), 1.25, dtype=torch.float64))
    found = {n.op for n in from_torch(module, torch.full((), 1.25, dtype=torch.float64)).graph.nodes()}
    assert found & {"rms_norm", "layer_norm", "silu", "cross_entropy", "log_softmax"} == wanted


def _dropped(*probabilities: float) -> Callable[[Tensor], Tensor]:
    def of(s: Tensor) -> Tensor:
        weights = s.softmax(-1)
        for p in probabilities:
            weights = nn.functional.dropout(weights, p)
        return weights

    return of


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"weights": _dropped(0.25)}, ["attention_dropout", 0, 0.25, 1]),
        ({"weights": _dropped(0.25), "masked": _filled(CAUSAL)}, ["attention_dropout", 1, 0.25, 1]),
        ({"weights": _dropped(0.25), "scores": _bmm, "product": _bmm_of_values}, ["attention_dropout", 0, 0.25, 1]),
        ({"weights": _dropped(0.25), "masked": _filled(WINDOW)}, ["softmax"]),
        ({"weights": _dropped(0.25), "masked": torch.tanh}, ["softmax"]),
        ({"weights": _dropped(0.25, 0.5)}, ["softmax"]),
    ],
)
def test_attention_whose_weights_are_dropped(how: dict[str, Any], wanted: list[Any]):
    """Dropped by the attention, with the probability and the seed that the dropout had: another one before has 0."""
    module = Function("neg")
    module.of = lambda a: _by_hand(nn.functional.dropout(a, 0.5), **how)
    found = from_torch(module, torch.full((), 1.25, dtype=torch.float64)).graph.nodes()
    said = [n for n in found if n.op == "softmax" or n.op.startswith("attention")]
    keys = ("causal", "drop", "seed")
    assert [said[0].op, *(said[0].attribute(k) for k in keys if said[0].op != "softmax")] == wanted
    assert len(said) == 1


class Reversed(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return -grad_outputs[0]


class Rounded(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        return (args[0] * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class Fused(torch.autograd.Function):
    """Its forward's own gradient, by a formula, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        ctx.save_for_backward(args[0])
        ctx.by = args[1]
        return (args[0] * args[1]).sin().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad_outputs[0][..., None] * (x * ctx.by).cos() * ctx.by, None


class Mixing(torch.autograd.Function):
    """A gradient that is neither its forward's nor by elements."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].flip(0)


def _hooked(a: Tensor) -> Tensor:
    y = a * 2
    y.register_hook(lambda g: 3 * g)
    return y


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "hook": (_hooked, "hook on the gradient of a tensor"),
    "function": (lambda a: Mixing.apply(a), "Mixing is a torch.autograd.Function, whose gradient is neither"),
    "scatter_of_products": (lambda a: a.scatter_reduce(0, INDEX, a, "prod"), "sum logarithms"),
    "mask_that_selects": (lambda a: a[a > 1], "depends on data"),
    "mask_that_gets_many": (lambda a: a.masked_scatter(a > 1, a), "no mapping"),
    "searchsorted_sorter": (lambda a: a * torch.searchsorted(HALVES, a, sorter=torch.arange(3)), "a sorter has no"),
    "branch": (lambda a: a if a.sum() > 0 else -a, "choose by torch.where"),
    "bits_and": (lambda a: a * ((4 * a).long() & 3), "of the bits of integers"),
    "bits_xor": (lambda a: a * ((4 * a).long() ^ 3), "of the bits of integers"),
    "bits_as_integers": (lambda a: a * a.view(torch.int64), "the bits of numbers"),
    "softmax_of_a_scalar": (lambda a: a.sum().softmax(0), "does not take these arguments"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    function, why = REFUSED[name]
    module = Function("neg")
    module.of = function
    with pytest.raises(UnityError, match=why):
        from_torch(module, torch.ones((), dtype=torch.float64))


def test_hooks_of_a_module_are_refused():
    for hook in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Linear(2, 1)
        getattr(module, hook)(lambda *_: None)
        with pytest.raises(UnityError, match="backward hook"):
            from_torch(module, torch.ones(1, 2), lambda y: y.sum())
    module = nn.Linear(2, 1)
    module.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(UnityError, match="parameter weight has a hook"):
        from_torch(module, torch.ones(1, 2), lambda y: y.sum())
    assert torch.Tensor.register_hook.__module__ != "unity_ir.frontends.torch.export"


def test_a_loss_without_a_signature_is_refused():
    with pytest.raises(UnityError, match="does not know the parameters"):
        from_torch(nn.Linear(2, 1), torch.ones(1, 2), torch.sum)

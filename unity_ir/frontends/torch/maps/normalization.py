"""
Map normalisation over last dims, groups of channels, and the batch from ATen operators to the compiler's. Each mapping
gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments, and returns
the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import add, mul
from unity_ir.frontends.torch.site import CallSite, cast, maps
from unity_ir.frontends.torch.values import Operand, constant, op, reshape
from unity_ir.pcg.node import Value, apply


def affine(site: CallSite, weight: Operand | None, bias: Operand | None, size: int) -> tuple[Value, Value]:
    """
    Return (weight, bias) of a normalisation as values of the graph, [size] each, in the element type of PyTorch's
    result: ones for a weight of None, zeros for a bias of None.
    """
    return tuple(
        constant(default, (size,), site.dtype) if v is None else reshape(site.value(v, site.dtype), (size,))
        for v, default in ((weight, 1), (bias, 0))
    )  # pyright: ignore[reportReturnType]


@maps("layer_norm")
def layer_norm(
    site: CallSite,
    x: Value,
    sizes: Sequence[int],
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Value:
    """
    Map PyTorch's layer normalisation over the last `len(sizes)` dims, whose sizes are `sizes`, with `eps` added to the
    variance; a `weight` of None is 1, a `bias` of None 0. `cudnn` has no effect.
    """
    del cudnn
    flat = reshape(x, (*x.shape[: len(x.shape) - len(sizes)], prod(sizes)))
    return reshape(op("layer_norm", flat, *affine(site, weight, bias, prod(sizes)), eps=float(eps)), x.shape)


@maps("native_layer_norm")
def native_layer_norm(
    site: CallSite, x: Value, sizes: Sequence[int], weight: Operand | None, bias: Operand | None, eps: float
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's layer normalisation as `layer_norm` does; return (result, None, None): the mean and the inverse
    deviation, PyTorch's other results, have no mapping.
    """
    return layer_norm(site, x, sizes, weight, bias, eps), None, None


@maps("rms_norm")
def rms_norm(
    site: CallSite, x: Value, sizes: Sequence[int], weight: Operand | None = None, eps: float | None = None
) -> Value:
    """
    Map PyTorch's RMS normalisation over the last `len(sizes)` dims, whose sizes are `sizes`; a `weight` of None is 1,
    an `eps` of None is the machine epsilon of the element type.
    """
    size = prod(sizes)
    flat = reshape(x, (*x.shape[: len(x.shape) - len(sizes)], size))
    ones, _ = affine(site, weight, None, size)
    eps = torch.finfo(site.result.dtype).eps if eps is None else eps
    return reshape(op("rms_norm", flat, ones, eps=float(eps)), x.shape)


@maps("group_norm")
def group_norm(
    site: CallSite,
    x: Value,
    groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Value:
    """
    Map PyTorch's group normalisation of `x` [batch, channels, ..]: a layer norm of each of `groups` groups of channels,
    then a weight and bias [channels], if given. `cudnn` has no effect.
    """
    del cudnn
    n, channels, *rest = x.shape
    size = prod((channels // groups, *rest))
    out = op("layer_norm", reshape(x, (n, groups, size)), *affine(site, None, None, size), eps=float(eps))
    out = reshape(out, x.shape)
    per_channel = (channels, *(1 for _ in rest))
    if weight is not None:
        out = mul(site, out, reshape(site.value(weight, site.dtype), per_channel))
    return out if bias is None else add(site, out, reshape(site.value(bias, site.dtype), per_channel))


@maps("native_group_norm")
def native_group_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    batch: int,
    channels: int,
    rest: int,
    groups: int,
    eps: float,
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's group normalisation as `group_norm` does, of `x` [batch, channels, ..] with `rest` elements per sample
    and channel; return (result, None, None): the mean and the inverse deviation have no mapping.
    """
    del batch, channels, rest
    return group_norm(site, x, groups, weight, bias, eps), None, None


@maps("instance_norm")
def instance_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand | None,
    var: Operand | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Value:
    """
    Map PyTorch's instance normalisation of `x` [batch, channels, ..], by the mean and variance of each sample and
    channel. Running statistics are not updated, so `mean`, `var`, `momentum` and `cudnn` have no effect. Raises
    `UnityError` unless `training`: PyTorch then normalises by running statistics.
    """
    if not training:
        raise UnityError("an instance norm by running statistics has no mapping")
    del mean, var, momentum
    return group_norm(site, x, x.shape[1], weight, bias, eps, cudnn)


@maps("batch_norm")
def batch_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand | None,
    var: Operand | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = True,
) -> Value:
    """
    Map PyTorch's batch normalisation of `x` [batch, channels, ..]: if `training`, or without running statistics, by the
    mean and variance of the whole batch, else by the running statistics `mean` and `var` [channels].

    If `training`, a step also replaces running statistics that are buffers of the module, as PyTorch does: the new one
    is `momentum` of the batch's and 1 - `momentum` of the old one. `cudnn` has no effect.
    """
    del cudnn
    w, b = affine(site, weight, bias, x.shape[1])
    if not training and mean is not None and var is not None:
        running = (site.tables.current_statistic(v) or v if isinstance(v, torch.Tensor) else v for v in (mean, var))
        return op("running_batch_norm", x, *(site.value(v, site.dtype) for v in running), w, b, eps=float(eps))
    center = op("batch_mean", x)
    stats = (*apply("batch_stats", (x, center), {}).results, center)
    if isinstance(mean, torch.Tensor) and isinstance(var, torch.Tensor):
        _replace_running(site, (mean, var), stats, x.shape[0] * prod(x.shape[2:]), momentum)
    return op("batch_norm", x, *stats, w, b, eps=float(eps))


def _replace_running(
    site: CallSite, buffers: Sequence[torch.Tensor], stats: Sequence[Value], count: int, momentum: float
) -> None:
    """
    Replace the running mean and variance [channels] in `buffers` by those after a batch whose statistics [1, channels]
    are `stats` (shift, square, center), of `count` values of each channel; leave tensors alone that are no buffers of
    the module, and are lost with the step.
    """
    before = [site.tables.current_statistic(buffer) for buffer in buffers]
    if None in before or count < 2:
        return
    mean, var = (v for v in before if v is not None)
    of_batch = (cast(v, mean.dtype) for v in stats)
    made = apply("running_stats", (mean, var, *of_batch), {"count": count, "momentum": float(momentum)}).results
    for buffer, value in zip(buffers, made, strict=True):
        site.tables.replace(buffer, value)


@maps("_native_batch_norm_legit", "native_batch_norm")
def native_batch_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand | None,
    var: Operand | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's batch normalisation as `batch_norm` does; return (result, None, None): ATen's other results, such as
    mean and deviation, have no mapping.
    """
    return batch_norm(site, x, weight, bias, mean, var, training, momentum, eps), None, None


@maps("_native_batch_norm_legit_functional")
def functional_batch_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand,
    var: Operand,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's batch normalisation as `batch_norm` does; return (result, None, None, None, None): ATen's other
    results, such as mean, deviation and the new running statistics, have no mapping.
    """
    return batch_norm(site, x, weight, bias, mean, var, training, momentum, eps), *(None,) * 4


@maps("_native_batch_norm_legit_no_training")
def evaluated_batch_norm(
    site: CallSite,
    x: Value,
    weight: Operand | None,
    bias: Operand | None,
    mean: Operand,
    var: Operand,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """
    Map PyTorch's batch normalisation in evaluation mode, by the running statistics `mean` and `var` [channels]; return
    (result, None, None): ATen's other results have no mapping.
    """
    return batch_norm(site, x, weight, bias, mean, var, False, momentum, eps), None, None

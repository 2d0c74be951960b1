"""
Write windows (affine indices of several variables, `x[2 * i + j]`) in PyTorch: convolutions, poolings and their
gradients by its functions, the rest by `index_add`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from unity_ir.forms.convolution import (
    Convolution,
    MaxPoolingGradient,
    Pooling,
    Sliding,
    convolution,
    max_pooling_gradient,
    pointwise_convolution,
    pooled_sum,
    pooling,
)
from unity_ir.forms.windows import exceeds_tensor, local_range
from unity_ir.kernels.pytorch.reads import padded, read_windows_folded, window_dim_name
from unity_ir.kernels.pytorch.tensor_text import TORCH_DTYPES, TensorText
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import Text
from unity_ir.tdl.syntax import Binary, Const, Expr, Reduce, Result, Window, index_names

F = "torch.nn.functional"


def target(number: int) -> str:
    """
    Return the placeholder name (`=0`, `=1`, ..) of the dim of a result that is written through its window (affine
    index) number `number`, from 0, as in a transposed convolution.
    """
    return f"={number}"


def written(writer: TorchWriter, result: Result) -> TensorText:
    """
    Return code for a result that is written through windows (affine indices, as in a transposed convolution or a
    pooling's gradient): values that fall on one position are added up. The dim of the i-th window is called
    `target(i)`, and its extent is added to `writer.extents`.
    """
    windows = [i for i in result.indices if isinstance(i, Window)]
    for number, window in enumerate(windows):
        writer.extents[target(number)] = window.size
    spread = max_pooling_gradient(writer.bound, result, writer.starts)
    if spread is not None and len(windows) == 2:
        return _max_pooling_gradient(writer, spread)
    found = convolution(result.indices, result.expr, writer.extents)
    if found is not None:
        return _convolution(writer, found)
    same = pooled_sum(result.indices, result.expr)
    if same is not None and len(same) == 2 and all(s.dilation == 1 for s in same):
        return _spread_sum(writer, same, writer.floating(writer.value(result.expr)))
    return _added(writer, result, windows)


def _added(writer: TorchWriter, result: Result, windows: Sequence[Window]) -> TensorText:
    """Write a result by adding every element to its place, one dim after the other; places outside are cut off."""
    names = [n for i in result.indices if not isinstance(i, Window) for n in index_names(i)]
    order = [*names, *(n for w in windows for n in index_names(w))]
    value = writer.value(result.expr)
    dtype = TORCH_DTYPES[result.dtype] if result.dtype else writer.dtype
    value = writer.tensor(value) if result.dtype is None or value.number else value
    text = writer.expanded(value, tuple(order))
    dims = list(order)
    for number, window in enumerate(windows):
        first, last = local_range(window, writer.extents)
        own = [n for _, n in window.terms]
        dim = dims.index(own[0]) if own else len(names) + number
        if len(own) > 1:
            text = writer.method(text, f"flatten({dim}, {dim + len(own) - 1})")
        if not own:
            text = writer.method(text, f"unsqueeze({dim})")
        dims[dim : dim + len(own)] = [target(number)]
        sizes = [last - first + 1 if n == target(number) else writer.extents[n] for n in dims]
        if len(own) != 1 or window.terms[0][0] > 1:
            at = " + ".join(
                f"torch.arange(0, {f * writer.extents[n]}, {f}, device={writer.device})"
                + (f"[{', '.join([':', *['None'] * (len(own) - 1 - k)])}]" if k < len(own) - 1 else "")
                for k, (f, n) in enumerate(window.terms)
            )
            places = f"({at}).flatten()" if len(own) > 1 else at or f"torch.zeros(1, dtype=int, device={writer.device})"
            # The variables of later windows still have dims of their own.
            zeros = f"torch.zeros({tuple(sizes)}, dtype={dtype}, device={writer.device})"
            text = Text(f"{zeros}.index_add({dim}, {places}, {text.text})")
        text = padded(writer, text, len(dims), {dim: (first, window.size - 1 - last)})
    return TensorText(text, tuple(dims))


# --- convolutions


def convolved(writer: TorchWriter, expr: Reduce) -> TensorText | None:
    """Return code for a sum of products along windows, as a PyTorch convolution; None for other sums."""
    found = convolution((), expr, writer.extents) or pointwise_convolution(expr, writer.extents)
    return None if found is None else _convolution(writer, found)


def _convolution(writer: TorchWriter, of: Convolution) -> TensorText:
    n = len(of.slidings)
    image, other = read_windows_folded(writer, of.image), read_windows_folded(writer, of.other)
    if image.kind != "float" or other.kind != "float":
        image, other = writer.floating(image), writer.floating(other)
    outer, inner = tuple(s.outer for s in of.slidings), tuple(s.inner for s in of.slidings)
    stride, dilation = tuple(s.stride for s in of.slidings), tuple(s.dilation for s in of.slidings)
    groups = prod(writer.extents[name] for name in of.groups)
    kernel = [(*of.groups, *of.own), of.shared, *map(_group, inner)]
    moved = [of.batch, (*of.groups, *of.own), *map(_group, outer)]
    if of.form == "data":
        x, w = _grouped(writer, image, moved), _grouped(writer, other, kernel)
        text, crop = _transposed(writer, of.slidings, f"{F}.conv_transpose{n}d({x.text}, {w.text}", groups)
        text = padded(writer, text, n + 2, {2 + k: c for k, c in enumerate(crop)})
        return _ungrouped(writer, text, [of.batch, (*of.groups, *of.shared), *((target(k),) for k in range(n))])
    still = [of.batch, (*of.groups, *of.shared), *((window_dim_name(k),) for k in range(n))]
    x, (padding, pads) = _grouped(writer, image, still), _padding(writer, of.slidings, None)
    x = padded(writer, x, n + 2, {2 + k: p for k, p in enumerate(pads)})
    if of.form == "forward":
        w = _grouped(writer, other, kernel)
        text = f"{F}.conv{n}d({x.text}, {w.text}, stride={stride}, padding={padding}, dilation={dilation}"
        return _ungrouped(writer, Text(f"{text}, groups={groups})"), moved)
    g = _grouped(writer, other, moved)
    sizes = tuple(prod(writer.extents[name] for name in some) for some in kernel)
    text = f"torch.nn.grad.conv{n}d_weight({x.text}, {sizes}, {g.text}, {stride}, {padding}, {dilation}, {groups})"
    return _ungrouped(writer, Text(text), kernel)


def _transposed(
    writer: TorchWriter, slidings: Sequence[Sliding], call: str, groups: int
) -> tuple[Text, list[tuple[int, int]]]:
    """
    Write a transposed convolution, given the text of its `call` up to the options.

    Returns it with the elements to add before and after each dim (cut off if below 0) to get the result's sizes.
    """
    ends = [(*local_range(s.window, writer.extents), s) for s in slidings]
    padding = tuple(-first for first, _, _ in ends)
    more = tuple(s.window.size - 1 - last - first for first, last, s in ends)
    crop = [(0, 0)] * len(slidings)
    if min(padding) < 0 or not all(0 <= m < max(s.stride, s.dilation) for m, s in zip(more, slidings, strict=True)):
        crop = [(first, s.window.size - 1 - last) for first, last, s in ends]
        padding = more = (0,) * len(slidings)
    stride, dilation = tuple(s.stride for s in slidings), tuple(s.dilation for s in slidings)
    options = f"stride={stride}, padding={padding}, output_padding={more}, groups={groups}, dilation={dilation}"
    return Text(f"{call}, {options})"), crop


def _padding(
    writer: TorchWriter, slidings: Sequence[Sliding], most: Sequence[int] | None
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """
    Return the `padding` argument of a PyTorch function, and the elements to add before and after each dim beforehand.

    The latter are 0 unless the padding would have to differ at both ends, be below 0, or be above `most` in some dim.
    """
    padding: list[int] = []
    for k, s in enumerate(slidings):
        first, _ = local_range(s.window, writer.extents)
        kernel = s.dilation * (_size(writer, s.inner) - 1)
        count = (s.window.size - 2 * first - kernel - 1) // s.stride + 1
        if first > 0 or count != _size(writer, s.outer) or (most is not None and -first > most[k]):
            ends = [(a, b, t.window.size) for t in slidings for a, b in (local_range(t.window, writer.extents),)]
            return (0,) * len(slidings), [(-a, b - size + 1) for a, b, size in ends]
        padding.append(-first)
    return tuple(padding), [(0, 0)] * len(slidings)


def _group(name: str) -> tuple[str, ...]:
    """Return the variables of a dim that has one or, if the name is empty, none."""
    return (name,) if name else ()


def _size(writer: TorchWriter, name: str) -> int:
    return writer.extents[name] if name else 1


def _grouped(writer: TorchWriter, value: TensorText, groups: Sequence[tuple[str, ...]]) -> Text:
    """Permute and flatten a tensor to one dim for each group of variables."""
    text = writer.ordered(value, tuple(n for group in groups for n in group))
    for dim, group in enumerate(groups):
        if len(group) > 1:
            text = writer.method(text, f"flatten({dim}, {dim + len(group) - 1})")
        elif not group:
            text = writer.method(text, f"unsqueeze({dim})")
    return text


def _ungrouped(writer: TorchWriter, text: Text, groups: Sequence[tuple[str, ...]]) -> TensorText:
    """Unflatten a tensor with one dim for each group of variables to one dim per variable."""
    for dim, group in reversed(list(enumerate(groups))):
        if len(group) > 1:
            text = writer.method(text, f"unflatten({dim}, {tuple(writer.extents[n] for n in group)})")
        elif not group:
            text = writer.method(text, f"squeeze({dim})")
    return TensorText(text, tuple(n for group in groups for n in group))


# --- poolings


def pooled(writer: TorchWriter, expr: Expr) -> TensorText | None:
    """Return code for a maximum, sum or mean over windows, as PyTorch's pooling; None for other expressions."""
    match expr:
        case Reduce("sum", indices, Binary("/", body, Const(by))) if by.is_integer() and by >= 1:
            found, divisor = pooling(Reduce("sum", indices, body), writer.extents), int(by)
        case Reduce():
            found, divisor = pooling(expr, writer.extents), 1
        case _:
            return None
    if found is None or not _fits(writer, found):
        return None
    n = len(found.slidings)
    text, groups, padding, _ = _pooled_image(writer, found)
    kernel, stride, dilation = _shape(writer, found.slidings)
    if found.kind == "max":
        text = Text(f"{F}.max_pool{n}d({text.text}, {kernel}, {stride}, {padding}, {dilation})")
    else:
        by = f", divisor_override={divisor}"
        text = Text(f"{F}.avg_pool{n}d({text.text}, {kernel}, {stride}, {padding}{by})")
    return _ungrouped(writer, text, [*groups, *(_group(s.outer) for s in found.slidings)])


def _fits(writer: TorchWriter, of: Pooling) -> bool:
    if of.kind == "sum":
        # avg_pool1d has no divisor_override, and no avg_pool has a dilation.
        return len(of.slidings) > 1 and all(s.dilation == 1 for s in of.slidings)
    return writer.kinds[of.image.tensor] == "float"


def _shape(writer: TorchWriter, slidings: Sequence[Sliding]) -> tuple[tuple[int, ...], ...]:
    """Return the kernel sizes, the strides and the dilations of a window's dims."""
    return (
        tuple(_size(writer, s.inner) for s in slidings),
        tuple(s.stride for s in slidings),
        tuple(s.dilation for s in slidings),
    )


def _lead(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the variables that are not pooled as two groups: the first two dims of a pooling function."""
    return [tuple(names[:-1]), tuple(names[-1:])]


def _pooled_image(
    writer: TorchWriter, of: Pooling
) -> tuple[Text, list[tuple[str, ...]], tuple[int, ...], Sequence[tuple[int, int]]]:
    """
    Return the image as a pooling function takes it, the variables of its first two dims, the `padding` argument, and
    the elements already added before and after its other dims.
    """
    image = writer.floating(read_windows_folded(writer, of.image))
    tokens = [window_dim_name(k) for k in range(len(of.slidings))]
    groups = _lead([n for n in image.dims if n not in tokens])
    text = _grouped(writer, image, [*groups, *((t,) for t in tokens)])
    padding, pads = _padding(writer, of.slidings, [_size(writer, s.inner) // 2 for s in of.slidings])
    rank = len(of.slidings) + 2
    low = ', value=float("-inf")' if of.kind == "max" else ""
    if of.kind == "max":
        for k, s in enumerate(of.slidings):
            text = _without_outside(writer, text, s, rank - 2 - k)
    return padded(writer, text, rank, {2 + k: p for k, p in enumerate(pads)}, low), groups, padding, pads


def _without_outside(writer: TorchWriter, text: Text, sliding: Sliding, dims_from_here: int) -> Text:
    """Replace the zeros of a halo that lies outside of the whole tensor by minus infinity, which is never a maximum."""
    window = sliding.window
    if not exceeds_tensor(window, writer.extents) or (window.low == 0 and window.size == window.whole):
        return text
    starts = [
        start if factor == 1 else f"{factor} * {start}"
        for factor, name in window.terms
        if (start := writer.starts.get(name)) is not None
    ]
    first = " + ".join([*starts, str(-window.low)]).replace("+ -", "- ")
    at = writer.named("position", f"torch.arange({window.size}, device={writer.device}) + {first}")
    nones = "".join(", None" for _ in range(dims_from_here - 1))
    condition = f"(({at} >= 0) & ({at} < {window.whole}))" + (f"[:{nones}]" if nones else "")
    return Text(f'torch.where({condition}, {text.text}, float("-inf"))')


def _max_pooling_gradient(writer: TorchWriter, of: MaxPoolingGradient) -> TensorText:
    slidings = of.pooling.slidings
    image, groups, padding, pads = _pooled_image(writer, of.pooling)
    g = _over(writer, writer.floating(writer.value(of.value)), [*groups, *(_group(s.outer) for s in slidings)])
    text = writer.named("image", image.text)
    kernel, stride, dilation = _shape(writer, slidings)
    options = f"{kernel}, {stride}, {padding}, {dilation}"
    first = f"{F}.max_pool2d({text}, {options}, return_indices=True)[1]"
    back = f"torch.ops.aten.max_pool2d_with_indices_backward({g.text}, {text}, {options}, False, {first})"
    crop: dict[int, tuple[int, int]] = {}
    for k, (s, window, (before, after)) in enumerate(zip(slidings, of.written, pads, strict=True)):
        shift = window.low - s.window.low
        crop[2 + k] = shift - before, window.size - s.window.size - shift - after
    result = padded(writer, Text(back), 4, crop)
    return _ungrouped(writer, result, [*groups, *((target(k),) for k in range(len(slidings)))])


def _over(writer: TorchWriter, value: TensorText, groups: Sequence[tuple[str, ...]]) -> Text:
    """Expand and flatten a tensor to one dim for each group of variables."""
    order = tuple(n for group in groups for n in group)
    return _grouped(writer, replace(value, text=writer.expanded(value, order), dims=order), groups)


def _spread_sum(writer: TorchWriter, slidings: Sequence[Sliding], value: TensorText) -> TensorText:
    """Write the gradient of a pooled sum, which adds each element to all places of its window."""
    outer = [s.outer for s in slidings]
    groups = _lead([n for n in value.dims if n not in outer])
    g = _over(writer, value, [*groups, *map(_group, outer)])
    kernel, stride, _ = _shape(writer, slidings)
    padding, pads = _padding(writer, slidings, [k // 2 for k in kernel])
    sizes = [s.window.size + sum(p) for s, p in zip(slidings, pads, strict=True)]
    lead = [prod(writer.extents[n] for n in group) for group in groups]
    like = f"torch.empty({(*lead, *sizes)}, dtype={writer.dtype}, device={writer.device})"
    text = f"torch.ops.aten.avg_pool2d_backward({g.text}, {like}, {kernel}, {stride}, {padding}, False, True, 1)"
    crop = {2 + k: (-before, -after) for k, (before, after) in enumerate(pads)}
    return _ungrouped(
        writer, padded(writer, Text(text), 4, crop), [*groups, *((target(k),) for k in range(len(slidings)))]
    )

"""
Write reads of operands: composite dims (several index variables flattened, `x[(h d)]`) unflattened, segments (parts of
a concatenation) cut out, windows (affine indices, `x[2 * i + j]`) unfolded, diagonals taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unity_ir.forms.windows import local_range
from unity_ir.kernels.pytorch.tensor_text import TensorText, letters
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import ATOM, Text
from unity_ir.tdl.syntax import Access, Composite, Segments, Window, index_names


def window_dim_name(number: int) -> str:
    """
    Return the placeholder name (`#0`, `#1`, ..) of the dim of an operand that its window number `number`, from 0,
    indexes, for the text in which that dim is not yet unfolded into one dim per variable of the window.
    """
    return f"#{number}"


def read(writer: TorchWriter, access: Access) -> TensorText:
    """
    Return code for a read of an operand, `access`, with one dim per index variable.

    Composite dims (several variables in one dim) are unflattened, segments (parts of a concatenation) cut out, and
    windows (affine indices) unfolded, with 0 outside of the tensor. Of dims with the same variable, the diagonal is
    taken.
    """
    value = read_windows_folded(writer, access)
    windows = [i for i in access.indices if isinstance(i, Window)]
    text, dims = value.text, list(value.dims)
    if windows:
        writer.strided = True
        text = _unfolded(writer, text, dims, windows)
    if len(set(dims)) < len(dims):
        writer.strided = True
        of = letters(dims)
        inside, outside = "".join(of[n] for n in dims), "".join(of.values())
        text = Text(f'torch.einsum("{inside}->{outside}", {text.text})')
        dims = list(of)
    return replace(value, text=text, dims=tuple(dims))


def read_windows_folded(writer: TorchWriter, access: Access) -> TensorText:
    """
    Return code for a read of an operand, as `read` does, but with windows (affine indices) not unfolded: the dim of
    window number i, from 0, is called `window_dim_name(i)`.
    """
    text = atom(writer, access.tensor)
    dims: list[str] = []
    windows = 0
    for index in access.indices:
        match index:
            case Composite(names):
                sizes = ", ".join(str(writer.extents[n]) for n in names)
                text = writer.method(text, f"unflatten({len(dims)}, ({sizes}))")
            case Segments(names, active):
                assert active is not None, "a segment is read through one of its variables"
                writer.strided = True
                start = sum(writer.extents[n] for n in names[:active])
                text = writer.method(text, f"narrow({len(dims)}, {start}, {writer.extents[names[active]]})")
                dims.append(names[active])
                continue
            case Window():
                dims.append(window_dim_name(windows))
                windows += 1
                continue
            case _:
                pass
        dims += index_names(index)
    return TensorText(text, tuple(dims), kind=writer.kinds[access.tensor])


def atom(writer: TorchWriter, tensor: str) -> Text:
    """
    Return the Python expression that the code has for an operand, given its name `tensor` in the TDL line: the one in
    the writer's `names`, a variable (`x`) or, where 16 bits are computed in float32, `x.float()`.
    """
    name = writer.names[tensor]
    return Text(name, ATOM if name.replace(".float()", "").isidentifier() else 0)


def _unfolded(writer: TorchWriter, text: Text, dims: list[str], windows: Sequence[Window]) -> Text:
    """
    Return code for the tensor `text` with its windows unfolded: the dim `window_dim_name(i)` becomes a dim per variable
    of `windows[i]`.

    `dims`, the names of the tensor's dims, is changed in place accordingly. Positions outside of the tensor are 0.
    """
    reaches = [local_range(window, writer.extents) for window in windows]
    around = [(max(0, -first), max(0, last - w.size + 1)) for (first, last), w in zip(reaches, windows, strict=True)]
    text = padded(writer, text, len(dims), {dims.index(window_dim_name(n)): pair for n, pair in enumerate(around)})
    for number, (window, (first, last), (before, after)) in enumerate(zip(windows, reaches, around, strict=True)):
        dim = dims.index(window_dim_name(number))
        whole = first + before == 0 and last + before + 1 == window.size + before + after
        if not window.terms:
            text = writer.method(text, f"select({dim}, {first + before})")
            del dims[dim]
            continue
        terms = list(window.terms)
        if len(terms) > 1 and not whole:
            text = writer.method(text, f"narrow({dim}, {first + before}, {last - first + 1})")
        rest = last - first
        while len(terms) > 1:
            factor, name = terms.pop(0)
            rest -= factor * (writer.extents[name] - 1)
            text = writer.method(text, f"unfold({dim}, {rest + 1}, {factor})")
            dims[dim] = name
            dim = len(dims)
            dims.append("")
        ((factor, name),) = terms
        dims[dim] = name
        if len(window.terms) == 1 and not whole:
            stop = f"{first + before}:{last + before + 1}"
        else:
            stop = ":" if factor > 1 else ""
        if stop:
            step = f":{factor}" if factor > 1 else ""
            text = Text(f"{text.at(ATOM)}[{':, ' * dim}{stop}{step}]")
    return text


def padded(writer: TorchWriter, text: Text, rank: int, pads: Mapping[int, tuple[int, int]], value: str = "") -> Text:
    """
    Return code for `torch.nn.functional.pad` of the tensor `text` of `rank` dims.

    `pads` maps dims to the numbers of elements to add (before, after); negative numbers cut elements off. `value` is
    the text that ends the call, with the value to pad with: `, value=-float("inf")`; empty for zeros.
    """
    if not any(map(any, pads.values())):
        return text
    outermost = min(d for d, pair in pads.items() if any(pair))
    amounts = [n for d in reversed(range(outermost, rank)) for n in pads.get(d, (0, 0))]
    writer.strided = writer.strided or min(amounts) < 0
    return Text(f"torch.nn.functional.pad({text.text}, {tuple(amounts)}{value})")


# --- writing

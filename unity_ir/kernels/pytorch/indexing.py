"""Write sums that read or add to the one place that integers pick: indexing, `gather`, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from unity_ir.kernels.pytorch.functions import chosen
from unity_ir.kernels.pytorch.reads import read
from unity_ir.kernels.pytorch.tensor_text import TensorText
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import ATOM, PRODUCT, SUM, Text
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather, scatter
from unity_ir.tdl.syntax import Access, Reduce, Var


def gathered(writer: TorchWriter, expr: Reduce) -> TensorText | None:
    """
    Return code, by indexing or `torch.gather`, for a sum that reads the one element whose index an integer operand
    gives, as an embedding does; the result is 0 where this rank's piece does not have that element. None for other
    sums, and if neither way fits the operands' dims.
    """
    picked = gather(expr)
    if picked is None or not isinstance(picked.body, Access) or Var(picked.variable) not in picked.body.indices:
        return None
    variable, size = picked.variable, writer.extents[picked.variable]
    at, table = read(writer, picked.at), read(writer, picked.body)
    rest = tuple(n for n in table.dims if n != variable)
    if variable in at.dims or len(rest) + 1 < len(table.dims):
        return None
    index, inside = at.text, None
    start = writer.starts.get(variable)
    if start is not None:
        local = Text(f"{index.at(SUM)} - {start}", SUM)
        inside = TensorText(Text(f"({local.text} >= 0) & ({local.text} < {size})", 0), at.dims, kind="bool")
        index = writer.method(local, f"clamp(0, {size - 1})")
    if not set(rest) & set(at.dims):
        text = writer.ordered(table, (variable, *rest))
        found = TensorText(Text(f"{text.at(ATOM)}[{index.text}]"), (*at.dims, *rest))
    elif set(rest) == set(at.dims):
        text = writer.ordered(table, (*at.dims, variable))
        each = f"{writer.method(index, 'long()').text}[..., None]"
        found = TensorText(Text(f"{text.at(ATOM)}.gather(-1, {each}).squeeze(-1)"), at.dims)
    else:
        # Dims of the table that the integers have as well are one with the indexed dim.
        shared = tuple(n for n in rest if n in at.dims)
        others = tuple(n for n in rest if n not in shared)
        text = writer.method(writer.ordered(table, (variable, *shared, *others)), f"flatten(0, {len(shared)})")
        index = _with_offsets(writer, index, at.dims, shared, prod(writer.extents[n] for n in shared), 1)
        found = TensorText(Text(f"{text.at(ATOM)}[{index.text}]"), (*at.dims, *others))
    return found if inside is None else chosen(writer, inside, found, TensorText(Text("0"), (), True, "int"))


def scattered(writer: TorchWriter, expr: Reduce) -> TensorText | None:
    """
    Return code for a sum that adds every element at the one index that an integer operand gives, as the gradient of an
    embedding table does; None for other sums.

    The code calls `embedding_dense_backward` or `scatter_add`; indices outside of this rank's piece are left out.
    """
    found = scatter(expr)
    if found is None or not set(expr.names) <= free_variables(found.at):
        return None
    if found.variable in free_variables(found.body):
        return None
    variable, size = found.variable, writer.extents[found.variable]
    at, body = read(writer, found.at), writer.value(found.body)
    if variable in at.dims or at.kind != "int" or body.kind != "float":
        return None
    index, start = at.text, writer.starts.get(variable)
    kept = tuple(n for n in at.dims if n not in expr.names)
    summed = tuple(n for n in at.dims if n in expr.names)
    rest = tuple(n for n in body.dims if n not in at.dims)
    outside = start is not None or bool(kept and rest)
    if outside:
        # Elements of places that are not here are added to one place after the last, which is cut off.
        local = writer.named("place", index.text if start is None else f"{index.at(SUM)} - {start}")
        index = Text(f"torch.where(({local} >= 0) & ({local} < {size}), {local}, {size})")
    places = size + outside
    value = writer.tensor(body)
    if kept and rest:
        # Dims that stay are one with the indexed dim: an embedding's gradient again.
        index = _with_offsets(writer, index, at.dims, kept, 1, places)
    at = replace(at, text=index)
    if not kept or rest:
        order = (*kept, *summed, *rest)
        source, ids = writer.expanded(value, order), writer.ordered(at, (*kept, *summed))
        shape = (prod(writer.extents[n] for n in (*kept, *summed)), prod(writer.extents[n] for n in rest))
        rows = places * prod(writer.extents[n] for n in kept)
        text = f"torch.ops.aten.embedding_dense_backward({writer.method(source, f'reshape{shape}').text}, "
        text += f"{writer.method(ids, f'reshape({shape[0]})').text}, {rows}, -1, False)"
        sizes = (*(writer.extents[n] for n in kept), places, *(writer.extents[n] for n in rest))
        made = writer.method(Text(text), f"reshape({', '.join(map(str, sizes))})")
        made = made if places == size else writer.method(made, f"narrow({len(kept)}, 0, {size})")
        return TensorText(made, (*kept, variable, *rest))
    order = (*kept, *summed)
    lead, last = [writer.extents[n] for n in kept], prod(writer.extents[n] for n in summed)
    texts = [writer.method(writer.expanded(v, order), f"reshape{(*lead, last)}").text for v in (at, value)]
    zeros = f"torch.zeros({(*lead, places)}, dtype={writer.dtype}, device={writer.device})"
    made = Text(f"{zeros}.scatter_add(-1, {texts[0]}, {texts[1]})")
    made = made if places == size else writer.method(made, f"narrow(-1, 0, {size})")
    return TensorText(made, (*kept, variable))


def _with_offsets(
    writer: TorchWriter, index: Text, dims: tuple[str, ...], among: tuple[str, ...], outer: int, inner: int
) -> Text:
    """
    Return `index * outer` (integers of the variables `dims`), plus `inner` times the number of the position along the
    variables `among` of them, the last of which counts fastest.
    """
    text = index.text if outer == 1 else f"{index.at(PRODUCT)} * {outer}"
    stride = inner
    for name in reversed(among):
        size = writer.extents[name]
        after = len(dims) - dims.index(name) - 1
        shape = ", ".join(map(str, (-1, *[1] * after)))
        offsets = f"torch.arange({size}, device={writer.device})"
        offsets += f".reshape({shape})" if after else ""
        text += f" + {offsets}" if stride == 1 else f" + {offsets} * {stride}"
        stride *= size
    return Text(text, SUM)

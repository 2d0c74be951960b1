"""Write sums that read or add to the one place that integers pick: indexing, `gather`, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from unity_ir.kernels.pytorch.functions import chosen
from unity_ir.kernels.pytorch.reads import read
from unity_ir.kernels.pytorch.tensor_text import TensorText
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import ATOM, SUM, Text
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
        return None
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
    if start is not None:
        # Elements that belong to other pieces are added to one place after the last, which is cut off.
        local = writer.named("place", f"{index.at(SUM)} - {start}")
        index = Text(f"torch.where(({local} >= 0) & ({local} < {size}), {local}, {size})")
    places = size + (start is not None)
    kept = tuple(n for n in at.dims if n not in expr.names)
    summed = tuple(n for n in at.dims if n in expr.names)
    rest = tuple(n for n in body.dims if n not in at.dims)
    value = writer.tensor(body)
    at = replace(at, text=index)
    if not kept:
        order = (*summed, *rest)
        source, ids = writer.expanded(value, order), writer.ordered(at, summed)
        shape = (prod(writer.extents[n] for n in summed), prod(writer.extents[n] for n in rest))
        text = f"torch.ops.aten.embedding_dense_backward({writer.method(source, f'reshape{shape}').text}, "
        text += f"{writer.method(ids, f'reshape({shape[0]})').text}, {places}, -1, False)"
        made = Text(text) if places == size else writer.method(Text(text), f"narrow(0, 0, {size})")
        sizes = tuple(writer.extents[n] for n in rest)
        return TensorText(writer.method(made, f"reshape({', '.join(map(str, (size, *sizes)))})"), (variable, *rest))
    order = (*kept, *rest, *summed)
    lead, last = [writer.extents[n] for n in (*kept, *rest)], prod(writer.extents[n] for n in summed)
    texts = [writer.method(writer.expanded(v, order), f"reshape{(*lead, last)}").text for v in (at, value)]
    zeros = f"torch.zeros({(*lead, places)}, dtype={writer.dtype}, device={writer.device})"
    made = Text(f"{zeros}.scatter_add(-1, {texts[0]}, {texts[1]})")
    made = made if places == size else writer.method(made, f"narrow(-1, 0, {size})")
    return TensorText(made, (*kept, *rest, variable))

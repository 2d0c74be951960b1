"""Write grouped products, of each row with the one weight that integers pick for it: a matrix product per weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import prod

from unity_ir.forms.grouped import Routed, routed
from unity_ir.kernels.pytorch.reads import read
from unity_ir.kernels.pytorch.tensor_text import TensorText
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import SUM, Text
from unity_ir.tdl.syntax import Access, Expr


def routed_product(writer: TorchWriter, expr: Expr) -> TensorText | None:
    """
    Return code for a grouped product: each row of one operand times the one of several weights that an integer operand
    picks for it, as in a mixture of experts, or the weights' gradient. None for other expressions.

    It is a matrix product per weight, whose rows are put back in order; for the weights' gradient, a stack of products.
    """
    of = routed(expr, writer.extents)
    if of is None or {writer.kinds[a.tensor] for a in (of.x, of.w)} != {"float"}:
        return None
    size = writer.extents[of.variable]
    x = writer.named("rows", _matrix(writer, of.x, (of.rows, of.left)).text)
    at, elsewhere = _places(writer, of)
    if of.of_weights:
        y = writer.named("columns", _matrix(writer, of.w, (of.rows, of.right)).text)
        v = _unlike("v", x, y, at)
        product = f"{x}[{at} == {v}].T @ {y}[{at} == {v}]"
        text = f"torch.stack([{product} for {v} in range({size})])"
        groups = ((of.variable,), of.left, of.right)
    else:
        w = writer.named("weights", _matrix(writer, of.w, ((of.variable,), of.left, of.right)).text)
        v = _unlike("v", x, w, at)
        parts = f"{x}[{at} == {v}] @ {w}[{v}] for {v} in range({size})"
        if elsewhere:
            columns = prod(writer.extents[n] for n in of.right)
            parts = f"*({parts}), {x}.new_zeros(int(({at} == {size}).sum()), {columns})"
        # The position of each row in the order by weights.
        back = f"torch.argsort(torch.argsort({at}, stable=True))"
        text, groups = f"torch.cat([{parts}])[{back}]", (of.rows, of.right)
    made = Text(text)
    if any(len(group) != 1 for group in groups):
        made = writer.method(made, f"reshape{_sizes(writer, [n for group in groups for n in group])}")
    return TensorText(made, tuple(n for group in groups for n in group))


def _places(writer: TorchWriter, of: Routed) -> tuple[str, bool]:
    """
    Return the text of each row's weight, [rows], and whether some rows pick weights of other pieces, which are then
    numbers outside of this piece's.
    """
    text = _matrix(writer, of.at, (of.rows,))
    start, size = writer.starts.get(of.variable), writer.extents[of.variable]
    if start is None:
        return writer.named("place", text.text), False
    local = writer.named("shifted", f"{text.at(SUM)} - {start}")
    if of.of_weights:
        return local, True
    inside = f"torch.where(({local} >= 0) & ({local} < {size}), {local}, {size})"
    return writer.named("place", inside), True


def _matrix(writer: TorchWriter, access: Access, groups: Sequence[tuple[str, ...]]) -> Text:
    """Write a read with one dim for each group of variables."""
    order = tuple(n for group in groups for n in group)
    text = writer.expanded(read(writer, access), order)
    if any(len(group) != 1 for group in groups):
        shape = tuple(prod(writer.extents[n] for n in group) for group in groups)
        text = writer.method(text, f"reshape({', '.join(map(str, shape))})")
    return text


def _sizes(writer: TorchWriter, names: Sequence[str]) -> str:
    return f"({', '.join(str(writer.extents[n]) for n in names)})"


def _unlike(wish: str, *texts: str) -> str:
    """Return a name like `wish` that none of the texts contains."""
    names = (wish if i == 0 else f"{wish}_{i}" for i in count())
    return next(n for n in names if not any(n in text for text in texts))

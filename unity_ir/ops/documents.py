"""Documents that samples are packed of: where each begins and ends, told from the tokens between them."""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.ops.operator import Operator, Shapes
from unity_ir.tdl.syntax import AttrValue


def _line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line for one size of the last dim, which it must state, as results and operand have different indices
    there.
    """
    size, separator = shapes[0][-1] if shapes[0] else 1, attributes["separator"]
    after = f"min[l](where(and(ge(l, i), eq(tokens[b.., l], {separator})), l + 1, {size}))"
    return (
        "documents(tokens: int)"
        f"  let before[b.., i] = max[j](where(and(lt(j, i), eq(tokens[b.., j], {separator})), j + 1, 0));"
        "  first: int[b.., i] = before[b.., i];"
        f"  end: int[b.., i] = {'i + 1' if attributes['causal'] else after};"
        "  position: int[b.., i] = i - before[b.., i]"
        f"  where size(i) = {size}"
    )


DOCUMENTS = Operator(
    _line,
    signature="documents(tokens: int; separator: int, causal: int = 1)",
    gradient=lambda of: (None,),
)
"""
Of tokens [b.., s], documents one after the other of which each ends with the token `separator`, three integers per
position: the first position of its document, the position after the last one that it may see (with `causal` 1 itself,
else the last of its document), and its position within its document. The first two are what `attention_ranges` reads.
"""

OPERATORS = (DOCUMENTS,)

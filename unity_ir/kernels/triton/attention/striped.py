"""
Where the tokens of a sequence in striped order lie (`forms.attention.Stripes`), as expressions of a kernel: for tiles
that are all in one block, whose tokens are neighbours in natural order, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.forms.attention import Stripes


@dataclass(frozen=True, slots=True)
class StripedPiece:
    """
    The `count` tokens of a sequence in striped order from the one on that the kernel variable `start` has the number
    of, or from the first: all the sequence, some whole stripes, or a part of one.
    """

    of: Stripes
    count: int
    start: str | None

    def fits(self, tile: int) -> bool:
        """Return whether no tile of `tile` tokens is of two blocks, and the piece is of whole stripes or of one."""
        whole = self.count % self.of.length == 0 or self.of.length % self.count == 0
        return whole and self.count % tile == 0 and self.of.block % tile == 0

    @property
    def stripes(self) -> int:
        """The number of stripes that the piece has tokens of."""
        return max(1, self.count // self.of.length)

    def position(self, token: str) -> str:
        """Return the position in natural order of the piece's token number `token`, by its place in the piece."""
        at = token if self.start is None else f"({token} + {self.start})"
        of, inside = self.of, f"{at} % {self.of.length}"
        return f"({inside} // {of.block} * {of.stripes} + {at} // {of.length}) * {of.block} + {inside} % {of.block}"

    def before(self, position: str) -> str:
        """Return how many of the piece's tokens come in natural order before `position`, the name of a variable."""
        of, own = self.of, self.stripes
        if own == of.stripes:
            return f"tl.minimum({position}, {self.count})"
        stripe = f"{position} // {of.block} % {of.stripes}"
        first, missing = "", ""
        if self.start is not None:
            first = f" - {self.start} // {of.length}"
            missing = f" - {self.start} % {of.length}" if self.count < of.length else ""
        rounds = f"{position} // {of.block * of.stripes} * {own}"

        def blocks(more: str) -> str:
            return f"({rounds} + tl.minimum(tl.maximum({stripe}{more}{first}, 0), {own})) * {of.block}"

        # Of the position's own block, if it is in the piece, the tokens before it.
        found = f"tl.minimum({blocks('')} + {position} % {of.block}, {blocks(' + 1')})"
        return f"tl.minimum(tl.maximum({found}{missing}, 0), {self.count})"

    def token(self, order: str) -> str:
        """Return the place in the piece of that token which is number `order` of them in natural order."""
        own, block = self.stripes, self.of.block
        if own == 1:
            return order
        return f"{order} // {block} % {own} * {self.of.length} + {order} // {block * own} * {block} + {order} % {block}"

"""Write PyTorch text: the base of the writer of a TDL line, which permutes, expands, converts and names tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Names, operand_shapes
from unity_ir.forms.float8 import without_rounding
from unity_ir.forms.rewrite import simplified
from unity_ir.kernels.pytorch.tensor_text import TensorText
from unity_ir.kernels.text import ATOM, Text
from unity_ir.tdl.syntax import Bound, Expr, Index, Window, index_names

_UNFLATTENED = re.compile(r"(.*)\.unflatten\((\d+), \((\d+(?:, \d+)+)\)\)", re.DOTALL)
_FLATTEN = re.compile(r"flatten\((\d+), (\d+)\)")


class Sharing:
    """
    The statements written so far, and the names of the subexpressions that they assign: those that `wanted` counts more
    than once. New names are taken from `names`.
    """

    def __init__(self, names: Names, wanted: Mapping[Expr, int]):
        self.names = names
        self.wanted = wanted
        """Number of uses of each canonical expression; those used more than once are assigned to a name."""
        self.uses: Counter[Expr] = Counter()
        """The same, counted while writing."""
        self.known: dict[Expr, tuple[TensorText, tuple[str, ...]]] = {}
        """Text of each canonical expression written so far, and the free variables it was written with."""
        self.lines: list[str] = []
        """The statements."""


class TorchWriter(ABC):
    """
    Base class of the writer of one TDL line, `bound`, as PyTorch code. The modules of the forms (`sums`, `windows`, ..)
    call its methods, which return code; subclasses define `value`.

    `names` has the Python variable of each operand, in order. `starts` has the name of the global index at which an
    index variable starts, for variables whose piece does not start at 0. Code is of expressions; statements are only
    written if `sharing` is set.
    """

    def __init__(self, bound: Bound, names: Sequence[str], starts: Mapping[str, str]):
        self.bound = simplified(without_rounding(bound), starts)
        self.extents = dict(bound.extents)
        self.names = {p.name: n for p, n in zip(bound.operands, names, strict=True)}
        self.kinds = {p.name: p.kind for p in bound.operands}
        self.shapes = operand_shapes(bound)
        self.starts = starts
        floats = [n for p, n in zip(bound.operands, names, strict=True) if p.floating]
        like = (floats or list(names))[0]
        self.device = f"{like.removesuffix('.float()')}.device"
        self.dtype = f"{like}.dtype" if floats and not like.endswith(".float()") else "torch.float32"
        self.strided = False
        """Whether a result may not be contiguous although the operands are."""
        self.sharing: Sharing | None = None
        """The statements before the expressions; None where only expressions are allowed."""

    @abstractmethod
    def value(self, expr: Expr) -> TensorText:
        """
        Return PyTorch code for `expr`, an expression in the line, with the name of the index variable that each dim of
        the tensor ranges over.
        """

    def fail(self, message: str) -> UnityError:
        """Return (not raise) the `UnityError` with this message about the line's operator."""
        return UnityError(f"pcg.{self.bound.operator}: {message}")

    def method(self, value: Text, call: str) -> Text:
        """
        Return code for `value.call`, where `call` is such as `sum(0)`. If `call` is a `flatten` that undoes the
        `unflatten` at the end of `value`, return code without either.
        """
        if (apart := _UNFLATTENED.fullmatch(value.text)) and (together := _FLATTEN.fullmatch(call)):
            first, last = map(int, together.groups())
            if int(apart[2]) == first and apart[3].count(",") == last - first:
                return Text(apart[1])
        return Text(f"{value.at(ATOM)}.{call}")

    def named(self, wish: str, text: str) -> str:
        """
        Return code for the expression `text` that may be written several times without computing it again: a new
        variable, called like `wish`, to which a statement assigns it. Where only expressions are allowed (`sharing` is
        None), return `text` in parentheses; if `text` is a variable already, return it.
        """
        if text.isidentifier():
            return text
        if self.sharing is None:
            return f"({text})"
        name = self.sharing.names.new(wish)
        self.sharing.lines.append(f"{name} = {text}")
        return name

    def dims(self, indices: Sequence[object], window: Callable[[int], str]) -> list[str]:
        """
        Return the names by which code calls the dims of a tensor that the line reads or writes at `indices`: the names
        of the index variables there and, for the i-th window (affine index) among `indices`, `window(i)`, a
        placeholder; i counts from 0. An index of several variables gives a name for each of them.
        """
        numbers = count()
        return [
            n
            for i in indices
            for n in ((window(next(numbers)),) if isinstance(i, Window) else index_names(cast(Index, i)))
        ]

    def expanded(self, value: TensorText, order: tuple[str, ...]) -> Text:
        """Return code for the tensor permuted and expanded to exactly the dims named in `order`, index variables."""
        text = self.ordered(value, order)
        if set(order) <= set(value.dims):
            return text
        self.strided = True
        return self.method(text, f"expand({', '.join(str(self.extents[n]) for n in order)})")

    def ordered(self, value: TensorText, order: tuple[str, ...]) -> Text:
        """
        Return code for the tensor permuted so that it broadcasts to the dims named in `order`, index variables; dims it
        lacks get size 1, and dims of its own that are not in `order`, which must be of size 1, are dropped.
        """
        have = [n for n in order if n in value.dims]
        text = value.text
        dims = [n for n in value.dims if n in have]
        # A variable of extent 1 may occur in an operand alone: it is read at position 0.
        extra = [d for d, n in enumerate(value.dims) if n not in have]
        if extra:
            text = self.method(text, f"squeeze({extra[0] if len(extra) == 1 else tuple(extra)})")
        places = [dims.index(n) for n in have]
        if places != sorted(places):
            self.strided = True
            text = self.method(text, "T" if places == [1, 0] else f"permute({', '.join(map(str, places))})")
        missing = order[order.index(have[0]) :] if have else ()
        if len(missing) > len(have):
            text = Text(f"{text.at(ATOM)}[{', '.join(':' if n in have else 'None' for n in missing)}]")
        return text

    def floating(self, value: TensorText) -> TensorText:
        """Return code for a tensor of integers or booleans converted to the line's floating point type."""
        if value.kind == "float":
            return value
        return replace(value, text=self.method(value.text, f"to({self.dtype})"), kind="float")

    def union(self, values: Sequence[TensorText]) -> tuple[str, ...]:
        """
        Return the names of the dims to which several tensors broadcast: in the order of the tensor that has all of
        them, else in the order of `extents`, in which the operator's line first names its index variables.
        """
        names = {n for v in values for n in v.dims}
        widest = max(values, key=lambda v: len(v.dims))
        return widest.dims if set(widest.dims) == names else tuple(n for n in self.extents if n in names)

    def tensor(self, value: TensorText) -> TensorText:
        """
        Return code for `value`, a tensor or a Python number, as a floating point tensor; a number becomes one without
        dims.
        """
        if not value.number:
            return self.floating(value)
        return TensorText(Text(f"torch.full((), {value.text.text}, dtype={self.dtype}, device={self.device})"), ())

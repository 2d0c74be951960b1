"""What all PyTorch text is written with: the operands' names and shapes, and values permuted, expanded and named."""

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
from unity_ir.forms.rewrite import simplified
from unity_ir.lowering.pytorch.tensor_text import TensorText
from unity_ir.lowering.text import ATOM, Text
from unity_ir.tdl.syntax import Bound, Expr, Index, Window, index_names

_UNFLATTENED = re.compile(r"(.*)\.unflatten\((\d+), \((\d+(?:, \d+)+)\)\)", re.DOTALL)
_FLATTEN = re.compile(r"flatten\((\d+), (\d+)\)")


class Sharing:
    """What statements have computed so far."""

    def __init__(self, names: Names, wanted: Mapping[Expr, int]):
        self.names = names
        self.wanted = wanted
        """How often each form is used; those used twice get a name."""
        self.uses: Counter[Expr] = Counter()
        self.known: dict[Expr, tuple[TensorText, tuple[str, ...]]] = {}
        """Values by canonical form, and the free variables they were computed with."""
        self.lines: list[str] = []


class TorchWriter(ABC):
    """
    What the functions of every form write with: names, shapes, and tensors brought to the dims that are wanted.

    Texts are of dims in the order of a value's `dims`; `value` makes one of any expression.
    """

    def __init__(self, bound: Bound, names: Sequence[str], starts: Mapping[str, str]):
        self.bound = simplified(bound, starts)
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
        """A result may not be contiguous although the operands are."""
        self.sharing: Sharing | None = None

    @abstractmethod
    def value(self, expr: Expr) -> TensorText:
        """The text of an expression, and the variables its dims range over."""

    def fail(self, message: str) -> UnityError:
        return UnityError(f"pcg.{self.bound.operator}: {message}")

    def method(self, value: Text, call: str) -> Text:
        if (apart := _UNFLATTENED.fullmatch(value.text)) and (together := _FLATTEN.fullmatch(call)):
            first, last = map(int, together.groups())
            if int(apart[2]) == first and apart[3].count(",") == last - first:
                # Taken apart and put together again at once.
                return Text(apart[1])
        return Text(f"{value.at(ATOM)}.{call}")

    def named(self, wish: str, text: str) -> str:
        """A text that may be repeated: a name where statements are allowed."""
        if text.isidentifier():
            return text
        if self.sharing is None:
            return f"({text})"
        name = self.sharing.names.new(wish)
        self.sharing.lines.append(f"{name} = {text}")
        return name

    def dims(self, indices: Sequence[object], window: Callable[[int], str]) -> list[str]:
        """A name for each variable of indices, and one for each window."""
        numbers = count()
        return [
            n
            for i in indices
            for n in ((window(next(numbers)),) if isinstance(i, Window) else index_names(cast(Index, i)))
        ]

    def expanded(self, value: TensorText, order: tuple[str, ...]) -> Text:
        """A tensor with exactly the dims of `order`."""
        text = self.ordered(value, order)
        if set(order) <= set(value.dims):
            return text
        self.strided = True
        return self.method(text, f"expand({', '.join(str(self.extents[n]) for n in order)})")

    def ordered(self, value: TensorText, order: tuple[str, ...]) -> Text:
        """A tensor that broadcasts against dims `order`: permuted, with dims of size 1 where it lacks one."""
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
        if value.kind == "float":
            return value
        return replace(value, text=self.method(value.text, f"to({self.dtype})"), kind="float")

    def union(self, values: Sequence[TensorText]) -> tuple[str, ...]:
        """The dims of a broadcast: as the widest operand has them, if it has all, else in TDL order."""
        names = {n for v in values for n in v.dims}
        widest = max(values, key=lambda v: len(v.dims))
        return widest.dims if set(widest.dims) == names else tuple(n for n in self.extents if n in names)

    def tensor(self, value: TensorText) -> TensorText:
        """A floating point tensor, also of a Python number."""
        if not value.number:
            return self.floating(value)
        return TensorText(Text(f"torch.full((), {value.text.text}, dtype={self.dtype}, device={self.device})"), ())

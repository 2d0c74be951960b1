"""A bound line as plain PyTorch expressions: what a person would write, and autograd can differentiate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import isinf, prod
from typing import cast

from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.expression import ATOM, COMPARISONS, LOGIC, PRODUCT, SUM, UNARY, Text, binary
from unity_ir.lowering.kernels.layout import Names, operand_shapes
from unity_ir.lowering.kernels.rewrite import canonical, is_work, simplified
from unity_ir.lowering.torch_value import TORCH_DTYPES, Value
from unity_ir.lowering.torch_windows import convolved, pooled, target, token, unfolded, written
from unity_ir.lowering.windows import masked_body
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather, scatter
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Index,
    Name,
    Opaque,
    Reduce,
    Result,
    Segments,
    Var,
    Window,
    children,
    index_names,
)

_FUNCTIONS: Mapping[str, str] = {
    "relu": "torch.relu",
    "gelu": "torch.nn.functional.gelu",
    "exp": "torch.exp",
    "log": "torch.log",
    "erf": "torch.erf",
    "sqrt": "torch.sqrt",
    "rsqrt": "torch.rsqrt",
    "tanh": "torch.tanh",
    "sigmoid": "torch.sigmoid",
    "sin": "torch.sin",
    "cos": "torch.cos",
    "abs": "torch.abs",
    "floor": "torch.floor",
}
_BINARY: Mapping[str, str] = {"maximum": "torch.maximum", "minimum": "torch.minimum", "pow": "torch.pow"}
_REDUCERS: Mapping[str, str] = {"sum": "sum", "max": "amax", "min": "amin"}


def torch_expression(bound: Bound, operand_names: Sequence[str]) -> tuple[str, ...]:
    """
    One expression of one line per result, over operands of these names and the shapes the extents imply.

    Given a matmul of `x` and `w`, returns `("x @ w",)`. Results may be views, or laid out in another order.
    """
    writer = Writer(bound, operand_names, {})
    return tuple(writer.result(r).text for r in writer.bound.results)


def torch_body(
    bound: Bound, operand_names: Sequence[str], starts: Mapping[str, str], names: Names
) -> tuple[list[str], tuple[str, ...]]:
    """
    Statements that name what occurs twice, and an expression per result, which is contiguous.

    `starts` names the global index at which a variable used as a value starts; 0 for all others.
    """
    first = Writer(bound, operand_names, starts)
    first.sharing = _Sharing(Names(), {})
    for result in first.bound.results:
        first.result(result)
    writer = Writer(bound, operand_names, starts)
    writer.sharing = sharing = _Sharing(names, first.sharing.uses)
    texts: list[str] = []
    for result in writer.bound.results:
        text = writer.result(result)
        texts.append((writer.method(text, "contiguous()") if writer.strided else text).text)
    return sharing.lines, tuple(texts)


def torch_reference(
    bound: Bound, operand_names: Sequence[str], taken: Iterable[str]
) -> tuple[list[str], tuple[str, ...]]:
    """
    The same in double precision, whatever floating point numbers the line says: statements, if it takes any, whose
    names are none of `taken` and no one else's, and an expression per result.
    """
    results = (replace(r, dtype="f64") if r.dtype is not None and r.floating else r for r in bound.results)
    bound = replace(bound, results=tuple(results))
    if any(_draws(r.expr) for r in bound.results):
        return torch_body(bound, operand_names, {}, Names(taken))
    return [], torch_expression(bound, operand_names)


def _draws(expr: Expr) -> bool:
    return (isinstance(expr, Call) and expr.function == "philox") or any(map(_draws, children(expr)))


_UNFLATTENED = re.compile(r"(.*)\.unflatten\((\d+), \((\d+(?:, \d+)+)\)\)", re.DOTALL)
_FLATTEN = re.compile(r"flatten\((\d+), (\d+)\)")


_OPAQUE: Mapping[str, tuple[str, str, str]] = {
    # Not torch.topk, which may take any of several equal elements.
    "topk_values": ("sort(dim={dim}, descending=True, stable=True)", "values", "float"),
    "topk_indices": ("sort(dim={dim}, descending=True, stable=True)", "indices", "int"),
}
"""The method that computes an opaque function along a dim, what of its result is meant, and what that holds."""


class _Sharing:
    """What statements have computed so far."""

    def __init__(self, names: Names, wanted: Mapping[Expr, int]):
        self.names = names
        self.wanted = wanted
        """How often each form is used; those used twice get a name."""
        self.uses: Counter[Expr] = Counter()
        self.known: dict[Expr, tuple[Value, tuple[str, ...]]] = {}
        """Values by canonical form, and the free variables they were computed with."""
        self.lines: list[str] = []


class Writer:
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
        self.sharing: _Sharing | None = None

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

    # -- results

    def result(self, result: Result) -> Text:
        reshaped = self.reshaped(result)
        if reshaped is not None:
            return reshaped
        axis = next((d for d, i in enumerate(result.indices) if isinstance(i, Segments)), None)
        if any(isinstance(i, Window) for i in result.indices):
            return self.folded(result.indices, written(self, result), result.dtype)
        if axis is None:
            return self.folded(result.indices, self.value(result.expr), result.dtype)
        assert isinstance(result.expr, Cases)
        pieces: list[str] = []
        for variable, expr in result.expr.branches:
            indices = [Var(variable) if d == axis else i for d, i in enumerate(result.indices)]
            pieces.append(self.folded(indices, self.value(expr), result.dtype).text)
        return Text(f"torch.cat([{', '.join(pieces)}], {axis})")

    def reshaped(self, result: Result) -> Text | None:
        """A line that only folds or unfolds dims, as a reshape."""
        if (
            not isinstance(result.expr, Access)
            or result.dtype
            or any(isinstance(i, Segments | Window) for i in (*result.expr.indices, *result.indices))
        ):
            return None
        orders = [
            [n for i in indices for n in index_names(i) if self.extents[n] > 1]
            for indices in (result.indices, result.expr.indices)
        ]
        if orders[0] != orders[1] or prod(self.extents[n] for n in orders[0]) != prod(self.shapes[result.expr.tensor]):
            return None
        shape = self.bound.result_shape(result)
        text = self.atom(result.expr.tensor)
        if shape == self.shapes[result.expr.tensor]:
            return text
        return self.method(text, f"reshape({', '.join(map(str, shape)) or '()'})")

    def folded(self, indices: Sequence[object], value: Value, into: str | None = None) -> Text:
        """
        The value over all the indices' variables, composite dims folded into one; `into` is another element type than
        that of the floating operands.
        """
        names = self.dims(indices, target)
        if value.number:
            shape = tuple(self.extents[n] for n in names)
            dtype = self.dtype if into is None else TORCH_DTYPES[into]
            text = Text(f"torch.full({shape}, {value.text.text}, dtype={dtype}, device={self.device})")
        elif into is None:
            text = self.expanded(self.floating(value), tuple(names))
        else:
            text = self.method(self.expanded(value, tuple(names)), f"to({TORCH_DTYPES[into]})")
        dim = 0
        for index in indices:
            if isinstance(index, Composite):
                text = self.method(text, f"flatten({dim}, {dim + len(index.names) - 1})")
            dim += 1
        return text

    def dims(self, indices: Sequence[object], window: Callable[[int], str]) -> list[str]:
        """A name for each variable of indices, and one for each window."""
        numbers = count()
        return [
            n
            for i in indices
            for n in ((window(next(numbers)),) if isinstance(i, Window) else index_names(cast(Index, i)))
        ]

    def expanded(self, value: Value, order: tuple[str, ...]) -> Text:
        """A tensor with exactly the dims of `order`."""
        text = self.ordered(value, order)
        if set(order) <= set(value.dims):
            return text
        self.strided = True
        return self.method(text, f"expand({', '.join(str(self.extents[n]) for n in order)})")

    def ordered(self, value: Value, order: tuple[str, ...]) -> Text:
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

    # -- values

    def value(self, expr: Expr) -> Value:
        sharing = self.sharing
        if sharing is None or not is_work(expr):
            return self._value(expr)
        form, free = canonical(expr, self.extents, self.starts)
        sharing.uses[form] += 1
        if form not in sharing.known:
            value = self._value(expr)
            if sharing.wanted.get(form, 0) > 1:
                name = sharing.names.new("shared")
                sharing.lines.append(f"{name} = {value.text.text}")
                value = replace(value, text=Text(name))
            sharing.known[form] = value, free
        value, then = sharing.known[form]
        now = dict(zip(then, free, strict=True))
        return replace(value, dims=tuple(now[n] for n in value.dims))

    def _value(self, expr: Expr) -> Value:
        match expr:
            case Const(value) if isinf(value):
                return Value(Text(f'float("{value}")'), (), True)
            case Const(value):
                whole = value.is_integer() and abs(value) < 2**31
                text = Text(repr(int(value) if whole else value), ATOM if value >= 0 else UNARY)
                return Value(text, (), True, "int" if whole else "float")
            case Name(name):
                start, size = self.starts.get(name), self.extents[name]
                limits = f"{size}" if start is None else f"{start}, {start} + {size}"
                return Value(Text(f"torch.arange({limits}, device={self.device})"), (name,), kind="int")
            case Access():
                return self.read(expr)
            case Binary("/", Call("exp", (above,)), Reduce() as below) if (axis := self.softmax_axis(expr)) is not None:
                del below
                return self.softmax(above, axis)
            case Binary(op, left, right):
                return self.joined(op, self.value(left), self.value(right))
            case Call(function, (left, right)) if function in COMPARISONS:
                return self.compared(COMPARISONS[function], self.value(left), self.value(right))
            case Call(function, (left, right)) if function in LOGIC:
                return self.compared(LOGIC[function], self.value(left), self.value(right), ATOM)
            case Call("not", (argument,)):
                value = self.value(argument)
                return replace(value, text=Text(f"~{value.text.at(ATOM)}", UNARY))
            case Call("philox", (Const(seed), position)):
                return self.uniform(int(seed), self.value(position))
            case Call(function, (left, right)) if function in _BINARY:
                return self.of_two(_BINARY[function], self.value(left), self.value(right))
            case Call("where", (condition, yes, no)):
                return self.chosen(self.value(condition), self.value(yes), self.value(no))
            case Call(function, (argument,)) if function in _FUNCTIONS:
                value = self.floating(self.value(argument))
                return Value(Text(f"{_FUNCTIONS[function]}({value.text.text})"), value.dims)
            case Call(function, _):
                raise self.fail(f"no PyTorch text for function {function}; add it to lowering/torch_code.py")
            case Reduce():
                known = convolved(self, expr) or pooled(self, expr) or self.gathered(expr) or self.scattered(expr)
                return known or self.product(expr) or self.reduced(masked_body(expr, self.extents))
            case Opaque(function, (Var(made),), (Var(taken),), body):
                return self.opaque(function, made, taken, self.value(body))
            case _:
                raise TypeError(f"{expr} cannot stand inside an expression")

    def floating(self, value: Value) -> Value:
        if value.kind == "float":
            return value
        return replace(value, text=self.method(value.text, f"to({self.dtype})"), kind="float")

    def union(self, values: Sequence[Value]) -> tuple[str, ...]:
        """The dims of a broadcast: as the widest operand has them, if it has all, else in TDL order."""
        names = {n for v in values for n in v.dims}
        widest = max(values, key=lambda v: len(v.dims))
        return widest.dims if set(widest.dims) == names else tuple(n for n in self.extents if n in names)

    def joined(self, op: str, left: Value, right: Value) -> Value:
        values = [left, right]
        if op in "+-":
            # PyTorch adds no booleans.
            values = [self.floating(v) if v.kind == "bool" else v for v in values]
        kind = "float" if op == "/" or "float" in (v.kind for v in values) else values[0].kind
        if kind == "float" and not any(v.kind == "float" and not v.number for v in values):
            # Numbers would not say which type of float to compute in.
            values = [v if v.number else self.floating(v) for v in values]
        order = self.union(values)
        left, right = values
        text = binary(op, self.ordered(left, order), self.ordered(right, order))
        return Value(text, order, left.number and right.number, "int" if kind == "bool" and left != right else kind)

    def chosen(self, condition: Value, yes: Value, no: Value) -> Value:
        kind = "float" if "float" in (yes.kind, no.kind) else "int"
        if kind == "float":
            if yes.number and no.number:
                text = f"torch.tensor({yes.text.text}, dtype={self.dtype}, device={self.device})"
                yes = Value(Text(text), ())
            yes, no = (v if v.number else self.floating(v) for v in (yes, no))
        order = self.union([condition, yes, no])
        texts = ", ".join(self.ordered(v, order).text for v in (condition, yes, no))
        return Value(Text(f"torch.where({texts})"), order, kind=kind)

    def uniform(self, seed: int, position: Value) -> Value:
        """Numbers in [0, 1), as `tdl.functions.philox` draws them; 64-bit products that overflow keep their bits."""
        if self.sharing is None:
            raise self.fail("no PyTorch expression of one line draws random numbers; leave dropout out")
        names, lines = self.sharing.names, self.sharing.lines
        at = position.text.text
        if position.number:
            at = f"torch.tensor({at}, device={self.device})"
        c, k = ([names.new(f"{word}{i}") for i in range(n)] for word, n in (("counter", 4), ("key", 2)))
        a, b, count = (names.new(n) for n in ("a", "b", "count"))
        low, high = "0xFFFFFFFF", ">> 32 & 0xFFFFFFFF"
        lines += [
            f"{c[0]} = {at}",
            f"{c[1]}, {c[2]}, {c[3]} = {c[0]} {high}, torch.zeros_like({c[0]}), torch.zeros_like({c[0]})",
            f"{c[0]}, {k[0]}, {k[1]} = {c[0]} & {low}, {seed & 0xFFFFFFFF}, {seed >> 32 & 0xFFFFFFFF}",
            f"for {count} in range(10):",
            f"    {a}, {b} = {c[0]} * 0xD2511F53, {c[2]} * 0xCD9E8D57",
            f"    {c[0]}, {c[1]} = ({b} {high}) ^ {c[1]} ^ {k[0]}, {b} & {low}",
            f"    {c[2]}, {c[3]} = ({a} {high}) ^ {c[3]} ^ {k[1]}, {a} & {low}",
            f"    {k[0]}, {k[1]} = {k[0]} + 0x9E3779B9 & {low}, {k[1]} + 0xBB67AE85 & {low}",
        ]
        return Value(Text(f"({c[0]} >> 8).to({self.dtype}) * 2.0**-24", PRODUCT), position.dims)

    # -- functions TDL cannot say

    def opaque(self, function: str, made: str, taken: str, value: Value) -> Value:
        """A function of `_OPAQUE` along one dim, which it makes another of."""
        if function not in _OPAQUE:
            raise self.fail(f"no PyTorch text for opaque {function}; add it to lowering/torch_code.py")
        dim = value.dims.index(taken)
        sort, part, kind = _OPAQUE[function]
        form = Access(value.text.text, (Var(str(dim)), Var(sort)))
        known = None if self.sharing is None else self.sharing.known.get(form)
        if known is None:
            known = Value(Text(self.named("ordered", f"{value.text.at(ATOM)}.{sort.format(dim=dim)}")), ()), ()
            if self.sharing is not None:
                self.sharing.known[form] = known
        dims = tuple(made if n == taken else n for n in value.dims)
        self.strided = True
        return Value(Text(f"{known[0].text.text}.{part}.narrow({dim}, 0, {self.extents[made]})"), dims, kind=kind)

    # -- softmax

    def softmax_axis(self, quotient: Binary) -> str | None:
        """The variable over which a quotient is a softmax; None if it is none."""
        match quotient:
            case Binary("/", Call("exp") as above, Reduce("sum", (Var(summed),), below)):
                return self.same_but(above, below, summed)
            case _:
                return None

    def same_but(self, expr: Expr, other: Expr, variable: str) -> str | None:
        """The free variable of `expr` that is called `variable` in `other`, if that is all they differ in."""
        want = canonical(Reduce("sum", (Var(variable),), other), self.extents, self.starts)
        for name in free_variables(expr):
            if canonical(Reduce("sum", (Var(name),), expr), self.extents, self.starts) == want:
                return name
        return None

    def softmax(self, expr: Expr, axis: str) -> Value:
        match expr:
            case Binary("-", above, Reduce("max", (Var(name),), below)) if self.same_but(above, below, name) == axis:
                # That the maximum is subtracted changes nothing but the range of numbers, which PyTorch sees to.
                expr = above
            case _:
                pass
        value = self.floating(self.value(expr))
        return Value(Text(f"torch.softmax({value.text.text}, {value.dims.index(axis)})"), value.dims)

    def compared(self, op: str, left: Value, right: Value, level: int = SUM) -> Value:
        order = self.union([left, right])
        a, b = self.ordered(left, order), self.ordered(right, order)
        return Value(Text(f"{a.at(level)} {op} {b.at(level)}", 0), order, kind="bool")

    def of_two(self, function: str, left: Value, right: Value) -> Value:
        """A function of two floating point tensors, or of one and a number."""
        values = [v if v.number else self.floating(v) for v in (left, right)]
        if function != "torch.pow":
            # Those take no numbers.
            values = [
                Value(Text(f"torch.tensor({v.text.text}, dtype={self.dtype}, device={self.device})"), ())
                if v.number
                else v
                for v in values
            ]
        order = self.union(values)
        return Value(Text(f"{function}({', '.join(self.ordered(v, order).text for v in values)})"), order)

    def atom(self, tensor: str) -> Text:
        """An operand by the name it was given."""
        name = self.names[tensor]
        return Text(name, ATOM if name.replace(".float()", "").isidentifier() else 0)

    def read(self, access: Access) -> Value:
        """A read with one dim per variable: composite dims unfolded, segments and windows cut out, diagonals taken."""
        value = self.whole(access)
        windows = [i for i in access.indices if isinstance(i, Window)]
        text, dims = value.text, list(value.dims)
        if windows:
            self.strided = True
            text = unfolded(self, text, dims, windows)
        if len(set(dims)) < len(dims):
            self.strided = True
            letters = _letters(dims)
            inside, outside = "".join(letters[n] for n in dims), "".join(letters.values())
            text = Text(f'torch.einsum("{inside}->{outside}", {text.text})')
            dims = list(letters)
        return replace(value, text=text, dims=tuple(dims))

    def whole(self, access: Access) -> Value:
        """A read with one dim per variable, and one for each window."""
        text = self.atom(access.tensor)
        dims: list[str] = []
        windows = 0
        for index in access.indices:
            match index:
                case Composite(names):
                    sizes = ", ".join(str(self.extents[n]) for n in names)
                    text = self.method(text, f"unflatten({len(dims)}, ({sizes}))")
                case Segments(names, active):
                    assert active is not None, "a segment is read through one of its variables"
                    self.strided = True
                    start = sum(self.extents[n] for n in names[:active])
                    text = self.method(text, f"narrow({len(dims)}, {start}, {self.extents[names[active]]})")
                    dims.append(names[active])
                    continue
                case Window():
                    dims.append(token(windows))
                    windows += 1
                    continue
                case _:
                    pass
            dims += index_names(index)
        return Value(text, tuple(dims), kind=self.kinds[access.tensor])

    # -- reductions

    def gathered(self, expr: Reduce) -> Value | None:
        """A sum that reads the one element that integers name, by indexing; None for anything else."""
        picked = gather(expr)
        if picked is None or not isinstance(picked.body, Access) or Var(picked.variable) not in picked.body.indices:
            return None
        variable, size = picked.variable, self.extents[picked.variable]
        at, table = self.read(picked.at), self.read(picked.body)
        rest = tuple(n for n in table.dims if n != variable)
        if variable in at.dims or len(rest) + 1 < len(table.dims):
            return None
        index, inside = at.text, None
        start = self.starts.get(variable)
        if start is not None:
            local = Text(f"{index.at(SUM)} - {start}", SUM)
            inside = Value(Text(f"({local.text} >= 0) & ({local.text} < {size})", 0), at.dims, kind="bool")
            index = self.method(local, f"clamp(0, {size - 1})")
        if not set(rest) & set(at.dims):
            text = self.ordered(table, (variable, *rest))
            found = Value(Text(f"{text.at(ATOM)}[{index.text}]"), (*at.dims, *rest))
        elif set(rest) == set(at.dims):
            text = self.ordered(table, (*at.dims, variable))
            each = f"{self.method(index, 'long()').text}[..., None]"
            found = Value(Text(f"{text.at(ATOM)}.gather(-1, {each}).squeeze(-1)"), at.dims)
        else:
            return None
        return found if inside is None else self.chosen(inside, found, Value(Text("0"), (), True, "int"))

    def scattered(self, expr: Reduce) -> Value | None:
        """
        A sum that adds every element to the one place that integers name, as PyTorch does for the gradients of an
        embedding or a gather; None for anything else.
        """
        found = scatter(expr)
        if found is None or not set(expr.names) <= free_variables(found.at):
            return None
        if found.variable in free_variables(found.body):
            return None
        variable, size = found.variable, self.extents[found.variable]
        at, body = self.read(found.at), self.value(found.body)
        if variable in at.dims or at.kind != "int" or body.kind != "float":
            return None
        index, start = at.text, self.starts.get(variable)
        if start is not None:
            # What belongs to other pieces goes to a place behind the last.
            local = self.named("place", f"{index.at(SUM)} - {start}")
            index = Text(f"torch.where(({local} >= 0) & ({local} < {size}), {local}, {size})")
        places = size + (start is not None)
        kept = tuple(n for n in at.dims if n not in expr.names)
        summed = tuple(n for n in at.dims if n in expr.names)
        rest = tuple(n for n in body.dims if n not in at.dims)
        value = self.tensor(body)
        at = replace(at, text=index)
        if not kept:
            order = (*summed, *rest)
            source, ids = self.expanded(value, order), self.ordered(at, summed)
            shape = (prod(self.extents[n] for n in summed), prod(self.extents[n] for n in rest))
            text = f"torch.ops.aten.embedding_dense_backward({self.method(source, f'reshape{shape}').text}, "
            text += f"{self.method(ids, f'reshape({shape[0]})').text}, {places}, -1, False)"
            made = Text(text) if places == size else self.method(Text(text), f"narrow(0, 0, {size})")
            sizes = tuple(self.extents[n] for n in rest)
            return Value(self.method(made, f"reshape({', '.join(map(str, (size, *sizes)))})"), (variable, *rest))
        order = (*kept, *rest, *summed)
        lead, last = [self.extents[n] for n in (*kept, *rest)], prod(self.extents[n] for n in summed)
        texts = [self.method(self.expanded(v, order), f"reshape{(*lead, last)}").text for v in (at, value)]
        zeros = f"torch.zeros({(*lead, places)}, dtype={self.dtype}, device={self.device})"
        made = Text(f"{zeros}.scatter_add(-1, {texts[0]}, {texts[1]})")
        made = made if places == size else self.method(made, f"narrow(-1, 0, {size})")
        return Value(made, (*kept, *rest, variable))

    def tensor(self, value: Value) -> Value:
        """A floating point tensor, also of a Python number."""
        if not value.number:
            return self.floating(value)
        return Value(Text(f"torch.full((), {value.text.text}, dtype={self.dtype}, device={self.device})"), ())

    def product(self, expr: Reduce) -> Value | None:
        """A sum of a product of two tensors, as a matrix product or an einsum; None for anything else."""
        match expr:
            case Reduce("sum", _, Binary("*", left, right)):
                pass
            case _:
                return None
        bound = set(expr.names)
        reads = isinstance(left, Access) and isinstance(right, Access)
        own, other = free_variables(left), free_variables(right)
        if not reads and not (own - other and other - own and own & other & bound):
            return None
        x, y = self.value(left), self.value(right)
        if not bound <= {*x.dims, *y.dims} or "int" in (x.kind, y.kind) or x.number or y.number:
            return None
        x, y = self.floating(x), self.floating(y)
        order = tuple(n for n in self.extents if n in {*x.dims, *y.dims} - bound)
        k = [n for n in x.dims if n in bound]
        if set(k) == bound and [n for n in y.dims if n in bound] == k and k:
            rest_x, rest_y = [n for n in x.dims if n not in bound], [n for n in y.dims if n not in bound]
            if not set(rest_x) & set(rest_y) and len(rest_y) == 1:
                if len(k) == 1 and order == (*rest_x, *rest_y) and x.dims[-1] == k[0] and rest_x:
                    w = y.text if y.dims[0] == k[0] else self.method(y.text, "T")
                    return Value(Text(f"{x.text.at(PRODUCT)} @ {w.at(UNARY)}", PRODUCT), order)
                leading = x.dims[: len(k)] == tuple(k) == y.dims[: len(k)]
                if leading and len(rest_x) == 1 and order == (*rest_x, *rest_y):
                    flat = f"flatten(0, {len(k) - 1})"
                    a, b = (self.method(t, flat) if len(k) > 1 else t for t in (x.text, y.text))
                    return Value(Text(f"{self.method(a, 'T').text} @ {b.at(UNARY)}", PRODUCT), order)
        self.strided = True
        letters = _letters([*x.dims, *y.dims])
        spec = f"{_spell(x.dims, letters)},{_spell(y.dims, letters)}->{_spell(order, letters)}"
        return Value(Text(f'torch.einsum("{spec}", {x.text.text}, {y.text.text})'), order)

    def reduced(self, expr: Reduce) -> Value:
        value = self.value(expr.body)
        dims = [d for d, n in enumerate(value.dims) if n in expr.names]
        rest = tuple(n for n in value.dims if n not in expr.names)
        text = value.text
        # What the body does not depend on only repeats it.
        times = prod(self.extents[n] for n in expr.names if n not in free_variables(expr.body))
        if dims:
            if expr.reducer == "prod":
                for d in reversed(dims):
                    text = self.method(text, f"prod({d})")
            else:
                where = "" if not rest else str(dims[0]) if len(dims) == 1 else str(tuple(dims))
                text = self.method(text, f"{_REDUCERS[expr.reducer]}({where})")
        if times > 1 and expr.reducer == "sum":
            text = Text(f"{text.at(PRODUCT)} * {times}", PRODUCT)
        elif times > 1 and expr.reducer == "prod":
            text = Text(f"{text.at(ATOM)} ** {times}", UNARY)
        return Value(text, rest, value.number, "int" if value.kind == "bool" else value.kind)


def _letters(names: Sequence[str]) -> dict[str, str]:
    """A letter for each variable: its own first letter where that is free."""
    letters: dict[str, str] = {}
    for name in dict.fromkeys(names):
        free = [c for c in (name[0], *"abcdefghijklmnopqrstuvwxyz") if c.isascii() and c.islower()]
        letters[name] = next(c for c in free if c not in letters.values())
    return letters


def _spell(names: Sequence[str], letters: Mapping[str, str]) -> str:
    return "".join(letters[n] for n in names)

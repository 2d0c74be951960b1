"""
Write expressions of TDL, the tensor description language, as text: in Triton kernels (`KernelWriter`), and as TDL again
for docstrings (`tdl_text`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isinf

from unity_ir.errors import UnityError
from unity_ir.forms.addresses import Address, Names, Run, address, runs
from unity_ir.forms.rewrite import canonical, is_worth_keeping, recurring, rename
from unity_ir.kernels.text import ATOM, COMPARISONS, LOGIC, PRODUCT, SUM, UNARY, Text, binary
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import Pick, gather
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Name,
    Opaque,
    Position,
    Reduce,
    Segments,
    Size,
    Slice,
    Var,
    Window,
    WrittenIndex,
    children,
)


def _gelu(x: Text) -> Text:
    return Text(f"0.5 * {x.text} * (1.0 + tl.erf({x.text} * 0.7071067811865476))", PRODUCT)


def _call(function: str) -> Callable[[Text], Text]:
    return lambda x: Text(f"tl.{function}({x.text})")


_UNARY: Mapping[str, Callable[[Text], Text]] = {
    # Not tl.maximum, which turns NaN into 0.
    "relu": lambda x: Text(f"tl.where({x.text} < 0.0, 0.0, {x.text})"),
    "gelu": _gelu,
    # There is no tl.tanh, and libdevice does not run in the interpreter.
    "tanh": lambda x: Text(f"2.0 * tl.sigmoid(2.0 * {x.at(UNARY)}) - 1.0", SUM),
    **{f: _call(f) for f in ("exp", "log", "erf", "sqrt", "rsqrt", "sigmoid", "sin", "cos", "abs", "floor")},
}
_USED_TWICE = frozenset({"relu", "gelu"})
"""Functions whose text repeats the argument, which must therefore be a name or a constant."""


def _power(x: Text, y: Text) -> Text:
    """Write x ** y by exp and log of |x|, as Triton has no tl.pow; signs and special cases are those of torch.pow."""
    base, exponent = x.text, y.at(UNARY)
    odd = f"({exponent} * 0.5 != tl.floor({exponent} * 0.5)).to(tl.float32)"
    sign = f'tl.where({exponent} == tl.floor({exponent}), 1.0 - 2.0 * {odd}, float("nan"))'
    size = f"tl.exp({exponent} * tl.log(tl.abs({base})))"
    return Text(f"tl.where({exponent} == 0.0, 1.0, tl.where({base} < 0.0, {sign}, 1.0) * {size})")


def _extreme(function: str) -> Callable[[Text, Text], Text]:
    return lambda x, y: Text(f"tl.{function}({x.text}, {y.text}, propagate_nan=tl.PropagateNan.ALL)")


_BINARY: Mapping[str, Callable[[Text, Text], Text]] = {
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
    "pow": _power,
}
KERNEL_FUNCTIONS = frozenset({*_UNARY, *COMPARISONS, *LOGIC, *_BINARY, "not", "where", "philox"})
"""TDL functions that can be written in kernels."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tile: positions in the space of some index variables, numbered in row-major order."""

    index: str
    """The expression that holds the positions, of a shape that broadcasts over the tile."""
    variables: tuple[str, ...]
    """The variables that are flattened, outermost first."""
    mask: str | None = None
    """The expression that is true for the positions that exist; None if all do."""
    stored: Mapping[int, str] = field(default_factory=dict[int, str])
    """By the elements of a padded row, the expression that is true for positions within it."""


class KernelWriter:
    """
    Writes a Triton kernel's body, statement by statement, into `lines`. A program of the kernel computes a tile: one
    value for each position of the tile's `axes`, which the caller sets; an axis (`Axis`) is some index variables,
    flattened.

    `extents` are the index variables' sizes, `pointers` has the pointer parameter of each tensor, and `integers` the
    tensors that hold integers. `names` are the kernel's identifiers. `starts` has the parameter that holds the global
    index at which a variable starts, for variables whose piece does not start at 0. With `wide`, addresses have 64
    bits.

    Floating point values are float32 whatever the operands hold. Loads and shared subexpressions are computed once and
    named.
    """

    def __init__(
        self,
        extents: Mapping[str, int],
        pointers: Mapping[str, str],
        integers: frozenset[str],
        names: Names,
        starts: Mapping[str, str],
        wide: bool = False,
    ):
        self.extents = dict(extents)
        self.pointers = pointers
        self.integers = integers
        self.names = names
        self.starts = dict(starts)
        self.wide = wide
        self.lines: list[str] = []
        self.axes: list[Axis] = []
        self.shifts: dict[str, tuple[str, int]] = {}
        """For the variable of a segment: the variable of the whole dim, and the position where the segment starts."""
        self.rows: Mapping[str, int] = {}
        """The elements of a stored row, of each tensor whose rows are padded: there is memory beyond the dim's end."""
        self.branch_mask: str | None = None
        """The expression that is true where the branch being written applies; loads are masked by it."""
        self._scopes: list[dict[object, str]] = [{}]
        self._indent = 1
        self._shared: set[Expr] = set()

    # -- statements

    def emit(self, line: str) -> None:
        """Append a line of code at the current indentation."""
        self.lines.append("    " * self._indent + line)

    def define(self, key: object, wish: str, text: str) -> str:
        """
        Emit the assignment of the expression `text` to a new name like `wish`; return the name.

        Within the current scope, `known(key)` returns it, too; `key` is any hashable.
        """
        name = self.names.new(wish)
        self.emit(f"{name} = {text}")
        self.let(key, name)
        return name

    def let(self, key: object, name: str) -> None:
        """
        Record that the kernel's variable `name` holds what `key` (any hashable) stands for, so that it is not computed
        again: `known(key)` returns `name` until the current scope ends. Nothing is written.
        """
        self._scopes[-1][key] = name

    def known(self, key: object) -> str | None:
        """Return the identifier defined under `key` in the current scope or one around it; None if there is none."""
        return next((scope[key] for scope in reversed(self._scopes) if key in scope), None)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """
        Emit the line `head`, which opens a loop (`for i in range(n):`), and indent what is written in the `with`
        statement: a scope of its own.
        """
        axes = list(self.axes)
        self._scopes.append({})
        self.emit(head)
        self._indent += 1
        yield
        self._indent -= 1
        self._scopes.pop()
        self.axes = axes

    def share(self, exprs: Iterable[Expr]) -> None:
        """
        Record that every subexpression which occurs more than once in `exprs` is to be assigned to a name, where
        `value` first writes it. Loads are named in any case.
        """
        seen: set[Expr] = set()

        def visit(expr: Expr) -> None:
            if expr in seen:
                self._shared.add(expr)
                return
            seen.add(expr)
            for child in children(expr):
                visit(child)

        for expr in exprs:
            visit(expr)

    # -- addresses

    def pointer(self, tensor: str, where: Address) -> tuple[str, str]:
        """
        Return two expressions as text, (pointer, mask), of the elements of `tensor` that the tile covers, one for each
        position of its axes. `where` is the address of an element: an offset and, for each index variable, a stride, in
        elements.

        The mask is true for those of the elements that exist; it is empty if all do.
        """
        strides = dict(where.strides)
        offset = where.offset
        for name, (whole, start) in self.shifts.items():
            stride = strides.pop(name, 0)
            if stride:
                strides[whole] = strides.get(whole, 0) + stride
                offset -= stride * start
        terms = [self.pointers[tensor]]
        masks: list[str] = []
        covered: set[str] = set()
        for axis in self.axes:
            found = runs(axis.variables, self.extents, Address(strides))
            for run in found:
                covered.update(run.names)
                position = self.coordinate(axis, run)
                terms.append(position if run.stride == 1 else f"{position} * {run.stride}")
            if found and axis.mask is not None:
                # Copies of whole rows are of aligned elements; what is beyond the dim nobody reads. Along other dims,
                # as of a matrix that is also read transposed, there is nothing beyond.
                row = self.rows.get(tensor, 0) if [run.stride for run in found] == [1] else 0
                masks.append(axis.stored.get(row, axis.mask))
        missing = strides.keys() - covered
        assert not missing, f"{tensor}: no axis runs over {sorted(missing)}"
        if self.branch_mask is not None and covered:
            masks.append(self.branch_mask)
        text = " + ".join(terms)
        if offset:
            text += f" + {offset}" if offset > 0 else f" - {-offset}"
        return text, " & ".join(dict.fromkeys(masks))

    def coordinate(self, axis: Axis, run: Run) -> str:
        """
        Return the expression of the position along `run`: some consecutive index variables of `axis`, an axis of the
        tile, that are taken as one. If the axis has no other variables, that is the axis's own position; else a
        statement is emitted that finds it by division and remainder, and the name is returned.
        """
        text = axis.index
        if run.inner > 1:
            text += f" // {run.inner}"
        if not run.outermost:
            text += f" % {run.size}"
        if text == axis.index:
            return text
        key = ("coordinate", axis.index, run.inner, run.size)
        return self.known(key) or self.define(key, "_".join(run.names), text)

    def position(self, variable: str) -> str | None:
        """
        Return the expression of the position along one index variable, counted from the start of this rank's piece;
        None if it is always 0, as for a variable of extent 1.
        """
        whole, start = self.shifts.get(variable, (variable, 0))
        for axis in self.axes:
            for run in runs(axis.variables, self.extents, Address({whole: 1})):
                text = self.coordinate(axis, run)
                return f"({text} - {start})" if start else text
        return None

    def load(self, access: Access) -> str:
        """
        Emit the load of the elements that `access` reads, over the axes of the tile, unless they are loaded already;
        return the name that holds them.
        """
        # Accesses written differently may be the same: `x[0, j]` and `x[j]`.
        where = address(access.indices, self.extents)
        pointer, mask = self.pointer(access.tensor, where)
        mask = " & ".join(filter(None, [mask, *map(self.inside, access.indices)]))
        key = ("load", pointer, mask)
        name = self.known(key)
        if name is None:
            integer = access.tensor in self.integers
            arguments = pointer + (f", mask={mask}, other={0 if integer else 0.0}" if mask else "")
            text = f"tl.load({arguments})" + ("" if integer else ".to(tl.float32)")
            name = self.define(key, access.tensor, text)
        return name

    def inside(self, index: WrittenIndex) -> str:
        """
        Return the mask, as an expression, of the positions at which a tensor's index along one dim lies inside the
        tensor. Only a window (`s * i + j` plus an offset, as a convolution with padding reads) may lie outside; for
        other indices, and for windows that never do, the mask is empty.
        """
        if not isinstance(index, Window):
            return ""
        first = index.offset + index.low
        low, high = first < 0, first + index.span(self.extents) >= index.size
        if not low and not high:
            return ""
        terms = [(factor, self.position(name)) for factor, name in index.terms]
        texts = [p if factor == 1 else f"{factor} * ({p})" for factor, p in terms if p is not None]
        text = " + ".join([*texts, *([str(first)] if first or not texts else [])])
        key = ("window", text)
        name = self.known(key) or self.define(key, "place", text)
        return " & ".join([f"({name} >= 0)"] * low + [f"({name} < {index.size})"] * high)

    def store(self, tensor: str, where: Address, value: str) -> None:
        """
        Emit the store of the expression `value` to a tensor's elements at `where`, an offset and a stride (in elements)
        per index variable, over the axes of the tile.
        """
        pointer, mask = self.pointer(tensor, where)
        if value.replace(".", "", 1).isdecimal():
            # Results that are the same number share a name.
            value = self.known(("number", value)) or self.define(("number", value), "value", value)
        elif not value.isidentifier():
            name = self.names.new("value")
            self.emit(f"{name} = {value}")
            value = name
        self.emit(f"tl.store({pointer}, {value}" + (f", mask={mask})" if mask else ")"))

    # -- values

    def value(self, expr: Expr) -> Text:
        """Return a TDL expression as Triton code, after emitting statements for its loads and shared subexpressions."""
        name = self.known(expr)
        if name is not None:
            return Text(name)
        text = self._value(expr)
        if expr in self._shared and not isinstance(expr, Access | Const | Name):
            return Text(self.define(expr, "shared", text.text))
        return text

    def number(self, expr: Expr) -> Text:
        """Return a TDL expression as Triton code of type float32, for functions and sums that take nothing else."""
        text = self.value(expr)
        if isinstance(expr, Const) or self.is_float(expr):
            return text
        return Text(f"{text.at(ATOM)}.to(tl.float32)")

    def is_float(self, expr: Expr) -> bool:
        """Return whether an expression's code is a floating point number, rather than an integer or a condition."""
        match expr:
            case Const():
                return not _is_int(expr)
            case Name():
                return False
            case Access(tensor, _):
                return tensor not in self.integers
            case Binary(op, left, right):
                return op == "/" or self.is_float(left) or self.is_float(right)
            case Call(function, args):
                if function in COMPARISONS or function in LOGIC or function == "not":
                    return False
                return function != "where" or any(map(self.is_float, args[1:]))
            case _:
                return True

    def _value(self, expr: Expr) -> Text:
        match expr:
            case Const(value) if isinf(value):
                return Text(f'float("{value}")')
            case Const(value):
                return Text(repr(float(value)), ATOM if value >= 0 else UNARY)
            case Name(name):
                start = self.starts.get(name)
                position = self.position(name)
                if start is None:
                    return Text(position or "0")
                return Text(start) if position is None else Text(f"{position} + {start}", SUM)
            case Access():
                return Text(self.load(expr))
            case Binary(op, left, right):
                return binary(op, self._operand(left, right), self._operand(right, left))
            case Call(function, (left, right)) if function in COMPARISONS:
                a, b = self._operand(left, right), self._operand(right, left)
                return Text(f"{a.at(SUM)} {COMPARISONS[function]} {b.at(SUM)}", 0)
            case Call(function, (left, right)) if function in LOGIC:
                return Text(f"{self.value(left).at(ATOM)} {LOGIC[function]} {self.value(right).at(ATOM)}", 0)
            case Call("not", (argument,)):
                return Text(f"{self.value(argument).at(ATOM)} == 0", 0)
            case Call("philox", (Const(seed), position)):
                return self.uniform(int(seed), self._operand(position, Name("")))
            case Call(function, (left, right)) if function in _BINARY:
                texts = [self.number(left), self.number(right)]
                if function == "pow":
                    texts = [self._named(a, t) for a, t in zip((left, right), texts, strict=True)]
                return _BINARY[function](*texts)
            case Call("where", (condition, yes, no)):
                parts = [self.value(condition), self.value(yes), self.value(no)]
                return Text(f"tl.where({', '.join(p.text for p in parts)})")
            case Call(function, (argument,)) if function in _UNARY:
                text = self.number(argument)
                return _UNARY[function](self._named(argument, text) if function in _USED_TWICE else text)
            case Reduce() if (picked := gather(expr)) is not None:
                return self.gathered(picked)
            case _:
                raise TypeError(f"{expr} cannot stand inside a kernel's expression")

    def _named(self, expr: Expr, text: Text) -> Text:
        """Return a text that may be repeated: the text itself if it is a name or a constant, else a new name."""
        plain = text.text.isidentifier() or isinstance(expr, Const)
        return text if plain else Text(self.define(("number", expr), "argument", text.text))

    def uniform(self, seed: int, position: Text) -> Text:
        """
        Return code for the random number in [0, 1), of 24 bits, that TDL's `philox(seed, position)` stands for: the
        `position` is that of an element in the whole tensor, so that shards draw the same numbers.

        Raises `UnityError` if positions need 64 bits (`wide`).
        """
        if self.wide:
            raise UnityError("lowering: no kernel draws random numbers at positions beyond 32 bits; divide the tensor")
        word = f"tl.randint({seed}, {position.text}).to(tl.uint32, bitcast=True)"
        return Text(f"({word} >> 8).to(tl.float32) * 5.960464477539063e-08", PRODUCT)

    def gathered(self, picked: Pick) -> Text:
        """
        Return code for a sum that reads only the one position that an integer operand gives (an embedding, say),
        matched as `picked`: the sum's body at that position, or 0 if this rank's piece does not have the position.
        """
        extent = self.extents[picked.variable]
        index = self.load(picked.at)
        if self.wide:
            key = ("wide", index)
            index = self.known(key) or self.define(key, "position", f"{index}.to(tl.int64)")
        start = self.starts.get(picked.variable)
        if start is not None:
            key = ("position", index, start)
            index = self.known(key) or self.define(key, "position", f"{index} - {start}")
        key = ("inside", index, extent)
        inside = self.known(key) or self.define(key, "inside", f"({index} >= 0) & ({index} < {extent})")
        # Under a name of its own: the same expression over a tile of this variable is something else.
        variable = f"{picked.variable} at {index}"
        self.extents[variable] = extent
        if start is not None:
            self.starts[variable] = start
        self.axes.append(Axis(index, (variable,), inside))
        body = self.value(rename(picked.body, {picked.variable: variable})).text
        self.axes.pop()
        if isinstance(picked.body, Access) and extent > 1 and picked.variable in free_variables(picked.body):
            # Its load is masked.
            return Text(body)
        return Text(f"tl.where({inside}, {body}, 0.0)")

    def _operand(self, expr: Expr, other: Expr) -> Text:
        """Return the text of `expr`; integer constants stay integers if `other` is one, so that ids compare exactly."""
        if isinstance(expr, Const) and _is_int(expr) and not self.is_float(other):
            return Text(str(int(expr.value)), ATOM if expr.value >= 0 else UNARY)
        return self.value(expr)


def _is_int(const: Const) -> bool:
    return const.value.is_integer() and abs(const.value) < 2**31


# --- TDL -------------------------------------------------------------------------------------------------------------


def tdl_text(bound: Bound) -> str:
    """
    Return a bound line as TDL text, followed by its extents (the sizes of its index variables).

    Given a matmul, returns `out[m, n] = sum[k](x[m, k] * w[k, n]), m = 4, n = 8, k = 2`.
    """
    return _line(bound, [f"{r.name}[{_indices(r.indices)}] = {_Tdl(bound).text(r.expr).text}" for r in bound.results])


def tdl_lines(bound: Bound) -> list[str]:
    """
    Return a bound line as TDL text followed by its extents, as `tdl_text` does, but as a list of lines: subexpressions
    that occur twice are defined by `let` lines.
    """
    recurs = recurring(r.expr for r in bound.results)
    first = _Tdl(bound, {}, recurs)
    for result in bound.results:
        first.text(result.expr)
    tdl = _Tdl(bound, first.uses, recurs)
    results = [f"{r.name}[{_indices(r.indices)}] = {tdl.text(r.expr).text}" for r in bound.results]
    if not tdl.definitions:
        return [tdl_text(bound)]
    return [f"{line};" for line in (*tdl.definitions, *results[:-1])] + [_line(bound, results[-1:])]


def _line(bound: Bound, results: Sequence[str]) -> str:
    return "; ".join(results) + "".join(f", {name} = {size}" for name, size in bound.extents.items())


def _indices(indices: Sequence[WrittenIndex]) -> str:
    return ", ".join(map(_index, indices))


def _index(index: WrittenIndex) -> str:
    match index:
        case Var(name):
            return name
        case Composite(names):
            return f"({' '.join(names)})"
        case Segments(names, active):
            return f"({' '.join(f'.{n}' if k == active else n for k, n in enumerate(names))})"
        case Slice(part, start, _):
            return f"{_index(part)} + {start}" if start else _index(part)
        case Window(terms, offset, _, _, low):
            steps = [n if factor == 1 else f"{factor}*{n}" for factor, n in terms]
            return " + ".join([*steps, *([str(offset + low)] if offset + low or not steps else [])])
        case _:
            raise TypeError(f"{index} is not bound")


class _Tdl:
    """
    Writer of expressions as TDL. `wanted` counts the uses of each canonical expression; those used more than once are
    put into `definitions`. Without it nothing is defined. `recurs` says which expressions may be used more than once.
    """

    def __init__(
        self,
        bound: Bound,
        wanted: Mapping[Expr, int] | None = None,
        recurs: Callable[[Expr], bool] = lambda _: True,
    ):
        self.extents = bound.extents
        self.wanted = wanted
        self.recurs = recurs
        self.names = Names([*bound.extents, *(p.name for p in bound.operands), *(r.name for r in bound.results)])
        self.uses: Counter[Expr] = Counter()
        self.known: dict[Expr, Text | str] = {}
        """The text of a canonical expression, or the name it was given."""
        self.definitions: list[str] = []

    def text(self, expr: Expr) -> Text:
        if self.wanted is None or isinstance(expr, Cases) or not is_worth_keeping(expr) or not self.recurs(expr):
            return self._text(expr)
        form, free = canonical(expr, self.extents, {})
        self.uses[form] += 1
        if form not in self.known:
            text = self._text(expr)
            if self.wanted.get(form, 0) > 1:
                name = self.names.new("shared")
                self.definitions.append(f"let {name}[{', '.join(free)}] = {text.text}")
                self.known[form] = name
            else:
                self.known[form] = text
        found = self.known[form]
        return found if isinstance(found, Text) else Text(f"{found}[{', '.join(free)}]")

    def _text(self, expr: Expr) -> Text:
        match expr:
            case Const(value):
                text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
                return Text(text, ATOM if value >= 0 else UNARY)
            case Name(name):
                return Text(name)
            case Access(tensor, indices):
                return Text(f"{tensor}[{_indices(indices)}]")
            case Binary(op, left, right):
                return binary(op, self.text(left), self.text(right))
            case Call(function, args):
                return Text(f"{function}({', '.join(self.text(a).text for a in args)})")
            case Reduce(reducer, indices, body):
                return Text(f"{reducer}[{_indices(indices)}]({self.text(body).text})")
            case Cases(branches):
                return Text(" | ".join(f"{n}: {self.text(e).text}" for n, e in branches))
            case Opaque(function, outputs, inputs, body):
                over = f"{_indices(outputs)}; {_indices(inputs)}"
                return Text(f"opaque {function}[{over}]({self.text(body).text})")
            case Size() | Position():
                raise TypeError(f"{expr} is not bound")

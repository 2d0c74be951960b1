"""
Generate an optimizer's step, in place, from its TDL line: as one kernel for all weights, or of one weight in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.kernels.text import COMPARISONS, SUM, UNARY, Text, binary
from unity_ir.kernels.triton.launch import Compiled, Launcher, pointer, signature
from unity_ir.ops.optimizers import OPTIMIZERS, OptimizerLine, with_average
from unity_ir.tdl.syntax import Access, Binary, Call, Const, Expr, Name, WrittenResult, accesses, children

BLOCK = 2048
"""Elements of a weight that a program of the kernel replaces."""
WARPS = 8


def _power(x: Text, y: Text) -> Text:
    return Text(f"{x.at(UNARY + 1)} ** {y.at(UNARY)}", UNARY)


def _root(x: Text) -> Text:
    return _power(x, Text("0.5"))


_ON_HOST: Mapping[str, Callable[..., Text]] = {"pow": _power, "sqrt": _root}


def _functions(module: str) -> Mapping[str, Callable[..., Text]]:
    """Return the functions of elements that lines use, as `tl` or `torch` has them."""
    compared = {name: _comparison(op) for name, op in COMPARISONS.items()}
    called = {name: _called(f"{module}.{name}") for name in ("sqrt", "where")}
    return {**compared, **called}


def _comparison(op: str) -> Callable[[Text, Text], Text]:
    def compared(x: Text, y: Text) -> Text:
        return Text(f"{x.at(SUM)} {op} {y.at(SUM)}", 0)

    return compared


def _called(function: str) -> Callable[..., Text]:
    return lambda *arguments: Text(f"{function}({', '.join(a.text for a in arguments)})")


@dataclass(frozen=True)
class _Writer:
    """Writer of a line's expressions; `known` has the names of those that are computed already."""

    functions: Mapping[str, Callable[..., Text]]
    known: dict[Expr, str]

    def text(self, expr: Expr) -> Text:
        if expr in self.known:
            return Text(self.known[expr])
        match expr:
            case Const(value):
                return Text(repr(float(value)))
            case Name(name) | Access(name):
                return Text(name)
            case Binary(op, left, right):
                return binary(op, self.text(left), self.text(right))
            case Call(function, arguments):
                return self.functions[function](*map(self.text, arguments))
            case _:
                raise TypeError(f"an optimizer's line has no {type(expr).__name__}")


def optimizer_launcher(
    name: str,
    dtype: str = "f32",
    impl: str = "triton",
    gradient: str = "f32",
    state: str = "f32",
    is_scaled: bool = False,
    cast: str | None = None,
    is_averaged: bool = False,
) -> Launcher:
    """
    Return the launcher (source text and kernels) of one step of the optimizer `name`. The names in it are those of the
    optimizer's TDL line in `ops.optimizers`: for `adam` the weight `p`, its gradient `g`, its state `m` and `v`, the
    number of the step `step`, from 1, and the hyperparameters `lr`, `beta1`, `beta2` and `eps`.

    With `impl` `torch` the source defines one function, which updates one weight. For `adam`, it is called as

        adam_torch(p, g, m, v, step, lr, beta1, beta2, eps)

    and replaces `p`, `m` and `v` in place; the tensors are contiguous and of one shape. If `is_scaled`, there is a last
    argument `scale`, by which the gradient is multiplied first. If `gradient` is not `dtype`, the function first casts
    the gradient to the weight's type.

    With `triton` the source defines two functions, for many weights. For `adam`, `adam_numbers` takes `step` and the
    arguments after it, each a number or a tensor [groups] with an entry per parameter group, and returns a tuple of
    those numbers that the kernel reads. From these the caller makes `numbers`, f32 [groups, numbers + 1], on the device
    (`packed` in `lowering.runtime.tables`); the last number of a row is 0 if the weights of its group are to be left as
    they are. Then `adam(table, numbers)` is one launch for all weights of a `WeightTable`. If some have kept casts of
    type `cast` (`plan.kept_casts`), it writes these, too.

    `dtype`, `gradient`, `state` and `cast` are the element types of weight, gradient, state and kept casts for which
    the kernel is compiled ahead of time. At run time the tensors' own types count. If `is_averaged`, the state has the
    average of the weights, too (`ops.optimizers.with_average`). Raises `UnityError` for another name
    or implementation.
    """
    if name not in OPTIMIZERS or impl not in ("triton", "torch"):
        known = ", ".join(OPTIMIZERS)
        raise UnityError(f"lowering: no {impl} optimizer {name}; known are {known}, with triton or torch")
    made = with_average(OPTIMIZERS[name]) if is_averaged else OPTIMIZERS[name]
    if impl == "torch":
        return Launcher(f"{name}_torch", _in_torch(made, is_scaled, gradient != dtype), {}, ())
    numbers = _numbers(made, is_scaled)
    tensors = {"p_ptr": dtype, "g_ptr": gradient, **{f"{s}_ptr": state for s in made.state}}
    tensors |= {} if cast is None else {"cast_ptr": cast}
    types = {n: pointer(d) for n, d in tensors.items()}
    types |= {"rows_ptr": "*i64", "blocks_ptr": "*i32", "numbers_ptr": "*fp32"}
    types |= {"ALIGNED": "constexpr", "BLOCK": "constexpr"}
    kernel = f"{name}_kernel"
    compiled = tuple(
        Compiled(kernel, types, {"ALIGNED": aligned, "BLOCK": BLOCK}, WARPS, 3) for aligned in (True, False)
    )
    source = _launch(made) + _BETWEEN + _in_numbers(made, numbers, is_scaled)
    return Launcher(name, source, {kernel: _kernel(made, numbers, cast is not None)}, compiled)


_BETWEEN = "\n\n"

_ROUNDED = """\
# The interpreter cuts off the digits that bfloat16 has no place for.
CAST_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, out_ptr):
    if CAST_INTERPRETED:
        if out_ptr.dtype.element_ty == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


"""
"""Text of a function that returns what a store to the type of `out_ptr` rounds to the nearest number, ties to even."""


def _numbers(made: OptimizerLine, is_scaled: bool) -> list[str]:
    """Return the names of the numbers that a kernel takes, in order of reading."""
    writer = _Writer(_functions("tl"), {r.expr: r.name for r in made.numbers})
    found = ["scale"] if is_scaled else []
    for result in made.replaced:
        found += _read(result.expr, writer.known)
        writer.known[result.expr] = result.name
    return [n for n in dict.fromkeys(found) if n not in {p.name for p in made.line.parameters}]


def _read(expr: Expr, known: Mapping[Expr, str]) -> Iterator[str]:
    """Yield the names of what an expression reads: tensors, numbers, and results that are `known`."""
    match expr:
        case _ if expr in known:
            yield known[expr]
        case Name(name) | Access(name):
            yield name
        case _:
            for part in children(expr):
                yield from _read(part, known)


def _arguments(made: OptimizerLine, is_scaled: bool) -> list[str]:
    """Return the names of the numbers that a step is given: that of the step, the hyperparameters, and the scale."""
    return [*(a.name for a in made.line.attributes), *(["scale"] if is_scaled else [])]


def _of_all(made: OptimizerLine) -> Iterator[str]:
    """Yield the lines that compute the numbers that are the same for all elements."""
    writer = _Writer(_ON_HOST, {})
    for result in made.numbers:
        yield f"    {result.name} = {writer.text(result.expr).text}"


def _what(made: OptimizerLine, of: str) -> str:
    kept = f", and of its state {', '.join(made.state)}" if made.state else ""
    return f'    """One step of {made.name}, in place{of}: of weight p by gradient g{kept}."""'


def _in_numbers(made: OptimizerLine, numbers: list[str], is_scaled: bool) -> str:
    lines = [
        f"def {made.name}_numbers({', '.join(_arguments(made, is_scaled))}):",
        f'    """What a step of {made.name} computes with, the same for all elements of a weight."""',
        *_of_all(made),
        f"    return {', '.join(numbers)}{',' if len(numbers) == 1 else ''}",
    ]
    return "\n".join(lines) + "\n"


def _launch(made: OptimizerLine) -> str:
    lines = [
        f"def {made.name}(table, numbers):",
        _what(made, " and for all weights of a table"),
        f"    {made.name}_kernel[(len(table.blocks),)](",
        "        *table.examples, table.rows, table.blocks, numbers,",
        f"        ALIGNED=table.is_aligned, BLOCK=table.block, num_warps={WARPS},",
        "    )",
    ]
    return "\n".join(lines) + "\n"


def _kernel(made: OptimizerLine, numbers: list[str], has_casts: bool) -> str:
    """
    Return the text of the kernel. A program takes a block of a weight, which `blocks_ptr` names: the weight's row, and
    the number of the block in it. Row `rows_ptr` has the addresses of the weight, its gradient and state, of its cast
    if weights have casts (0: this one has none), its number of elements, and its group. The pointers it is given are of
    any weight, and tell the types.
    """
    tensors = [p.name for p in made.line.parameters]
    pointers = [f"{t}_ptr" for t in (*tensors, *(["cast"] if has_casts else []))]
    arguments = [*pointers, "rows_ptr", "blocks_ptr", "numbers_ptr"]
    size, group, live = len(pointers), len(pointers) + 1, len(numbers)
    out = ["@triton.jit", signature(f"{made.name}_kernel", arguments, ("ALIGNED", "BLOCK"))]
    out.append(f"    weight = rows_ptr + {len(pointers) + 2} * tl.load(blocks_ptr + 2 * tl.program_id(0))")
    out += [f"    has_cast = tl.load(weight + {len(tensors)}) != 0"] if has_casts else []
    out += [f"    {name} = tl.load(weight + {i}).to({name}.dtype)" for i, name in enumerate(pointers)]
    out.append(f"    numbers = numbers_ptr + {live + 1} * tl.load(weight + {group})")
    out += [f"    {name} = tl.load(numbers + {i})" for i, name in enumerate(numbers)]
    out.append(f"    size = tl.where(tl.load(numbers + {live}) > 0.0, tl.load(weight + {size}), 0)")
    out.append("    if ALIGNED:")
    out += [f"        {name} = tl.multiple_of({name}, 16)" for name in (*pointers, "size")]
    out.append("    block = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)")
    out.append("    index = block * BLOCK + tl.arange(0, BLOCK)")
    out.append("    mask = index < size")
    out += [f"    {t} = tl.load({t}_ptr + index, mask=mask, other=0.0).to(tl.float32)" for t in tensors]
    if "scale" in numbers:
        out.append("    g = scale * g")
    writer = _Writer(_functions("tl"), {r.expr: r.name for r in made.numbers})
    for result in _replaced(made, writer):
        out.append(f"    {result.name} = {writer.text(result.expr).text}")
    out += [f"    tl.store({r.name}_ptr + index, {r.name}, mask=mask)" for r in made.replaced]
    out += ["    tl.store(cast_ptr + index, rounded(p, cast_ptr), mask=mask & has_cast)"] if has_casts else []
    return (_ROUNDED if has_casts else "") + "\n".join(out) + "\n"


def _in_torch(made: OptimizerLine, is_scaled: bool, is_cast: bool) -> str:
    arguments = [*(p.name for p in made.line.parameters), *_arguments(made, is_scaled)]
    out = [f"def {made.name}_torch({', '.join(arguments)}):", _what(made, ""), *_of_all(made)]
    out += ["    g = g.to(p.dtype)"] if is_cast else []
    out += ["    g = scale * g"] if is_scaled else []
    writer = _Writer(_functions("torch"), {r.expr: r.name for r in made.numbers})
    out += [f"    {_in_place(result, writer)}" for result in _replaced(made, writer)]
    return "\n".join(out) + "\n"


def _replaced(made: OptimizerLine, writer: _Writer) -> Iterator[WrittenResult]:
    """Yield the results that replace operands, in order; each is known to `writer` from then on."""
    gone: set[str] = set()
    for result in made.replaced:
        assert gone.isdisjoint(_operands(result.expr, writer.known)), f"{made.name} reads what it has replaced"
        yield result
        gone.add(result.name)
        writer.known[result.expr] = result.name


def _operands(expr: Expr, known: Mapping[Expr, str]) -> Iterator[str]:
    """Yield the names of the operands that an expression reads itself, not in parts that are `known`."""
    if isinstance(expr, Access):
        yield expr.tensor
    for part in () if expr in known else children(expr):
        yield from _operands(part, known)


def _in_place(result: WrittenResult, writer: _Writer) -> str:
    """
    Return the statement by which PyTorch replaces a tensor: given `m[i..] = keep * m[i..] + g[i..]`, returns
    `m.mul_(keep).add_(g)`, which makes no tensor of its size, as an assignment would.
    """
    (_, first), *rest = _terms(result.expr)
    text = result.name
    match first:
        case Access(tensor) if tensor == result.name:
            pass
        case Binary("*", number, Access(tensor)) if tensor == result.name and not accesses(number):
            text += f".mul_({writer.text(number).text})"
        case _:
            rest = []
    if not rest or any(
        result.name in _operands(term, writer.known) for _, term in rest[0 if text != result.name else 1 :]
    ):
        return f"{result.name}.copy_({writer.text(result.expr).text})"
    for sign, term in rest:
        method = "add_" if sign == "+" else "sub_"
        match term:
            case Binary("*", number, Access()) if term not in writer.known and not accesses(number):
                text += f".{method}({writer.text(term.right).text}, alpha={writer.text(number).text})"
            case _:
                text += f".{method}({writer.text(term).text})"
    return text


def _terms(expr: Expr) -> list[tuple[str, Expr]]:
    """Return the terms of a sum, each with its sign."""
    if isinstance(expr, Binary) and expr.op in "+-":
        return [*_terms(expr.left), (expr.op, expr.right)]
    return [("+", expr)]

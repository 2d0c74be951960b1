"""Generate an optimizer's step of one weight, in place, from its TDL line: as one kernel, or in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.kernels.text import COMPARISONS, SUM, UNARY, Text, binary
from unity_ir.kernels.triton.launch import Compiled, Launcher, pointer
from unity_ir.ops.optimizers import OPTIMIZERS, OptimizerLine
from unity_ir.tdl.syntax import Access, Binary, Call, Const, Expr, Name, WrittenResult, accesses, children

BLOCK = 4096
WARPS = 16


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
) -> Launcher:
    """
    Return the launcher of an optimizer's step: `sgd(p, g, lr)`, `adam(p, g, m, v, step, lr, beta1, beta2, eps)`, and so
    on, as `ops.optimizers` has its operands and attributes.

    The launcher replaces the weight `p` and its state in place, given the gradient `g`: contiguous tensors of one
    shape. `step` counts from 1. `dtype`, `gradient` and `state` are the element types of p, of g, and of the state;
    `impl` is `triton` or `torch`. If it `is_scaled`, a last argument `scale` is multiplied with the gradient first.
    Raises `UnityError` for another name or implementation.
    """
    if name not in OPTIMIZERS or impl not in ("triton", "torch"):
        known = ", ".join(OPTIMIZERS)
        raise UnityError(f"lowering: no {impl} optimizer {name}; known are {known}, with triton or torch")
    made = OPTIMIZERS[name]
    if impl == "torch":
        return Launcher(f"{name}_torch", _in_torch(made, is_scaled), {}, ())
    numbers = _numbers(made, is_scaled)
    tensors = {"p_ptr": dtype, "g_ptr": gradient, **{f"{s}_ptr": state for s in made.state}}
    signature = {n: pointer(d) for n, d in tensors.items()} | {"size": "i32"}
    signature |= dict.fromkeys(numbers, "fp32") | {"BLOCK": "constexpr"}
    kernel = f"{name}_kernel"
    compiled = Compiled(kernel, signature, {"BLOCK": BLOCK}, WARPS, 3)
    return Launcher(name, _launch(made, numbers, is_scaled), {kernel: _kernel(made, numbers)}, (compiled,))


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


def _head(made: OptimizerLine, name: str, is_scaled: bool) -> Iterator[str]:
    """Yield the first lines of a launcher: its arguments, what it does, and the numbers that are computed once."""
    arguments = [*(p.name for p in made.line.parameters), *(a.name for a in made.line.attributes)]
    yield f"def {name}({', '.join([*arguments, *(['scale'] if is_scaled else [])])}):"
    kept = f", and of its state {', '.join(made.state)}" if made.state else ""
    yield f'    """One step of {made.name}, in place: of weight p by gradient g{kept}."""'
    writer = _Writer(_ON_HOST, {})
    for result in made.numbers:
        yield f"    {result.name} = {writer.text(result.expr).text}"


def _launch(made: OptimizerLine, numbers: list[str], is_scaled: bool) -> str:
    tensors = ", ".join(p.name for p in made.line.parameters)
    lines = [
        *_head(made, made.name, is_scaled),
        f"    {made.name}_kernel[(triton.cdiv(p.numel(), {BLOCK}),)](",
        f"        {tensors}, p.numel(), {', '.join(numbers)},",
        f"        BLOCK={BLOCK}, num_warps={WARPS},",
        "    )",
    ]
    return "\n".join(lines) + "\n"


def _kernel(made: OptimizerLine, numbers: list[str]) -> str:
    tensors = [p.name for p in made.line.parameters]
    arguments = [*(f"{t}_ptr" for t in tensors), "size", *numbers, "BLOCK: tl.constexpr"]
    out = ["@triton.jit", f"def {made.name}_kernel({', '.join(arguments)}):"]
    out.append("    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)")
    out.append("    mask = index < size")
    out += [f"    {t} = tl.load({t}_ptr + index, mask=mask, other=0.0).to(tl.float32)" for t in tensors]
    if "scale" in numbers:
        out.append("    g = scale * g")
    writer = _Writer(_functions("tl"), {r.expr: r.name for r in made.numbers})
    for result in _replaced(made, writer):
        out.append(f"    {result.name} = {writer.text(result.expr).text}")
    out += [f"    tl.store({r.name}_ptr + index, {r.name}, mask=mask)" for r in made.replaced]
    return "\n".join(out) + "\n"


def _in_torch(made: OptimizerLine, is_scaled: bool) -> str:
    out = [*_head(made, f"{made.name}_torch", is_scaled), *(["    g = scale * g"] if is_scaled else [])]
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

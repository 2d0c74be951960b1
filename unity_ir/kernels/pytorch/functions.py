"""Write functions of elements in PyTorch, random numbers, and the opaque functions that TDL has no expression for."""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.kernels.pytorch.tensor_text import TensorText
from unity_ir.kernels.pytorch.writer import TorchWriter
from unity_ir.kernels.text import ATOM, PRODUCT, SUM, Text, binary
from unity_ir.tdl.syntax import Access, Var

FUNCTIONS: Mapping[str, str] = {
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
BINARY: Mapping[str, str] = {"maximum": "torch.maximum", "minimum": "torch.minimum", "pow": "torch.pow"}
# Not torch.topk, which may take any of several equal elements.
_LARGEST_FIRST = "sort(dim=-1, descending=True, stable=True)"
_EQUALS_BEFORE = (
    "(torch.arange({size}, device={device}) - torch.searchsorted({of}.values, {of}.values))"
    ".gather(-1, {of}.indices.argsort(-1))"
)
_OPAQUE: Mapping[str, tuple[str, str, str]] = {
    "equals_before": ("sort(dim=-1, stable=True)", _EQUALS_BEFORE, "int"),
    "topk_values": (_LARGEST_FIRST, "{of}.values", "float"),
    "topk_indices": (_LARGEST_FIRST, "{of}.indices", "int"),
}
"""
For each opaque function along the last dim, of `size` elements: a method, what is made of its result `of`, and the kind
of that.
"""


def joined(writer: TorchWriter, op: str, left: TensorText, right: TensorText) -> TensorText:
    """
    Return code for `left op right`, where `op` is `+`, `-`, `*` or `/`, with both operands broadcast to the index
    variables of either. `writer` is that of the TDL line they are part of.
    """
    values = [left, right]
    if op in "+-":
        # PyTorch adds no booleans.
        values = [writer.floating(v) if v.kind == "bool" else v for v in values]
    kind = "float" if op == "/" or "float" in (v.kind for v in values) else values[0].kind
    if kind == "float" and not any(v.kind == "float" and not v.number for v in values):
        # Python numbers do not tell in which type of float to compute.
        values = [v if v.number else writer.floating(v) for v in values]
    order = writer.union(values)
    left, right = values
    text = binary(op, writer.ordered(left, order), writer.ordered(right, order))
    return TensorText(text, order, left.number and right.number, "int" if kind == "bool" and left != right else kind)


def compared(writer: TorchWriter, op: str, left: TensorText, right: TensorText, level: int = SUM) -> TensorText:
    """
    Return code for the boolean tensor `left op right`, where `op` is such as `<` or `&`; `writer` is that of the TDL
    line they are part of. An operand gets parentheses if its outermost operator binds less tightly than `level`, a
    precedence of `kernels.text` (`SUM` below `PRODUCT`, `UNARY`, `ATOM`).
    """
    order = writer.union([left, right])
    a, b = writer.ordered(left, order), writer.ordered(right, order)
    return TensorText(Text(f"{a.at(level)} {op} {b.at(level)}", 0), order, kind="bool")


def binary_call(writer: TorchWriter, function: str, left: TensorText, right: TensorText) -> TensorText:
    """
    Return code for the call of a PyTorch function of two arguments, such as `torch.maximum` or `torch.pow`: tensors, of
    which integers are first converted to floating point, or Python numbers.
    """
    values = [v if v.number else writer.floating(v) for v in (left, right)]
    if function != "torch.pow":
        # Those take no numbers.
        values = [
            TensorText(Text(f"torch.tensor({v.text.text}, dtype={writer.dtype}, device={writer.device})"), ())
            if v.number
            else v
            for v in values
        ]
    order = writer.union(values)
    return TensorText(Text(f"{function}({', '.join(writer.ordered(v, order).text for v in values)})"), order)


def chosen(writer: TorchWriter, condition: TensorText, yes: TensorText, no: TensorText) -> TensorText:
    """
    Return code for `torch.where(condition, yes, no)`, broadcast to the index variables of all three; if `yes` or `no`
    is floating point, the other is converted to it.
    """
    kind = "float" if "float" in (yes.kind, no.kind) else "int"
    if kind == "float":
        if yes.number and no.number:
            text = f"torch.tensor({yes.text.text}, dtype={writer.dtype}, device={writer.device})"
            yes = TensorText(Text(text), ())
        yes, no = (v if v.number else writer.floating(v) for v in (yes, no))
    order = writer.union([condition, yes, no])
    texts = ", ".join(writer.ordered(v, order).text for v in (condition, yes, no))
    return TensorText(Text(f"torch.where({texts})"), order, kind=kind)


def uniform(writer: TorchWriter, seed: int, position: TensorText) -> TensorText:
    """
    Return code for the random numbers in [0, 1) that `tdl.functions.philox` draws for `seed` at each of the integers
    `position`, after writing the statements it needs to `writer`.

    The 64-bit products overflow, which keeps their low bits. Raises `UnityError` where statements are not allowed.
    """
    if writer.sharing is None:
        raise writer.fail("no PyTorch expression of one line draws random numbers; leave dropout out")
    names, lines = writer.sharing.names, writer.sharing.lines
    at = position.text.text
    if position.number:
        at = f"torch.tensor({at}, device={writer.device})"
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
    return TensorText(Text(f"({c[0]} >> 8).to({writer.dtype}) * 2.0**-24", PRODUCT), position.dims)


def opaque(writer: TorchWriter, function: str, made: str, taken: str, value: TensorText) -> TensorText:
    """
    Return code for the opaque function `function` of `value`, along one dim, as `tdl/opaque.py` defines it. `taken` is
    the index variable that this dim of `value` ranges over, and `made` the one that it ranges over in the result; as
    many of the function's values are returned as `made` has positions.

    Raises `UnityError` for functions without a text here.
    """
    if function not in _OPAQUE:
        raise writer.fail(f"no PyTorch text for opaque {function}; add it to kernels/pytorch/functions.py")
    method, made_of_it, kind = _OPAQUE[function]
    others = tuple(n for n in value.dims if n != taken)
    last = writer.ordered(value, (*others, taken))
    form = Access(last.text, (Var(method),))
    known = None if writer.sharing is None else writer.sharing.known.get(form)
    if known is None:
        known = TensorText(Text(writer.named("ordered", f"{last.at(ATOM)}.{method}")), ()), ()
        if writer.sharing is not None:
            writer.sharing.known[form] = known
    size, count = writer.extents[taken], writer.extents[made]
    text = Text(made_of_it.format(of=known[0].text.text, size=size, device=writer.device))
    text = text if count == size else writer.method(text, f"narrow(-1, 0, {count})")
    writer.strided = True
    return TensorText(text, (*others, made), kind=kind)

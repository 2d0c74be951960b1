"""Every constant and every term of a program's optimizer done wrong, one at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from unity_ir.ops.optimizers import OPTIMIZERS

NOT_ARITHMETIC = {"ALIGNED", "BLOCK", "block", "num_warps", "num_stages", "other", "mask"}
"""Keywords of how a kernel is launched, and of what is read and written where nothing is."""

PLACES = r"\w+_ptr|weight|numbers|size|block|index|mask"
"""Variables of a kernel that say where weights and numbers are, and which elements a program has."""

_OTHER: dict[type[ast.operator], list[ast.operator]] = {
    ast.Add: [ast.Sub(), ast.Mult()],
    ast.Sub: [ast.Add(), ast.Mult()],
    ast.Mult: [ast.Add(), ast.Div()],
    ast.Div: [ast.Mult(), ast.Sub()],
    ast.Pow: [ast.Mult(), ast.Add()],
}


def mutants(text: str) -> list[tuple[str, str]]:
    """
    What is wrong with each, and the program's text: of its `update`, the functions that it calls and the kernel that
    these launch, each number is another, each operator another, each term, factor, call and statement left out, and
    each two arguments exchanged.
    """
    tree = ast.parse(text)
    wanted = [f for f in tree.body if isinstance(f, ast.FunctionDef) and _is_update(f.name)]
    lines = text.splitlines(keepends=True)
    found: dict[str, str] = {}
    for function in wanted:
        start = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        head, tail = "".join(lines[: start - 1]), "".join(lines[function.end_lineno or 0 :])
        right = ast.unparse(function)
        for what, made in _changed(function):
            if made != right:
                found.setdefault(head + made + "\n" + tail, f"{function.name}: {what}")
    return [(what, mutant) for mutant, what in found.items()]


def _is_update(name: str) -> bool:
    return name == "update" or re.sub("_(torch|kernel|numbers)$", "", name) in OPTIMIZERS


def _changed(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """What is wrong with each wrong form of a function, and its text."""
    parents = {child: (parent, field) for parent in ast.walk(function) for field, child in _children(parent)}
    for node in list(ast.walk(function)):
        if _is_left_out(node, parents):
            continue
        for kind in range(6):
            new = _wrong(node, kind)
            if new is None:
                continue
            before = ast.unparse(node) if not isinstance(node, ast.operator | ast.arguments) else ""
            parent, field = parents[node]
            _put(parent, field, node, new)
            yield f"{before} -> {ast.unparse(new)}", ast.unparse(function)
            _put(parent, field, new, node)


def _children(parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(parent):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _put(parent: ast.AST, field: str, old: ast.AST, new: ast.AST) -> None:
    value = getattr(parent, field)
    if isinstance(value, list):
        value[value.index(old)] = new
    else:
        setattr(parent, field, new)


def _is_left_out(node: ast.AST, parents: dict[ast.AST, tuple[ast.AST, str]]) -> bool:
    """Of what is no arithmetic: where elements are, how a kernel is launched, text."""
    while node in parents:
        parent, field = parents[node]
        if isinstance(node, ast.keyword) and node.arg in NOT_ARITHMETIC:
            return True
        # The grid, positions and masks: a launch of other elements, which is tested with the kernels.
        if isinstance(parent, ast.Subscript) and field == "slice":
            return True
        if isinstance(node, ast.Assign) and re.fullmatch(PLACES, ast.unparse(node.targets[0])):
            return True
        if isinstance(node, ast.If) and ast.unparse(node.test) == "ALIGNED":
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True
        if isinstance(node, ast.arguments) and isinstance(parent, ast.FunctionDef) and parent.name != "adam":
            return True
        if field in ("decorator_list", "annotation", "returns"):
            return True
        if (
            isinstance(parent, ast.Call)
            and ast.unparse(parent.func) in ("tl.load", "tl.store")
            and node is parent.args[0]
        ):
            return True
        node = parent
    return False


def _wrong(node: ast.AST, kind: int) -> ast.AST | None:
    """A wrong node in the place of one, of the ways in which it may be wrong the one of this number; None if none."""
    match node:
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return (
                [ast.Constant(value * 1.5 + 0.0), ast.Constant(value * 0.9), ast.Constant(value + 1), None, None, None][
                    kind
                ]
                if value
                else [ast.Constant(0.1), None, None, None, None, None][kind]
            )
        case ast.BinOp(left, op, right):
            others = _OTHER.get(type(op), [])
            if kind < len(others):
                return ast.BinOp(left, others[kind], right)
            exchanged = None if isinstance(op, ast.Add | ast.Mult) else ast.BinOp(right, op, left)
            return {2: left, 3: right, 4: exchanged}.get(kind)
        case ast.Call(ast.Attribute(value, name), args, keywords):
            if kind == 0 and name not in ("load", "store", "numel", "cdiv", "to") and not isinstance(value, ast.Name):
                return value  # one of a chain of calls left out
            if kind == 1 and name == "sqrt":
                return args[0] if args else value
            if kind == 2 and name == "add_":
                return ast.Call(ast.Attribute(value, "sub_"), args, keywords)
            if kind == 3 and name.endswith("_") and len(args) > 1:
                return ast.Call(ast.Attribute(value, name), [*args[1:], args[0]], keywords)
            if kind == 4 and keywords and keywords[0].arg == "alpha":
                return ast.Call(ast.Attribute(value, name), args, [])
        case ast.Call(function, args, keywords) if isinstance(function, ast.Name | ast.Subscript):
            plain = [i for i, a in enumerate(args[:-1]) if not isinstance(a, ast.Starred) and i >= 4]
            if kind < len(plain):
                swapped = list(args)
                i = plain[kind]
                swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
                return ast.Call(function, swapped, keywords)
        case ast.UnaryOp(ast.USub(), operand) if kind == 0:
            return operand
        case ast.Expr(ast.Call()) if kind == 0:
            return ast.Pass()
        case ast.If(test, body, orelse):
            return (
                [ast.If(ast.Constant(False), body, orelse), ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)][kind]
                if kind < 2
                else None
            )
        case ast.Assign(targets, ast.BinOp()) if kind == 0:
            return ast.Assign(targets, ast.parse("1.5 * (" + ast.unparse(node.value) + ")", mode="eval").body, lineno=0)
        case _:
            return None
    return None

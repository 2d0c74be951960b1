"""
Makes Triton's interpreter remember what it computes again for every operation, launch and program.

It computes the same with or without: what is remembered depends on nothing but the arguments. Triton's functions stay
replaced after a launch, so that the process can do nothing with them but interpret.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter

LANGUAGES = language, core


def quicken() -> None:
    """
    Let the interpreter of this process remember types of elements and rewritten kernels, and replace Triton's functions
    only once.
    """
    made: Any = interpreter
    numpy_type, kinds = made._get_np_dtype, dict[tuple[type, str], Any]()

    def remembered_type(type_: Any) -> Any:
        key = type(type_), type_.name
        if key not in kinds:
            kinds[key] = numpy_type(type_)
        return kinds[key]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in inspect.getmembers(package, core.is_builtin):
            scope.set_attr(package, name, _interpreted(member, made.interpreter_semantic))

    replace, replaced = made._patch_lang, list[Any]()

    def replace_once(function: Any) -> Any:
        if not replaced:
            # Of this module's function, which sees all of `LANGUAGES`, as some of Triton's own do.
            replaced.append(replace(quicken))
        return made._LangPatchScope()

    rewrite, rewritten = made.FunctionRewriter.rewrite_ast, dict[Any, CodeType]()

    def rewrite_once(rewriter: Any) -> Any:
        function = rewriter.fn
        code = function.__code__.replace(co_filename="", co_firstlineno=1)
        rewriter.key = code, function.__defaults__, tuple(function.__annotations__.items())
        return execute(rewriter) if rewriter.key in rewritten else rewrite(rewriter)

    def compile_and_execute(rewriter: Any, tree: Any) -> Any:
        rewritten[rewriter.key] = compile(tree, rewriter.filename, "exec")
        return execute(rewriter)

    def execute(rewriter: Any) -> Any:
        found, seen = dict(rewriter.kwargs), rewriter.fn.__globals__
        for name, value in vars(interpreter).items():
            seen.setdefault(name, value)
        exec(rewritten[rewriter.key], seen, found)
        return found[rewriter.fn.__name__]

    made._get_np_dtype, made._patch_builtin, made._patch_lang = remembered_type, replace_builtins, replace_once
    made.FunctionRewriter.rewrite_ast, made.FunctionRewriter._compile_and_exec = rewrite_once, compile_and_execute


def _interpreted(member: Any, semantic: Any) -> Any:
    """One of Triton's functions, interpreted."""

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*arguments, **options)

    return call

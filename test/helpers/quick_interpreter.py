"""
Makes Triton's interpreter remember what it computes again for every operation, launch and program.

It computes the same with or without: what is remembered depends on nothing but the arguments, and what is left out has
no effect. Triton's functions stay replaced after a launch, so that the process can do nothing with them but interpret.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import CodeType
from typing import Any

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter

LANGUAGES = language, core


def quicken() -> None:
    """
    Let the interpreter of this process remember types of elements, shapes and rewritten kernels, reduce whole slices,
    and replace Triton's functions only once.
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

    patch, patched = made._patch_lang, list[Any]()

    def patch_once(function: Any) -> Any:
        if not patched:
            # Of this module's function, which sees all of `LANGUAGES`, as some of Triton's own do.
            patched.append(patch(quicken))
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

    def position(rewriter: Any) -> tuple[str, int]:
        return rewriter.fn.__code__.co_filename, rewriter.fn.__code__.co_firstlineno

    made._get_np_dtype, made._patch_builtin, made._patch_lang = remembered_type, replace_builtins, patch_once
    made.FunctionRewriter.rewrite_ast, made.FunctionRewriter._compile_and_exec = rewrite_once, compile_and_execute
    made.FunctionRewriter._get_jit_fn_file_line = position
    made.ReduceOps.generic_reduce = _reduce
    # It is computed whether integers overflow, and then not asserted, as these options do not have `debug`.
    assert not made.interpreter_builder.options.debug
    made.interpreter_builder.options = replace(made.interpreter_builder.options, sanitize_overflow=False)
    _remember_shapes()
    _remember_operands()


def _interpreted(member: Any, semantic: Any) -> Any:
    """One of Triton's functions, interpreted."""
    # A wrapper only looks whether `_semantic` was given.
    function = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*arguments, **options)

    return call


def _remember_shapes() -> None:
    """Let blocks of equal shapes share its constants, which each tensor has again, and skip what broadcasts nothing."""
    block_type, tensor, semantics = core.block_type, core.tensor, semantic.TritonSemantic
    make_type, make_tensor, broadcast = block_type.__init__, tensor.__init__, semantics.broadcast_impl_value
    shapes = dict[tuple[int, ...], Any]()

    def remembered_shape(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in getattr(shape, "values", shape))
        found = shapes.get(sizes)
        if found is None:
            make_type(self, element_ty, shape)
            constants = core.tuple([core.constexpr(s) for s in sizes])
            found = self.shape, self.numel, str(self.shape), constants, core.constexpr(math.prod(sizes))
            shapes[sizes] = found
        self.element_ty = element_ty
        self.shape, self.numel, text, *self.constants = found
        self.name = f"<{text}, {element_ty}>"

    def remembered_constants(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            return make_tensor(self, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel = type.constants

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    block_type.__init__, tensor.__init__ = remembered_shape, remembered_constants
    semantics.broadcast_impl_value = broadcast_others


def _remember_operands() -> None:
    """
    Let operators of two operands remember to which types each pair of types goes, and leave it to numpy to repeat one
    of them along the other: no operator's result keeps an operand that is not repeated.
    """
    tensor, semantics = core.tensor, semantic.TritonSemantic
    check, unwrap = semantics.binary_op_type_checking_impl, core._unwrap_if_constexpr
    valid, handle = interpreter._validate_np_data_size, interpreter.TensorHandle
    builder: Any = interpreter.InterpreterBuilder
    plans = dict[Any, Any]()
    numbers = {int, float, bool}
    plain = {tensor, *numbers, type(None)}

    def checked_operands(self: Any, lhs: Any, rhs: Any, *rest: bool) -> tuple[Any, Any]:
        operands = lhs, rhs
        if any(type(x) is not tensor and type(x) not in numbers for x in operands):
            return check(self, lhs, rhs, *rest)
        # A text tells -0.0 from 0.0.
        key = (*(x.type.name if type(x) is tensor else (type(x), repr(x)) for x in operands), rest)
        if key not in plans:
            plans[key] = [
                (f.type, None if type(x) is tensor else tensor(self.scalar_constant(x, f.dtype).handle, f.type))
                for f, x in zip(check(self, lhs, rhs, *rest), operands, strict=True)
            ]
        (one, number), (other, constant) = plans[key]
        return (
            seen_as(self, lhs, one) if number is None else number,
            seen_as(self, rhs, other) if constant is None else constant,
        )

    def seen_as(self: Any, x: Any, kind: Any) -> Any:
        """An operand as it goes in: cast, and of the type that it has once it is repeated."""
        if x.dtype.name != kind.scalar.name:
            x = self.cast(x, kind.scalar)
        return x if x.type.name == kind.name else tensor(x.handle, kind)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > lhs.data.itemsize and not valid(output, kind):
            output = output.astype(interpreter._get_np_dtype(kind))
        # As it is made, but for a second look at the elements' size.
        made = object.__new__(handle)
        made.data, made.dtype, made.attr = output, kind, {}
        return made

    def unwrapped(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    semantics.binary_op_type_checking_impl, builder.binary_op = checked_operands, binary_op
    core._unwrap_if_constexpr = unwrapped


def _reduce(self: Any, input: Any) -> list[Any]:
    """
    Reduce with any function: slice by slice along the axis, where Triton goes element by element. Functions combine
    each element on its own, so that the result is the same.
    """
    operands, axis = self.unravel(input, self.axis)
    kinds = [x.dtype for x in operands]
    slices = [np.moveaxis(x.handle.data, axis, 0) for x in operands]
    first, *others = zip(*slices, strict=True)
    found = list(first)
    for one in others:
        tensors = (self.to_tensor(a, kind) for a, kind in zip([*found, *one], kinds * 2, strict=True))
        combined = self.combine_fn.fn(*tensors)
        made = combined if isinstance(combined, tuple) else (combined,)
        found = [m.handle.data.astype(f.dtype).reshape(f.shape) for m, f in zip(made, found, strict=True)]
    if self.keep_dims:
        found = [np.expand_dims(f, axis) for f in found]
    elif self.axis is None:
        found = [f.item() for f in found]
    return [self.to_tensor(f, kind) for f, kind in zip(found, kinds, strict=True)]

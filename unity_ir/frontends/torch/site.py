"""Register mappings of ATen operators to the compiler's, and give them access to the graph being built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.recognise.sorted import Orders
from unity_ir.frontends.torch.values import DTYPES, Operand, Shape, constant, element_type, expand, op
from unity_ir.pcg.node import Node, Value, leaf
from unity_ir.pcg.types import tensor_type


class Tables:
    """
    The tables of an imported model: inputs of the graph whose values come with the model, which are buffers, parameters
    of integers, and tensors computed at import.

    Each is named by its buffer or parameter, or `constant.N`.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.leaves: list[Node] = []
        self.names: dict[int, str] = {}
        """Full names of buffers and parameters of integers by `id` of the tensor."""
        self.replaced: dict[str, Value] = {}
        """The value that a step leaves in a table, by its name, of those that it replaces: running statistics."""
        self.calls: dict[str, int] = {}
        """How many times a step replaces each running statistic that it reads; 0 for those that stay the same."""
        self.orders = Orders()
        self._known: dict[object, Value] = {}

    def current_statistic(self, tensor: torch.Tensor) -> Value | None:
        """
        Return the value of a running statistic at this point of the graph, given its buffer `tensor`: the input that
        holds the buffer or, if an earlier call of the batch norm replaced it, the new value. None if the tensor is no
        buffer of the module.

        Also enters the statistic in `calls`, which counts how often a step replaces each.
        """
        name = self.names.get(id(tensor))
        if name is None:
            return None
        self.calls.setdefault(name, 0)
        return self.replaced.get(name) or self.add(tensor)

    def replace(self, tensor: torch.Tensor, value: Value) -> None:
        """
        Record that a step replaces a running statistic by `value`, and count it in `calls`. `tensor` is the statistic's
        buffer; call `current_statistic` with it first.
        """
        name = self.names[id(tensor)]
        self.replaced[name] = value
        self.calls[name] += 1

    def add(self, tensor: torch.Tensor) -> Value:
        """
        Return the graph's input that holds a tensor known at import (a table); add the input if there is none. One with
        a name (a buffer, say) has one input, and other tensors share one if type, shape and elements are equal.

        Raises `UnityError` for element types that the compiler does not have, and for a tensor on the meta device that
        is no buffer or parameter.
        """
        name = self.names.get(id(tensor))
        key = name or (tensor.dtype, tuple(tensor.shape), _bytes(tensor))
        if key not in self._known:
            name = name or f"constant.{sum(n.startswith('constant.') for n in self.values)}"
            node = leaf("input", tensor_type(tuple(tensor.shape), element_type(tensor.dtype)), name=name)
            self.values[name] = tensor
            self.leaves.append(node)
            self._known[key] = node.result
        return self._known[key]


class CallSite:
    """
    What a mapping needs to know of the call of a PyTorch operator that it maps; every mapping gets it as `site`. It has
    the shape and element type of the result that PyTorch recorded, and methods that bring operands into the graph.
    """

    def __init__(
        self,
        meta: Any,
        tables: Tables,
        trained: Callable[[Value], bool],
        seeds: Callable[[], int],
        examples: Mapping[str, torch.Tensor],
    ):
        self.meta = meta
        """The result as torch.export describes it: a tensor without data, or a tuple of such."""
        self.examples = examples
        """The example inputs by name."""
        self.tables = tables
        self.trained = trained
        """Returns whether a value depends on a trained weight (`Importer.trained`)."""
        self.seeds = seeds
        """Returns the next seed, one for every random operator."""

    def of(self, value: Value) -> CallSite:
        """
        Return a call site whose result has the shape of `value` and the element type of this one's result: pass it to
        another mapping that computes an intermediate step of this one.
        """
        return self.like(value.shape, self.result.dtype)

    def in_reals(self) -> CallSite:
        """
        Return a call site whose results have this one's shapes, and the element type of the real and imaginary parts
        where this one's are complex: for mappings of these parts.
        """
        meta = pytree.tree_map_only(torch.Tensor, _real, self.meta)
        return CallSite(meta, self.tables, self.trained, self.seeds, self.examples)

    def in_floats(self) -> CallSite:
        """
        Return a call site with this one's result, but in f32 if that holds integers: for steps whose result is rounded
        to integers only at the end.
        """
        return self if self.result.dtype.is_floating_point else self.like(self.shape, torch.float32)

    def of_bools(self) -> CallSite:
        """
        Return a call site whose result has this one's shape and is boolean, for a mapping that computes a condition.
        """
        return self.like(self.shape, torch.bool)

    def like(self, shape: Sequence[int], dtype: torch.dtype) -> CallSite:
        """
        Return a call site whose result has the given shape and element type: pass it to another mapping that computes
        an intermediate step of this one.
        """
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return CallSite(meta, self.tables, self.trained, self.seeds, self.examples)

    @property
    def shape(self) -> Shape:
        """The shape of the result that PyTorch recorded for this call; of the first, if there are several."""
        return tuple(self.result.shape)

    @property
    def dtype(self) -> str:
        """
        The element type, such as `f32`, of the (first) result that PyTorch recorded for this call. Raises `UnityError`
        for a type that the compiler does not have.
        """
        return element_type(self.result.dtype)

    @property
    def result(self) -> torch.Tensor:
        """The (first) result that PyTorch recorded for this call, as a tensor on the meta device, without data."""
        return self.meta if isinstance(self.meta, torch.Tensor) else self.meta[0]

    def value(self, x: Operand, dtype: str | None = None) -> Value:
        """
        Return the operand `x` as a value of the graph, cast to the element type `dtype`: a tensor known at import
        becomes an input with its values (a table), or a constant if all its elements are equal; a number becomes a
        scalar constant.

        With `dtype` None, values and tensors keep their element type, and numbers get that of PyTorch's result. Raises
        `UnityError` for nan.
        """
        if isinstance(x, Value):
            return cast(x, dtype or x.type.dtype)
        if not isinstance(x, torch.Tensor):
            dtype = dtype or self.dtype
            return constant(finite(x, _torch_dtype(dtype)), (), dtype)
        if dtype is not None:
            x = x.to(_torch_dtype(dtype))
        number = uniform(x)
        if number is not None:
            return constant(finite(number, x.dtype), tuple(x.shape), element_type(x.dtype))
        return self.tables.add(x)

    def fit(self, x: Value) -> Value:
        """
        Return `x` broadcast to the shape, and cast to the element type, of the (first) result that PyTorch recorded for
        this call.
        """
        return cast(expand(x, self.shape), self.dtype)


Rule: TypeAlias = Callable[..., Any]
"""A mapping: takes a site and the arguments of the ATen operator, returns its result or results."""

MAPPINGS: dict[str, Rule] = {}
"""Mappings by the operator's name without overload, such as `linear`."""


COMPLEX: dict[str, Rule] = {}
"""Mappings of operators with complex operands or results, by the operator's name without overload."""


def maps(*names: str) -> Callable[[Rule], Rule]:
    """
    Return a decorator that registers a function in `MAPPINGS` as the mapping of the ATen operators with these names
    (without overload). Each operator has one mapping at most.

    The function is called with the `CallSite` and the operator's arguments, and returns its result or results.
    """
    return _registering(MAPPINGS, names)


def maps_complex(*names: str) -> Callable[[Rule], Rule]:
    """
    Return the same for `COMPLEX`: mappings of ATen operators with complex operands or results, which get and return
    complex numbers as `complexes.Complex`.
    """
    return _registering(COMPLEX, names)


def _registering(table: dict[str, Rule], names: Sequence[str]) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for name in names:
            assert name not in table, name
            table[name] = function
        return function

    return add


def cast(x: Value, dtype: str) -> Value:
    """Return `x` cast to element type `dtype`, such as `bf16`; `x` itself if it has that type."""
    return x if x.type.dtype == dtype else op("cast", x, to=dtype)


def number(x: Operand) -> float | None:
    """
    Return the number that an operand is known to hold: `x` itself if it is a number, or the common value if it is a
    tensor known at import whose elements are all equal. None for other tensors, and for values of the graph.
    """
    if isinstance(x, Value):
        return None
    return uniform(x) if isinstance(x, torch.Tensor) else x


def finite(x: float, dtype: torch.dtype) -> float:
    """
    Return `x` as a number that the graph's text format can hold: if `dtype` is of floating point, infinity becomes the
    largest finite number of that type, with the same sign; other numbers stay.

    Raises `UnityError` for nan.
    """
    if math.isnan(x):
        raise UnityError("nan is no constant; give it as an input")
    return x if math.isfinite(x) or not dtype.is_floating_point else math.copysign(torch.finfo(dtype).max, x)


def uniform(x: torch.Tensor) -> float | None:
    """
    Return the number that all elements of a tensor equal; None if they differ, or it is empty or on the meta device.
    """
    if x.is_meta:
        return None
    first = x.reshape(-1)[:1]
    return first.item() if x.numel() and bool((x == first).all()) else None


def shrink(x: torch.Tensor) -> torch.Tensor:
    """
    Return a smaller tensor that broadcasts to `x`: dims along which its elements are equal get size 1, and leading dims
    of size 1 are dropped.
    """
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and torch.equal(x, x.narrow(dim, 0, 1).expand_as(x)):
            x = x.narrow(dim, 0, 1)
    while x.dim() and x.shape[0] == 1:
        x = x[0]
    return x


def require_value(x: Operand, what: str) -> Value:
    """
    Return the operand `x`, which must be a value of the graph. Raises `UnityError` if it is a tensor or number known at
    import; `what` names the operand in the message.
    """
    if not isinstance(x, Value):
        raise UnityError(f"{what} is a constant; it must depend on an input or a parameter")
    return x


def _real(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data of a shape, with the element type of its real parts."""
    return torch.empty(tuple(x.shape), dtype=x.dtype.to_real() if x.is_complex() else x.dtype, device="meta")


def _torch_dtype(name: str) -> torch.dtype:
    return next(d for d, n in DTYPES.items() if n == name)


def _bytes(x: torch.Tensor) -> bytes:
    if x.is_meta:
        raise UnityError("a constant is on the meta device and has no data; materialise the module's buffers")
    return x.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()

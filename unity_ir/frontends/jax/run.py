# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Run a jaxpr in PyTorch, equation by equation, under `torch.export`.

What depends on no weight and no input is computed at once, by JAX: masks, positions, random numbers of known keys.
Loops and calls are run through, so that the export sees no control flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src import source_info_util
from jax.extend import core
from torch.fx.traceback import annotate

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.attention import attention_of
from unity_ir.frontends.jax.gradients import check_gradient
from unity_ir.frontends.jax.known import KNOWN, WITH_NUMBER
from unity_ir.frontends.jax.primitives import PRIMITIVES, swapped_product
from unity_ir.frontends.jax.random import DRAWS, RandomKey
from unity_ir.frontends.jax.trace import CALLS
from unity_ir.frontends.jax.values import MOVES, WIDER, Operand, fold, is_known, known, to_torch, torch_type
from unity_ir.frontends.report import Report, one_line
from unity_ir.frontends.torch.export import short_path

Values = list[Any]

SAY_ONLY = ("debug_callback", "debug_print")
"""Primitives that show values and have no results."""


class StackedWeight:
    """A weight of which only slices along the first dim are used, as one weight for each position."""

    def __init__(self, slices: Sequence[torch.Tensor]):
        self.slices = slices


class JaxprRunner:
    """Runs jaxprs: operands and results are PyTorch tensors, known arrays (NumPy's), or keys of random numbers."""

    def __init__(self, name: str) -> None:
        self.report = Report(name, "--from-jax")
        """The equations that cannot be run, of the function called `name`; results stand in for theirs."""
        self._stand_ins: list[torch.Tensor] = []
        self._lines: list[str] = []
        """The lines of the calls that are being run, outermost first."""
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        """Sums by `id`: (the sum, which keeps the id its own; what is summed; over which dims)."""
        self._means: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        """The same of means."""
        self._converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors by `id` that were converted from another element type: (the tensor, what it was)."""
        self._permuted: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        """Products by `id` whose dims are put in another order: (the product as it is; as it was made; the order)."""

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> Values:
        """Return the results of a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_known, consts), strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        scope = _Scope(jaxpr, env)
        for eqn in jaxpr.eqns:
            results = self.equation(eqn, scope)
            env.update(zip(eqn.outvars, results, strict=True))
        return [scope.value(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, scope: _Scope) -> Values:
        """
        Return the results of an equation: of one that cannot be run, which is reported, tensors of their shapes and
        element types.
        """
        self._lines.append(_source_line(eqn) or (self._lines[-1] if self._lines else "outside of the function"))
        try:
            # Operators of PyTorch that the import refuses are named by these.
            with annotate({"operator": _shown(eqn), "line": self._lines[-1]}):
                return self._equation(eqn, scope)
        except (UnityError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if not self._follows(eqn, scope):
                why = str(error) if isinstance(error, UnityError) else f"its mapping fails: {one_line(error)}"
                self.report.add(_shown(eqn), why, self._lines[-1])
            results = [_stand_in(v.aval) for v in eqn.outvars]
            self._stand_ins += [r for r in results if isinstance(r, torch.Tensor)]
            return results
        finally:
            self._lines.pop()

    def _follows(self, eqn: Any, scope: _Scope) -> bool:
        """Return whether an equation that cannot be run may be so only as what it reads could not be made."""
        reads = [(scope.value(v), v.aval.dtype) for v in eqn.invars]
        lacking = [dtype for value, dtype in reads if any(value is s for s in self._stand_ins)]
        is_known = eqn.primitive.name in PRIMITIVES or any(jnp.issubdtype(d, jnp.complexfloating) for d in lacking)
        return bool(lacking) and is_known

    def _equation(self, eqn: Any, scope: _Scope) -> Values:
        name, operands = eqn.primitive.name, [scope.value(v) for v in eqn.invars]
        if name in SAY_ONLY:
            return []
        if (called := self.call(eqn, operands)) is not None:
            return called
        if any(isinstance(v, RandomKey) for v in operands):
            if all(_is_key(v.aval) for v in eqn.outvars):
                return [RandomKey() for _ in eqn.outvars]
            raise UnityError("random bits of a key that is an input have no operator; draw numbers from it")
        if all(map(is_known, operands)):
            return fold(eqn, operands)
        if name not in PRIMITIVES:
            raise UnityError("no mapping")
        if name not in MOVES and any(v.aval.dtype.name in WIDER for v in eqn.outvars):
            raise UnityError("integers of 8 or 16 bits, or without a sign, wrap around; convert them to int32 before")
        if name == "convert_element_type" and isinstance(operands[0], StackedWeight):
            converted: list[Any] = [PRIMITIVES[name](eqn, each) for each in operands[0].slices]
            return [StackedWeight(converted)]
        return self.mapped(eqn, [_whole(v) for v in operands], scope)

    def mapped(self, eqn: Any, operands: Sequence[Operand], scope: _Scope) -> Values:
        """Return the results of an equation by PyTorch, by the function that `PRIMITIVES` has for it."""
        name = eqn.primitive.name
        if (mean := self._mean(eqn, operands)) is not None:
            return [mean]
        if name == "convert_element_type" and (narrow := self._narrow_sum(eqn, operands[0])) is not None:
            return [narrow]
        if name == "gather" or name.startswith("scatter"):
            columns: Any = scope.columns(eqn.invars[1])
            operands = [operands[0], columns, *operands[2:]]
        if name == "dot_general" and scope.is_swapped(eqn):
            product, order = swapped_product(eqn, *operands)
            out = product.permute(order)
            self._permuted[id(out)] = (out, product, order)
            return [out]
        if name == "transpose" and id(operands[0]) in self._permuted:
            _, product, order = self._permuted[id(operands[0])]
            return [product.permute([order[int(d)] for d in eqn.params["permutation"]])]
        made: Any = PRIMITIVES[name](eqn, *operands)
        results: Values = list(made) if isinstance(made, tuple | list) else [made]
        if name == "reduce_sum":
            source = to_torch(operands[0])
            self._sums[id(results[0])] = (results[0], source, tuple(map(int, eqn.params["axes"])))
        elif name in ("broadcast_in_dim", "reshape", "expand_dims", "squeeze") and id(operands[0]) in self._sums:
            total, source, axes = self._sums[id(operands[0])]
            if results[0].numel() == total.numel():
                self._sums[id(results[0])] = (results[0], source, axes)
        elif name == "convert_element_type" and isinstance(operands[0], torch.Tensor):
            self._converted[id(results[0])] = (results[0], operands[0])
        for at, (result, variable) in enumerate(zip(results, eqn.outvars, strict=True)):
            if isinstance(result, torch.Tensor) and tuple(result.shape) != tuple(variable.aval.shape):
                raise UnityError(f"its result {at} became {list(result.shape)}; JAX has {list(variable.aval.shape)}")
        return results

    def _mean(self, eqn: Any, operands: Sequence[Operand]) -> torch.Tensor | None:
        """Return the mean that a division of a sum by the number of its terms is; None for any other equation."""
        if eqn.primitive.name != "div" or not isinstance(operands[1], np.ndarray) or operands[1].size == 0:
            return None
        _, source, axes = self._sums.get(id(operands[0]), (None, None, ()))
        by = operands[1]
        if source is None or not axes or by.strides != (0,) * by.ndim:
            return None
        count = int(np.prod([source.shape[a] for a in axes]))
        shape = tuple(eqn.outvars[0].aval.shape)
        if float(by.reshape(-1)[0]) != count:
            return None
        mean = source.mean(axes).reshape(shape)
        self._means[id(mean)] = (mean, source, axes)
        return mean

    def _narrow_sum(self, eqn: Any, operand: Operand) -> torch.Tensor | None:
        """
        Return the sum or mean of numbers of 16 bits that JAX makes in float32 and rounds once, as the compiler's are;
        None for any other conversion.
        """
        for table, function in ((self._sums, torch.sum), (self._means, torch.mean)):
            _, source, axes = table.get(id(operand), (None, None, ()))
            _, narrow = self._converted.get(id(source), (None, None))
            if narrow is not None and axes and narrow.dtype == torch_type(eqn.params["new_dtype"]):
                return function(narrow, axes).reshape(tuple(eqn.outvars[0].aval.shape))
        return None

    def call(self, eqn: Any, operands: Sequence[Any]) -> Values | None:
        """Return the results of an equation that runs other jaxprs; None for others, and calls with known operands."""
        name, params = eqn.primitive.name, eqn.params
        label = str(params.get("name"))
        if name == "jit" and label in DRAWS and any(isinstance(v, RandomKey) for v in operands):
            return [DRAWS[label](eqn, *operands)]
        if name in ("jit", "custom_jvp_call") and any(isinstance(v, torch.Tensor) for v in operands):
            called = str(params.get("name") or _custom_name(eqn))
            fits = called not in WITH_NUMBER or all(map(is_known, operands[1:]))
            for find in KNOWN.get(called, ()) if fits else ():
                if (function := find(eqn)) is not None:
                    return [function(*map(to_torch, operands))]
        attention = attention_of(label) if name == "jit" else None
        if attention is not None and any(isinstance(v, torch.Tensor) for v in operands):
            return [attention(*operands)]
        if name in CALLS:
            return self.inner(params[CALLS[name]], operands)
        if name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
            inner = params.get("call_jaxpr") or params["fun_jaxpr"]
            if not all(map(is_known, operands)):
                check_gradient(eqn, inner)
            return self.inner(inner, operands)
        if name == "scan":
            return self.scan(params, operands)
        if name == "while":
            return self.loop(params, operands)
        if name == "cond":
            index, *rest = operands
            if not isinstance(index, np.ndarray):
                raise UnityError("the branch depends on data; compute both, and choose by jnp.where")
            branches = params["branches"]
            return self.inner(branches[int(np.clip(index, 0, len(branches) - 1))], rest)
        return None

    def inner(self, jaxpr: Any, operands: Sequence[Any]) -> Values:
        """Return the results of a jaxpr, closed or without constants."""
        return self.run(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), operands)

    def scan(self, params: Mapping[str, Any], operands: Sequence[Any]) -> Values:
        """Return the results of `lax.scan`, whose body is run for each position."""
        fixed, count = params["num_consts"], params["num_carry"]
        consts, carry, scanned = operands[:fixed], list(operands[fixed : fixed + count]), operands[fixed + count :]
        body, length = params["jaxpr"], params["length"]
        places = reversed(range(length)) if params["reverse"] else range(length)
        stacks: list[list[Any]] = [[None] * length for _ in body.jaxpr.outvars[count:]]
        for at in places:
            out = self.inner(body, [*consts, *carry, *(_at(x, at) for x in scanned)])
            carry = out[:count]
            for stack, value in zip(stacks, out[count:], strict=True):
                stack[at] = value
        return [*carry, *map(_stacked, stacks)]

    def loop(self, params: Mapping[str, Any], operands: Sequence[Any]) -> Values:
        """Return the results of `lax.while_loop` whose condition is known at import, as a counter's is."""
        condition, body = params["cond_nconsts"], params["body_nconsts"]
        of_condition, of_body = operands[:condition], operands[condition : condition + body]
        carry = list(operands[condition + body :])
        while True:
            (goes_on,) = self.inner(params["cond_jaxpr"], [*of_condition, *carry])
            if not isinstance(goes_on, np.ndarray):
                raise UnityError("how often it is run depends on data; run it a fixed number of times")
            if not goes_on:
                return carry
            carry = self.inner(params["body_jaxpr"], [*of_body, *carry])


class _Scope:
    """The values of the variables of one jaxpr, and which equation makes each."""

    def __init__(self, jaxpr: core.Jaxpr, env: dict[Any, Any]):
        self._env = env
        self._makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self._readers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for variable in eqn.invars:
                if not isinstance(variable, core.Literal):
                    self._readers.setdefault(variable, []).append(eqn)

    def value(self, variable: Any) -> Any:
        return _known(variable.val) if isinstance(variable, core.Literal) else self._env[variable]

    def index(self, variable: Any) -> Operand:
        """
        Return indices without what makes negative ones count from the end (`select_n(i < 0, i, i + n)`), which ids that
        depend on data must not be.
        """
        value = _whole(self.value(variable))
        eqn = None if isinstance(variable, core.Literal) else self._makers.get(variable)
        if not isinstance(value, torch.Tensor) or eqn is None:
            return value
        match eqn.primitive.name:
            case "select_n":
                condition, of, shifted = eqn.invars
                if self._is_made(condition, "lt", of) and self._is_made(shifted, "add", of):
                    return self.index(of)
            case "jit" if eqn.params["name"] == "_where":
                condition, shifted, of = eqn.invars
                if self._is_made(condition, "lt", of) and self._is_made(shifted, "add", of):
                    return self.index(of)
            case "convert_element_type" if _is_integer(variable) and _is_integer(eqn.invars[0]):
                return self.index(eqn.invars[0])
            case "broadcast_in_dim" | "reshape" | "expand_dims" | "squeeze":
                inner = [self.index(v) for v in eqn.invars]
                if any(a is not b for a, b in zip(inner, map(self.value, eqn.invars), strict=True)):
                    found: Any = PRIMITIVES[eqn.primitive.name](eqn, *inner)
                    return found
            case _:
                pass
        return value

    def columns(self, variable: Any) -> list[Operand]:
        """Return indices [places.., n] as n arrays of positions [places..], without what wraps negative ones."""
        eqn: Any = None if isinstance(variable, core.Literal) else self._makers.get(variable)
        if eqn is not None and eqn.primitive.name == "concatenate":
            if eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
                return [column for part in eqn.invars for column in self.columns(part)]
        value = self.index(variable)
        return [value[..., i] for i in range(value.shape[-1])]

    def is_swapped(self, eqn: Any) -> bool:
        """
        Return whether a `dot_general` is followed by a transpose that puts the dims of its right operand before those
        of the left, as `jnp.einsum` has it where it exchanges its operands.
        """
        readers = self._readers.get(eqn.outvars[0], [])
        if len(readers) != 1 or readers[0].primitive.name != "transpose":
            return False
        (summed, _), (both, _) = eqn.params["dimension_numbers"]
        whole, left = len(both), eqn.invars[0].aval.ndim - len(both) - len(summed)
        order = [int(d) for d in readers[0].params["permutation"] if d >= whole]
        first, last = range(whole, whole + left), range(whole + left, whole + len(order))
        return 0 < left < len(order) and order == [*last, *first]

    def _is_made(self, variable: Any, name: str, of: Any) -> bool:
        """Return whether a variable is the result of the primitive called `name` of the variable `of` and another."""
        eqn = None if isinstance(variable, core.Literal) else self._makers.get(variable)
        return eqn is not None and eqn.primitive.name == name and eqn.invars[0] is of


def _source_line(eqn: Any) -> str | None:
    """Return the line of the user's source that an equation comes from, as `file:line`; None if JAX does not say."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else short_path(frame.file_name, str(frame.start_line))


def _shown(eqn: Any) -> str:
    label = eqn.params.get("name")
    return f"{eqn.primitive.name} {label}" if isinstance(label, str) and label else eqn.primitive.name


def _custom_name(eqn: Any) -> str | None:
    """Return the name of a function with a gradient of its own."""
    inner = eqn.params.get("call_jaxpr")
    info = getattr(getattr(inner, "jaxpr", None), "debug_info", None)
    return getattr(info, "func_name", None)


def _is_integer(variable: Any) -> bool:
    return np.issubdtype(variable.aval.dtype, np.integer)


def _is_key(aval: Any) -> bool:
    """Return whether a type is of keys of random numbers, or of the integers that make one."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or aval.dtype == np.uint32


def _stand_in(aval: Any) -> Any:
    """Return a tensor of a type, for the result of an equation that cannot be run."""
    try:
        return torch.zeros(tuple(aval.shape), dtype=torch_type(aval.dtype))
    except (UnityError, TypeError):
        return RandomKey() if _is_key(aval) else torch.zeros(tuple(aval.shape))


def _known(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor | RandomKey | StackedWeight) else known(value)


def _whole(value: Any) -> Any:
    return torch.stack(list(value.slices)) if isinstance(value, StackedWeight) else value


def _at(value: Any, at: int) -> Any:
    if isinstance(value, StackedWeight):
        return value.slices[at]
    if isinstance(value, RandomKey):
        return value
    # An element of a NumPy vector is a number, and no array.
    return np.asarray(value[at]) if isinstance(value, np.ndarray) else value[at]


def _stacked(values: Sequence[Any]) -> Any:
    if not values:
        raise UnityError("a scan over nothing has no results to stack; leave it out")
    if all(isinstance(v, np.ndarray) for v in values):
        return np.stack(values)
    if any(isinstance(v, RandomKey) for v in values):
        return RandomKey()
    return torch.stack([to_torch(v) for v in values])

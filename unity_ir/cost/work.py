"""
Count the work of one task of an operator: its kernels, forward and backward, from TDL and the operator's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from unity_ir.cost.masks import CausalMask, causal_mask
from unity_ir.cost.time import Kernel, seconds
from unity_ir.forms.contraction import contraction
from unity_ir.forms.float8 import rounding_reads
from unity_ir.forms.kinds import kind
from unity_ir.machine.device import Device
from unity_ir.ops import operator as find_operator
from unity_ir.ops.operator import Attributes, Shapes
from unity_ir.pcg.differentiate import nodes_with_gradient, operand_gradients
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.types import ELEMENT_BYTES, TensorType, divided_type
from unity_ir.tdl.counts import contraction_flops, flops, rounds
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.element_types import FLOAT8, HALVES
from unity_ir.tdl.parallel import Configuration, line_of_task, operand_degrees
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue, Entry


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels that one task of an operator runs, forward and backward."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]

    def forward_time(self, device: Device) -> float:
        """Return the seconds of the forward kernels on a device."""
        return sum(seconds(k, device) for k in self.forward)

    def backward_time(self, device: Device) -> float:
        """Return the seconds of the backward kernels on a device."""
        return sum(seconds(k, device) for k in self.backward)


def model_flops(graph: Graph) -> int:
    """
    Return the FLOPs of a training step of a serial forward graph, as they are usually quoted for models: three times
    those of the forward's contractions, with attention counted whole (masked scores, too). Where weights are frozen, a
    contraction without a gradient counts once, and one of which an operand has none twice.
    """
    trained, every = nodes_with_gradient(graph), nodes_with_gradient(graph, frozen=True)

    def is_frozen(node: Node) -> bool:
        return node in every and node not in trained

    def times(node: Node) -> int:
        return 1 if is_frozen(node) else 3 - any(is_frozen(v.node) for v in node.operands)

    return sum(times(n) * contraction_flops(n.analysis.bound) for n in graph.nodes() if n.is_compute)


def kernel_of(node: Node) -> Kernel:
    """
    Return the kernel of one task (the work of one device) of a compute node, sharded as the layouts in its operands'
    and results' types say: its sizes, FLOPs, and the bytes of the pieces it reads and writes. A value read twice counts
    once; of attention under a causal mask the scores that the busiest device sees do (`cost.masks`).
    """
    local = line_of_task(node.analysis.bound, node.configuration, node.analysis)
    values = (*node.operands, *node.results)
    moved = sum(_piece_bytes(v.type) for v in dict.fromkeys(values))
    dtypes = tuple(v.type.dtype for v in node.operands)
    sizes = (*(size for v in node.operands for size in v.type.piece_shape), *local.extents.values())
    mask = mask_of(node)
    seen = 1.0 if mask is None else mask.seen(local.extents)
    made = Kernel(
        kernel_operator(node.op, node.attributes, dtypes),
        sizes,
        kind_of(node),
        int(flops(local, node.analysis.bound.extents) * seen),
        moved,
        computes_in(dtypes, node.analysis),
    )
    if made.dtype != FLOAT8:
        return made
    return made.rounding([_piece_bytes(v.type) for v in node.operands], rounding_reads(node.analysis.bound.results))


def kind_of(node: Node) -> str:
    """
    Return the kind of a compute node's kernel (`forms.kinds`), such as `contraction`. It does not depend on how the
    node is sharded.
    """
    shapes, dtypes = tuple(v.shape for v in node.operands), tuple(v.dtype for v in node.operands)
    return kind_of_operator(node.op, shapes, node.attributes, dtypes)


def mask_of(node: Node) -> CausalMask | None:
    """Return the causal mask of a compute node's attention; None if it is no attention, or has no such mask."""
    return mask_of_operator(
        node.op, tuple(v.shape for v in node.operands), node.attributes, tuple(v.dtype for v in node.operands)
    )


@lru_cache(maxsize=65536)
def mask_of_operator(
    operator: str, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...]
) -> CausalMask | None:
    """
    Return the causal mask of the attention that the operator named `operator` computes; None if it is no attention, or
    has no such mask. The arguments are those of `kind_of_operator`.
    """
    return causal_mask(find_operator(operator).bind(shapes, attributes, dtypes), dict(attributes))


def adds_gradients(node: Node, weight: Value) -> bool:
    """
    Return whether the kernel that makes the gradient of `weight` adds it in place to that of earlier micro-batches
    (`plan.additions`). `node` is the compute node that alone reads the weight. True if `node` is a matrix product, and
    the gradient's element type has more than 16 bits.
    """
    shapes, dtypes = tuple(v.shape for v in node.operands), tuple(v.dtype for v in node.operands)
    return weight.type.grad_dtype not in HALVES and _is_product(node.op, shapes, node.attributes, dtypes)


@lru_cache(maxsize=65536)
def _is_product(operator: str, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...]) -> bool:
    line = find_operator(operator).bind(shapes, attributes, dtypes).bound
    return all(contraction(result, line.extents) is not None for result in line.results)


@lru_cache(maxsize=65536)
def kind_of_operator(operator: str, shapes: Shapes, attributes: Attributes, dtypes: tuple[str, ...]) -> str:
    """
    Return the kind of the kernel of the operator named `operator` (`forms.kinds`), such as `contraction`.

    `shapes` and `dtypes` are its operands' global shapes and element types; `attributes` are sorted (name, value)
    pairs.
    """
    return kind(find_operator(operator).bind(shapes, attributes, dtypes))


def computes_in(dtypes: tuple[str, ...], analysis: Analysis) -> str:
    """
    Return the element type an operator computes in: the first floating-point type of its operands, else `f32`; 8 bits
    for a product that rounds operands of 16 (`forms.float8`).
    """
    if rounds(analysis.bound, dtypes):
        return FLOAT8
    return next((d for d in dtypes if d not in NOT_FLOATING), "f32")


@lru_cache(maxsize=65536)
def kernel_operator(operator: str, attributes: Attributes, dtypes: tuple[str, ...]) -> str:
    """
    Return the name of an operator's kernels in profiles: given matmul with act = "relu" on two f32 operands,
    `matmul{act=relu}(f32, f32)`.

    `dtypes` are the operands' element types. Attributes that are degrees (numbers of parts of index variables that
    occur in no operand) are left out, as they do not change a task.
    """
    clauses = find_operator(operator).line.clauses
    degrees = {c.value.attribute for c in clauses if c.kind == "degree" and isinstance(c.value, Entry)}
    said = ", ".join(f"{name}={_attribute(value)}" for name, value in attributes if name not in degrees)
    return f"{operator}{{{said}}}({', '.join(dtypes)})" if said else f"{operator}({', '.join(dtypes)})"


def _attribute(value: AttrValue) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _piece_bytes(type: TensorType) -> int:
    elements = 1
    for size in type.piece_shape:
        elements *= size
    return elements * ELEMENT_BYTES[type.dtype]


@lru_cache(maxsize=65536)
def work(
    operator: str,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    attributes: Attributes,
    degrees: tuple[tuple[str, int], ...],
    needs: tuple[bool, ...],
    same: tuple[int, ...],
) -> Work:
    """
    Return the forward and backward kernels of one task (one device's share) of the operator named `operator`, whose
    index variables are divided by `degrees`: (variable, number of parts) pairs.

    `operands` are (global shape, element type) pairs, `attributes` sorted (name, value) pairs; `needs` says, per
    operand, whether its gradient is wanted; `same` is, per operand, the index of the first operand that is the same
    value (see `repeats`), since a value read twice counts once. Copies and partial sums do not change a task, so they
    are no arguments.
    """
    forward, backward = applied(operator, operands, attributes, degrees, needs, same)
    return Work((kernel_of(forward),), tuple(map(kernel_of, backward)))


def applied(
    operator: str,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    attributes: Attributes,
    degrees: tuple[tuple[str, int], ...],
    needs: tuple[bool, ...],
    same: tuple[int, ...],
) -> tuple[Node, tuple[Node, ...]]:
    """
    Build one task (one device's share) of an operator, and of its gradient, as nodes on new inputs. Return (the
    forward's node, the backward's compute nodes in topological order); the latter are () if no gradient is wanted.

    `operands` are (global shape, element type) pairs, `attributes` sorted (name, value) pairs, `degrees` (index
    variable, number of parts) pairs. `needs` says, per operand, whether its gradient is wanted; `same` is, per operand,
    the index of the first operand that is the same value.
    """
    of = find_operator(operator)
    shapes = tuple(shape for shape, _ in operands)
    analysis = of.bind(shapes, attributes, tuple(dtype for _, dtype in operands))
    configuration = Configuration(dict(degrees))
    leaves = [
        leaf("input", divided_type(shape, dtype, d), name=str(i)).result
        for i, (shape, dtype), d in zip(same, operands, operand_degrees(analysis, configuration), strict=True)
    ]
    node = apply(operator, leaves, dict(of.divided(shapes, attributes, configuration.degrees)))
    if not any(needs):
        return node, ()
    grads = [leaf("input", t.dual, name=f"grad{i}").result for i, t in enumerate(node.types) if t.is_floating]
    wanted = [g for g, n in zip(operand_gradients(node, grads), needs, strict=True) if n and g is not None]
    # What the forward computes anyway is not computed again.
    return node, tuple(n for n in topological(wanted) if n.is_compute and n is not node)


@dataclass(frozen=True, slots=True)
class GradientReads:
    """The operands and results of an operator that the kernels of some of its gradients read."""

    operands: tuple[int, ...]
    """Indices of the operands that are read; of several that are one value, the first."""
    results: bool
    """Whether gradients of results are read."""
    passed: tuple[int, ...]
    """Indices of all operands whose gradient is that of the only result itself, so that no kernel computes it."""


def gradient_reads(node: Node, of: tuple[bool, ...]) -> GradientReads:
    """
    Return what the kernels read that compute gradients of a compute node: which of its operands, and whether the
    gradients of its results. The gradients are those of the operands whose flag in `of` (one flag per operand) is True.
    """
    operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
    return _gradient_reads(node.op, operands, node.attributes, of, repeats(node))


@lru_cache(maxsize=65536)
def _gradient_reads(
    operator: str,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    attributes: Attributes,
    of: tuple[bool, ...],
    same: tuple[int, ...],
) -> GradientReads:
    node, _ = applied(operator, operands, attributes, (), (False,) * len(operands), same)
    grads = [leaf("input", t.dual, name=f"grad{i}").result for i, t in enumerate(node.types) if t.is_floating]
    found = operand_gradients(node, grads)
    wanted = [g for g, is_wanted in zip(found, of, strict=True) if is_wanted and g is not None]
    before = {*topological(wanted)}
    read = tuple(i for i, v in enumerate(node.operands) if v.node in before and same[i] == i)
    passed = tuple(i for i, g in enumerate(found) if len(grads) == 1 and g is grads[0])
    return GradientReads(read, any(g.node in before for g in grads), passed)


def work_of(node: Node, needs: tuple[bool, ...], backward: bool = True, pieces: tuple[str, int] | None = None) -> Work:
    """
    Return the forward and backward kernels of one task (one device's share) of a compute node, sharded as the layouts
    in its operands' and results' types say.

    `needs` says, per operand, whether its gradient is wanted; with `backward` False the kernels of the backward are
    left out. `pieces` is None, or (index variable, number of pieces) for an operator that is computed in pieces along
    that variable, one after the other (loss pieces); then the kernels of all pieces are returned.
    """
    facts, key = node.form.facts, (work_of, needs, backward, pieces)
    found = facts.get(key)
    if found is None:
        found = facts[key] = _work_of(node, needs, backward, pieces)
    return found


def _work_of(node: Node, needs: tuple[bool, ...], backward: bool, pieces: tuple[str, int] | None) -> Work:
    degrees = dict(node.configuration.degrees)
    if not backward and pieces is None:
        return Work((kernel_of(node),), ())
    variable, count = pieces or ("", 1)
    if pieces is not None:
        degrees[variable] = degrees.get(variable, 1) * count
    operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
    needs = needs if backward else (False,) * len(needs)
    found = work(node.op, operands, node.attributes, tuple(degrees.items()), needs, repeats(node))
    return Work(found.forward * count, found.backward * count)


def repeats(node: Node) -> tuple[int, ...]:
    """
    Return, per operand, the index of the first operand that is the same value: (0, 0) for `mul(x, x)`, (0, 1) for
    `mul(x, y)`.
    """
    return node.form.repeats

"""The operations of the spmd dialect: a rank's program, and the instructions in it."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, prod
from typing import TypeVar, cast

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    UnitAttr,
    f64,
    i64,
)
from xdsl.ir import Attribute, Region, SSAValue
from xdsl.irdl import (
    BaseAttr,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    opt_result_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import IsolatedFromAbove, IsTerminator, NoTerminator, SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from unity_ir.dialects.spmd.types import LocalTensorType, PieceType
from unity_ir.pcg.collectives import HALO_EXCHANGES, PLANNED
from unity_ir.pcg.parallel import IN_TIME
from unity_ir.pcg.reshard import move_kind
from unity_ir.pcg.sharding import pins_of, role_class, role_name
from unity_ir.tdl.element_types import HALVES

MAX_DEVICES = 2**20
"""Maximum number of devices of a mesh, more than any cluster has."""

PIECE = BaseAttr(PieceType)


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """
    `spmd.program @name mesh [2, 2] {...}`: the program that every rank of the mesh runs. In `mesh [2, 2, 4]
    micro_batches 4` the last axis is not one of devices: along it are the micro-batches of a step. In `mesh [2, 2, 8]
    loss_pieces 8` along the last axis are the pieces of the tokens in which the loss is computed; with both, this axis
    comes before that of the micro-batches. With `pipeline {order = "1f1b", ranks = 2 : i64}` the operators are in
    stages. With `ring_attention`, the keys and values that attention gathers along a sequence go around a ring instead.
    With `exchange_rows`, the rows that experts gather are exchanged instead; with `imbalance 1.5 : f64`, at most so
    many times an even share to a device. With `bucket 4194304`, gathers of weights and sums of gradients of fewer bytes
    share calls.
    """

    name = "spmd.program"

    sym_name = prop_def(SymbolNameConstraint())
    mesh = prop_def(DenseArrayBase.constr(i64))
    micro_batches = opt_prop_def(IntegerAttr.constr(i64))
    loss_pieces = opt_prop_def(IntegerAttr.constr(i64))
    pipeline = opt_prop_def(BaseAttr(DictionaryAttr))
    ring_attention = opt_prop_def(UnitAttr)
    exchange_rows = opt_prop_def(UnitAttr)
    imbalance = opt_prop_def(FloatAttr)
    bucket = opt_prop_def(IntegerAttr.constr(i64))
    body = region_def("single_block")

    traits = traits_def(SymbolOpInterface(), NoTerminator(), IsolatedFromAbove())
    assembly_format = (
        "$sym_name `mesh` $mesh (`micro_batches` $micro_batches^)? (`loss_pieces` $loss_pieces^)? "
        "(`pipeline` $pipeline^)? (`ring_attention` $ring_attention^)? (`exchange_rows` $exchange_rows^)? "
        "(`imbalance` $imbalance^)? (`bucket` $bucket^)? attr-dict-with-keyword $body"
    )

    def __init__(
        self,
        name: str,
        mesh: tuple[int, ...],
        body: Region,
        micro_batches: int = 1,
        loss_pieces: int = 1,
        pipeline: DictionaryAttr | None = None,
        ring_attention: bool = False,
        exchange_rows: float = 0.0,
        bucket: int = 0,
    ):
        own: dict[str, Attribute] = {"sym_name": StringAttr(name), "mesh": DenseArrayBase.from_list(i64, mesh)}
        if pipeline is not None:
            own["pipeline"] = pipeline
        if micro_batches > 1:
            own["micro_batches"] = IntegerAttr(micro_batches, i64)
        if loss_pieces > 1:
            own["loss_pieces"] = IntegerAttr(loss_pieces, i64)
        if ring_attention:
            own["ring_attention"] = UnitAttr()
        if exchange_rows:
            own["exchange_rows"] = UnitAttr()
        if 0 < exchange_rows < inf:
            own["imbalance"] = FloatAttr(exchange_rows, f64)
        if bucket:
            own["bucket"] = IntegerAttr(bucket, i64)
        super().__init__(properties=own, regions=[body])

    @property
    def micro_batch_count(self) -> int:
        """The number of micro-batches of a step; 1 if it does not run its batch in micro-batches."""
        return 1 if self.micro_batches is None else self.micro_batches.value.data

    @property
    def pieces(self) -> int:
        """The number of pieces of the tokens in which a step computes its loss; 1 if it computes it at once."""
        return 1 if self.loss_pieces is None else self.loss_pieces.value.data

    @property
    def time_axes(self) -> tuple[int | None, int | None]:
        """
        (number of the mesh axis of the micro-batches, number of that of the loss pieces); None in place of one that the
        program does not have.
        """
        last = len(self.mesh.get_values()) - 1
        is_in_loop = self.micro_batches is not None
        return last if is_in_loop else None, None if self.loss_pieces is None else last - is_in_loop

    def verify_(self) -> None:
        """
        Raise `VerifyException` for an invalid mesh, values used before they are made, and local shapes other than the
        global shape divided by the sizes of the mesh axes that shard it (with the halo added).
        """
        sizes = tuple(int(s) for s in self.mesh.get_values())
        if any(size < 1 for size in sizes) or prod(sizes) > MAX_DEVICES:
            raise VerifyException(f"spmd.program: the mesh {list(sizes)} must be of 1 to {MAX_DEVICES} devices")
        if self.micro_batches is not None and (
            self.micro_batch_count < 2 or not sizes or sizes[-1] != self.micro_batch_count
        ):
            raise VerifyException(
                f"spmd.program: {self.micro_batch_count} micro-batches must be 2 or more, the last axis of the mesh "
                f"{list(sizes)}"
            )
        axis = self.time_axes[1]
        if axis is not None and (self.pieces < 2 or axis < 0 or sizes[axis] != self.pieces):
            raise VerifyException(
                f"spmd.program: {self.pieces} pieces of the loss must be 2 or more, the axis of the mesh {list(sizes)} "
                "after those of devices"
            )
        block = self.body.block
        if block.args:
            raise VerifyException("spmd.program: its block has arguments; a rank's program reads spmd.input")
        made: set[SSAValue] = set()
        for op in block.ops:
            for value in op.operands:
                if value not in made:
                    name = value.name_hint or "?"
                    raise VerifyException(f"{op.name}: uses %{name} before it is made; reorder them")
            for value in op.results:
                if isinstance(value.type, PieceType):
                    _check_piece(value.type.data, sizes, op.name)
            made.update(op.results)


def _check_piece(piece: LocalTensorType, mesh: tuple[int, ...], where: str) -> None:
    if len(piece.layout) != len(mesh):
        raise VerifyException(f"{where}: {piece} has {len(piece.layout)} roles, but the mesh has {len(mesh)} axes")
    for axis, coordinate in pins_of(piece.layout):
        if coordinate >= mesh[axis]:
            raise VerifyException(f"{where}: {piece} is at {coordinate} of an axis of {mesh[axis]} devices")
    for dim, (local, size, (low, high)) in enumerate(zip(piece.local, piece.shape, piece.borders, strict=True)):
        degree = 1
        for axis, role in zip(mesh, piece.layout, strict=True):
            degree *= axis if role == dim else 1
        if (local - low - high) * degree != size:
            beside = f" + {low} + {high}" if low or high else ""
            raise VerifyException(
                f"{where}: {piece}: dim {dim} is in {degree} pieces, so its local size is {size}/{degree}{beside}"
            )
        if max(low, high) > size or (degree == 1 and low + high):
            raise VerifyException(f"{where}: {piece}: dim {dim} in {degree} pieces has no halo of {low} and {high}")


@irdl_op_definition
class InputOp(IRDLOperation):
    """`spmd.input "x" : type`: this rank's piece of a batch."""

    name = "spmd.input"
    input_name = prop_def(StringAttr, prop_name="name")
    result = result_def(PIECE)
    assembly_format = "$name attr-dict `:` type($result)"


@irdl_op_definition
class WeightOp(IRDLOperation):
    """`spmd.weight "w" : type`: this rank's piece of a parameter."""

    name = "spmd.weight"
    weight_name = prop_def(StringAttr, prop_name="name")
    result = result_def(PIECE)
    assembly_format = "$name attr-dict `:` type($result)"


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """
    `spmd.constant 1.0 : type`: a tensor all of whose elements are one number. Along mesh axes of role `sum` only the
    first rank has the number, and the others have 0.
    """

    name = "spmd.constant"
    value = prop_def(FloatAttr.constr(f64))
    result = result_def(PIECE)
    assembly_format = "$value attr-dict `:` type($result)"

    def verify_(self) -> None:
        """Raise `VerifyException` unless the number is finite."""
        if not isfinite(self.value.value.data):
            raise VerifyException(f"{self.name}: {self.value.value.data} is not a finite number")


@irdl_op_definition
class ComputeOp(IRDLOperation):
    """
    `spmd.compute "matmul"(%x, %w) with {act = "relu"} over ["m0", "copy"]`: an operator applied to this rank's pieces.
    `over` says what each mesh axis divides: an index variable of the operator, or `copy`, `sum` or `repeat`.
    """

    name = "spmd.compute"
    operator = prop_def(StringAttr)
    operator_attributes = prop_def(BaseAttr(DictionaryAttr))
    over = prop_def(ArrayAttr.constr(BaseAttr(StringAttr)))
    """The role of every mesh axis in the operator's task grid: an index variable, `copy`, `sum` or `repeat`."""
    arguments = var_operand_def(PIECE)
    made = var_result_def(PIECE)
    assembly_format = (
        "$operator `(` $arguments `)` `with` $operator_attributes `over` $over attr-dict"
        " `:` functional-type($arguments, $made)"
    )


class BetweenRanks(IRDLOperation):
    """
    Base of communication: `spmd.KIND %x along array<i64: 0> : from -> to` exchanges pieces of a value with other ranks
    along mesh axes.
    """

    operand = operand_def(PIECE)
    result = result_def(PIECE)
    axes = prop_def(DenseArrayBase.constr(i64))

    assembly_format = "$operand `along` $axes attr-dict `:` type($operand) `->` type($result)"

    @property
    def kind(self) -> str:
        """
        The kind of communication, such as `all_gather` or `halo`: the operation's name without `spmd.`, one of
        `pcg.collectives`.
        """
        return self.name.removeprefix("spmd.")

    @property
    def along(self) -> tuple[int, ...]:
        """The numbers of the mesh axes, from 0 (outermost), along which ranks communicate."""
        return tuple(int(a) for a in self.axes.get_values())

    @property
    def pieces(self) -> tuple[LocalTensorType, LocalTensorType]:
        """(type of the operand, type of the result): what a rank has before and after the communication."""
        assert isinstance(self.operand.type, PieceType)
        assert isinstance(self.result.type, PieceType)
        return self.operand.type.data, self.result.type.data


Kind = TypeVar("Kind", bound=IRDLOperation)


def _of_kind(kind: str, base: type[Kind]) -> type[Kind]:
    """Return the operation class of `spmd.KIND`."""
    name = f"{kind.title().replace('_', '')}Op"
    made = type(name, (base,), {"name": f"spmd.{kind}", "__module__": __name__})
    return irdl_op_definition(cast("type[Kind]", made))


class MoveOp(BetweenRanks):
    """
    Base of the moves of reshards: `spmd.all_gather %x along array<i64: 0> : from -> to` changes the role that mesh axes
    have in a value's layout. There is one class for each collective or local step (such as `slice`).
    """

    @property
    def between(self) -> tuple[int, int] | None:
        """(stage that sends, stage that receives) of a pipeline; None for a move within one stage."""
        return None

    @property
    def roles(self) -> tuple[int, int]:
        """
        (before, after): the role that the mesh axes of the move have in the operand and in the result, as a number: the
        dim that they shard (0 or more), or below 0 one of `pcg.sharding`'s `COPY`, `SUM`, `REPEAT` and `PINNED` (only
        the devices at one coordinate, whichever it is, hold anything).

        Raises `VerifyException` if the axes differ in their roles.
        """
        before, after = (piece.layout for piece in self.pieces)
        every = range(min(len(before), len(after)))
        found = {(role_class(before[a]), role_class(after[a])) for a in self.along if a in every}
        if len(found) != 1 or len(before) != len(after):
            raise VerifyException(f"{self.name}: its axes {list(self.along)} do not all go from one role to one other")
        return found.pop()

    def verify_(self) -> None:
        """
        Raise `VerifyException` unless the types of operand and result differ only in the role of the move's mesh axes,
        and this kind of move is the one that changes the old role to the new one.
        """
        source, target = self.roles
        axes = set(self.along)
        if list(self.along) != sorted(axes):
            raise VerifyException(f"{self.name}: its axes {list(self.along)} must be in order, each once")
        before, after = self.pieces
        if before.halo or before.halo_sum:
            raise VerifyException(f"{self.name}: {before} has a halo, which comes last and is reduced first")
        moved = tuple(a if i in axes else b for i, (b, a) in enumerate(zip(before.layout, after.layout, strict=True)))
        if replace(after, local=before.local, layout=before.layout) != before or moved != after.layout:
            raise VerifyException(f"{self.name}: takes {before} to {after}, which is more than its axes' roles")
        same = before.layout == after.layout
        if same or move_kind(source, target) != self.kind:
            wanted = "nothing" if same else move_kind(source, target)
            raise VerifyException(f"{self.name}: {role_name(source)} to {role_name(target)} is {wanted}")


class StageMoveOp(MoveOp):
    """
    Base of the moves that can lead from one stage of a pipeline to another: `spmd.send %x along array<i64: 0> stages
    array<i64: 0, 1> : from -> to` hands a value of stage 0 to stage 1. Between stages on the same devices it is a
    `retype` along no axes.
    """

    stages = opt_prop_def(DenseArrayBase.constr(i64))
    assembly_format = "$operand `along` $axes (`stages` $stages^)? attr-dict `:` type($operand) `->` type($result)"

    @property
    def between(self) -> tuple[int, int] | None:
        """
        (stage that sends, stage that receives) of a pipeline; None for a move within one stage. Raises
        `VerifyException` unless there are two different stages.
        """
        if self.stages is None:
            return None
        stages = tuple(int(stage) for stage in self.stages.get_values())
        if len(stages) != 2 or min(stages) < 0 or stages[0] == stages[1]:
            raise VerifyException(f"{self.name}: stages {list(stages)} must be two, numbered from 0")
        return stages

    def verify_(self) -> None:
        """
        Raise `VerifyException` as `MoveOp.verify_` does. A move between stages along no axes, which leaves the type as
        it is, is also valid: the stages are on the same devices.
        """
        if self.between is None or self.along or self.pieces[0] != self.pieces[1]:
            super().verify_()


MOVES: dict[str, type[MoveOp]] = {
    kind: _of_kind(kind, StageMoveOp if kind in ("send", "retype") else MoveOp) for kind in PLANNED
}
"""The class of every kind of move."""


class ExchangeOp(BetweenRanks):
    """
    Base of halo exchanges: `spmd.halo %x along array<i64: 0> : from -> to` exchanges borders with the neighbours along
    one dim.
    """

    @property
    def border(self) -> tuple[int, int, int]:
        """
        (dim, before, after): the dim of the exchange, and how many elements the type with the halo has more than the
        other, before and after the piece.

        Raises `VerifyException` if the types of operand and result differ by more than a halo along one dim.
        """
        before, after = self.pieces
        old, new = (before, after) if self.kind == "halo" else (after, before)
        changed = [d for d, (a, b) in enumerate(zip(old.borders, new.borders, strict=False)) if a != b]
        kind = "halo" if self.kind == "halo" else "halo_sum"
        with_border = getattr(new, kind)
        if len(changed) != 1 or any(old.borders[changed[0]]) or not with_border:
            raise VerifyException(f"{self.name}: takes {before} to {after}, which is no halo along one dim")
        (dim,) = changed
        without = (*with_border[:dim], (0, 0), *with_border[dim + 1 :])
        same = replace(new, local=old.local, **{kind: without if any(map(any, without)) else ()})
        if same != old:
            raise VerifyException(f"{self.name}: takes {before} to {after}, which is more than a halo along dim {dim}")
        return dim, *new.borders[dim]

    def verify_(self) -> None:
        """
        Raise `VerifyException` unless the types of operand and result differ by a halo along one dim, and the exchange
        is along exactly the mesh axes that shard this dim.
        """
        dim, _, _ = self.border
        wanted = [i for i, role in enumerate(self.pieces[0].layout) if role == dim]
        if list(self.along) != wanted:
            raise VerifyException(f"{self.name}: along {list(self.along)}, but dim {dim} is divided along {wanted}")


EXCHANGES: dict[str, type[ExchangeOp]] = {kind: _of_kind(kind, ExchangeOp) for kind in HALO_EXCHANGES}
"""The class of every exchange of halos."""


class TimeOp(IRDLOperation):
    """
    Base of the operations that lead into a loop over micro-batches, or over loss pieces, and out of it:
    `spmd.accumulate %x : from -> to`. They change the role that the loop's mesh axis has in the value's layout; every
    piece stays on its device.

    The result of `accumulate` may be f32 where its addends are of 16 bits.
    """

    operand = operand_def(PIECE)
    result = result_def(PIECE)
    assembly_format = "$operand attr-dict `:` type($operand) `->` type($result)"

    @property
    def kind(self) -> str:
        """
        The operation's name without `spmd.`: `pipeline` (into the loop: each micro-batch or loss piece gets its shard
        of a dim), `reuse` (into it: each gets the whole value), `batch` (out of it: their shards are joined) or
        `accumulate` (out of it: their addends are summed).
        """
        return self.name.removeprefix("spmd.")

    def verify_(self) -> None:
        """
        Raise `VerifyException` unless the program has a loop over micro-batches or loss pieces, the types differ only
        in the role of that loop's mesh axis, and the roles before and after are those of this kind of operation
        (`ENDS_IN_TIME`).
        """
        program = self.parent_op()
        assert isinstance(self.operand.type, PieceType)
        assert isinstance(self.result.type, PieceType)
        before, after = self.operand.type.data, self.result.type.data
        axes = program.time_axes if isinstance(program, ProgramOp) else (None, None)
        if axes == (None, None) or len(before.layout) != len(after.layout):
            raise VerifyException(
                f"{self.name}: is of a loop over micro-batches, or over pieces of the loss; give spmd.program "
                "micro_batches, or loss_pieces"
            )
        pairs = zip(before.layout, after.layout, strict=True)
        changed = [(axis, pair) for axis, pair in enumerate(pairs) if pair[0] != pair[1]]
        wanted = ENDS_IN_TIME[self.kind]
        is_changed = len(changed) == 1 and changed[0][0] in axes
        ends = tuple("dim" if role >= 0 else role_name(role) for _, pair in changed for role in pair)
        is_longer = self.kind == "accumulate" and before.dtype in HALVES and after.dtype == "f32"
        is_alike = before.shape == after.shape and (before.dtype == after.dtype or is_longer)
        if not is_changed or ends != wanted or not is_alike:
            raise VerifyException(
                f"{self.name}: from {before} to {after}; only time changes, from {' to '.join(wanted)}"
            )

    @property
    def is_of_pieces(self) -> bool:
        """
        Whether the operation leads into or out of the loop over the loss pieces, rather than the one over
        micro-batches.
        """
        program = self.parent_op()
        assert isinstance(program, ProgramOp)
        assert isinstance(self.operand.type, PieceType)
        assert isinstance(self.result.type, PieceType)
        axis = program.time_axes[1]
        return axis is not None and self.operand.type.data.layout[axis] != self.result.type.data.layout[axis]


ENDS_IN_TIME = {
    "pipeline": ("repeat", "dim"),
    "batch": ("dim", "repeat"),
    "reuse": ("repeat", "copy"),
    "accumulate": ("sum", "repeat"),
}
"""The roles of the axis of time before and after each step into the loop or out of it."""

TIME_STEPS: dict[str, type[TimeOp]] = {kind: _of_kind(kind, TimeOp) for kind in IN_TIME}
"""The class of every step into the loop over micro-batches, or out of it."""


@irdl_op_definition
class UpdateOp(IRDLOperation):
    """
    `spmd.update %w, %g {optimizer = "sgd", lr = 0.1}`: one step of the optimizer on this rank's piece of a weight.
    """

    name = "spmd.update"
    weight = operand_def(PIECE)
    grad = operand_def(PIECE)
    optimizer = prop_def(BaseAttr(DictionaryAttr))
    assembly_format = "$weight `,` $grad `by` $optimizer attr-dict `:` type($weight) `,` type($grad)"

    def verify_(self) -> None:
        """Raise `VerifyException` unless weight and gradient have the same type."""
        if self.weight.type != self.grad.type:
            raise VerifyException(f"spmd.update: the gradient is {self.grad.type}, the weight {self.weight.type}")


class HostOp(IRDLOperation):
    """
    Base of the copies between this rank's device and the memory of its host.

    `spmd.from_host %w`, `spmd.to_host %w`, without a result: copies the optimizer's state of a piece of a weight, which
    rests in the memory of the host, to the device before the weight's update, or back after it.

    `%h = spmd.to_host %x : type -> type`, `%y = spmd.from_host %h`: copies a value that the forward saves, and back
    before the backward reads it. What `to_host` makes is read by `from_host` alone.
    """

    operand = operand_def(PIECE)
    result = opt_result_def(PIECE)
    assembly_format = "$operand attr-dict `:` type($operand) (`->` type($result)^)?"

    @property
    def kind(self) -> str:
        """Which way it copies: `from_host` or `to_host`."""
        return self.name.removeprefix("spmd.")

    def verify_(self) -> None:
        """
        Raise `VerifyException` unless a value keeps its type, one from the host was copied there, and what is there is
        read by `from_host` alone.
        """
        if self.result is None:
            return
        if self.result.type != self.operand.type:
            raise VerifyException(f"{self.name}: from {self.operand.type} to {self.result.type}; a copy keeps its type")
        if self.kind == "from_host" and not _is_at_host(self.operand):
            raise VerifyException("spmd.from_host: its value is not at the host; it must be what spmd.to_host makes")
        readers = [use.operation for use in self.result.uses] if self.kind == "to_host" else []
        other = next((r for r in readers if not isinstance(r, HostOp) or r.kind != "from_host"), None)
        if other is not None:
            raise VerifyException(f"spmd.to_host: {other.name} reads a value at the host; only spmd.from_host can")


def _is_at_host(value: SSAValue) -> bool:
    owner = value.owner
    return isinstance(owner, HostOp) and owner.kind == "to_host"


HOST_COPIES: dict[str, type[HostOp]] = {kind: _of_kind(kind, HostOp) for kind in ("from_host", "to_host")}
"""The class of every copy between a device and its host."""


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """`spmd.return %loss`: the results of the step, the loss first."""

    name = "spmd.return"
    values = var_operand_def(PIECE)
    traits = traits_def(IsTerminator())
    assembly_format = "$values attr-dict `:` type($values)"

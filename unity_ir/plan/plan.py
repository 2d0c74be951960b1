"""
Plan a rank's training step: every decision that costs time or memory, as data.

The plan of a step has the groups of operators that are one kernel, the implementation of each, and the lines of the
step in order: when each collective is started and waited for, which of them share a call, and when each tensor is
freed. `simulate.replay` says how long it takes, `lowering.emit` prints it as a program; neither decides anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from unity_ir.errors import UnityError
from unity_ir.forms.attention import Attention
from unity_ir.forms.classify import classify, is_convolution
from unity_ir.forms.contraction import contraction
from unity_ir.forms.kinds import CONTRACTIONS, kind
from unity_ir.forms.rewrite import simplified
from unity_ir.forms.scatter import scattered
from unity_ir.forms.stored import has_padded_results
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.pytorch.attention import cudnn_attention, cudnn_is_faster
from unity_ir.machine.model import Machine
from unity_ir.machine.tuned import IMPLEMENTATIONS, TuningTable
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Pins, is_shard, pins_of
from unity_ir.plan.additions import with_additions, with_longer_products
from unity_ir.plan.channels_last import with_channels_last
from unity_ir.plan.copies import Copies, copies
from unity_ir.plan.deadlock import calls, check_order, ranks_of_move
from unity_ir.plan.groups import GroupMemo, with_fusions
from unity_ir.plan.host_state import WINDOW_BYTES, StateCopy, UpdateAction, state_bytes, update_lines
from unity_ir.plan.host_values import still_going, with_values_at_host, without_values_at_host
from unity_ir.plan.instructions import (
    Compute,
    Fused,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    TimeStep,
    ValueMove,
    communicates,
)
from unity_ir.plan.kept_casts import with_kept_casts
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.padded_rows import with_padded_copies, with_padded_rows
from unity_ir.plan.pipeline.actions import TRANSFERS
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.orders import steady_step
from unity_ir.plan.pipeline.parts import StepPart, StepParts, step_parts
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.sends import check_sends, with_sends
from unity_ir.plan.pipeline.total_order import check
from unity_ir.plan.products import product_implementation
from unity_ir.plan.program import Program, most_of_a_device
from unity_ir.plan.rings import with_rings
from unity_ir.plan.routes import with_routes
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.plan.schedule import bucket_bytes, schedule
from unity_ir.plan.scheduled import Schedule, Start, Wait, moves_of
from unity_ir.plan.short_gradients import with_short_gradients
from unity_ir.tdl.syntax import Bound, Slice, accesses

AUTO = "auto"
"""The implementation of matrix products that is chosen by estimate, for each of them."""
CHANNELS = ("auto", "last", "first")
"""The values of `PlanOptions.channels`."""


@dataclass(frozen=True)
class PlanOptions:
    """
    Options of the plan of a step. Raises `UnityError` for unknown values.

    `matmul`, `convolution`, `attention` and `kernels` say what computes matrix products, convolutions, attention that
    cuDNN can compute, and all other operators: `triton` or `torch`. `matmul` and `attention` may be `auto`: for each
    product the faster one by estimate (`plan.products`), and cuDNN's attention where it is faster. With `kernels` in
    torch, all operators are in torch, so that the program runs at full speed on CPUs and does not need Triton.
    """

    matmul: str = AUTO
    kernels: str = "triton"
    convolution: str = "torch"
    tuned: TuningTable | None = None
    """Measured implementations: operators that it has get the faster one, whatever the other options say."""
    fuse: bool = True
    """Whether operators that one Triton kernel can compute are one group."""
    bucket: int | None = None
    """Gradient syncs and weight gathers of fewer bytes share calls; 0: none do; None: as the program says."""
    order: PipelineSchedule | None = None
    """The schedule of a step in stages, in place of that which the plan names; with sends or without."""
    attention: str = "auto"
    channels: str = "auto"
    """
    In which order of dims images of convolutions are stored: with the channels `last`, or `first`, before rows and
    columns; `auto` means `last` where convolutions have 16-bit operands (`plan.channels_last`).
    """
    eager: bool = False
    """
    Whether casts of weights and gradients, additions of gradients, and moves of parts of tensors are kernels of their
    own, as PyTorch runs them; else updates, products and the kernels beside them do them where they can.
    """
    window: int = WINDOW_BYTES
    """Most bytes of the optimizer's state on its way between the device and the host at once, each way."""
    memo: GroupMemo = field(default_factory=GroupMemo, compare=False, repr=False)
    """Groups tried in earlier programs with these options."""

    def __post_init__(self) -> None:
        for name in ("matmul", "kernels", "convolution", "attention"):
            value = getattr(self, name)
            known = (*IMPLEMENTATIONS, *((AUTO,) if name in ("matmul", "attention") else ()))
            if value not in known:
                raise UnityError(f"triton: {name} is {value!r}; it must be {' or '.join(known)}")
        if self.channels not in CHANNELS:
            raise UnityError(
                f"triton: channels is {self.channels!r}; it must be {', '.join(CHANNELS[:-1])} or {CHANNELS[-1]}"
            )
        if self.bucket is not None and self.bucket < 0:
            raise UnityError(f"triton: bucket is {self.bucket}; it must be 0 or more bytes")
        if self.kernels == "torch" and self.tuned is not None:
            raise UnityError("triton: with kernels in torch there is nothing to choose; leave out tune or kernels")

    def implementation(self, operator: LocalOperator) -> str:
        """
        Return the implementation of an operator at its local shapes: `triton`, `torch`, or `cudnn` (cuDNN's attention).
        The first that applies:

        - `triton` for a fused group, and for an operator whose results have padded rows;
        - `torch` if the option `kernels` is `torch`;
        - the fastest one measured, if the table `tuned` has the operator;
        - what the option for its kind says: `convolution`, `matmul`, `attention`, or `kernels` for all others.
        """
        if operator.fused or has_padded_results(operator.line):
            return "triton"
        found = self._implementation(operator)
        return product_implementation(operator) if found == AUTO else found

    def implementation_of(self, program: Program, compute: Compute) -> str:
        """
        Return the implementation of an operator of a program, as `implementation` does; for a fused group, the one that
        it names (`Fused.implementation`). Equal operators are looked up in `memo`.
        """
        if isinstance(compute, Fused):
            return compute.implementation
        key, known = program.number(compute), self.memo.choices
        if key not in known:
            known[key] = self.implementation(local_operator(program, compute))
        return known[key]

    def fusion_choice(self, operator: LocalOperator) -> str:
        """
        Return `triton` if an operator, or a fused group, may be part of a fused kernel, `torch` if not; `with_kernels`
        passes this method to `with_fusions` as the `choice`.

        A single operator may be if it is computed by Triton, or if it is a matrix product for which `auto` has yet to
        choose. A group may not be if, with `auto`, its product is estimated to be faster in PyTorch
        (`product_implementation`), or if, with the option `eager`, it does what no kernel of PyTorch does, such as
        reading slices of tensors.
        """
        if operator.fused and self.eager and _stores_elsewhere(operator.line):
            return "torch"
        if operator.fused:
            return product_implementation(operator) if self.matmul == AUTO else "triton"
        return "torch" if self._implementation(operator) in ("torch", "cudnn") else "triton"

    def _implementation(self, operator: LocalOperator) -> str:
        """Return the implementation of one operator, or `auto` for a product for which nothing else says it."""
        if self.kernels == "torch":
            return "torch"
        measured = None if self.tuned is None else self.tuned.fastest(operator.key)
        if measured is not None:
            return measured
        line = operator.line
        if all(is_convolution(r, line.extents) for r in line.results):
            return self.convolution
        if all(contraction(r, line.extents) is not None for r in line.results):
            return self.matmul
        if self.attention != "triton" and (
            (found := cudnn_attention(line, operator.dtypes, {n: n for n in operator.divided})) is not None
            and (self.attention == "torch" or cudnn_is_faster(line, found))
        ):
            return "cudnn"
        return self.kernels


def _stores_elsewhere(line: Bound) -> bool:
    """
    Return whether a group reads slices of tensors or stacks what it makes, stores attention's results in other places,
    or adds a scatter to a tensor: kernels of PyTorch do none of these.
    """
    sliced = any(isinstance(i, Slice) for r in line.results for a in accesses(r.expr) for i in a.indices)
    if sliced or line.is_concatenation or isinstance(classify(simplified(line, {}), {}), Attention):
        return True
    places = (scattered(r, line.extents) for r in line.results)
    return any(each is not None and each.total is not None for each in places)


DEFAULT = PlanOptions()
"""The options of a plan of which nothing is said: one object, so that all such plans share a memo."""


@dataclass(frozen=True)
class Plan:
    """The plan of one rank's training step, or of a forward alone; every rank has the same one."""

    program: Program
    """The instructions, with groups of operators as one (`Fused`), and backwards that read what forwards saved."""
    schedule: Schedule
    """
    The lines of the step in the order of issue, with waits, shared calls, and the tensors that die in each. None of a
    step in stages: its parts have them.
    """
    options: PlanOptions
    pipeline: StepParts | None = None
    """The parts of a step whose operators are in stages, and the schedule that orders them."""

    @cached_property
    def updates(self) -> tuple[UpdateAction, ...]:
        """The lines of the update of weights, which comes after those of the schedule, in order."""
        return update_lines(self.program, self.options.window)

    @cached_property
    def parts(self) -> tuple[tuple[StepPart, Plan], ...]:
        """The parts of a step in pipeline stages, as (part, the plan of its program); () for a step without stages."""
        if self.pipeline is None:
            return ()
        *stages, after = self.pipeline.parts
        found = [(part, _plan_part(part, self.options)) for part in stages]
        lines = (line.action for _, own in found for line in own.schedule.lines)
        waited = {r for action in lines if isinstance(action, Wait) for r in action.registers}
        return *found, (after, _plan_part(_without_waits(after, waited), self.options))

    def most_on_a_rank(self, count: Callable[[Plan], int]) -> int:
        """
        Return the largest count of any rank of the pipeline. A rank runs several parts of the step, each with a plan of
        its own (`parts`): its count is the sum of `count(plan)` over these. Only for a step in stages (`pipeline` is
        not None).
        """
        assert self.pipeline is not None
        ranks = [0] * len(self.pipeline.schedule.ranks)
        for part, own in self.parts:
            on = range(len(ranks)) if part.stage is None else [self.pipeline.schedule.rank_of[part.stage]]
            found = count(own)
            for rank in on:
                ranks[rank] += found
        return max(ranks)

    @cached_property
    def implementations(self) -> Mapping[Compute, str]:
        """The implementation of each operator or group of the program: `triton`, `torch` or `cudnn`."""
        found: dict[Compute, str] = {}
        for instruction in self.program.body:
            if isinstance(instruction, Compute) and instruction not in found:
                found[instruction] = self._implementation(instruction)
        return found

    def _implementation(self, compute: Compute) -> str:
        return self.options.implementation_of(self.program, compute)

    @cached_property
    def in_place(self) -> frozenset[Register]:
        """
        The registers (numbers of local tensors) whose tensor is stored in the memory of an operand, not in new memory.
        They are results of all-reduces, and of `accumulate` instructions (`TimeStep`), which take the memory of their
        first addend; both only if nothing else reads the operand and it is stored in memory of its own, not a view. The
        totals to which a kernel adds (`is_added`) are among them, too. Other all-reduces copy their operand.
        """
        schedule = self.schedule
        added = set(self.program.added.values())
        own = ("all_reduce", "reduce_scatter", "all_gather")
        stored = {i.result for i in self.program.body if isinstance(i, ReshardMove) and i.kind in own}
        stored |= {i.result for i in self.program.body if isinstance(i, TimeStep) and i.kind == "accumulate"}
        stored |= {i.result for op in ("sum", "started") for i in self.program.leaves(op)}
        makers = {register: i for i in self.program.body if isinstance(i, Compute) for register in i.results}
        lines = [line for line in schedule.lines if not isinstance(line.action, Wait)]
        readers = Counter(r for line in lines for r in schedule.reads_and_makes(line.action)[0])
        moves = [(line.action, line.dies) for line in lines if isinstance(line.action, ReshardMove)]
        sums = [(line.action, line.dies) for line in lines if isinstance(line.action, TimeStep)]
        # What a padding does not fill with zeros is its operand, or a copy of it in a larger tensor.
        padded = {move.result: (move, dies) for move, dies in moves if move.kind == "zero_pad"}

        def is_alone(move: ReshardMove | TimeStep, dies: Collection[Register]) -> bool:
            """Whether a move may take its operand's memory; what another reader made may be a view of it."""
            operand = schedule.held(move.operand)
            return operand in dies and readers[operand] == 1 and is_stored(operand)

        def is_stored(register: Register) -> bool:
            if register in padded:
                move, dies = padded[register]
                return is_shard(move.source) or is_alone(move, dies)
            if (maker := makers.get(register)) is None:
                return register in stored
            if isinstance(maker, Fused) or self._implementation(maker) in ("triton", "cudnn"):
                return True
            return kind(self.program.analysis(maker)) in CONTRACTIONS

        return frozenset(
            move.result
            for move, dies in (*moves, *sums)
            if move.result in added or (move.kind in ("all_reduce", "accumulate") and is_alone(move, dies))
        )

    def copies(self, start: Start) -> tuple[Copies, Copies]:
        """
        Return the copies that a device makes for `start`, one call of a collective in the schedule: (those before the
        collective starts, those after it was waited for), each as numbers of kernels and bytes.
        """
        return copies(self.program, start, self.in_place)

    @cached_property
    def launches(self) -> int:
        """
        The number of kernels that a rank launches in the forward and backward of a step, over all micro-batches: those
        of each Triton operator, one for each PyTorch call, and those that move values into and out of loops
        (`TimeStep`). Copies for collectives are counted by `copy_kernels`. Where ranks differ, the largest number of
        any rank.
        """
        if self.pipeline is not None:
            return self.most_on_a_rank(lambda part: part.launches)
        tensors = self.program.tensors
        return most_of_a_device(
            self.program.mesh,
            (
                (pins_of(tensors[i.result].layout), self._copies(i))
                if isinstance(i, TimeStep)
                else (pins_of(tensors[i.results[0]].layout), self._launches(i) * self.program.times(i))
                for i in self.program.body
                if isinstance(i, Compute | TimeStep)
            ),
        )

    def time_step_bytes(self, step: TimeStep) -> tuple[int, ...]:
        """
        Return the bytes that an instruction into or out of a loop (`TimeStep`) reads and writes on a rank, one number
        for each pass of that loop: one pass per micro-batch, or per piece of the loss.

        An `accumulate` adds an addend to those of earlier passes; its first pass has 0 bytes if the total takes over
        the addend's memory. If the kernel that makes the addend adds it to the total (`is_added`), all are 0, and
        `added_bytes` has what that kernel reads. The other kinds copy a piece, or have 0 bytes where a view of it will
        do.
        """
        program, size = self.program, self.program.bytes[step.operand]
        passes = program.loss_pieces if step.is_of_pieces else program.micro_batches
        if step.is_added:
            return (0,) * passes
        if step.kind == "accumulate":
            total, result = program.held_bytes(step.result), program.bytes[step.result]
            first = 0 if step.result in self.in_place and total == size else size + total
            added = [first, *((size + 2 * total,) * (passes - 1))]
            added[-1] += total + result if total != result else 0
            return tuple(added)
        copied = 0
        if step.is_of_pieces and step.kind == "batch":
            return (program.bytes[step.result] + 2 * size, *((2 * size,) * (passes - 1)))
        if step.is_of_pieces and step.kind == "pipeline":
            piece = program.tensors[step.result]
            is_view = prod(piece.local(program.mesh)[: piece.layout[program.axes]]) == 1
            copied = 0 if is_view else 2 * program.bytes[step.result]
        return (copied,) * passes

    def added_bytes(self, compute: Compute) -> int:
        """
        Return the bytes of the totals that an operator's kernel reads to add its results to them (`TimeStep.is_added`),
        in each pass of its loop except the first. 0 for an operator that adds to none.
        """
        return sum(self.program.bytes[r] for r in compute.results if r in self.program.added)

    def _copies(self, step: TimeStep) -> int:
        """Return the kernels of a step into a loop, or out of it."""
        times = self.program.micro_batches if step.is_of_pieces else 1
        return times * sum(size > 0 for size in self.time_step_bytes(step))

    def _launches(self, compute: Compute) -> int:
        operator = local_operator(self.program, compute)
        try:
            made = launcher(operator.line, operator.dtypes, self.implementations[compute], operator.divided)
        except UnityError:
            return 1  # a type that no kernel takes, such as f64: it cannot be emitted
        return max(len(made.work), 1) + made.roundings

    def bytes_of_copies(self, kind: str) -> int:
        """
        Return the bytes that a device copies from its host in a step, or to it: `kind` is `from_host` or `to_host`.
        They are those of the optimizer's state and those of values, in all micro-batches.
        """
        program = self.program
        values = (i for i in program.body if isinstance(i, ValueMove) and i.kind == kind)
        states = (p for a in self.updates if isinstance(a, StateCopy) and a.kind == kind for p in a.parts)
        copied = sum(program.bytes[i.operand] * program.times(i) for i in values)
        return copied + sum(state_bytes(program, part) for part in states)

    @property
    def collectives(self) -> int:
        """
        The number of collective calls of a rank in the forward and backward of a step, over all micro-batches, with the
        sends and receives of a pipeline. A bucket of several moves is one call. Where ranks differ, the largest number
        of any rank.
        """
        if self.pipeline is not None:
            sends = max(sum(a.kind in TRANSFERS for a in actions) for actions in self.pipeline.schedule.ranks)
            return sends + self.most_on_a_rank(lambda part: part.collectives)
        firsts = (moves_of(start)[0] for start in self._starts)
        times = self.program.times
        return most_of_a_device(
            self.program.mesh, ((ranks_of_move(self.program, first), times(first)) for first in firsts)
        )

    @property
    def copy_kernels(self) -> int:
        """
        The number of kernels that a rank launches in a step to copy pieces for collectives. Where ranks differ, the
        largest number of any rank.
        """
        if self.pipeline is not None:
            return self.most_on_a_rank(lambda part: part.copy_kernels)
        counts: list[tuple[Pins, int]] = []
        for start in self._starts:
            first = moves_of(start)[0]
            ends = (pins_of(self.program.tensors[r].layout) for r in (first.operand, first.result))
            times = self.program.times(first)
            counts += zip(ends, (times * copied.kernels for copied in self.copies(start)), strict=True)
        return most_of_a_device(self.program.mesh, counts)

    @property
    def _starts(self) -> Iterator[Start]:
        """The calls of collectives, in order."""
        for line in self.schedule.lines:
            if isinstance(line.action, Start) and communicates(moves_of(line.action)[0]):
                yield line.action


def _without_waits(after: StepPart, waited: Collection[Register]) -> StepPart:
    """Return what is done after all micro-batches, in which sums are there that other parts have waited for."""

    def known(instruction: Instruction) -> Instruction:
        is_waited = isinstance(instruction, Leaf) and instruction.op == "started" and instruction.result in waited
        return replace(instruction, op="sum") if is_waited else instruction

    return replace(after, program=replace(after.program, body=tuple(map(known, after.program.body))))


def with_kernels(program: Program, options: PlanOptions) -> Program:
    """
    Return the program prepared for Triton kernels: images with channels last (`with_channels_last`), rows padded
    (`with_padded_rows`, `with_padded_copies`) and, if `options.fuse`, operators fused (`with_fusions`). `options.memo`
    is the cache of groups, read and extended.
    """
    if options.channels != "first" and not options.eager:
        program = with_channels_last(program, options.memo, are_short=options.channels == "auto")
    # First for what is known of single operators, as a product's speed depends on it; then for groups.
    program = with_padded_rows(program, options.implementation)
    if not options.eager:
        program = with_padded_copies(program, options.implementation)
    if options.fuse:
        program = with_fusions(program, options.fusion_choice, options.memo)
    return with_padded_rows(program, options.implementation)


def _with_products(program: Program, options: PlanOptions) -> Program:
    """Return the program whose products make float32, and add up, where their implementation can."""
    if options.eager:
        return program
    return with_additions(with_longer_products(program, options.implementation_of), options.implementation_of)


def _plan_part(part: StepPart, options: PlanOptions) -> Plan:
    """Return the plan of a part of a step."""
    program = part.program
    if options.kernels == "triton":
        program = with_kernels(program, options)
    program = _with_products(program, options)
    lines = schedule(program, options.bucket)
    check_order(f"spmd.program @{program.name}, part {part.name}", calls(program, lines))
    return Plan(program, lines, options)


def plan_step(program: Program, options: PlanOptions | None = None) -> Plan:
    """
    Return the plan of one rank's training step, or of a forward alone: the program with operators fused, an
    implementation of each, and the order of all kernels, collectives and waits. A step in stages has a plan for each of
    its parts (`Plan.parts`). `options` None means the defaults.

    Raises `UnityError` if ranks would wait for each other for ever (a deadlock), and if the pipeline schedule does not
    fit the step's stages.
    """
    options = options or DEFAULT
    going = {*program.values_at_host.values()}
    program, staying = without_values_at_host(program)
    if not options.eager:
        are_casts_read = program.casts_alone or program.state_at_host
        gathers_cast = options.kernels == "triton" and options.fuse and not are_casts_read
        program = with_kept_casts(program, gathers_cast)
    if program.ring_attention:
        program = with_rings(program)
    if program.exchange_rows:
        program = with_routes(program)
    if options.kernels == "triton":
        program = with_savings(program, only_results=options.eager)
    if options.order is not None and program.pipeline is None:
        raise UnityError(f"pipeline schedule {options.order.name}: the plan has no stages; leave the schedule out")
    if program.pipeline is not None and (program.state_at_host or going):
        what = "state" if program.state_at_host else "values"
        raise UnityError(f"offload: a step in stages keeps its {what} on the devices; leave offload or the stages out")
    if program.pipeline is not None and program.optimizer is not None:
        return _plan_stages(program, options, program.pipeline)
    if options.kernels == "triton":
        program = with_kernels(program, options)
    program = _with_products(program, options)
    if not options.eager:
        program = with_short_gradients(program)
    if going:
        # Kernels may save other values: what is cast in their readers, what attention has summed up.
        program = with_values_at_host(program, still_going(program, going, staying))
    lines = schedule(program, options.bucket)
    check_order(f"spmd.program @{program.name}", calls(program, lines))
    return Plan(program, lines, options)


def _plan_stages(program: Program, options: PlanOptions, pipeline: Pipeline) -> Plan:
    """Return the plan of a step in stages. Raises `UnityError` for a schedule that does not fit them, or never ends."""
    order = pipeline_schedule(pipeline.order, pipeline.ranks, program.micro_batches, pipeline.chunks)
    bucket = bucket_bytes(program, options.bucket)
    options = replace(options, bucket=bucket)
    if options.order is not None:
        if options.order.rank_of != order.rank_of:
            raise UnityError(
                f"pipeline schedule {options.order.name}: its stages are on ranks {_listed(options.order.rank_of)}, "
                f"those of the plan on {_listed(order.rank_of)}; use a schedule of the plan's stages"
            )
        if order.gradient_delay:
            raise UnityError(
                f"pipeline schedule {options.order.name}: the plan's, {order.name}, goes on from step to step, which "
                "no file says; leave the schedule out"
            )
        order = options.order
    check(order)
    if not any(action.kind in TRANSFERS for rank in order.ranks for action in rank):
        order = with_sends(order)
    check_sends(order)
    step = steady_step(order) if order.gradient_delay else order
    return Plan(program, Schedule((), {}), options, step_parts(program, step, bucket))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def plan_graph(
    graph: Graph, machine: Machine, optimizer: Optimizer | None = None, options: PlanOptions | None = None
) -> Plan:
    """
    Return the plan of a placed graph's training step on a machine, as `-t triton` emits it. In a placed graph all
    operators have machine views. `options` None means the defaults.

    A forward is differentiated first, with the optimizer that it names, or else `optimizer` (None: SGD). If it is a
    part of a model, without a loss, the gradients of its outputs become inputs. Raises `UnityError` if the graph does
    not fit the machine.
    """
    if not graph.updates:
        graph = training_step(graph, graph.optimizer or optimizer or Optimizer(), machine.mesh)
    return plan_step(lower(graph, machine), options)

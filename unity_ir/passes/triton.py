"""`-t triton`: the module's training step as a Python program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.utils.target import Target

from unity_ir.dialects.convert import pcg_functions, to_graph
from unity_ir.dialects.convert_program import from_op
from unity_ir.dialects.imported import origin_of
from unity_ir.dialects.machine import module_machine
from unity_ir.dialects.spmd import ProgramOp
from unity_ir.errors import UnityError
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.machine.tuned import read_table
from unity_ir.passes.differentiate import Differentiate, OptimizerOptions
from unity_ir.passes.fuse_collectives import FuseCollectives
from unity_ir.passes.graph_pass import Switch
from unity_ir.passes.lower_to_spmd import REFERENCE, LowerToSpmd
from unity_ir.plan.check_step import check_step
from unity_ir.plan.forward import forward_of
from unity_ir.plan.pipeline.csv_text import from_csv
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.plan import AUTO, PlanOptions, plan_step


@dataclass(frozen=True)
class TritonTarget(OptimizerOptions, Target):
    """
    Print the module's training step as one self-contained Python program.

    A module without `spmd.program` is lowered first: differentiated with `optimizer` and its hyperparameters as by
    `pcg-differentiate`, and its collectives fused. For a module that is a whole step already, these options are an
    error.

    `matmul` chooses the implementation of matrix products: `triton`, `torch` (cuBLAS), or `auto`, for each product the
    faster one by estimate. `convolution` chooses that of convolutions: `torch` (cuDNN) or `triton`; `attention` that of
    plain attention in 16 bits: `triton`, `torch` (cuDNN, on GPUs that have it), or `auto`, for each the faster one.
    `channels` chooses the order of dims in which images of convolutions are stored: channels `last`, channels `first`,
    or `auto`, which is last where convolutions have 16-bit operands.
    `kernels` chooses that of all other operators; `torch` makes the whole program plain PyTorch, for CPUs. `tune` is a
    table of `unity-tune`: an operator measured there on the same shapes gets the faster implementation.

    Gradient synchronizations and weight gathers of fewer than `bucket` bytes are combined (by default as the plan says,
    or 1 MiB). With `fuse`, operators that one Triton kernel computes together are emitted as one line. With `evaluate`,
    the program also has the forward alone, without dropout, for evaluation on other data. `schedule` is a CSV file of
    actions, a row per rank, by which a step in stages is run instead of the order that its plan names.
    """

    name = "triton"

    matmul: str = AUTO
    kernels: str = "triton"
    convolution: str = "torch"
    attention: str = "auto"
    channels: str = "auto"
    tune: str | None = None
    bucket: int | None = None
    fuse: bool = True
    evaluate: Switch = False
    schedule: str | None = None

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """
        Write the Python program of the module's training step to `output`, lowering the module in place first if it has
        no `spmd.program`; `ctx` is xDSL's context.

        Raises `UnityError` unless the module has exactly one training step, with its serial forward, and for operators
        that no kernel covers.
        """
        lowered = any(isinstance(op, ProgramOp) for op in module.ops)
        settings = self.given
        if settings and (lowered or any(to_graph(f).updates for f in pcg_functions(module))):
            given = ", ".join(settings)
            raise UnityError(f"triton: the module is a whole training step already; give {given} to pcg-differentiate")
        if not lowered:
            if not any(to_graph(f).updates for f in pcg_functions(module)):
                Differentiate(**settings).apply(ctx, module)
            FuseCollectives().apply(ctx, module)
            LowerToSpmd().apply(ctx, module)
        programs = [op for op in module.ops if isinstance(op, ProgramOp)]
        if len(programs) != 1:
            raise UnityError(f"triton: a program is made of one training step, but the module has {len(programs)}")
        (op,) = programs
        name = op.sym_name.data + REFERENCE
        serial = next((f for f in module.ops if isinstance(f, FuncOp) and f.sym_name.data == name), None)
        if serial is None:
            raise UnityError(f"triton: the serial forward @{name}, which --check compares with, is missing")
        program = from_op(op)
        machine = module_machine(module) or load(f"box:{program.devices}")
        levels = machine.axis_levels if machine.mesh.sizes == program.mesh.sizes[: program.axes] else ()
        reference = to_graph(serial)
        tuned = None if self.tune is None else read_table(Path(self.tune))
        order = None if self.schedule is None else _read_schedule(Path(self.schedule))
        settings = self.matmul, self.kernels, self.convolution, tuned, self.fuse, self.bucket, order, self.attention
        options = PlanOptions(*settings, channels=self.channels)
        check_step(program, reference)
        links = [machine.levels[level].name for level in levels]
        peaks = {dtype: peak * program.devices for dtype, peak in machine.device.flops.items()} if levels else {}
        # A switch that is named without a value is None.
        forward = None if self.evaluate is False else plan_step(forward_of(program, machine), options)
        origin = origin_of(serial, reference)
        emitted = emit(plan_step(program, options), reference, "train.py", links, origin, peaks, forward)
        output.write(emitted.text)


def _read_schedule(path: Path) -> PipelineSchedule:
    """Read a pipeline schedule from a CSV file. Raises `UnityError` if it cannot be read, or is none."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UnityError(f"triton: schedule {path}: {getattr(error, 'strerror', None) or error}") from None
    return from_csv(text, path.name)

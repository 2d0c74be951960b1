"""Search for a plan, read one, and say, compare, keep and emit it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from xdsl.dialects.func import FuncOp
from xdsl.targets.mlir import MLIRTarget
from xdsl.utils.arg_spec import ArgSpec

from unity_ir.api.files import write_folder, write_text
from unity_ir.api.modules import as_unity_errors, new_context, verify
from unity_ir.api.options import (
    Option,
    check_arguments,
    search_options,
    seconds,
    with_settings,
)
from unity_ir.api.read_text import as_xdsl
from unity_ir.api.source import Source, file_source, source_of
from unity_ir.errors import UnityError, not_installed

if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from unity_ir.api.stats import Compared, Stats
    from unity_ir.api.step import Step
    from unity_ir.frontends.torch import Imported
    from unity_ir.interop.jax.step import JaxStep
    from unity_ir.interop.jax.trees import ArgumentTrees, LossStep
    from unity_ir.machine import Machine
    from unity_ir.pcg.graph import Graph
    from unity_ir.pcg.origin import Origin
    from unity_ir.plan.program import Program
    from unity_ir.search.result import SearchResult

Progress = Callable[[int, float], None]
"""Called by a search with the number of graphs explored, and the seconds of the best plan so far."""


class Plan:
    """
    A training step placed on a machine. `plan` (a search) and `load` (a file) return one; it does not change.

    Printed, it is its text. All methods raise `UnityError` where they cannot do what they are asked.
    """

    def __init__(self, source: Source, result: SearchResult | None = None):
        from unity_ir.dialects.convert import pcg_functions

        self._source, self._result = source, result
        functions = pcg_functions(source.module)
        if len(functions) != 1:
            raise UnityError(f"{source.name}: a plan is one function of pcg operations, not {len(functions)}; split it")
        self._function: FuncOp = functions[0]

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Plan of @{self.name} on {self.machine.name}>"

    @property
    def name(self) -> str:
        """The name of the model's function."""
        return self._function.sym_name.data

    @cached_property
    def text(self) -> str:
        """The plan as text (`.pcg`): what `unity-opt` prints, and `load` reads."""
        out = StringIO()
        MLIRTarget().emit(new_context(), self._source.module, out)
        return out.getvalue()

    @cached_property
    def graph(self) -> Graph:
        """The placed graph of the plan, as the rest of this package (costs, simulation, lowering) uses it."""
        from unity_ir.dialects.convert import to_graph

        with as_unity_errors(self._source.name, self._source.module):
            return to_graph(self._function)

    @cached_property
    def machine(self) -> Machine:
        """The machine that the plan is for: its devices, levels and links."""
        from unity_ir.api.stats import machine_of

        return machine_of(self._source.module, self.graph)

    @cached_property
    def stats(self) -> Stats:
        """Seconds, bytes and tokens per second of an iteration (`stats.Stats`)."""
        from unity_ir.api.stats import stats_of

        with as_unity_errors(self._source.name, self._source.module):
            return stats_of(self._source.module, self._function)

    @property
    def note(self) -> str | None:
        """
        A message for the user if the search ended early, by Ctrl-C or its budget; None if it did not, or if the plan
        was loaded.
        """
        from unity_ir.passes.search import end_message

        return None if self._result is None else end_message(self._result, self.name)

    @property
    def imported(self) -> Imported | None:
        """
        The graph and tensors of the PyTorch module or the loss of JAX that this plan is of, if it was planned in this
        process; None for any other plan.
        """
        return self._source.imported

    def explain(self, operator: str) -> str:
        """
        Explain, as text, why the search divides an operator as it does: its choice, and what the best plan with each
        alternative would cost, as `unity-opt --explain` prints it. `operator` is its name in the plan's text
        (`matmul1`), or its number from 1.

        Raises `UnityError` for plans that were loaded or made by hand: only the search that found a plan has this
        information.
        """
        from unity_ir.passes.search import explained

        if self._result is None:
            raise UnityError("explain: this plan was read, and what its search has looked at is gone; plan it anew")
        return explained(self._result, self.name, operator)

    def diff(self, other: Plan) -> str:
        """
        Describe, as text, how `other` differs from this plan: seconds, bytes, and what is divided differently. This
        plan is "before", `other` is "after".
        """
        from unity_ir.api.diff import diff

        return diff(self.compared, other.compared)

    def report(self, path: str | Path, against: Plan | None = None, baselines: bool = False) -> None:
        """
        Write a report on the plan to a file, atomically: one HTML page, which opens without a network, with its graph,
        a simulated iteration, memory and links, as `unity-opt --report` writes it.

        With `against`, the report also compares this plan with that one, as `diff` does. With `baselines`, it also
        prices plans that people make by hand, which takes a while for large models.
        """
        from unity_ir.api.report import report_html

        with as_unity_errors(self._source.name, self._source.module):
            page = report_html(self.compared, None if against is None else against.compared, baselines)
        write_text(path, page)

    @cached_property
    def compared(self) -> Compared:
        """The plan's graph, machine and stats, as comparisons and reports take them."""
        from unity_ir.api.stats import Compared

        return Compared(self.graph, self.machine, self.stats)

    def save(self, path: str | Path) -> None:
        """Write the plan's text to a file, atomically; `load` reads it."""
        write_text(path, self.text)

    def save_weights(self, path: str | Path) -> None:
        """
        Write the weights and tables (buffers, constants) of the module, or of the loss of JAX, that was planned to a
        safetensors file, as `unity-opt --weights-out` does: a program can start training from it. Raises `UnityError`
        for other plans.
        """
        if self.imported is None:
            raise UnityError(
                "save_weights: this plan was not made of a module or a loss of JAX here, so it has no weights"
            )
        try:
            self.imported.save(path)
        except OSError as error:
            raise UnityError(f"{path}: {error.strerror or error}") from error

    def emit(self, path: str | Path, **options: Option) -> None:
        """
        Write the plan's program to a file, atomically: the one that `unity-opt -t triton` writes. `options` are the
        options of that target: `optimizer`, `lr`, `weight_decay`, `clip`, `groups`, .., `kernels="torch"`,
        `evaluate=True`.
        """
        write_text(path, self.program_text(**options))

    def program_text(self, **options: Option) -> str:
        """Return the text of the plan's program, as `emit` writes it, with the same `options`."""
        from unity_ir.passes.triton import TritonTarget

        spec = ArgSpec("triton", {name: (value,) for name, value in options.items()})
        check_arguments("emit", spec, TritonTarget)
        out, module = StringIO(), self._source.module.clone()
        with as_unity_errors(self._source.name, module), as_xdsl("written by -t triton"):
            TritonTarget.from_spec(spec).emit(new_context(), module, out)
        return out.getvalue()

    def placements(self) -> dict[str, Any]:
        """
        Return the plan as DTensor placements, as data that JSON can hold: what `unity-opt -t dtensor` prints. The
        fields are those of docs/pytorch.md. Raises `UnityError`, in a message that names the operator and the value, if
        DTensor cannot express the plan.
        """
        from unity_ir.interop.dtensor.described import described

        return described(self._step_program, self.machine)

    @cached_property
    def _step_program(self) -> Program:
        from unity_ir.interop.expressible import DTENSOR, step_program

        with as_unity_errors(self._source.name, self._source.module):
            return step_program(self.graph, self.machine, DTENSOR)

    @cached_property
    def _origin(self) -> Origin:
        from unity_ir.dialects.imported import origin_of
        from unity_ir.pcg.origin import Origin

        return origin_of(self._function, self.graph) or Origin()

    @cached_property
    def _jax_program(self) -> Program:
        from unity_ir.interop.expressible import JAX, step_program

        with as_unity_errors(self._source.name, self._source.module):
            return step_program(self.graph, self.machine, JAX)

    def jax(self, mesh: Mesh | None = None, form: str = "manual") -> JaxStep | LossStep:
        """
        Return the plan's step as a function of JAX: `step(weights, batch)` returns the loss, and the gradients of the
        weights in the weights' shardings, for Optax or another optimizer (docs/jax.md). For a plan of a loss of JAX,
        made in this process, the step takes and returns the loss's own trees (`LossStep`), else arrays by name.

        `mesh` must have the plan's dims (`step.mesh`); None makes it of JAX's first devices. In the form `manual` the
        step is one `jax.shard_map`, with the collectives of the plan; in the form `annotated` it is on whole arrays,
        with the sharding of each value, and XLA adds the collectives.

        Raises `UnityError` where JAX cannot express the plan, is not installed, or has fewer devices.
        """
        with _if_installed():
            from unity_ir.interop.jax.step import JaxStep

            own = {} if self.imported is None else self.imported.tables
            step = JaxStep(self._jax_program, self.machine, own, mesh, form, self._origin.tables)
            trees = self._argument_trees
        if trees is None:
            return step
        from unity_ir.interop.jax.trees import LossStep

        return LossStep(step, trees)

    @property
    def _argument_trees(self) -> ArgumentTrees | None:
        """How the arguments of the loss of JAX that was planned hold weights and inputs; None for other models."""
        traced = getattr(self.imported, "trace", None)
        if traced is None:
            return None
        from unity_ir.frontends.jax.imported import input_name
        from unity_ir.interop.jax.trees import ArgumentTrees

        inputs = [None if leaf.is_key else input_name(leaf) for leaf in traced.batch]
        names, shapes = [leaf.names for leaf in traced.weights], [leaf.shape for leaf in traced.weights]
        return ArgumentTrees(traced.weights_tree, names, shapes, traced.batch_tree, inputs)

    def stablehlo(self, form: str = "manual", platform: str = "cuda") -> str:
        """
        Return the plan's step as StableHLO text with Shardy's annotations, for XLA; `form` is that of `jax`. It is
        written by JAX, which must be installed, for a platform (`cuda`, `rocm`, `tpu` or `cpu`) that need not be there.
        Raises `UnityError` where JAX cannot express the plan.
        """
        with _if_installed():
            from unity_ir.interop.jax.step import stablehlo

            return stablehlo(self._jax_program, self.machine, form, platform)

    def linalg(self, form: str = "annotated") -> str:
        """
        Return the plan's step as text of upstream MLIR, as `unity-opt -t linalg` prints it (docs/mlir.md): `linalg`
        operations on whole tensors, each annotated with its layout in the `shard` dialect, or, in the form `manual`, on
        one device's pieces, with the plan's collectives. Raises `UnityError` where `shard` cannot express the plan.
        """
        from unity_ir.interop.expressible import LINALG, step_program
        from unity_ir.interop.linalg.step import step_module

        with as_unity_errors(self._source.name, self._source.module):
            return f"{step_module(step_program(self.graph, self.machine, LINALG), self.machine, form)!s}\n"

    def stages(self) -> dict[str, Any]:
        """
        Return the stages of a pipelined plan, as data that JSON can hold, for torch.distributed.pipelining: the modules
        and parameters of each, and the schedule as CSV (docs/pytorch.md). Raises `UnityError` for a plan without
        stages.
        """
        from unity_ir.interop.pipelining import stages

        with as_unity_errors(self._source.name, self._source.module):
            return stages(self.graph, self.machine)

    def chakra(self, folder: str | Path) -> None:
        """
        Write Chakra execution traces of the plan's training step to a folder, atomically, a file for each rank, with
        the process groups in a file of their own: what `unity-opt --chakra` writes, and ASTRA-sim reads
        (docs/chakra.md). A folder that is there may have only such files, which are replaced.

        Raises `UnityError` for other folders, and for a schedule that goes on from step to step.
        """
        from unity_ir.interop.chakra.step import chakra_step, is_file_of_traces

        with as_unity_errors(self._source.name, self._source.module):
            step = chakra_step(self.graph, self.machine)
        write_folder(folder, step.files(), is_file_of_traces)

    def parallelize(self, module: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """
        Change a PyTorch module in place so that it runs by the plan, and return it. Its parameters become DTensors.
        Calling it with the whole batch (the module's inputs, then the loss's targets) returns the loss, a DTensor,
        whose `backward` leaves a DTensor in the `grad` of each parameter. Optimizer, clipping and checkpoints are
        PyTorch's.

        Every rank calls this with the same plan and the same weights. Values are redistributed where the plan moves
        them, forward and backward, and nowhere else. `mesh` must have the dims of the plan (`placements()["mesh"]`), or
        those divided further (4 into 2 x 2, say), or one dim of all devices; None makes a mesh with the plan's dims, of
        all ranks. Raises `UnityError` where DTensor cannot express the plan, and where module or mesh are not the
        plan's.
        """
        with _if_installed():
            from unity_ir.api.ranks import ensure_process_group
            from unity_ir.interop.dtensor.module import PlannedStep, parallelize
        own = {} if self.imported is None else self.imported.tables
        step = PlannedStep(self._step_program, self.machine, self._origin, own)
        ensure_process_group(None)
        return parallelize(module, step, mesh)

    def program(
        self,
        weights: nn.Module | Mapping[str, torch.Tensor] | str | Path | None = None,
        *,
        seed: int = 0,
        backend: str | None = None,
        **options: Option,
    ) -> Step:
        """
        Join the ranks, and return the plan's program as a step to call in a training loop: `loss = step(batch)`. Every
        rank calls this, with the same plan; `torchrun` starts as many ranks as the machine has devices.

        `weights` are what training starts from: a module, its state dict (whole tensors by name), a safetensors file,
        or a Hugging Face folder of such files. None takes those of the module that was planned or, for a model without
        weights, random ones drawn by `seed`. `backend` is `nccl` or `gloo`; None takes that of the process group, if
        there is one, else `nccl` if there are GPUs. `options` are those of `emit`; by default kernels are Triton's with
        GPUs, else PyTorch's, and the program can evaluate.
        """
        with _if_installed():
            import torch

            from unity_ir.api.step import Model, start
        kernels = "triton" if torch.cuda.is_available() else "torch"
        text = self.program_text(**{"kernels": kernels, "evaluate": True, **options})
        own: dict[str, torch.Tensor] | None = None
        if self.imported is not None:
            # Those of which only shapes were given have no values.
            all_own = {**self.imported.weights, **self.imported.tables}
            own = {name: tensor for name, tensor in all_own.items() if not tensor.is_meta}
        inputs = tuple(node.name for node in self.graph.inputs)
        return start(Model(self.name, inputs, text, own), weights, seed, backend)


@contextmanager
def _if_installed() -> Generator[None]:
    """Raise `UnityError`, with what to install, where a library is missing that only some work needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = not_installed(error)
        if missing is None:
            raise
        raise missing from error


def plan(
    model: nn.Module | Callable[..., Any] | str | Path,
    inputs: object = None,
    loss: Callable[..., Any] | None = None,
    *,
    machine: str | None = None,
    search: str | None = "joint",
    degrees: str | None = None,
    optimizer: str | None = None,
    freeze: str | None = None,
    precision: str | None = None,
    micro_batches: int | str | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    loss_pieces: int | str | None = None,
    stages: int | str | None = None,
    schedule: str | None = None,
    budget: float | None = None,
    profile: str | Path | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    **sizes: int | str,
) -> Plan:
    """
    Search for the fastest plan of a model's training step on a machine, as `unity-opt` does with the options of the
    same names; return it.

    `model` is one of these: a PyTorch module; a loss function of JAX; the name of a model of the zoo, with `sizes` such
    as `batch=8, layers=2`; the path of a `.pcg` file; or the text of one. A PyTorch module needs an example of its
    `inputs` (a tensor, a tuple of arguments, or a dict by name; a whole batch of all ranks). Its `loss` is called as
    `loss(outputs, *targets)`, the targets being the last inputs; without one, the loss is in the module's output. A
    function of JAX (`frontends.jax.from_jax`) returns a loss, and its `inputs` are what it is called with: `(weights,
    batch, ..)`, trees of arrays or of `jax.ShapeDtypeStruct`s. `name` is that of the graph, by default the module's
    class or the function.

    `machine` is a preset or a file: `dgx-h100:2`, `2gpu`, `cluster.toml`; `profile` a file of measurements of it.
    `search` is a strategy, with options after it (`mcmc,seed=3`), or None for a text that is a plan already; `degrees`,
    such as `tp=8,dp=4,zero=1`, makes the plan by degrees of parallelism instead. `optimizer` is the one to train with
    (`adamw`), whose state takes memory. `freeze` has patterns of names of weights that are not trained, as on the
    command line: `freeze="*,!lm_head.*"`; parameters of a module that do not require gradients are frozen without it.
    `precision="bf16"` computes in bf16 with weights in f32. `micro_batches`, `recompute`, `offload`, `loss_pieces`,
    `stages` and `schedule` are as on the command line, where `auto` lets the search choose.

    `budget` is a number of seconds after which the best plan so far is taken, as after Ctrl-C (`Plan.note` then says
    so). `progress` is called with the number of graphs explored, and the seconds of the best plan so far.

    Raises `UnityError` for options that are wrong or contradict each other, a model that cannot be imported, and a plan
    that does not fit the devices' memory.
    """
    with _if_installed():
        source = source_of(model, inputs, loss, name, sizes)
    if freeze is not None:
        from unity_ir.passes.freeze import Freeze

        with as_unity_errors(source.name, source.module):
            Freeze(freeze).apply(new_context(), source.module)
    if precision not in (None, "f32"):
        from unity_ir.passes.mixed_precision import MixedPrecision
        from unity_ir.pcg.mixed_precision import mixed_precision_options

        options = mixed_precision_options(precision, "plan: precision")
        with as_unity_errors(source.name, source.module):
            MixedPrecision(**options).apply(new_context(), source.module)
    given: dict[str, Option | None] = {
        "micro_batches": micro_batches,
        "recompute": recompute,
        "offload": offload,
        "loss_pieces": loss_pieces,
        "stages": stages,
        "schedule": schedule,
        "optimizer": optimizer,
    }
    asked_by = "search"
    if degrees is not None:
        if search not in (None, "joint"):
            raise UnityError("plan: degrees and search each make the plan; leave one out")
        asked_by, search = "degrees", ",".join(filter(None, ("degrees", degrees)))
    if search is None:
        said = {**given, "budget": budget, "machine": machine, "profile": profile}
        extra = next((name for name, value in said.items() if value is not None), None)
        if extra is not None:
            raise UnityError(f"plan: {extra} is of a search; give search, or leave it out")
        return Plan(source)
    settings = with_settings(search_options(search, f"plan: {asked_by}"), given, "plan", asked_by)
    if budget is not None:
        settings["seconds"] = seconds(str(budget), "plan: budget")
    if profile is not None:
        if machine is None:
            raise UnityError("plan: profile is of a machine's devices; give machine")
        machine = f"{machine},profile={profile}"
    return _searched(source, machine, settings, progress)


def _searched(source: Source, machine: str | None, settings: Mapping[str, Option], progress: Progress | None) -> Plan:
    """Run the pass pcg-search on the module, in place."""
    from unity_ir.dialects.machine import module_machine
    from unity_ir.passes.search import Search

    if machine is None and module_machine(source.module) is None:
        raise UnityError("plan: the machine is missing; give machine, such as dgx-h100:1")

    def shown(name: str) -> AbstractContextManager[Progress | None]:
        return nullcontext(progress)

    made = cast(Any, Search)(machine=machine, **settings)
    Plan(source)  # of one function
    with as_unity_errors(source.name, source.module), as_xdsl("planned"):
        ((_, result),) = made.results(source.module, shown)
        verify(source.module)
    return Plan(source, result)


def load(path: str | Path) -> Plan:
    """
    Read the plan in a file that `Plan.save` or `unity-opt -o` has written. Raises `UnityError` for wrong text, and if
    the file cannot be read.
    """
    return Plan(file_source(path))

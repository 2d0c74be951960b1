"""
`unity-opt`: reads a module, applies passes to it, prints it.

    unity-opt model.pcg --search --machine=summit:4 -p pcg-differentiate,lower-pcg-to-spmd -t triton

xDSL's driver with a frontend for `.pcg`, the search as a flag, and errors of one line. It finds this package's
dialects, passes and targets as any xDSL driver does, through `unity_ir.universe`.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from inspect import signature
from io import BytesIO, StringIO
from shutil import rmtree
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute
from xdsl.passes import ModulePass, PassPipeline
from xdsl.printer import Printer
from xdsl.utils.arg_spec import parse_pipeline, parse_spec
from xdsl.utils.exceptions import (
    ArgSpecParseError,
    DiagnosticException,
    ParseError,
    PassFailedException,
    VerifyException,
)
from xdsl.xdsl_opt_main import xDSLOptMain

from unity_ir.api.files import place_folder, staged_files, staged_folder, write_files
from unity_ir.api.options import check_arguments, search_options, seconds, with_settings
from unity_ir.api.read_text import as_xdsl, check_structure, read_module
from unity_ir.api.text_errors import did_you_mean, name_operation, parse_error
from unity_ir.errors import UnityError
from unity_ir.tools.command_line import Once, check_folder, outcome
from unity_ir.tools.opt_arguments import add_arguments, check_repeated, expanded, usage_error
from unity_ir.tools.opt_help import add_help
from unity_ir.version import __version__

if TYPE_CHECKING:
    from unity_ir.api.plans import Plan
    from unity_ir.frontends.torch import Imported
    from unity_ir.interop.chakra.step import ChakraStep
    from unity_ir.pcg.optimizer import Optimizer


class UnclosedBuffer(StringIO):
    """String buffer whose text can still be read after it is closed: xDSL's driver closes it even after an error."""

    def close(self) -> None:
        """Do nothing, so that the text can be read after the driver closes the buffer."""
        pass


class UnityOpt(xDSLOptMain):
    """
    xDSL's driver with this project's options: search, statistics, traces, import from PyTorch.

    Raises `UnityError`, `ParseError`, `DiagnosticException` or `OSError` for errors that a user can fix.
    """

    version_format = f"unity-opt {__version__} (xDSL {{xdsl_version}})"

    output: StringIO | None = None
    """The content of the file of `-o`, which is written only if everything succeeds."""

    imported: Imported | None = None
    """The model that `--from-torch` or `--from-jax` imported."""

    against: Plan | None = None
    """The plan of `--against`."""

    derivation: str | None = None
    """The content of the file of `--derivation-out`."""

    pictures: Mapping[str, str] = MappingProxyType({})
    """The contents of the files of `--trace`, `--timeline` and `--report`, by file name."""

    traces: ChakraStep | None = None
    """The files in the folder of `--chakra`."""

    def register_all_arguments(self, arg_parser: ArgumentParser) -> None:
        """Add xDSL's options and this project's to the parser."""
        arg_parser.register("action", None, Once)
        super().register_all_arguments(arg_parser)
        arg_parser.prog = "unity-opt"
        arg_parser.error = usage_error
        add_help(arg_parser, add_arguments(arg_parser))

    # Reading

    def register_all_frontends(self) -> None:
        """Register `parse_text` as the reader of `.pcg` and `.mlir` files, beside xDSL's readers."""
        super().register_all_frontends()
        self.available_frontends["mlir"] = self.available_frontends["pcg"] = self.parse_text

    def parse_text(self, io: IO[bytes]) -> ModuleOp:
        """
        Parse the text of a stream, and check the structure of the module (`check_structure`) unless verification is
        disabled; return the module. Raises as `read_module` does, and `UnityError` for a wrong structure.
        """
        name, implicit = self.get_input_name(), not self.args.no_implicit_module
        module = read_module(self.ctx, io.read(), name, implicit, raise_verify=self.args.verify_diagnostics)
        if not self.args.disable_verify:
            self.with_errors_said(module, check_structure)
            from unity_ir.dialects.convert import drop_names, pcg_functions

            # The generic form has every input's name as an attribute, too.
            for func in pcg_functions(module):
                drop_names(func)
        return module

    def get_input_name(self) -> str:
        """Return the name of the input for error messages: a file's, `--model=...`, `--from-torch=...`, .."""
        return next((f"{option}={value}" for option, value in self.models()), None) or super().get_input_name()

    def models(self) -> list[tuple[str, str]]:
        """Return the options given that name a model to read instead of a file, with their values."""
        args = self.args
        given = (("--model", args.model), ("--from-torch", args.from_torch), ("--from-jax", args.from_jax))
        return [(option, value) for option, value in given if value is not None]

    def get_input_stream(self) -> tuple[IO[bytes], str]:
        """
        Return (stream, file extension) of the input: the text of a model of the zoo, from PyTorch or from JAX, or the
        input file.

        Raises `UnityError` if more than one is given, or `--weights-out` without a model that is imported.
        """
        given = [option for option, _ in self.models()]
        if self.args.input_file is not None:
            given.append(f"the file {self.args.input_file}")
        if len(given) > 1:
            raise UnityError(f"unity-opt: {' and '.join(given)} are both given; leave one out")
        if self.args.weights_out is not None and self.args.from_torch is None and self.args.from_jax is None:
            raise UnityError("unity-opt: --weights-out writes the weights of --from-torch or --from-jax; give one")
        if self.args.model is not None:
            return self.model_text(), "pcg"
        if self.args.from_torch is not None or self.args.from_jax is not None:
            return self.imported_text(), "pcg"
        # Read whole, so that `-o` may name the same file.
        stream, extension = super().get_input_stream()
        data = stream.read()
        if self.args.input_file is not None:
            stream.close()
        return BytesIO(data), extension

    def model_text(self) -> IO[bytes]:
        """Build the model of the zoo that `--model` names; return its graph as text (.pcg), in a stream."""
        from unity_ir.api.source import module_of_graph
        from unity_ir.models import from_text

        return BytesIO(str(module_of_graph(from_text(self.args.model))).encode())

    def imported_text(self) -> IO[bytes]:
        """Import the model that `--from-torch` or `--from-jax` names; return its graph as text (.pcg), in a stream."""
        from unity_ir.api.source import module_of_imported

        if self.args.from_jax is not None:
            from unity_ir.frontends.jax.load import from_text as from_jax

            self.imported = from_jax(self.args.from_jax)
        else:
            from unity_ir.frontends.torch.load import from_text as from_torch

            self.imported = from_torch(self.args.from_torch)
        return BytesIO(str(module_of_imported(self.imported)).encode())

    def prepare_input(self) -> tuple[list[tuple[IO[bytes], int]], str]:
        """
        Return (the input as (stream, offset) pairs, file extension), as xDSL's driver does. There is one pair, or one
        per part of the file with `--split-input-file`; the offset counts the lines before the part. Raises `UnityError`
        for an unknown extension.
        """
        try:
            return super().prepare_input()
        except ValueError as error:
            raise UnityError(f"{self.get_input_name()}: {error}; name it .pcg or .mlir, or say -f mlir") from error

    # Passes

    def setup_pipeline(self) -> None:
        """
        Check the options, and make the pipeline of passes from them: freezing, mixed precision and search, if these are
        asked for, then the passes of `-p`.

        Raises `UnityError` for options that contradict each other, and for unknown passes and arguments.
        """
        args = self.args
        asked_by = "--search"
        if args.degrees is not None:
            if args.search is not None:
                raise UnityError("unity-opt: --degrees and --search each make the plan; leave one out")
            asked_by, args.search = "--degrees", ",".join(filter(None, ("degrees", args.degrees)))
        used = (args.search, args.stats, args.print_plan, args.trace, args.timeline, args.chakra, args.report)
        if args.machine is not None and not any(used):
            raise UnityError(
                "unity-opt: --machine says where to search and to cost; "
                "add --search, --stats, --print-plan, --trace, --timeline, --chakra or --report"
            )
        self.check_files()
        for flag, value in (("--against", args.against), ("--baselines", args.baselines or None)):
            if value is not None and args.report is None:
                raise UnityError(f"unity-opt: {flag} is compared in a report; add --report=FILE.html")
        if args.against is not None:
            self.against = self.other_plan(args.against)
        if args.profile == "" or args.machine == "":
            raise UnityError(f"unity-opt: --{'profile' if args.profile == '' else 'machine'} is empty; leave it out")
        if args.explain is not None and args.search is None:
            raise UnityError("unity-opt: --explain explains what a search has chosen; add --search")
        if args.micro_batches is not None and args.search is None:
            raise UnityError("unity-opt: --micro-batches divides the batch of the plan that is made; add --search")
        if args.recompute is not None and args.search is None:
            raise UnityError("unity-opt: --recompute is of the plan that is made; add --search")
        if args.offload is not None and args.search is None:
            raise UnityError("unity-opt: --offload is of the plan that is made; add --search")
        if args.loss_pieces is not None and args.search is None:
            raise UnityError("unity-opt: --loss-pieces is of the plan that is made; add --search")
        for flag, value in (("--stages", args.stages), ("--schedule", args.schedule)):
            if value is not None and args.search is None:
                raise UnityError(f"unity-opt: {flag} is of the plan that is made; add --search")
        if args.budget is not None and args.search is None:
            raise UnityError("unity-opt: --budget is what a search may take; add --search")
        if self.args.profile is not None:
            if self.args.machine is None:
                raise UnityError("unity-opt: --profile is of a machine's devices; add --machine")
            self.args.machine += f",profile={self.args.profile}"
        for flag, text in (("-p", self.args.passes), ("-t", self.args.target)):
            check_repeated(flag, text)
        specs = list(parse_pipeline(self.args.passes))
        for spec in specs:
            if spec.name not in self.available_passes:
                raise UnityError(f"unity-opt: unknown pass {spec.name}{did_you_mean(spec.name, self.available_passes)}")
            check_arguments(f"unity-opt: -p {self.args.passes}", spec, self.available_passes[spec.name]())
        try:
            super().setup_pipeline()
        except ValueError as error:
            raise UnityError(f"unity-opt: -p {self.args.passes}: {error}") from error
        self.check_target()
        if self.args.search is not None:
            search: Any = self.available_passes["pcg-search"]()
            options: dict[str, Any] = search_options(self.args.search, f"unity-opt: {asked_by}")
            if self.args.budget is not None:
                options["seconds"] = seconds(self.args.budget)
            settings = ("micro_batches", "recompute", "offload", "loss_pieces", "stages", "schedule")
            given = {name: getattr(args, name) for name in settings}
            options = with_settings(options, given, "unity-opt", asked_by, lambda name: f"--{name.replace('_', '-')}")
            options["explain"] = self.args.explain
            if self.trains_with is not None:
                if options.setdefault("optimizer", self.trains_with) != self.trains_with:
                    raise UnityError(
                        f"unity-opt: --search plans for {options['optimizer']}, but what comes after it trains with "
                        f"{self.trains_with}; say the same"
                    )
            if (ema := self._of_training("ema", (int, float))) is not None:
                options.setdefault("ema", ema)
            first = search(machine=self.args.machine, **options)
            self.pipeline = PassPipeline((first, *self.pipeline.passes), self.pipeline.callback)
        if self.args.mixed_precision is not None:
            mixed: Any = self.available_passes["pcg-mixed-precision"]()
            from unity_ir.pcg.mixed_precision import mixed_precision_options

            first = mixed(**mixed_precision_options(self.args.mixed_precision))
            self.pipeline = PassPipeline((first, *self.pipeline.passes), self.pipeline.callback)
        if self.args.freeze is not None:
            frozen: Any = self.available_passes["pcg-freeze"]()
            self.pipeline = PassPipeline(
                (frozen(weights=self.args.freeze), *self.pipeline.passes), self.pipeline.callback
            )
        if self.args.print_ir_after is not None:
            self.pipeline = _printing(self.pipeline, self.args.print_ir_after, self.args.print_op_generic)

    @property
    def trains_with(self) -> str | None:
        """
        The name of the optimizer that the command line gives to `pcg-differentiate` or to the target, such as `adam`;
        None if it gives none. A search plans for this optimizer, since its state takes memory.
        """
        return self._of_training("optimizer", (str,))

    def _of_training(self, name: str, kinds: tuple[type, ...]) -> Any:
        """Return the option `name` of `pcg-differentiate` or of the target, of one of these types; None without."""
        given = [s for s in parse_pipeline(self.args.passes) if s.name == "pcg-differentiate"]
        given += [parse_spec(self.args.target)] if self.args.target.startswith("triton") else []
        values = (value for spec in given for value in spec.parameters.get(name, ()))
        return next((value for value in values if isinstance(value, kinds)), None)

    @property
    def optimizer(self) -> Optimizer | None:
        """
        The optimizer called `trains_with` (by default sgd), with its default hyperparameters, and with the average of
        weights (`ema`) that the command line asks for; None if it asks for neither.
        """
        from unity_ir.pcg.optimizer import Optimizer, optimizer_of

        ema = self._of_training("ema", (int, float))
        if self.trains_with is None and ema is None:
            return None
        return optimizer_of("unity-opt", self.trains_with or Optimizer().name, {} if ema is None else {"ema": ema})

    def check_files(self) -> None:
        """
        Raise `UnityError` if an option's file name is empty or its folder is not there, or if two of the command line's
        files are the same; only `-o` may name the input's file.
        """
        written = {
            "--trace": self.args.trace,
            "--timeline": self.args.timeline,
            "--chakra": self.args.chakra,
            "--report": self.args.report,
            "-o": self.args.output_file,
            "--derivation-out": self.args.derivation_out,
            "--weights-out": self.args.weights_out,
        }
        seen: dict[str, str] = {}
        if self.args.input_file is not None:
            seen[os.path.realpath(self.args.input_file)] = "the input"
        for flag, file in written.items():
            if file == "":
                raise UnityError(f"unity-opt: {flag} is empty; name a file")
            if file is None or file == os.devnull:
                continue
            check_folder("unity-opt", flag, file)
            path = os.path.realpath(file)
            # `-o` may name the input: it is read whole before.
            if path in seen and not (flag == "-o" and seen[path] == "the input"):
                raise UnityError(f"unity-opt: {seen[path]} and {flag} are both {file}; name two files")
            seen[path] = flag

    def check_target(self) -> None:
        """Raise `UnityError` for wrong arguments of the target (`-t`), so that they are found before the search."""
        spec = parse_spec(self.args.target)
        factory: Any = self.available_targets[spec.name]
        if spec.parameters and not signature(factory).parameters:
            kind: Any = factory()
            check_arguments(f"unity-opt: -t {self.args.target}", spec, kind)
            try:
                kind.from_spec(spec)
            except ValueError as error:
                raise UnityError(f"unity-opt: -t {self.args.target}: {error}") from error

    def with_errors_said(self, module: ModuleOp, work: Callable[[ModuleOp], None]) -> None:
        """
        Call `work(module)`, which verifies or changes the module, and say for users what fails in it: raises
        `UnityError`, in a message that names the operation, where verification fails, and `PassFailedException` where a
        pass fails. If that is since a plan does not fit the memory, prints the plan's costs before, with `--stats`.
        """
        try:
            with as_xdsl("changed or verified"):
                work(module)
        except PassFailedException as error:
            if self.args.stats:
                _print_misfit(error.__cause__)
            raise
        except VerifyException as error:
            if self.args.verify_diagnostics:
                raise
            raise UnityError(f"{self.get_input_name()}: {name_operation(module, error)}") from error

    def apply_passes(self, prog: ModuleOp) -> None:
        """
        Run the pipeline of passes on the module `prog`, in place. Then print `--stats` and `--print-plan`, and prepare
        the files of `--derivation-out`, `--trace`, `--timeline`, `--chakra` and `--report`, for those that are asked
        for.
        """
        self.with_errors_said(prog, super().apply_passes)
        if self.args.derivation_out is not None:
            self.derivation = _derivation_text(prog)
        if self.args.stats:
            self.print_stats(prog)
        if self.args.print_plan:
            self.print_plan(prog)
        if self.args.trace is not None or self.args.timeline is not None:
            self.pictures = self.draw(prog)
        if self.args.chakra is not None:
            self.traces = self.chakra(prog)
        if self.args.report is not None:
            self.pictures = {**self.pictures, self.args.report: self.report(prog)}

    def print_plan(self, module: ModuleOp) -> None:
        """
        Print to stderr the plan of each pcg function's training step (`--print-plan`): kernels, collectives and waits.
        """
        from unity_ir.api.stats import machine_of
        from unity_ir.dialects.convert import pcg_functions, to_graph
        from unity_ir.plan.listing import listing
        from unity_ir.plan.plan import plan_graph

        for func in pcg_functions(module):
            graph = to_graph(func)
            print(listing(plan_graph(graph, machine_of(module, graph, self.args.machine))), file=sys.stderr, end="")

    def print_stats(self, module: ModuleOp) -> None:
        """Print to stderr what each pcg function of a module costs (`--stats`): time, memory and simulation."""
        from unity_ir.api.stats import stats_of
        from unity_ir.dialects.convert import pcg_functions

        for func in pcg_functions(module):
            print(stats_of(module, func, self.args.machine, self.optimizer), file=sys.stderr)

    def draw(self, module: ModuleOp) -> Mapping[str, str]:
        """
        Simulate an iteration of the module's only pcg function; return the contents of the files that `--trace` and
        `--timeline` ask for, by file name. Nothing is written yet.

        Raises `UnityError` for a lowered module, and unless there is exactly one function.
        """
        from unity_ir.api.stats import machine_of
        from unity_ir.dialects.convert import to_graph
        from unity_ir.plan.plan import plan_graph
        from unity_ir.simulate.full import simulate
        from unity_ir.simulate.replay import replay
        from unity_ir.simulate.stages import simulate_stages
        from unity_ir.simulate.timeline import timeline_svg
        from unity_ir.simulate.trace import trace

        graph = to_graph(_shown(module, "--trace" if self.args.trace is not None else "--timeline"))
        machine = machine_of(module, graph, self.args.machine)
        plan = plan_graph(graph, machine)
        if plan.pipeline is None:
            timeline = simulate(replay(plan, machine))
        else:
            timeline = simulate_stages(plan, machine).timeline()
        title = f"@{graph.name} on {machine.name}"
        drawn = {self.args.trace: trace, self.args.timeline: timeline_svg}
        return {file: draw(timeline, title) for file, draw in drawn.items() if file is not None}

    def chakra(self, module: ModuleOp) -> ChakraStep:
        """
        Return the traces of `--chakra`, of the module's only pcg function. Raises `UnityError` as `draw` does, and for
        a step of which there is no trace.
        """
        from unity_ir.api.stats import machine_of
        from unity_ir.dialects.convert import to_graph
        from unity_ir.interop.chakra.step import chakra_step

        graph = to_graph(_shown(module, "--chakra"))
        return chakra_step(graph, machine_of(module, graph, self.args.machine), self.optimizer)

    def report(self, module: ModuleOp) -> str:
        """Return the page of `--report` on the module's only pcg function. Raises `UnityError` as `draw` does."""
        from unity_ir.api.report import report_html
        from unity_ir.api.stats import compared

        plan = compared(module, _shown(module, "--report"), self.args.machine, self.optimizer)
        return report_html(plan, None if self.against is None else self.against.compared, self.args.baselines)

    def other_plan(self, path: str) -> Plan:
        """
        Read the plan in the file of `--against`; called before the search, so that a wrong file is found at once.
        Raises `UnityError` for an empty name, and for a file that cannot be read or is no plan.
        """
        from unity_ir.api.plans import load

        if not path:
            raise UnityError("unity-opt: --against is empty; name a file")
        return load(path)

    # Writing

    def output_resulting_program(self, prog: ModuleOp) -> str:
        """
        Return the module as text in the format of the target (`-t`). In MLIR's generic form, each argument gets its
        input's name as an attribute, since MLIR does not keep SSA names. Raises `DiagnosticException` if the target
        writes nothing.
        """
        if self.args.print_op_generic:
            from unity_ir.dialects.convert import pcg_functions, write_names

            for func in pcg_functions(prog):
                write_names(func)
        with as_xdsl(f"written by -t {self.args.target}"):
            text = super().output_resulting_program(prog)
        if not text.strip():
            raise DiagnosticException(f"-t {self.args.target} writes nothing of it; it is for other operations")
        return text

    def prepare_output(self) -> IO[str]:
        """
        Return the stream to write the module to: stdout, or a buffer that `write_output_file` writes to the file of
        `-o`.
        """
        if self.args.output_file is None:
            return sys.stdout
        self.output = UnclosedBuffer()
        return self.output

    def write_output_file(self) -> None:
        """
        Write the files of all options that name one, after everything else has succeeded. All are first written to
        temporary files next to them: if one of these cannot be written, raises `UnityError`, and no file changes.
        """
        texts = dict(self.pictures)
        if self.output is not None:
            texts[self.args.output_file] = self.output.getvalue()
        if self.derivation is not None:
            texts[self.args.derivation_out] = self.derivation
        staged, folder = staged_files(texts), None
        try:
            if self.traces is not None:
                from unity_ir.interop.chakra.step import is_file_of_traces

                folder = staged_folder(self.args.chakra, self.traces.files(), is_file_of_traces)
            if self.imported is not None and self.args.weights_out is not None:
                self.imported.save(self.args.weights_out)
            write_files(texts, staged)
            if folder is not None:
                place_folder(self.args.chakra, folder)
        finally:
            for left in staged.values():
                os.unlink(left)
            if folder is not None:
                rmtree(folder, ignore_errors=True)


def _shown(module: ModuleOp, flag: str) -> FuncOp:
    """Return a module's only pcg function, to be shown by the option `flag`; raises `UnityError` if that is not so."""
    from unity_ir.dialects.convert import pcg_functions

    functions = list(pcg_functions(module))
    if any(op.name == "spmd.program" for op in module.ops):
        raise UnityError(f"unity-opt: {flag} shows a plan, but the module is lowered; leave out lower-pcg-to-spmd")
    if len(functions) != 1:
        raise UnityError(f"unity-opt: {flag} shows one function, but the module has {len(functions)}; split it")
    return functions[0]


def _printing(pipeline: PassPipeline, after: str, generic: bool) -> PassPipeline:
    """
    Return the pipeline that prints the module to stderr after the passes named in `after`, as MLIR does, separated by
    commas, or after `all`; in MLIR's generic form if `generic`. Raises `UnityError` for a pass that is not in it.
    """
    run = list(dict.fromkeys(each.name for each in pipeline.passes))
    names = run if after == "all" else after.split(",")
    if missing := [name for name in names if name not in run]:
        raise UnityError(
            f"unity-opt: --print-ir-after={after}: no pass {missing[0]} is run; there are {', '.join(run) or 'none'}"
        )

    def callback(before: ModulePass | None, module: ModuleOp, then: ModulePass | None) -> None:
        if pipeline.callback is not None:
            pipeline.callback(before, module, then)
        if before is not None and before.name in names:
            print(f"// -----// IR Dump After {before.name} //----- //", file=sys.stderr)
            Printer(stream=sys.stderr, print_generic_format=generic).print_op(module)
            print(file=sys.stderr)

    return PassPipeline(pipeline.passes, callback)


def _print_misfit(error: BaseException | None) -> None:
    """
    Print to stderr the costs of the plan that a `DoesNotFit` error (too little memory) carries; do nothing for other
    errors and None.
    """
    from unity_ir.api.stats import priced
    from unity_ir.search.run import DoesNotFit

    if isinstance(error, DoesNotFit):
        print(priced(error.result.graph, error.result.cost), file=sys.stderr)


def _derivation_text(module: ModuleOp) -> str:
    """
    Return the rule applications that searches have recorded on the functions of a module, as text: `@name`, then a line
    for each. Raises `UnityError` if there are none.
    """
    from unity_ir.dialects.certificate import certificate_of
    from unity_ir.dialects.convert import pcg_functions

    found = {func.sym_name.data: certificate_of(func).derivation for func in pcg_functions(module)}
    lines = [line for name, steps in found.items() if steps is not None for line in (f"@{name}", *steps)]
    if not lines:
        raise UnityError("unity-opt: --derivation-out, but no function has a derivation; add --search")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """
    Run `unity-opt` on the arguments `argv` (None: those of the process); return the exit code.

    Errors in the input print one line on stderr: exit code 1. Any other exception is a bug.
    """
    return outcome("unity-opt", lambda: _run(expanded(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    verification = Attribute.__post_init__
    tool = None
    try:
        tool = UnityOpt("Unity modular optimizer driver", argv)
        tool.run()
        tool.write_output_file()
    except ParseError as error:
        known = [op.name for op in tool.ctx.loaded_ops] if tool else []
        raise UnityError(parse_error(error, known)) from error
    except DiagnosticException as error:
        raise UnityError(f"{tool.get_input_name()}: {error}" if tool is not None else str(error)) from error
    except ArgSpecParseError as error:
        raise UnityError(f"unity-opt: {error}") from error
    finally:
        # `--disable-verify` switches verification off for the whole process.
        Attribute.__post_init__ = verification
    return 0


if __name__ == "__main__":
    sys.exit(main())

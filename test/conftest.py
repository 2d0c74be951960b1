"""
Runs the FileCheck tests, the .mlir and .pcg files under test/ with RUN lines, as pytest items.

`pytest` runs `unity-opt` and `filecheck` inside this process, which is many times faster than lit's processes.
`pytest --lit` hands each file to lit instead. Both understand these RUN lines:

    // RUN: unity-opt %s -p canonicalize | filecheck %s
    // RUN: not unity-opt %S/Inputs/bad.pcg 2>&1 | filecheck %s --check-prefix=BAD
    // RUN: unity-opt %s > %t.pcg

A pipeline passes when each of its commands exits with 0 (after `not`: with anything else).
"""

import gc
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis.internal import reflection
from xdsl.ir import Attribute

# How long an example takes is the machine's affair: nothing here is timed. Properties are tried on the same examples
# each time, so that a failure means the change at hand; `make random` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("EXAMPLES", "same"))

# Every case of a property reads the property's source for its seed: once is enough.
reflection._clean_source = cache(reflection._clean_source)
reflection.inspect = SimpleNamespace(**(vars(inspect) | {"getsource": cache(inspect.getsource)}))

# Kernels run in Triton's interpreter, which has to be said before anything imports Triton, as parts of PyTorch do.
os.environ["TRITON_INTERPRET"] = "1"

SUFFIXES = {".mlir", ".pcg"}
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])}

RUN_LINE = re.compile(r"(?<!\w)RUN:(.*)")
OPERATOR = re.compile(r"\d*[|&;<>]+((?<=&)\d+)?")
WORD = re.compile(r"""([^\s|&;<>'"\\]|\\.|'[^']*'|"(\\.|[^"\\])*")+""")
TOKEN = re.compile(rf"{OPERATOR.pattern}|{WORD.pattern}|\S")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lit", action="store_true", help="run the FileCheck tests with lit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make zoo` the tests marked `zoo`, and all but every n-th case of those marked `sampled(n)`."""
    if os.environ.get("ZOO") == "all":
        return
    seen = Counter[str]()
    left: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    for item in items:
        sampled = item.get_closest_marker("sampled")
        name = item.nodeid.partition("[")[0]
        is_kept = seen[name] % sampled.args[0] == 0 if sampled else item.get_closest_marker("zoo") is None
        (kept if is_kept else left).append(item)
        seen[name] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    # What has been imported stays: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    # What tests make is mostly not cyclic; the collector took a twentieth of their time.
    gc.set_threshold(100_000, 20, 100)


def pytest_sessionfinish() -> None:
    # As it ends, pytest has all garbage collected five times.
    gc.freeze()


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> pytest.Collector | None:
    if file_path.suffix in SUFFIXES and RUN_LINE.search(file_path.read_text()):
        return FileCheckFile.from_parent(parent, path=file_path)
    return None


class FileCheckFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield FileCheckItem.from_parent(self, name="filecheck")


class FileCheckItem(pytest.Item):
    def runtest(self) -> None:
        run = run_with_lit if self.config.getoption("--lit") else run_in_process
        try:
            run(self.path)
        except RunError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"filecheck {self.path.name}"


def run_with_lit(test: Path) -> None:
    result = subprocess.run([BIN / "lit", "-v", test], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RunError(result.stdout + result.stderr)


def run_in_process(test: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        substitutions = {"%s": str(test), "%S": str(test.parent), "%t": f"{directory}/{test.name}.tmp"}
        for line in run_lines(test.read_text()):
            try:
                run_pipeline(parse_pipeline(line, substitutions))
            except RunError as error:
                raise RunError(f"RUN: {line}\n{error}") from None


class RunError(Exception):
    """A RUN line is malformed, or one of its commands did not exit as expected."""


# Reading RUN lines


@dataclass(frozen=True, slots=True)
class Command:
    """One stage of a pipeline, e.g. `not unity-opt a.pcg 2>&1`."""

    argv: list[str]
    expect_failure: bool
    merge_stderr: bool
    """stderr goes where stdout goes (`2>&1`)."""
    output: str | None
    """The file that takes stdout (`>`)."""


def run_lines(text: str) -> list[str]:
    """
    The RUN lines of a test, in order, with continued lines joined.

    `RUN: a \\`, `RUN:   b`, `RUN: c` -> `["a b", "c"]`
    """
    joined = "\n".join(match[1].strip() for match in RUN_LINE.finditer(text))
    return re.sub(r"\\\n", "", joined).splitlines()


def parse_pipeline(line: str, substitutions: Mapping[str, str]) -> list[Command]:
    """
    The commands of a RUN line.

    `a 'b c' 2>&1 | not d %s` -> commands `a 'b c'` (merging stderr) and `d x.pcg` (expected to fail)
    """
    stages: list[list[str]] = [[]]
    for match in TOKEN.finditer(line):
        if match[0] == "|":
            stages.append([])
        else:
            stages[-1].append(match[0])
    return [parse_command(stage, substitutions) for stage in stages]


def parse_command(tokens: list[str], substitutions: Mapping[str, str]) -> Command:
    argv: list[str] = []
    merge_stderr = False
    output = None
    remaining = iter(tokens)
    for token in remaining:
        if token == "2>&1":
            merge_stderr = True
        elif token == ">":
            output = parse_word(next(remaining, ""), substitutions)
        else:
            argv.append(parse_word(token, substitutions))
    expect_failure = argv[:1] == ["not"]
    if expect_failure:
        argv = argv[1:]
    if not argv:
        raise RunError("a command is missing")
    return Command(argv, expect_failure, merge_stderr, output)


def parse_word(token: str, substitutions: Mapping[str, str]) -> str:
    if not WORD.fullmatch(token):
        raise RunError(f"`{token}` is not supported: use words, quotes, `not`, `|`, `2>&1` and `>`")
    return re.sub("%[sSt]", lambda match: substitutions[match[0]], "".join(shlex.split(token)))


# Running them


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    stdout: str
    stderr: str


def run_pipeline(commands: list[Command]) -> None:
    stdin = ""
    for command in commands:
        main = IN_PROCESS.get(command.argv[0])
        result = run_subprocess(command, stdin) if main is None else call(main, command, stdin)
        if (result.code != 0) != command.expect_failure or "internal error" in result.stderr + result.stdout:
            raise RunError(f"{shlex.join(command.argv)}: exit code {result.code}\n{result.stdout}{result.stderr}")
        if command.output is None:
            stdin = result.stdout
        else:
            Path(command.output).write_text(result.stdout)
            stdin = ""


def run_subprocess(command: Command, stdin: str) -> Result:
    try:
        process = subprocess.run(
            command.argv,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command.merge_stderr else subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise RunError(f"{command.argv[0]}: {error.strerror}") from None
    return Result(process.returncode, process.stdout, process.stderr or "")


def call(main: Callable[[list[str]], int | None], command: Command, stdin: str) -> Result:
    """
    What the process `command` would do, done by calling its `main` with the arguments.

    Standard streams are real text wrappers, since xDSL and filecheck read `sys.stdin.buffer`.
    """
    stdout = io.BytesIO()
    stderr = stdout if command.merge_stderr else io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command.argv)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        patch.setattr(sys, "stdout", out := io.TextIOWrapper(stdout, encoding="utf-8", write_through=True))
        patch.setattr(sys, "stderr", err := io.TextIOWrapper(stderr, encoding="utf-8", write_through=True))
        # Changes nothing here, but undoes on leaving what `--disable-verify` does to this whole process.
        patch.setattr(Attribute, "__post_init__", Attribute.__post_init__)
        code = exit_code(main, command.argv[1:])
    out.detach()
    err.detach()
    return Result(code, stdout.getvalue().decode(), "" if command.merge_stderr else stderr.getvalue().decode())


def exit_code(main: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    """The exit code that the Python interpreter would give for `sys.exit(main(arguments))`."""
    try:
        return main(arguments) or 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    except Exception:
        traceback.print_exc()
        return 1


def unity_opt(arguments: list[str]) -> int:
    from unity_ir.tools.unity_opt import main

    return main(arguments)


def filecheck(arguments: list[str]) -> None:
    from filecheck.main import main

    main(["filecheck", *arguments])


IN_PROCESS = {"unity-opt": unity_opt, "filecheck": filecheck}

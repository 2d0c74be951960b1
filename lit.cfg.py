# pyright: basic, reportUndefinedVariable=false
"""
FileCheck tests under lit: `lit test`, or `pytest`, which runs the same files without starting processes.

lit executes this file with `config` defined.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lit.formats
import lit.Test

ROOT = Path(__file__).parent


class FileCheckTest(lit.formats.ShTest):
    """
    Takes as tests the files under test/ that have RUN lines.

    `config.excludes` can't say this: it compares names at every level, so excluding the package's `passes` would
    exclude test/filecheck/passes too.
    """

    def getTestsForPath(self, testSuite, path_in_suite, litConfig, localConfig) -> Iterator[lit.Test.Test]:
        for test in super().getTestsForPath(testSuite, path_in_suite, litConfig, localConfig):
            if path_in_suite[0] == "test" and "RUN:" in Path(test.getSourcePath()).read_text():
                yield test

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        # lit's workers can't import this class, and need not: they run tests, they don't look for them.
        return lit.formats.ShTest, (self.execute_external,)


config.name = "unity-ir"
config.test_format = FileCheckTest(execute_external=False)
config.suffixes = [".mlir", ".pcg"]
config.excludes = [".venv", "build"]
# test_source_root stays the folder of this file: lit resolves the paths on its command line against it.
config.test_exec_root = str(ROOT / "build" / "lit")

# lit runs tests in an empty environment. Commands come from the environment that lit itself runs in.
FORWARDED = ("HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET", "XDG_CACHE_HOME")
config.environment.update({name: os.environ[name] for name in FORWARDED if name in os.environ})
config.environment["VIRTUAL_ENV"] = sys.prefix
config.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
# Where `--from-torch` finds the modules of the tests.
config.environment["PYTHONPATH"] = str(ROOT / "test" / "helpers")

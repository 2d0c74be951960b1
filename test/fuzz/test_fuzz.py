"""
The first inputs of the fuzzer, the same each time, and all it has found something with. `make zoo` tries five times as
many, `make fuzz` goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from drive import LENGTH, Fault, Hang, Result, call, check, limited
from extent import examples
from fuzz import DEEP, TINY, Fuzzer
from seeds import CORPUS

from unity_ir.tools import unity_opt, unity_rules

INPUTS = sorted(p for p in CORPUS.iterdir())


@pytest.fixture
def fuzzer(tmp_path: Path) -> Fuzzer:
    return Fuzzer(0, tmp_path, graphs=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(("text", 1500), ("deep", 60), ("machine", 150), ("profile", 100), ("table", 100), ("rule", 200)),
        *(("applied_rule", 60), ("derivation", 60), ("collection", 60), ("command_line", 150)),
    ],
)
def test_inputs_end_as_they_may(kind: str, count: int, fuzzer: Fuzzer):
    for _ in range(examples(count)):
        try:
            getattr(fuzzer, kind)()
        except Fault as fault:
            said, data, argv = fuzzer.input
            raise AssertionError(f"{said} {list(argv)}\n{data.decode('utf-8', 'replace')}\n{fault}") from None
    assert fuzzer.counts.total() >= examples(count)


@pytest.mark.slow
@pytest.mark.parametrize("path", INPUTS, ids=lambda p: p.name)
def test_what_was_found_once(path: Path, tmp_path: Path):
    tiny = TINY.encode()
    match path.suffix:
        case ".toml":
            check(call(unity_opt.main, ["--stats", f"--machine={path}"], tiny), reports=True)
        case ".rules":
            for argv in (["list", "--file", str(path)], ["show", "r", "--file", str(path)], ["prove", str(path)]):
                check(call(unity_rules.main, argv), silent=argv[0] == "prove")
        case _:
            fuzzer = Fuzzer(0, tmp_path, graphs=0)
            data = path.read_bytes()
            if fuzzer.try_module(data):
                for argv in DEEP:
                    fuzzer.try_deep(data, argv)


# What the fuzzer itself must find.


def result(err: str, code: int = 1) -> Result:
    return Result(code, "", err)


@pytest.mark.parametrize(
    "wrong",
    [
        result("", 1),
        result("one\ntwo\n"),
        result("x" * (LENGTH + 1) + "\n"),
        result("a \u202e b\n"),
        result("unity-opt: internal error: KeyError\n"),
        result("x\n", 2),
        result("x\n", 130),
    ],
)
def test_what_is_no_message_is_a_fault(wrong: Result):
    with pytest.raises(Fault):
        check(wrong)


def test_exceptions_and_hangs_are_faults(monkeypatch: pytest.MonkeyPatch):
    def raises(argv: list[str]) -> int:
        raise KeyError("x")

    def hangs(argv: list[str]) -> int:
        while True:
            pass

    with pytest.raises(Fault, match="KeyError"):
        call(raises, [])
    monkeypatch.setattr("drive.LIMIT", 0.01)
    with pytest.raises(Fault, match="no end"):
        call(hangs, [])
    with pytest.raises(Hang), limited(0.01):
        hangs([])


@pytest.mark.slow
def test_a_seed_makes_the_same_inputs(tmp_path: Path):
    made: list[list[object]] = []
    for _ in range(2):
        fuzzer = Fuzzer(5, tmp_path, graphs=2)
        own: list[object] = []
        for _ in range(5):
            fuzzer.text()
            own.append(fuzzer.input)
        made.append(own)
    assert made[0] == made[1]

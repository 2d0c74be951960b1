"""One row per collective: whatever a row needs elsewhere is there, and nothing is there without a row."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from mutants import DROPPED

from unity_ir.lowering import runtime
from unity_ir.machine.bounds import DEMANDS
from unity_ir.machine.collectives import SCHEDULES
from unity_ir.machine.transfers import PLANS
from unity_ir.pcg.collectives import (
    COLLECTIVES,
    FREE,
    FUSED,
    KIND_BETWEEN,
    PLANNED,
    PROFILED,
    Collective,
    RuntimeCall,
    fusion_of,
)
from unity_ir.pcg.parallel import PARALLEL_OPERATORS

RUNTIME = Path(runtime.__file__).parent
TABLES: Mapping[str, Mapping[str, object]] = {
    "unity_ir/machine/collectives.py: SCHEDULES": SCHEDULES,
    "unity_ir/machine/transfers.py: PLANS": PLANS,
    "unity_ir/machine/bounds.py: DEMANDS": DEMANDS,
}


def runtime_functions() -> dict[str, list[str]]:
    """The parameters of every function that an emitted program may call to move something."""
    return {
        s.name: [a.arg for a in s.args.args]
        for path in (RUNTIME / "collectives.py", RUNTIME / "halos.py")
        for s in ast.parse(path.read_text()).body
        if isinstance(s, ast.FunctionDef)
    }


def lacks(row: Collective) -> Iterator[str]:
    """Yield what a row of the table of collectives still lacks, and the file to add it to."""
    if row.crosses_links:
        yield from (f"{row.name} has no entry in {place}" for place, table in TABLES.items() if row.name not in table)
        if row.received is None:
            yield f"{row.name} crosses links: say in unity_ir/pcg/collectives.py what its groups receive"
    functions = runtime_functions()
    for call in dict.fromkeys(row.calls.values()):
        if call is None:
            continue
        if call.function not in functions:
            yield f"{row.name} has no function {call.function} in unity_ir/lowering/runtime/collectives.py"
        elif 3 + len(call.arguments) + call.arguments.count("held") != len(functions[call.function]):
            yield f"{call.function} takes {functions[call.function]}, but its row passes ctx, x, {call.arguments}, axes"
        if call.function not in DROPPED:
            yield f"{row.name} has no mutant of {call.function} in test/programs/mutants.py: DROPPED"
    if row.members in ("all", "none") and row.name not in FREE and row.profiled is None:
        yield f"{row.name} is not measured: say in unity_ir/pcg/collectives.py which dims to profile it with"
    if row.fuses and row.name not in PARALLEL_OPERATORS:
        yield f"{row.name} fuses parallel operators, but is none itself in unity_ir/pcg/parallel.py"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_row_has_what_it_needs(name: str):
    assert list(lacks(COLLECTIVES[name])) == []


def test_a_new_row_says_where_it_lacks_something():
    call = RuntimeCall("all_to_all_v", ("source", "target"))
    ends = {("shard", "shard"): call}
    new = replace(COLLECTIVES["all_to_all"], name="all_to_all_v", calls=ends, profiled=None, received=None)
    assert list(lacks(new)) == [
        "all_to_all_v has no entry in unity_ir/machine/collectives.py: SCHEDULES",
        "all_to_all_v has no entry in unity_ir/machine/transfers.py: PLANS",
        "all_to_all_v has no entry in unity_ir/machine/bounds.py: DEMANDS",
        "all_to_all_v crosses links: say in unity_ir/pcg/collectives.py what its groups receive",
        "all_to_all_v has no function all_to_all_v in unity_ir/lowering/runtime/collectives.py",
        "all_to_all_v has no mutant of all_to_all_v in test/programs/mutants.py: DROPPED",
        "all_to_all_v is not measured: say in unity_ir/pcg/collectives.py which dims to profile it with",
        "all_to_all_v fuses parallel operators, but is none itself in unity_ir/pcg/parallel.py",
    ]


@pytest.mark.parametrize("place", TABLES)
def test_no_algorithm_is_without_a_row(place: str):
    assert set(TABLES[place]) == {name for name, row in COLLECTIVES.items() if row.crosses_links}


def test_each_pair_of_roles_has_one_collective():
    planned = [ends for name in PLANNED for ends in COLLECTIVES[name].calls]
    assert len(planned) == len(set(planned)) == len(KIND_BETWEEN)
    roles = ("shard", "partial", "replicate", "pinned")
    assert set(KIND_BETWEEN) == {(a, b) for a in roles for b in roles} - {("partial", "partial")}


@pytest.mark.parametrize("name", PROFILED)
def test_profiles_measure_what_programs_call(name: str):
    call, dims = COLLECTIVES[name].profiled_call()
    assert call in COLLECTIVES[name].calls.values()
    assert len(dims) == len(call.arguments)


def test_chains_are_fused_by_their_row():
    for row in FUSED:
        (first, _), (second, _) = row.fuses
        assert fusion_of(first, second) == row
        assert PARALLEL_OPERATORS[row.name].attributes == row.attributes
    assert fusion_of("pick", "replicate") is None

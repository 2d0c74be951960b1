"""
Make the points of a grid: every model and machine with every setting of the knobs; what cannot be is refused before
anything is searched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import product
from math import gcd, prod
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.load import load, read_tables
from unity_ir.machine.model import Machine
from unity_ir.machine.toml import described, machine_from
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import in_mixed_precision, mixed_precision_options
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.sweep.knobs import BANDWIDTH, BATCH, GPUS, GPUS_PER_NODE, HBM, MACHINE, MEMORY, MOST, Knob

Settings = tuple[tuple[str, float], ...]
"""Knobs by name, and the value of each, in the order of the grid."""


@dataclass(frozen=True)
class Point:
    """
    A point of a sweep's grid: a model (as text for `--model`) on a machine (its name), and the values of the knobs,
    settings of model or machine that the grid varies.
    """

    model: str
    machine: str
    settings: Settings = ()

    @property
    def text(self) -> str:
        """
        The text of the model for `--model`, with the values of the knobs that are settings of the model:
        `llama3_8b,batch=16`.
        """
        return ",".join([self.model, *(f"{name}={value:.0f}" for name, value in _of_model(self.settings))])

    @property
    def family(self) -> str:
        """
        The text of the model without its batch, such as `llama3_8b`: equal for points that differ only in batch and
        machine.
        """
        return ",".join(part for part in self.text.split(",") if not part.startswith(f"{BATCH}="))

    @property
    def title(self) -> str:
        """The point as messages name it: model, machine, and the values of all knobs."""
        return ", ".join([self.model, self.machine, *(f"{name}={value:g}" for name, value in self.settings)])

    def changed_machine(self) -> Machine:
        """
        Return the point's machine, changed by those knobs that are settings of the machine; memoised. Raises
        `UnityError` where the machine lacks such a knob, and for impossible values.
        """
        return machine_with(self.machine, tuple((n, v) for n, v in self.settings if Knob(n, ()).is_of_machine))


def _of_model(settings: Settings) -> Settings:
    return tuple((name, value) for name, value in settings if not Knob(name, ()).is_of_machine)


@dataclass(frozen=True)
class Grid:
    """
    The grid of a sweep: models, machines, and knobs (settings that it varies); `mixed` is the element type of mixed
    precision, None for none.
    """

    models: tuple[str, ...]
    machines: tuple[str, ...]
    knobs: tuple[Knob, ...] = ()
    mixed: str | None = None

    def points(self) -> tuple[Point, ...]:
        """
        Return all points of the grid: every model and machine with every combination of the knobs' values, the last
        knob varying fastest.

        Raises `UnityError` for a knob that is unknown, given twice, or lacking in a machine; for impossible values; for
        more points than `MOST`; for a batch whose samples cannot be divided evenly among the devices, even if those of
        one member of the outermost level (a node, say) share samples by tensor parallelism; and for a device whose peak
        FLOP/s in the type `mixed` is not known.
        """
        names = [knob.name for knob in self.knobs]
        for name in names:
            if names.count(name) > 1:
                raise UnityError(f"sweep: {name} is given twice; leave one out")
        count = len(self.models) * len(self.machines) * prod(len(knob.values) for knob in self.knobs)
        if count > MOST:
            raise UnityError(f"sweep: {count} points are too many; at most {MOST} are allowed")
        values = product(*(knob.values for knob in self.knobs))
        settings = [tuple(zip(names, each, strict=True)) for each in values]
        found = tuple(Point(*each) for each in product(self.models, self.machines, settings))
        for point in found:
            _check(point, point.changed_machine(), self.mixed)
        return found


PRECISION = "sweep: --mixed-precision"
"""With what messages about mixed precision begin."""


def graph_of(text: str, mixed: str | None) -> Graph:
    """
    Build the serial forward graph of the model that `text` names (as for `--model`), in mixed precision with the
    element type `mixed` unless that is None. Raises `UnityError` for an unknown model or setting.
    """
    graph = _graph(text)
    return graph if mixed is None else in_mixed_precision(graph, mixed, PRECISION)


@lru_cache(maxsize=8)
def _graph(text: str) -> Graph:
    try:
        return from_text(text)
    except UnityError as error:
        # A knob of neither the machine nor the model.
        if "has no key" not in str(error):
            raise
        said = f"sweep: {error.args[0].partition('--model: ')[2]}; knobs of machines are {', '.join(MACHINE)}"
        raise UnityError(said) from error


@lru_cache(maxsize=64)
def samples(text: str) -> int:
    """
    Return the number of samples in a batch of the model that `text` names (as for `--model`): the greatest common
    divisor of the sizes of its inputs' sample dims; 1 if no input has samples.
    """
    graph = _graph(text)
    dims = sample_dims(graph)
    return gcd(*(n.result.shape[dims[n.name]] for n in graph.inputs if n.name in dims)) or 1


def _check(point: Point, machine: Machine, mixed: str | None) -> None:
    """Raise `UnityError` for a batch that no leading part of a machine divides, and for a type it has no peak for."""
    batch = samples(point.text)
    # Tensor parallelism is over innermost mesh axes, within a member of the outermost level.
    inner = prod(level.size for level in machine.levels[1:]) if len(machine.levels) > 1 else machine.devices
    if gcd(batch, machine.devices) * inner < machine.devices:
        raise UnityError(
            f"sweep: {point.text}: {batch} samples do not divide over {machine.devices} devices of {machine.name}; "
            "take a multiple, or fewer devices"
        )
    if mixed is not None:
        machine.device.peak(mixed_precision_options(mixed, PRECISION)["type"])


@lru_cache(maxsize=4096)
def machine_with(name: str, settings: Settings) -> Machine:
    """
    Return the machine called `name` changed by `settings`, (knob, value) pairs of settings of machines, such as the
    bandwidth of a level; memoised. The result is called `name with knob=value, ..`, or `name` without settings.

    Raises `UnityError` for a knob that the machine lacks, for one that changes a speed where the machine's times are
    measured (they would not change with it), and for impossible values.
    """
    load(name)  # what is wrong with its description is said first
    tables, profile = read_tables(name)
    given = dict(settings)
    levels = [dict(level) for level in tables.get("levels", ())]
    if not levels and given:
        raise _lacks(name, next(iter(given)), "its links are listed one by one")
    tables = {**tables, "levels": levels} if levels else tables
    for knob, value in given.items():
        if knob.startswith(BANDWIDTH):
            _set_bandwidth(name, levels, knob, value)
    if {HBM, MEMORY} & given.keys():
        tables["device"] = _device(name, tables, given)
    _set_sizes(name, tables, levels, given)
    changed = f"{name} with {', '.join(f'{k}={v:g}' for k, v in settings)}" if settings else name
    machine = machine_from(changed, tables, profile=profile)
    if machine.device.profile is not None:
        for knob in given:
            if knob == HBM or knob.startswith(BANDWIDTH):
                raise _lacks(name, knob, "its times are measured, so that nothing would follow")
    return machine


def _lacks(name: str, knob: str, why: str) -> UnityError:
    return UnityError(f"sweep: {name} has no knob {knob}: {why}; leave it out")


def _set_bandwidth(name: str, levels: Sequence[dict[str, Any]], knob: str, value: float) -> None:
    level = next((level for level in levels if level.get("name") == knob.removeprefix(BANDWIDTH)), None)
    if level is None:
        raise _lacks(name, knob, f"its levels are {', '.join(str(level.get('name')) for level in levels)}")
    if level.get("link") == "links":
        raise _lacks(name, knob, "its links are listed one by one")
    level["bandwidth"] = value


def _device(name: str, tables: Mapping[str, Any], given: Mapping[str, float]) -> dict[str, Any]:
    if "device" not in tables:
        raise _lacks(name, next(k for k in (HBM, MEMORY) if k in given), "it has several kinds of devices")
    device = dict(tables["device"])
    if HBM in given:
        device["memory_bandwidth"] = given[HBM]
    if MEMORY in given:
        device["memory"] = int(given[MEMORY])
    return device


def _set_sizes(name: str, tables: dict[str, Any], levels: Sequence[dict[str, Any]], given: Mapping[str, float]) -> None:
    """Set the sizes of levels to those that `gpus` and `gpus_per_node` ask for."""
    if not {GPUS, GPUS_PER_NODE} & given.keys():
        return
    if any(level.get("kinds") for level in levels):
        raise _lacks(name, next(k for k in (GPUS, GPUS_PER_NODE) if k in given), "its members are of several kinds")
    count = tables.get("parameter", 1)
    sizes = [count if level["size"] == "parameter" else level["size"] for level in levels]
    if GPUS_PER_NODE in given:
        if len(levels) == 1:
            raise _lacks(name, GPUS_PER_NODE, f"it has one level; use {GPUS}")
        sizes[-1] = int(given[GPUS_PER_NODE])
    if GPUS in given:
        left = int(given[GPUS])
        for i in range(len(sizes) - 1, 0, -1):
            sizes[i] = min(sizes[i], left)
            if left % sizes[i]:
                inner = f"{sizes[i]} {levels[i]['name']}"
                raise UnityError(f"sweep: {GPUS}={int(given[GPUS])} is no whole number of {inner} of {name}")
            left //= sizes[i]
        if levels[0]["size"] != "parameter" and left > levels[0]["size"]:
            most = prod(sizes[1:]) * levels[0]["size"]
            raise UnityError(f"sweep: {GPUS}={int(given[GPUS])}, but {name} has {most}; take fewer")
        sizes[0] = left
    for level, size in zip(levels, sizes, strict=True):
        level["size"] = size


def machine_tables(machine: Machine) -> dict[str, Any]:
    """
    Return the description of a machine as the tables of a `.toml` file (`machine.toml`), with a hash of its measured
    times: equal for machines that differ only in name.
    """
    profile = machine.device.profile
    if profile is None:
        return described(machine)
    kernels = [[name, *sizes, seconds] for name, rows in profile.kernels.items() for sizes, seconds in rows.items()]
    collectives = [[*key, *map(list, points)] for key, points in profile.collectives.items()]
    measured = json.dumps([sorted(kernels, key=str), sorted(collectives, key=str)])
    return {**described(machine), "profile": sha256(measured.encode()).hexdigest()}


def mesh_key(machine: Machine) -> str:
    """
    Return a text (JSON) that is equal for machines that differ only in the bandwidths of links and memory, and in the
    size of memory. A program for one of them runs on the others, and takes no longer where no bandwidth is lower.
    """
    tables = machine_tables(machine)
    if "device" in tables:
        changing = ("memory_bandwidth", "memory", "reserve")
        tables["device"] = {key: value for key, value in tables["device"].items() if key not in changing}
    for level in tables.get("levels", ()):
        del level["bandwidth"]
    return json.dumps(tables, sort_keys=True)

"""
Say how much a step does per second: tokens or samples, the part of the devices' peak that the model's FLOPs take (MFU),
and how far predictions of such steps were from measured ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod

from unity_ir.cost.work import kind_of, model_flops
from unity_ir.forms.kinds import CONTRACTIONS
from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph

INTEGERS = ("i32", "i64")
"""Element types of ids."""


def batch_count(graph: Graph, tables: Collection[str] = ()) -> tuple[int, str]:
    """
    Return (number of tokens or samples that a step takes, the word for them). If there is an input of integers with two
    or more dims, it is the number of elements of the first such input, and `tokens`; else the largest first dim of any
    input, and `samples`.

    `tables` are the names of inputs to leave out, as they do not belong to a batch.
    """
    shapes = [(n.result.type.shape, n.result.type.dtype) for n in graph.inputs if n.name not in tables]
    ids = next((shape for shape, dtype in shapes if len(shape) > 1 and dtype in INTEGERS), None)
    if ids is not None:
        return prod(ids), "tokens"
    return max((shape[0] for shape, _ in shapes if shape), default=1), "samples"


@dataclass(frozen=True, slots=True)
class Throughput:
    """How much a step does per second on each device."""

    rate: float
    """Tokens or samples per second and device."""
    unit: str
    """`tokens` or `samples`."""
    mfu: float | None
    """
    Part of a device's dense peak that the FLOPs of the products of forward and backward take, attention whole,
    recompute left out (Chowdhery et al., 2022); None where the peak is not known.
    """
    dtype: str | None
    """The element type of that peak."""

    def __str__(self) -> str:
        """Return the line of `--stats`: `604,439 samples per second and device, MFU 9.4% of the peak in f32`."""
        text = f"{self.rate:,.0f}" if self.rate >= 100 else f"{self.rate:.3g}"
        line = f"{text} {self.unit} per second and device"
        if self.mfu is None:
            return line
        share = f"{self.mfu:.1%}" if self.mfu >= 0.01 else f"{self.mfu * 100:.2g}%"
        return f"{line}, MFU {share} of the peak in {self.dtype}"


def throughput(graph: Graph, machine: Machine, seconds: float) -> Throughput | None:
    """
    Return the throughput of a placed forward graph whose step takes `seconds`, with its MFU (model FLOPs utilisation).
    None for a graph that has its backward already, and for a step that takes no time.

    The peak of the MFU is that of the element type of most operands of contractions; MFU is None if the device has no
    peak for any of their types.
    """
    if graph.updates or seconds <= 0:
        return None
    count, unit = batch_count(graph)
    rate = count / seconds / machine.devices
    dtypes = [v.dtype for n in graph.nodes() if n.is_compute and kind_of(n) in CONTRACTIONS for v in n.operands]
    dtype = max(sorted({*dtypes} & machine.device.flops.keys()), key=dtypes.count, default=None)
    if dtype is None:
        return Throughput(rate, unit, None, None)
    return Throughput(rate, unit, model_flops(graph) / seconds / machine.devices / machine.device.peak(dtype), dtype)


def throughput_lines(graph: Graph, machine: Machine, seconds: float) -> tuple[str, ...]:
    """
    Return the lines of `--stats` on throughput and MFU of a placed forward graph whose step takes `seconds`. If
    predictions for such models on such devices have been compared with measurements, there is a line on their error,
    too. () for a graph that has its backward already.
    """
    found = throughput(graph, machine, seconds)
    if found is None:
        return ()
    error = error_text(graph, machine)
    return (f"throughput     {found}", *([f"accuracy       {error}"] if error else []))


def error_text(graph: Graph, machine: Machine) -> str:
    """
    Return a text on the error of predictions for models like `graph` on devices like the machine's: given a transformer
    on H100s, how many published steps were compared, and within what percentages half and nine in ten of them were
    predicted. Empty if nothing is known.
    """
    operators = {n.op for n in graph.nodes() if n.is_compute}
    if any(op.startswith("attention") for op in operators):
        family = "transformer"
    elif any(op.startswith("conv") for op in operators):
        family = "convolutional"
    else:
        return ""
    device = machine.device.name.partition("-")[0]
    band = _bands().get(device, {}).get(family)
    if band is None:
        return ""
    return (
        f"of {band['rows']} published steps of {family} models on {device}, half were predicted within "
        f"{band['median']:.1%}, nine in ten within {band['most']:.1%} (docs/accuracy.md)"
    )


@cache
def _bands() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    return tomllib.loads(files("unity_ir.cost").joinpath("accuracy.toml").read_text(encoding="utf-8"))

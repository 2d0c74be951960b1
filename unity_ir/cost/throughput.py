"""
Say how much a step does per second: tokens or samples, the part of the devices' peak that the model's FLOPs take (MFU),
and how far predictions of such steps were from measured ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from math import prod

from unity_ir.cost.work import kind_of, model_flops
from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph

INTEGERS = ("i32", "i64")
"""Element types of ids."""


def counted(graph: Graph, tables: Collection[str] = ()) -> tuple[int, str]:
    """
    Return how many tokens a step takes, those of an input of ids [samples, length], or else how many samples, with the
    word for them; `tables` are the names of inputs that no batch has.
    """
    shapes = [(n.result.type.shape, n.result.type.dtype) for n in graph.inputs if n.name not in tables]
    ids = next((shape for shape, dtype in shapes if len(shape) > 1 and dtype in INTEGERS), None)
    if ids is not None:
        return prod(ids), "tokens"
    return max((shape[0] for shape, _ in shapes if shape), default=1), "samples"


def throughput_lines(graph: Graph, machine: Machine, seconds: float) -> tuple[str, ...]:
    """
    Return the lines of `--stats` on a placed forward graph whose step takes `seconds`: its throughput and MFU (of the
    dense peak, the FLOPs of the products of forward and backward, attention whole, recompute left out; Chowdhery et
    al., 2022), and the errors of predictions, if steps of such models on such devices were compared. A graph that has
    its backward already has none.
    """
    if graph.updates or seconds <= 0:
        return ()
    count, what = counted(graph)
    rate = count / seconds / machine.devices
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    line = f"{text} {what} per second and device"
    dtypes = [v.dtype for n in graph.nodes() if n.is_compute and kind_of(n) == "contraction" for v in n.operands]
    dtype = max(sorted({*dtypes} & machine.device.flops.keys()), key=dtypes.count, default=None)
    if dtype is not None:
        part = model_flops(graph) / seconds / machine.devices / machine.device.peak(dtype)
        share = f"{part:.1%}" if part >= 0.01 else f"{part * 100:.2g}%"
        line += f", MFU {share} of the peak in {dtype}"
    error = error_text(graph, machine)
    return (f"throughput     {line}", *([f"accuracy       {error}"] if error else []))


def error_text(graph: Graph, machine: Machine) -> str:
    """
    Return what is known of the error of predictions for such a model on such a device: given a transformer on H100s,
    how many published steps there were, and within what half and nine tenths of them were predicted. Empty if nothing.
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

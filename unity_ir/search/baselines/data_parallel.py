"""Data parallelism, plain and fully sharded: every operator shards the samples over all devices."""

from __future__ import annotations

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.search.baselines.recipe import Degrees, recipe


def data_parallel(graph: Graph, machine: Machine) -> Graph:
    """
    Return the plan with inputs sharded along their samples (`batch_dims`) over all devices; weights, and inputs without
    samples such as tables, are replicated.

    Raises `UnityError` if the number of samples is not divisible by the devices.
    """
    return recipe(graph, machine, Degrees(), "data-parallel")


def fsdp(graph: Graph, machine: Machine) -> Graph:
    """
    Return data parallelism with every weight sharded over all devices as far as its sizes allow: gathered once, by one
    call where one dim can be sharded by all, kept for the backward, and its gradient reduce-scattered (PyTorch's FSDP
    with `reshard_after_forward=False`).

    Raises `UnityError` if the number of samples is not divisible by the devices.
    """
    return recipe(graph, machine, Degrees(zero=2), "fsdp")

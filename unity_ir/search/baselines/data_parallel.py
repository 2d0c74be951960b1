"""Data parallelism, plain and fully sharded: every operator shards the samples over all devices."""

from __future__ import annotations

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.search.baselines.recipe import Degrees, recipe


def data_parallel(graph: Graph, machine: Machine) -> Graph:
    """
    Return the parallel graph of a serial one in which inputs are sharded along their samples (`batch_dims`) over all
    devices, and operators with them; weights, and inputs without samples such as tables, are replicated.

    Raises `UnityError` if the number of devices does not divide that of samples.
    """
    return recipe(graph, machine, Degrees(), "data-parallel")


def fsdp(graph: Graph, machine: Machine) -> Graph:
    """
    Return the parallel graph of a serial one under data parallelism with every weight stored in shards over all
    devices, as far as its sizes allow: gathered once per step, by one all-gather where all devices shard one dim, and
    kept for the backward; its gradient is reduce-scattered (PyTorch's FSDP with `reshard_after_forward=False`).

    Raises `UnityError` if the number of devices does not divide that of samples.
    """
    return recipe(graph, machine, Degrees(zero=2), "fsdp")

"""Plans in stages, of plans for one part of the machine: operators in the graph's order, as many in each stage."""

from __future__ import annotations

from dataclasses import replace

from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.node import Node
from unity_ir.pcg.stages import in_stages
from unity_ir.plan.pipeline.catalogue import pipeline_schedule

ENOUGH = 8
"""Micro-batches with which every order has a schedule, for the ranks of its stages."""


def cut(plan: Graph, stages: int) -> dict[Node, int]:
    """The stage of each compute node that data and weights reach: as many of them in each, in the graph's order."""
    of_data, of_weights = set[Node](), set[Node]()
    for node in plan.nodes():
        for found, kind in ((of_data, "input"), (of_weights, "weight")):
            if node.op == kind or any(v.node in found for v in node.operands):
                found.add(node)
    order = [node for node in plan.nodes() if node.is_compute and node in of_data & of_weights]
    return {node: i * stages // len(order) for i, node in enumerate(order)}


def staged(plan: Graph, pipeline: Pipeline, on: Machine, stage_of: dict[Node, int] | None = None) -> Graph:
    """A plan of a micro-batch on the whole machine, in stages, given that on one part of it."""
    rank_of = pipeline_schedule(pipeline.order, pipeline.ranks, ENOUGH, pipeline.chunks).rank_of
    made = in_stages(plan, stage_of or cut(plan, len(rank_of)), rank_of, on.mesh)
    return replace(made, pipeline=pipeline)

"""Make the step of a chosen pipeline: its operators in stages on the machine, its batch in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.micro_batches import in_micro_batches
from unity_ir.pcg.stages import in_stages
from unity_ir.search.pipeline.equal import PipelinePlan


def pipeline_step(plan: PipelinePlan, machine: Machine, dims: Mapping[str, int]) -> Graph:
    """
    Return the forward graph of the whole step of a chosen pipeline, placed on all of `machine`: the operators of `plan`
    in their stages, its batch in micro-batches, with its schedule. `dims` has, by the name of each input with samples,
    the number of the dim along which they run.
    """
    stage_of = {node: stage for node, stage in plan.stage_of.items() if node.is_compute}
    staged = in_stages(plan.graph, stage_of, plan.outcome.schedule.rank_of, machine.mesh)
    staged = replace(staged, pipeline=plan.pipeline)
    return in_micro_batches(staged, dims, plan.micro_batches)

"""
Rewrite for one device first, then parallelize: what joint optimization is compared with (Unity, section 6.4).

Rules, algorithms and costs are those of the joint search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.rules.rule import Rule
from unity_ir.search.joint.best_first import JointPlan, Progress, joint, one_device


def rewritten_alone(
    graph: Graph, machine: Machine, rules: Sequence[Rule], optimizer: Optimizer, progress: Progress | None = None
) -> JointPlan:
    """
    Return the plan of the graph into which the algebraic `rules` rewrite a serial graph so that it is fastest on one
    device of `machine`. `progress` is called with the number of graphs explored and the best seconds so far.
    """
    return joint(graph, one_device(machine), rules, optimizer, progress=progress)


def sequential(
    graph: Graph, machine: Machine, alone: JointPlan, optimizer: Optimizer, progress: Progress | None = None
) -> JointPlan:
    """
    Return the plan of a serial graph, rewritten so that it is fastest on one device, for all devices of `machine`
    (Unity, section 6.4), a baseline of `joint`.

    `alone` is the plan for one device that `rewritten_alone` returned; `progress` is as there.
    """
    found = joint(alone.rewritten, machine, (), optimizer, progress=progress, like=graph)
    return replace(found, derivation=alone.derivation, explored=alone.explored + found.explored, source=None)

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


def sequential(
    graph: Graph, machine: Machine, rules: Sequence[Rule], optimizer: Optimizer, progress: Progress | None = None
) -> JointPlan:
    """
    Rewrite a serial graph so that it is fastest on one device, then parallelize it: return that plan (Unity, section
    6.4), a baseline of `joint`.

    `rules` are the algebraic rules; `progress` is called with the number of graphs explored and the best seconds so
    far.
    """
    rewritten = joint(graph, one_device(machine), rules, optimizer, progress=progress)
    found = joint(rewritten.rewritten, machine, (), optimizer, progress=progress, like=graph)
    explored = rewritten.explored + found.explored
    return replace(found, derivation=rewritten.derivation, explored=explored, source=None)

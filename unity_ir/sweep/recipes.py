"""
Define the family of plans that a sweep searches: those of `--degrees` (search/baselines/recipe.py), with micro-batches,
recompute and stages. Two are neighbours if one of these differs by a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part_counts
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.micro_batches import micro_batch
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.baselines.attention import has_sequence
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.in_time import in_time
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.fit import with_recompute_and_pieces
from unity_ir.search.result import SearchResult

PLAIN = "dp"
"""The text of the recipe that only divides samples."""

AUTO = "auto"
KINDS = ("none", "attention", AUTO, "block")
"""Kinds of recompute, from the least to the most; `auto` is as little as fits the device, the loss in pieces too."""

PARTS = 16
"""Parts of the pipeline to begin with, at most: those of published recipes are 4 to 16."""

SHARDINGS = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))
"""ZeRO stages, and whether weights are sharded among the devices of a node only."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    How a plan is divided, by a few numbers (a recipe, as people write for `--degrees`): `tp` devices of tensor
    parallelism (with sequence parallelism where the model has sequences), ZeRO stage `zero` among `shards` devices
    (None: all of data parallelism), `micro_batches`, and what is recomputed, one of `KINDS`.

    A pipeline has `stages` stages in all, with `chunks` of them on each of the parts into which it divides the machine;
    1 stage means no pipeline.
    """

    tp: int = 1
    zero: int = 0
    shards: int | None = None
    micro_batches: int = 1
    recompute: str = "none"
    stages: int = 1
    chunks: int = 1

    def text(self, sp: bool = True) -> str:
        """
        Return the recipe as text for `--degrees`, such as `tp=8,sp=true,zero=1`; `sp` says whether the model has
        sequences.
        """
        said = [f"tp={self.tp}" + ",sp=true" * sp] if self.tp > 1 else []
        said += [f"zero={self.zero}"] if self.zero else []
        said += [f"shards={self.shards}"] if self.shards else []
        said += [f"micro_batches={self.micro_batches}"] if self.micro_batches > 1 else []
        said += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        said += ["loss_pieces=auto"] if self.has_pieces else []
        said += [f"stages={self.stages},schedule={self._schedule}"] if self.stages > 1 else []
        return ",".join(said) or PLAIN

    @property
    def has_pieces(self) -> bool:
        """
        Whether the loss is computed in loss pieces, as many as the plan needs to fit the memory; else it is computed at
        once.
        """
        return self.recompute == AUTO and self.stages == 1

    @property
    def _schedule(self) -> str:
        return "1f1b" if self.chunks == 1 else f"interleaved:{self.chunks}"

    @property
    def pipeline(self) -> Stages | None:
        """The pipeline's stages and their schedule, 1F1B or interleaved 1F1B; None without a pipeline."""
        return None if self.stages == 1 else Stages.of(self.stages, self._schedule)

    def plan(self, graph: Graph, machine: Machine, optimizer: Optimizer) -> Graph:
        """
        Place a serial forward graph on a machine by this recipe; return the placed graph. The plan may exceed the
        machine's memory. `optimizer` is the one to train with. Raises `UnityError` where the recipe does not fit the
        model or the mesh.
        """
        sp = self.tp > 1 and has_sequence(graph)
        degrees = Degrees(tp=self.tp, zero=self.zero, shards=self.shards, sp=sp)
        pieces = None if self.has_pieces else 1
        on = machine if self.pipeline is None else self.pipeline.part(machine)
        if self.micro_batches == 1:
            return with_recompute_and_pieces(recipe(graph, on, degrees), self.recompute, pieces, on, optimizer)
        dims = sample_dims(graph)
        small = micro_batch(graph, dims, self.micro_batches)

        def search(part: Machine) -> SearchResult:
            plan = recipe(small, part, degrees)
            return SearchResult("degrees", plan, cost(plan, part, optimizer))

        def again(plan: Graph, whole: Callable[[Graph], Graph]) -> Graph:
            return with_recompute_and_pieces(plan, self.recompute, pieces, on, optimizer, whole, on=machine)

        each, count = self.zero >= 2, self.micro_batches
        found = in_time(search, small, dims, count, machine, optimizer, False, each, lambda: (), again, self.pipeline)
        return found.graph


@dataclass(frozen=True)
class Family:
    """
    All recipes (degrees of parallelism, micro-batches, recompute) that fit a machine's mesh and a batch of `samples`
    samples; pipelines are among them only with `has_stages`.
    """

    machine: Machine
    samples: int
    has_stages: bool = False

    @property
    def tensor(self) -> tuple[int, ...]:
        """
        The degrees of tensor parallelism of these recipes, ascending from 1: products of the sizes of the innermost
        mesh axes, within the innermost level.
        """
        levels = self.machine.axis_levels
        inner = [size for size, at in zip(self.machine.mesh.sizes, levels, strict=True) if at == levels[-1]]
        return tuple(prod(inner[i:]) for i in range(len(inner), -1, -1))

    def stages(self) -> tuple[int, ...]:
        """
        Return the numbers of parts into which a pipeline may divide the machine, ascending; the first is 1, no
        pipeline.
        """
        if not self.has_stages:
            return (1,)
        return tuple(part_counts(self.machine))

    def starts(self) -> Iterator[Recipe]:
        """
        Yield the recipes from which a search begins: sharded data parallelism; that with tensor parallelism over the
        innermost level; and the latter in pipeline stages. In each, a device has one sample in a micro-batch. Recipes
        that do not divide the batch are left out.
        """
        most = self.tensor[-1]
        parts = max(count for count in self.stages() if count * most <= self.machine.devices and count <= PARTS)
        for tp, stages in dict.fromkeys([(1, 1), (most, 1), (most, parts)]):
            dp = self.machine.devices // tp // stages
            found = Recipe(tp, 2 if dp > 1 else 0, None, 1, "attention", stages)
            most_batches = self._most(found)
            if most_batches:
                yield replace(found, micro_batches=most_batches)

    def _most(self, of: Recipe) -> int:
        """Return the most micro-batches of a recipe's degrees: one sample of each on a device; 0 if there are none."""
        dp = self.machine.devices // of.tp // (of.stages // of.chunks)
        return self.samples // dp if self.samples % dp == 0 else 0

    def has(self, of: Recipe) -> bool:
        """
        Return whether a recipe is in this family. Its degrees must multiply to the number of devices, it must use ZeRO
        exactly if it has data parallelism, and its micro-batches must divide the samples of a device. A pipeline must
        have two or more micro-batches and no ZeRO-3.
        """
        if of.stages % of.chunks or of.stages // of.chunks not in self.stages() or of.tp not in self.tensor:
            return False
        if of.stages > 1 and (of.micro_batches < 2 or of.zero == 3):
            return False
        parts = of.stages // of.chunks
        dp = self.machine.devices // of.tp // parts
        if dp < 1 or dp * of.tp * parts != self.machine.devices or (of.zero > 0) != (dp > 1):
            return False
        if of.shards is not None and not 1 < of.shards < dp:
            return False
        most = self._most(of)
        return most > 0 and of.micro_batches >= 1 and most % of.micro_batches == 0

    def neighbours(self, of: Recipe) -> Iterator[Recipe]:
        """
        Yield the recipes of the family that differ from `of` by one step, those that most often pay first:
        micro-batches, recompute, ZeRO, tensor parallelism, parts of the machine or chunks go one step up or down; in
        some, the number of micro-batches changes to match.
        """
        kind = KINDS.index(of.recompute)
        changes: list[Mapping[str, Any]] = []
        if of.micro_batches % 2 == 0:
            changes.append({"micro_batches": of.micro_batches // 2})
        changes.append({"micro_batches": of.micro_batches * 2})
        changes += [{"recompute": KINDS[k]} for k in (kind - 1, kind + 1) if 0 <= k < len(KINDS)]
        if of.micro_batches % 2 == 0 and kind + 1 < len(KINDS):
            changes.append({"micro_batches": of.micro_batches // 2, "recompute": KINDS[kind + 1]})
        if kind > 0:
            changes.append({"micro_batches": of.micro_batches * 2, "recompute": KINDS[kind - 1]})
        for zero, is_node in SHARDINGS:
            changes.append({"zero": zero, "shards": max(self.tensor[-1] // of.tp, 2) if is_node else None})
        at = self.tensor.index(of.tp)
        others = [self.tensor[i] for i in (at - 1, at + 1) if 0 <= i < len(self.tensor)]
        for tp in others:
            for count in dict.fromkeys((of.micro_batches, max(1, of.micro_batches * of.tp // tp))):
                changes.append({"tp": tp, "micro_batches": count})
        counts = self.stages()
        parts = of.stages // of.chunks
        where = counts.index(parts)
        for i in (where - 1, where + 1):
            if 0 <= i < len(counts):
                by = counts[i] / parts
                for count in dict.fromkeys((of.micro_batches, max(1, round(of.micro_batches * by)))):
                    changes.append({"stages": counts[i] * (of.chunks if counts[i] > 1 else 1), "micro_batches": count})
        if parts > 1:
            changes += [{"stages": parts * chunks, "chunks": chunks} for chunks in (1, 2) if chunks != of.chunks]
        seen = {of}
        for change in changes:
            found = replace(of, **change)
            if found.stages == 1 and found.chunks > 1:
                found = replace(found, chunks=1)
            dp = self.machine.devices // found.tp // max(1, found.stages // found.chunks)
            if dp == 1 or found.zero == 0:
                found = replace(found, zero=0, shards=None) if dp == 1 else replace(found, zero=1, shards=None)
            if found not in seen and self.has(found):
                seen.add(found)
                yield found


def read_recipe(text: str) -> Recipe:
    """Parse the text that `Recipe.text` returns, with or without `sp`. Raises `UnityError` for any other text."""
    parts = [each.partition("=") for each in text.split(",")]
    keys = {key: value for key, _, value in parts}
    chunks = keys.pop("schedule", "").partition(":")[2]
    try:
        shards = keys.get("shards")
        found = Recipe(
            tp=int(keys.get("tp", 1)),
            zero=int(keys.get("zero", 0)),
            shards=None if shards is None else int(shards),
            micro_batches=int(keys.get("micro_batches", 1)),
            recompute=keys.get("recompute", KINDS[0]),
            stages=int(keys.get("stages", 1)),
            chunks=int(chunks or 1),
        )
    except ValueError as error:
        raise UnityError(f"sweep: {text!a} is no recipe: {error}") from error
    if text not in (found.text(), found.text(sp=False)):
        raise UnityError(f"sweep: {text!a} is no recipe of a sweep, which are such as {found.text()}")
    return found

"""
Read the published steps in `published/*.toml`: what ran on what, and how long it took.

A file is a source: `name`, `source` (title, table, address), `year`, `kernels`, and what all of its rows share. Rows
are in `[[rows]]`, one each, or in `[[tables]]`: `columns` names the columns of the lines of `lines` (or of the CSV file
`csv`), and every other entry of the table is a field of a row, in which `{column}` stands for the line's value.
`[of.COLUMN.VALUE]` gives further columns to all lines by the value of one, such as the layers of a model by its name.
With a column `gpus` there is `{nodes}`, of 8 GPUs each. `[[missing]]` has the name of what cannot be expressed,
and its reason.

How long a step took is said as in the source, by one of `MEASURES`.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from unity_ir.machine import Machine, load
from unity_ir.machine.toml import machine_from

ROWS = Path(__file__).with_name("published")
CHOICES = {
    "attention": ("flash1", "flash2", "cudnn", "products"),
    "loss": ("fused", "alone"),
    "fused": ("all", "pointwise", "none"),
    "checkpoints": ("", "op"),
    "overlap": ("all", "none", "products"),
    "norms": ("fused", "steps"),
    "launches": ("ahead", "waited"),
    "weights": ("views", "copied"),
}
"""The values that fields of a row may have."""
MEASURES = ("ms", "seconds", "samples_per_second", "tokens_per_second", "tokens_per_second_and_gpu")
DEFAULTS = {("llama3_8b", "sequence"): 8192, ("llama3_8b", "layers"): 32, ("gpt2", "sequence"): 1024}
"""Sizes that the zoo's models have unless their text says another."""
NO_LIMIT = 2**50
"""Bytes of memory of a device whose limit is lifted."""


@dataclass(frozen=True)
class Row:
    """A published step."""

    source: str
    year: int
    name: str
    model: str
    """As `--model` has it, with the batch of all devices."""
    machine: str
    """A preset, or a file of `published/machines`, with its size: see `machine_of`."""
    degrees: str
    """As `--degrees` has it, with micro-batches, recompute and stages."""
    precision: str
    """As `--mixed-precision` has it; empty for f32."""
    measured: Mapping[str, float]
    """What the source says, by its name in `MEASURES`."""
    kernels: str
    fused: str = "all"
    """Which operators were fused, by a compiler or by hand: `all`, `pointwise` (not with products) or `none`."""
    attention: str = "products"
    """
    `flash1` or `flash2` (FlashAttention 1, 2), `cudnn` (of 2024; on an A100 as FlashAttention 2), or `products`: two
    batched products with a softmax kernel between them, which scales and masks, too.
    """
    dropout: float = 0.0
    """Probability of dropping a weight of an attention of products."""
    loss: str = "fused"
    """`fused`, or `alone`: casts of logits and of their gradient are kernels of their own."""
    checkpoints: str = ""
    """`op`: all but attention and every second product is recomputed, which no degrees say (torchtitan's policy)."""
    overlap: str = "all"
    """
    Which moves overlapped kernels in the measured code: `all` that the plan starts early; `none` (Megatron-LM until
    2022 waits for each, and for the gradients' sum after the backward); or `products`, `all` and those of tensor
    parallelism in pieces beside the products that make or read them (Transformer Engine's userbuffers).
    """
    norms: str = "fused"
    """`fused`, or `steps`: each step of an RMSNorm and of a rotary embedding is a kernel of its own, in f32."""
    launches: str = "ahead"
    """`ahead` of the device, or `waited`: a kernel ends before the next is launched (CUDA_LAUNCH_BLOCKING=1)."""
    weights: str = "views"
    """
    Weights that are gathered are `views` of what one collective gathers (FSDP), or `copied` out of it before their
    layer runs (FSDP2's `foreach_all_gather_copy_out`).
    """
    optimizer: str = "adamw"
    uncertain: str = ""

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{self.source}: {self.name}: {key} is {getattr(self, key)!r}, not one of {known}")
        if len(self.measured) != 1:
            raise ValueError(f"{self.source}: {self.name}: give one of {', '.join(MEASURES)}")

    @cached_property
    def ms(self) -> float:
        """Milliseconds of a step, as measured."""
        ((name, value),) = self.measured.items()
        samples, tokens = self.size("batch"), self.size("batch") * self.size("sequence")
        match name:
            case "ms":
                return value
            case "seconds":
                return value * 1e3
            case "samples_per_second":
                return samples / value * 1e3
            case "tokens_per_second":
                return tokens / value * 1e3
            case _:
                return tokens / (value * machine_of(self.machine).devices) * 1e3

    def size(self, name: str) -> int:
        """Return a size of the model that its text gives, such as `batch`, or the zoo's default."""
        found = re.search(rf"\b{name}=(\d+)", self.model)
        return int(found[1]) if found else DEFAULTS.get((self.model.partition(",")[0], name), 1)

    def degree(self, name: str) -> int:
        """Return a number that the degrees give, such as `tp`; 1 if they do not."""
        found = re.search(rf"\b{name}=(\d+)", self.degrees)
        return int(found[1]) if found else 1

    @property
    def family(self) -> str:
        """The family of the model."""
        known = {"gpt2": "GPT", "llama3_8b": "Llama", "bert_large": "BERT"}
        return known.get(self.model.partition(",")[0], "convolutional")

    @property
    def device(self) -> str:
        """The kind of GPU."""
        stem = self.machine.partition(":")[0]
        kinds = {"jean-zay": "A100", "vtrain": "A100", "grand-teton": "H100"}
        return kinds.get(stem) or next(k for k in ("A100", "H100", "V100", "P100", "K80") if k.lower() in stem)


@dataclass(frozen=True)
class Missing:
    """What a source has and no row can say."""

    source: str
    name: str
    reason: str


@dataclass
class Published:
    """All rows, and what is missing."""

    rows: list[Row] = field(default_factory=list[Row])
    missing: list[Missing] = field(default_factory=list[Missing])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Where a source is to be found, by its name."""


def published(folder: Path = ROWS) -> Published:
    """Return the rows of all files of a folder. Raises `ValueError` for a row that says too much or too little."""
    found = Published()
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        name = table.pop("name")
        found.sources[name] = table.pop("source")
        missing, rows, tables = (table.pop(key, ()) for key in ("missing", "rows", "tables"))
        of = table.pop("of", {})
        lines = [*rows, *(row for each in tables for row in _lines_of(each, of, folder))]
        found.rows += [_row(name, {**table, **line}) for line in lines]
        found.missing += [Missing(name, each["name"], each["reason"]) for each in missing]
    return found


def _row(source: str, entries: Mapping[str, Any]) -> Row:
    known = {f.name for f in fields(Row)}
    measured = {key: float(entries[key]) for key in MEASURES if key in entries}
    if unknown := entries.keys() - known - {*MEASURES}:
        raise ValueError(f"{source}: {entries.get('name')}: {', '.join(sorted(unknown))} is no field of a row")
    own = {key: value for key, value in entries.items() if key in known}
    return Row(**{"source": source, "precision": "", "degrees": "", **own, "measured": measured})


def _lines_of(table: Mapping[str, Any], of: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a table, as entries of `[[rows]]`; `of` has further columns, by a column's name and value."""
    columns: list[str] = table["columns"].split()
    if "csv" in table:
        with (folder / table["csv"]).open(encoding="utf-8-sig", newline="") as file:
            lines = [*csv.reader(file)][1:]
    else:
        lines = [line.split() for line in table["lines"].strip().splitlines()]
    entries = {k: v for k, v in table.items() if k not in ("columns", "lines", "csv")}
    for line in lines:
        if len(line) != len(columns):
            raise ValueError(f"{' '.join(line)}: {len(line)} values for {len(columns)} columns")
        values: dict[str, Any] = dict(zip(columns, line, strict=True))
        for column, by_value in of.items():
            # What the line says itself counts.
            values = {**by_value.get(values.get(column), {}), **values}
        if "gpus" in values:
            values["nodes"] = int(values["gpus"]) // 8
        if {"batch", "dp", "micro"} <= values.keys():
            values["steps"] = int(values["batch"]) // (int(values["dp"]) * int(values["micro"]))
        yield {key: v.format(**values) if isinstance(v, str) else v for key, v in entries.items()}


def machine_of(name: str) -> Machine:
    """
    Return a machine of `published/machines`, or a preset, with the limit of its memory lifted.

    After the colon is what a preset has there, the number of its nodes, or the sizes of its levels; sizes of more
    levels than it has divide its outermost level into groups, as pipelines of 12 stages on 48 nodes need.
    """
    stem, _, size = name.partition(":")
    own = ROWS / "machines" / f"{stem}.toml"
    if not own.exists() and size.count("x") < 2:
        found = load(name)
    else:
        path = own if own.exists() else files("unity_ir.machine").joinpath("presets", f"{stem}.toml")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if "x" not in size:
            found = machine_from(name, table, int(size))
        else:
            sizes = [int(text) for text in size.split("x")]
            outer, *inner = table["levels"]
            groups = [{**outer, "name": f"groups{i}"} for i in range(len(sizes) - 1 - len(inner))]
            levels = zip((*groups, outer, *inner), sizes, strict=True)
            found = machine_from(name, {**table, "levels": [{**level, "size": n} for level, n in levels]})
    return replace(found, device=replace(found.device, memory=NO_LIMIT, reserve=0))

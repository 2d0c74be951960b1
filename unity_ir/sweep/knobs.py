"""
Name the knobs of a sweep, and read their values: `gpus=8..512*2`, `bandwidth.nodes=25G,50G`, `batch=256`.

A knob is a figure of the machine or a key of the model. Of some, more is never slower (links, the bandwidth and size of
memory), of the batch less is: `monotone.py` relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from unity_ir.errors import UnityError

GPUS = "gpus"
GPUS_PER_NODE = "gpus_per_node"
HBM = "hbm"
MEMORY = "memory"
BANDWIDTH = "bandwidth."
"""Begins the knob of the links of a level, by the level's name."""
BATCH = "batch"

MACHINE = {
    GPUS: "devices in all: the outermost level gets as many members as make them, inner ones are filled first",
    GPUS_PER_NODE: "devices of a member of the innermost level",
    HBM: "bytes/s of a device's memory",
    MEMORY: "bytes of a device's memory, its reserve included",
    f"{BANDWIDTH}LEVEL": "bytes/s of a link (a port) of a level, and direction",
}
"""The knobs of machines; every other one is a key of the model, such as batch."""

WHOLE = (GPUS, GPUS_PER_NODE)
"""Knobs of machines that are whole numbers from 1 on."""

SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

MOST = 10_000
"""Values of a knob, and points of a grid, at most: more is a typing error."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that a sweep varies, of the machine or of the model, and the values that it takes, ascending."""

    name: str
    values: tuple[float, ...]

    @property
    def is_of_machine(self) -> bool:
        """Whether it is a setting of the machine, such as `gpus`, rather than of the model, such as `batch`."""
        return self.name in MACHINE or self.name.startswith(BANDWIDTH)


def read_knob(text: str) -> Knob:
    """
    Parse `NAME=VALUES`, a setting to vary and its values, such as `gpus=8..512*2`; return it with the values ascending.

    Values are numbers with commas between them, or ranges: `A..B*F` (A, A * F, .. up to B) and `A..B+D` (A, A + D, ..
    up to B). Numbers may have the suffix K, M, G or T, for 10^3, 10^6, 10^9 and 10^12.

    Raises `UnityError` for other text, an empty range, a value given twice or not above 0, and one that is not whole,
    except for bandwidths and memory. Whether the setting exists is not checked.
    """
    name, equals, said = text.partition("=")
    if not equals or not name:
        raise UnityError(f"sweep: {text!a} is not NAME=VALUES; write gpus=8,16 or gpus=8..512*2")
    values = [value for part in said.split(",") for value in _values(name, part)]
    if len({*values}) != len(values):
        raise UnityError(f"sweep: {name} has a value twice; leave one out")
    is_whole = name in WHOLE or not Knob(name, ()).is_of_machine
    for value in values:
        if is_whole and value != int(value):
            raise UnityError(f"sweep: {name} is {value:g}; it must be a whole number")
    return Knob(name, tuple(sorted(int(v) if is_whole else v for v in values)))


def _values(name: str, part: str) -> Sequence[float]:
    first, dots, rest = part.partition("..")
    if not dots:
        return [_number(name, part)]
    sign = next((s for s in "*+" if s in rest), None)
    if sign is None:
        raise UnityError(f"sweep: {name}: the range {part!a} has no step; write {first}..{rest}*2, or +D")
    last, _, step = rest.partition(sign)
    low, high, by = (_number(name, each) for each in (first, last, step))
    if low > high:
        raise UnityError(f"sweep: {name}: the range {part!a} is empty; its first value is the least")
    if sign == "*" and by <= 1:
        raise UnityError(f"sweep: {name}: the range {part!a} goes on for ever; its factor must be above 1")
    found = [low]
    while (value := found[-1] * by if sign == "*" else low + len(found) * by) <= high * (1 + 1e-9):
        found.append(value)
        if len(found) > MOST:
            raise UnityError(f"sweep: {name}: the range {part!a} has more than {MOST} values; take larger steps")
    return found


def _number(name: str, text: str) -> float:
    scale = SUFFIXES.get(text[-1:], 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0 and text.isascii()):
        raise UnityError(f"sweep: {name} is {text!a}; it must be a number above 0, such as 8 or 50G")
    return value

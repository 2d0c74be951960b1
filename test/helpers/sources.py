"""Find figures of data files of which no comment says where they are from."""

from __future__ import annotations

from collections.abc import Collection

FIGURES = (
    *("flops", "memory_bandwidth", "memory", "reserve", "launch", "efficiency", "bandwidth", "hub", "overhead"),
    *("from_host", "to_host", "both"),
)
"""
What a machine's file has that is measured, or from a datasheet: a comment on its line, or above it in its table, says
where it is from.
"""


def without_a_source(
    text: str, figures: Collection[str] = FIGURES, sharing: Collection[str] = ("flops", "memory_bandwidth")
) -> list[str]:
    """
    Return the lines of a TOML file with one of the `figures` of which no comment says where it is from. Those of
    `sharing` may share a comment above them, as those of a datasheet; protocols and curves one above their table.
    """
    found: list[str] = []
    above = table = False
    for text_line in text.splitlines():
        line = text_line.strip()
        if line.startswith("["):
            table = above and line.startswith(("[protocols]", "[device.curves"))
        if line.startswith("#") or not line:
            above = line.startswith("#")
            continue
        name = line.partition(" = ")[0]
        shared = above and name in sharing
        if name in figures and not (table or shared or "#" in line):
            found.append(line)
        if not shared:
            above = False
    return found

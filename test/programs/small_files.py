"""A function that ranks call (`ranks`): run a program that writes folders of small files."""

from __future__ import annotations

from typing import Any

from ranks import run_main


def run_with_small_files(program: Any, options: list[str], size: int) -> list[str]:
    """The lines a rank prints when the program runs with these options, with files of at most `size` bytes."""
    program.SHARD_BYTES = size
    return run_main(program, options)

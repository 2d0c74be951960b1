"""
What this package adds to any xDSL driver (entry point `xdsl.universe`): dialects, passes and targets.

Every driver imports this module at start-up, so it names things and imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from xdsl.universe import Universe

from unity_ir.dialects import DIALECTS
from unity_ir.passes import PASSES, TARGETS


def _factories(paths: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """Given `{"pcg": "unity_ir.dialects.pcg:PCG"}`, returns `{"pcg": f}` where `f()` imports the module."""

    def factory(path: str) -> Callable[[], Any]:
        module, _, name = path.partition(":")
        return lambda: getattr(import_module(module), name)

    return {name: factory(path) for name, path in paths.items()}


UNITY_UNIVERSE = Universe(
    all_dialects=_factories(DIALECTS),
    all_passes=_factories(PASSES),
    all_targets=_factories(TARGETS),
)

"""
unity-ir: joint algebraic and parallelization search for training graphs, lowered to Triton and NCCL programs.

    import unity_ir as ui

    plan = ui.plan("gpt2", batch=8, machine="dgx-h100:1", optimizer="adamw")

`plan`, `load` and the classes of what they return are `unity_ir.api`'s (docs/api.md), imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unity_ir.errors import UnityError
from unity_ir.version import __version__

if TYPE_CHECKING:
    from unity_ir.api.plans import Plan, load, plan
    from unity_ir.api.stats import Stats
    from unity_ir.api.step import Step

__all__ = ["Plan", "Stats", "Step", "UnityError", "__version__", "load", "plan"]

_FROM = {
    "Plan": "unity_ir.api.plans",
    "load": "unity_ir.api.plans",
    "Stats": "unity_ir.api.stats",
    "Step": "unity_ir.api.step",
}
"""The module of each name that is imported when it is first used."""


class _Callable(ModuleType):
    """The class of the package `unity_ir.plan`, which is a floor of the compiler, and has the name of the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Search for a plan: `unity_ir.api.plans.plan`."""
        from unity_ir.api.plans import plan

        return plan(*args, **options)


import_module("unity_ir.plan").__class__ = _Callable


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)

# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Whole batches: from a file, a function, or at random."""

from __future__ import annotations

import importlib
import os
import sys

import torch

from unity_ir.lowering.runtime.plan import INPUTS
from unity_ir.lowering.runtime.ranks import fail
from unity_ir.lowering.runtime.weights import read_safetensors

# --- copied into the program from here on ---


# --- data: whole batches by step number, the same on every rank


class Data:
    """
    Rows of the arrays of an .npz or .safetensors file, shuffled anew every epoch; what `function(step)` of
    "module:function" returns, arrays by input name; or random numbers. What a batch is depends on the step and the seed
    alone, so that a run that goes on needs to know no more.
    """

    def __init__(self, source=None, seed=0):
        self.source, self.seed, self.arrays, self.function = source, seed, None, None
        if source and not os.path.exists(source) and ":" in str(source):
            self.function = self._function(str(source))
        elif source:
            self.arrays = self._read(source)

    @staticmethod
    def _function(source):
        module, _, name = source.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            return getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as e:
            fail(f"cannot import {name} of {module}: {type(e).__name__}: {e}")
        finally:
            sys.path.remove(os.getcwd())

    @staticmethod
    def _read(path):
        """The arrays of the inputs. A file that could only train something else than it says is refused."""
        if str(path).endswith(".safetensors"):
            arrays = read_safetensors(path, INPUTS, "input")
        else:
            import numpy

            try:
                with open(path, "rb") as file, numpy.load(file, allow_pickle=False) as loaded:
                    arrays = {name: torch.from_numpy(loaded[name]) for name in INPUTS}
            except Exception as e:  # numpy, zip and torch have many ways to say what is wrong with a file
                fail(f"cannot read {', '.join(INPUTS)} from {path}: {e}")
        for name, spec in INPUTS.items():
            array = arrays[name]
            if not (array.dim() == len(spec.shape) > 0 and len(array) >= spec.shape[0]):
                fail(f"{path}: {name} is {list(array.shape)}; a batch is {list(spec.shape)}")
            arrays[name] = _converted(path, name, array, (len(array), *spec.shape[1:]), spec)
        if len({len(a) for a in arrays.values()}) != 1 or len({s.shape[0] for s in INPUTS.values()}) != 1:
            fail(f"{path}: {', '.join(INPUTS)} must have as many rows as each other, in the file and in a batch")
        return arrays

    def batch(self, t):
        """The whole batch of step `t`."""
        if self.function is not None:
            return self._called(t)
        if self.arrays is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + t)
            return {name: self._random(spec, generator) for name, spec in INPUTS.items()}
        rows = len(next(iter(self.arrays.values())))
        size = next(iter(INPUTS.values())).shape[0]
        epoch, within = divmod(t, rows // size)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        take = order[within * size : (within + 1) * size]
        return {name: self.arrays[name][take] for name in INPUTS}

    def _called(self, t):
        try:
            found = self.function(t)
            arrays = {name: torch.as_tensor(found[name]) for name in INPUTS}
        except (Exception, SystemExit) as e:
            fail(f"{self.source}({t}): {type(e).__name__}: {e}; it must return arrays by name: {', '.join(INPUTS)}")
        return {n: _converted(f"{self.source}({t})", n, arrays[n], s.shape, s) for n, s in INPUTS.items()}

    @staticmethod
    def _random(spec, generator):
        if not spec.dtype.is_floating_point:
            return torch.randint(0, spec.below or 2, spec.shape, generator=generator, dtype=spec.dtype)
        return torch.randn(spec.shape, generator=generator, dtype=torch.float32).to(spec.dtype)


def _converted(source, name, array, shape, spec):
    """An array as an input's tensor; what would be another one is refused."""
    if tuple(array.shape) != tuple(shape):
        fail(f"{source}: {name} is {list(array.shape)}; a batch is {list(spec.shape)}")
    if array.layout != torch.strided:
        fail(f"{source}: {name} is {array.layout}; it must be dense")
    if array.is_complex() or (array.is_floating_point() and not spec.dtype.is_floating_point):
        fail(f"{source}: {name} is {array.dtype}; it must convert to {spec.dtype}")
    array = array.detach().to(spec.dtype)
    if spec.below is not None and not (0 <= int(array.min()) and int(array.max()) < spec.below):
        fail(f"{source}: {name} has values outside 0 to {spec.below - 1}")
    return array

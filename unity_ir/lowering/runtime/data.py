# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Make whole batches: from a file, by a function, or at random."""

from __future__ import annotations

import importlib
import os
import sys

import torch

from unity_ir.lowering.runtime.pieces import piece, sent, wholes
from unity_ir.lowering.runtime.plan import COUNTERS, INPUTS, RUNNING, TABLES
from unity_ir.lowering.runtime.ranks import fail
from unity_ir.lowering.runtime.tokens import Tokens
from unity_ir.lowering.runtime.weights import names_in, read_safetensors

# --- copied into the program from here on ---


# --- data: whole batches by step number, the same on every rank


ROWS = [name for name in INPUTS if name not in TABLES]
"""Inputs of which every batch has rows of its own."""


class Data:
    """
    Source of batches, which depend on step and `seed` alone, so that a run can be resumed. `source` is an .npz or
    .safetensors file of samples (rows), shuffled every epoch by `seed` if `is_shuffled`; a token file, .npy or .bin
    (`Tokens`); "module:function", a function that returns a step's arrays by input name; or None: random numbers.
    Given the id that ends the documents of a token file, `document_end`, samples begin with documents. `tables`
    ({name: tensor}) are inputs that are no part of a batch (TABLES), and counters of steps (COUNTERS); if None, tables
    are random or in the source. Ends the run if files do not fit the inputs.

    Steps replace this rank's pieces of running statistics, `running` ({name: piece}), in place; in `tables` these stay
    as they were before the first step.
    """

    def __init__(self, source=None, seed=0, tables=None, is_shuffled=True, document_end=None):
        # Random tables are enough for a check.
        self.tables = None if tables is None else {n: _table("the file of weights", n, t) for n, t in tables.items()}
        if self.tables is not None:
            self.tables = {**_initial_tables(), **self.tables}
        self.running: dict = {}
        self.kept: dict = {}  # this rank's pieces of tables that no step replaces
        self.source, self.seed, self.is_shuffled, self.function = source, seed, is_shuffled, None
        self.arrays: dict = {}
        self.tokens: Tokens | None = None
        if source and not os.path.exists(source) and ":" in str(source):
            self.function = self._function(str(source))
        elif source and str(source).endswith((".npy", ".bin")):
            self.tokens = Tokens(source, ROWS, seed, is_shuffled, document_end)
        elif source:
            self.arrays = self._read(source)
            for name in [n for n in TABLES if n in self.arrays]:
                self.tables = {**(self.tables or {}), name: _table(source, name, self.arrays.pop(name))}

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
        """Return the arrays of the inputs by name; end the run if shapes, types or values do not fit the inputs."""
        if str(path).endswith(".safetensors"):
            there = names_in(path)
            arrays = read_safetensors(path, [n for n in INPUTS if n not in TABLES or n in there], "input")
        else:
            import numpy

            try:
                with open(path, "rb") as file, numpy.load(file, allow_pickle=False) as loaded:
                    wanted = [n for n in INPUTS if n not in TABLES or n in loaded]
                    arrays = {name: torch.from_numpy(loaded[name]) for name in wanted}
            except Exception as e:  # numpy, zip and torch raise many classes for damaged files; all end the run
                fail(f"cannot read {', '.join(ROWS)} from {path}: {e}")
        for name in ROWS:
            array, spec = arrays[name], INPUTS[name]
            if not (array.dim() == len(spec.shape) > 0 and len(array) >= spec.shape[0]):
                fail(f"{path}: {name} is {list(array.shape)}; a batch is {list(spec.shape)}")
            arrays[name] = _converted(path, name, array, (len(array), *spec.shape[1:]), spec)
        if len({len(arrays[n]) for n in ROWS}) != 1 or len({INPUTS[n].shape[0] for n in ROWS}) != 1:
            fail(f"{path}: {', '.join(ROWS)} must have as many rows as each other, in the file and in a batch")
        return arrays

    def batch(self, t):
        """Return step `t`'s (from 0) batch, {input name: whole tensor}, constant inputs (tables) included."""
        return self._with_tables(self._rows(t))

    def _with_tables(self, made):
        """Return the inputs of a step that were `made`, and the tables, in order."""
        found = {**(self.tables or {}), **made}
        missing = [name for name in INPUTS if name not in found]
        if missing:
            given = "give --weights or --tables FILE, as unity-opt --from-torch=.. --weights-out=FILE writes it"
            fail(f"input {missing[0]!r} is a table of the model, which comes with its weights: {given}")
        return {name: found[name] for name in INPUTS}

    def pieces(self, ctx, t):
        """
        Return this rank's pieces of step `t`'s (from 0) batch, by input name, on its device. Those of running
        statistics, which training replaces in place, and of tables that a file has are the same tensors in all steps.
        """
        own = self.tokens.pieces(ctx, t) if self.tokens else {}
        found = self._with_tables(own or self._rows(t))
        for name in RUNNING:
            if name not in self.running:
                self.running[name] = piece(ctx, found[name], INPUTS[name])
        # Other tables are the same in all steps, and sent once.
        for name, table in (self.tables or {}).items():
            if found.get(name) is table and name not in self.running and name not in self.kept:
                self.kept[name] = piece(ctx, table, INPUTS[name])
        own = {**own, **self.kept, **self.running}
        return {name: own[name] if name in own else sent(ctx, found[name], spec) for name, spec in INPUTS.items()}

    def trained(self):
        """Add to each counter in `tables` what a step adds (COUNTERS); call it after each step that is not skipped."""
        for name, count in COUNTERS.items():
            self.tables[name] = self.tables[name] + count

    def whole_tables(self, ctx):
        """Return {name: whole tensor} of tables, counters and running statistics as they are now. All ranks call it."""
        specs = {name: INPUTS[name] for name in self.running}
        now = {name: value.cpu() for name, (value, _) in wholes(ctx, self.running, specs).items()}
        return {**(self.tables or {}), **now}

    def say_how_packed(self, ctx):
        """Have rank 0 print how documents of a token file are packed into samples, if they are."""
        if self.tokens and self.tokens.packed and ctx.rank == 0:
            print(self.tokens.packed, flush=True)

    def whole_batches(self):
        """Return (number of whole batches in the file, samples left over); (None, 0) for a function or random data."""
        if self.tokens:
            return divmod(self.tokens.there, self.tokens.samples)
        if not self.arrays:
            return None, 0
        return divmod(len(self.arrays[ROWS[0]]), INPUTS[ROWS[0]].shape[0])

    def _rows(self, t):
        """Return the inputs of a step that are no tables, and the tables if they are random or the function's."""
        if self.function is not None:
            return self._called(t)
        if self.tokens:
            return self.tokens.batch(t)
        if not self.arrays:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + t)
            wanted = ROWS if self.tables is not None else INPUTS
            return {name: self._random(INPUTS[name], generator) for name in wanted}
        rows = len(self.arrays[ROWS[0]])
        size = INPUTS[ROWS[0]].shape[0]
        epoch, within = divmod(t, rows // size)
        order = torch.arange(rows)
        if self.is_shuffled:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        take = order[within * size : (within + 1) * size]
        return {name: self.arrays[name][take] for name in ROWS}

    def _called(self, t):
        try:
            found = self.function(t)
            arrays = {n: torch.as_tensor(found[n]) for n in INPUTS if n not in TABLES or n in found}
        except (Exception, SystemExit) as e:
            fail(f"{self.source}({t}): {type(e).__name__}: {e}; it must return arrays by name: {', '.join(ROWS)}")
        return {n: _converted(f"{self.source}({t})", n, a, INPUTS[n].shape, INPUTS[n]) for n, a in arrays.items()}

    @staticmethod
    def _random(spec, generator):
        if not spec.dtype.is_floating_point:
            return torch.randint(0, spec.below or 2, spec.shape, generator=generator, dtype=spec.dtype)
        return torch.randn(spec.shape, generator=generator, dtype=torch.float32).to(spec.dtype)


def _initial_tables():
    """Return what tables are that a step replaces, or adds to, before any, by name."""
    found = {n: torch.full(INPUTS[n].shape, value, dtype=INPUTS[n].dtype) for n, value in RUNNING.items()}
    return {**found, **{n: torch.zeros((), dtype=torch.int64) for n in COUNTERS}}


def _table(source, name, array):
    if name in COUNTERS:
        return array.detach().to(torch.int64).reshape(()).clone()
    return _converted(source, name, array, INPUTS[name].shape, INPUTS[name])


def _converted(source, name, array, shape, spec):
    """Convert an array to an input's type; end the run if its shape, kind or values do not fit."""
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

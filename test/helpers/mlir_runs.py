"""
Run functions of `linalg` on a CPU by `mlir-opt | mlir-runner`: inputs are constants of a `main`, which prints the bits
of results.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlir_tools import MLIR_OPT, mlir_opt
from xdsl.builder import Builder
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region
from xdsl.rewriter import InsertPoint

from unity_ir.interop.linalg.lines import Replicate, compute
from unity_ir.interop.linalg.scalars import TYPES
from unity_ir.tdl.elements import NUMPY
from unity_ir.tdl.functions import Array
from unity_ir.tdl.syntax import Bound

PIPELINE = ",".join(
    (
        "canonicalize",
        "one-shot-bufferize{bufferize-function-boundaries}",
        "func.func(convert-linalg-to-loops)",
        "convert-scf-to-cf",
        "expand-strided-metadata",
        "lower-affine",
        "arith-expand{include-bf16=true}",
        "convert-math-to-llvm",
        "convert-math-to-libm",
        "finalize-memref-to-llvm",
        "convert-func-to-llvm",
        "convert-arith-to-llvm",
        "convert-index-to-llvm",
        "convert-cf-to-llvm",
        "reconcile-unrealized-casts",
    )
)
"""The passes from `linalg` on tensors to LLVM, as `docs/mlir.md` has them."""


@dataclass(frozen=True)
class Run:
    """A function of a module by name, its operands, and the element types and shapes of operands and results."""

    name: str
    operands: Sequence[Array]
    types: Sequence[str]
    results: Sequence[tuple[str, Sequence[int]]]


def line_module(
    lines: Mapping[str, tuple[Bound, Sequence[str], Sequence[Sequence[int]]]], replicate: Replicate | None = None
) -> str:
    """
    A module with a function for each bound line, by name, given the element types and shapes of its operands. With
    `replicate` the lines are in the form that can be divided over devices.
    """
    functions: list[FuncOp] = []
    for name, (bound, dtypes, shapes) in lines.items():
        given = [TensorType(TYPES[d], list(s)) for d, s in zip(dtypes, shapes, strict=True)]
        block = Block(arg_types=given)
        made = compute(bound, block.args, Builder(InsertPoint.at_end(block)), replicate)
        block.add_op(ReturnOp(*made))
        functions.append(FuncOp(name, (given, [v.type for v in made]), Region(block)))
    module = ModuleOp(functions)
    module.verify()
    return str(module)


def run(module: str, runs: Sequence[Run]) -> list[list[Array]]:
    """The results of some functions of a module, each as an array of float64 or int64."""
    assert MLIR_OPT is not None
    text = module.rstrip().removesuffix("}") + _main(runs) + "}\n"
    lowered = mlir_opt(text, f"-pass-pipeline=builtin.module({PIPELINE})")
    assert lowered.returncode == 0, lowered.stderr[:2000]
    folder = Path(MLIR_OPT).parent
    libraries = [folder.parent / "lib" / f"libmlir_{n}.so" for n in ("c_runner_utils", "runner_utils", "float16_utils")]
    shared = f"-shared-libs={','.join(map(str, libraries))}"
    ran = subprocess.run(
        [folder / "mlir-runner", "-e", "main", "-entry-point-result=void", "-O0", shared],
        input=lowered.stdout,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[:2000]
    numbers = iter(np.array(ran.stdout.split(), dtype=np.int64))
    found: list[list[Array]] = []
    for each in runs:
        found.append([])
        for dtype, shape in each.results:
            bits = np.array([next(numbers) for _ in range(int(np.prod(shape)))], dtype=np.int64)
            is_number = dtype not in ("i64", "i32", "bool")
            found[-1].append((bits.view(np.float64) if is_number else bits).reshape(tuple(shape)))
    assert next(numbers, None) is None
    return found


def _main(runs: Sequence[Run]) -> str:
    """A function that calls others on constants, and prints the bits of every element of their results."""
    lines = ["func.func private @printI64(i64)", "func.func private @printNewline()", "func.func @main() {"]
    for number, each in enumerate(runs):
        names: list[str] = []
        types: list[str] = []
        for k, (array, dtype) in enumerate(zip(each.operands, each.types, strict=True)):
            names.append(f"%a{number}_{k}")
            types.append(_tensor(dtype, array.shape))
            lines.append(f"  {names[-1]} = arith.constant {_dense(array, dtype)} : {types[-1]}")
        made = [_tensor(dtype, shape) for dtype, shape in each.results]
        lines.append(
            f"  %r{number}:{len(made)} = func.call @{each.name}({', '.join(names)})"
            f" : ({', '.join(types)}) -> ({', '.join(made)})"
        )
        for k, (dtype, shape) in enumerate(each.results):
            lines += _printed(f"%r{number}#{k}", f"{number}_{k}", dtype, shape)
    return "\n".join([*lines, "  return", "}", ""])


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{TYPES[dtype]}>"


def _dense(array: Array, dtype: str) -> str:
    """The bytes of an array, as MLIR reads them."""
    if dtype == "bf16":
        raw = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = np.ascontiguousarray(array, NUMPY[dtype])
    return f'dense<"0x{raw.tobytes().hex()}">'


def _printed(value: str, own: str, dtype: str, shape: Sequence[int]) -> list[str]:
    """Print the elements of a tensor in row-major order, one to a line."""
    depth = len(shape)
    lines = [f"  %zero{own} = arith.constant 0 : index", f"  %one{own} = arith.constant 1 : index"]
    lines += [f"  %size{own}_{d} = arith.constant {size} : index" for d, size in enumerate(shape)]
    for d in range(depth):
        lines.append(f"  scf.for %i{own}_{d} = %zero{own} to %size{own}_{d} step %one{own} {{")
    at = ", ".join(f"%i{own}_{d}" for d in range(depth))
    lines.append(f"  %x{own} = tensor.extract {value}[{at}] : {_tensor(dtype, shape)}")
    if dtype == "i64":
        bits = f"%x{own}"
    elif dtype in ("bool", "i32"):
        extend = "extui" if dtype == "bool" else "extsi"
        lines.append(f"  %b{own} = arith.{extend} %x{own} : {TYPES[dtype]} to i64")
        bits = f"%b{own}"
    else:
        wide = f"%x{own}"
        if dtype != "f64":
            lines.append(f"  %w{own} = arith.extf %x{own} : {dtype} to f64")
            wide = f"%w{own}"
        lines.append(f"  %b{own} = arith.bitcast {wide} : f64 to i64")
        bits = f"%b{own}"
    lines += [f"  func.call @printI64({bits}) : (i64) -> ()", "  func.call @printNewline() : () -> ()"]
    return [*lines, *["  }"] * depth]

"""
Ahead-of-time compilation of kernels for GPUs that need not be there, and what of a GPU each takes.

Triton brings its own assembler, so that registers, spills, shared memory and instructions of every launch are known
before a program ever runs. `python -m unity_ir.lowering.aot` does the work, in a process of its own: kernels that were
defined under the interpreter cannot be compiled, and what is compiled is code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.step import Compiled

SHARED_LIMITS: Mapping[str, int] = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}
"""Shared memory that one program may have, in bytes, by target."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes."""

    kernel: str
    registers: int
    """Per thread (vector registers on AMD)."""
    spill_bytes: int
    """Stack frame per thread; 0 if everything is in registers."""
    shared_bytes: int
    """Shared memory per program."""
    seconds: float
    """To compile."""
    cp_async: bool
    """Copies to shared memory run beside the arithmetic (Ampere and later): the loop is pipelined."""
    wgmma: bool
    """Uses Hopper's warp-group matrix instructions."""
    mma: bool
    """Uses a matrix unit: `mma.sync`, `wgmma`, or AMD's `mfma`."""


def compile_all(source: str, compiled: Sequence[Compiled], target: str = "cuda:90") -> list[Resources]:
    """
    Compile kernels for `target` (`cuda:80`, `cuda:90`, `hip:gfx942`), which need not be present.

    `source` is text that defines all the kernels; imports of triton are added. It is run as Python code. Returns what
    each of `compiled` takes, in order. Raises `UnityError` with the compiler's message if one does not compile.
    """
    backend, _, arch = target.partition(":")
    if backend not in ("cuda", "hip") or not arch:
        raise UnityError(f"compile: target {target!r} is not known; use {', '.join(SHARED_LIMITS)}")
    request = {"source": source, "compiled": [asdict(c) for c in compiled], "backend": backend, "arch": arch}
    with tempfile.TemporaryDirectory() as directory:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": directory, "TRITON_DEFAULT_FP_FUSION": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "unity_ir.lowering.aot", directory],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnityError(f"compile: {last}")
    return [Resources(**r) for r in json.loads(done.stdout.splitlines()[-1])]


def _main(directory: str) -> None:
    request: dict[str, Any] = json.load(sys.stdin)
    module = _load("import triton\nimport triton.language as tl\n\n\n" + request["source"], Path(directory))
    found = [_compile(module, Compiled(**c), request["backend"], request["arch"]) for c in request["compiled"]]
    print(json.dumps([asdict(r) for r in found]))


def _load(source: str, directory: Path) -> ModuleType:
    """Kernels have to come from a file, since Triton reads their source again."""
    path = directory / "kernels.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(module: ModuleType, compiled: Compiled, backend: str, arch: str) -> Resources:
    triton: Any = importlib.import_module("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function: Any = getattr(module, compiled.kernel)
    names = list(compiled.signature)
    if names != list(function.arg_names):
        raise ValueError(f"{compiled.kernel}: its parameters are {function.arg_names}, its signature has {names}")
    types = {n: t.partition(":")[0] for n, t in compiled.signature.items()}
    aligned = [n for n, t in compiled.signature.items() if t.startswith("*") or t.endswith(":16")]
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={(names.index(n),): value for n, value in compiled.constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)
    options = {"num_warps": compiled.num_warps, "num_stages": compiled.num_stages}
    start = time.perf_counter()
    kernel: Any = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    shared = int(kernel.metadata.shared)
    if backend == "cuda":
        ptx: str = kernel.asm["ptx"]
        registers, frame = cubin_resources(kernel.asm["cubin"])
        wgmma = "wgmma.mma_async" in ptx
        mma = wgmma or "mma.sync" in ptx
        return Resources(compiled.kernel, registers, frame, shared, seconds, "cp.async.c" in ptx, wgmma, mma)
    text: str = kernel.asm["amdgcn"]
    frame = _metadata(text, "private_segment_fixed_size")
    return Resources(
        compiled.kernel, _metadata(text, "vgpr_count"), frame, shared, seconds, False, False, "v_mfma" in text
    )


def _metadata(amdgcn: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s+(\d+)", amdgcn)
    return int(found[1]) if found else 0


_SECTION = struct.Struct("<IIQQQQIIQQ")
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11
"""Attributes of `.nv.info`, whose values are a symbol and a number."""


def cubin_resources(cubin: bytes) -> tuple[int, int]:
    """
    Registers and stack frame bytes per thread of a cubin's kernel.

    They stand in the section `.nv.info` of the ELF file, as `ptxas -v` prints them.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [_SECTION.unpack_from(cubin, headers + _SECTION.size * k) for k in range(count)]
    strings = sections[names][4]
    registers = frame = 0
    for section in sections:
        begin = strings + section[0]
        if cubin[begin : cubin.index(b"\0", begin)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at + 4 <= end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            # Only attributes of form 4 have a payload, of `value` bytes.
            if form == 4:
                if attribute == _REGISTER_COUNT:
                    registers = struct.unpack_from("<II", cubin, at)[1]
                elif attribute == _FRAME_SIZE:
                    frame = struct.unpack_from("<II", cubin, at)[1]
                at += value
    return registers, frame


if __name__ == "__main__":
    _main(sys.argv[1])

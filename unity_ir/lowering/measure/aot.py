"""
Compile kernels ahead of time for GPUs that need not be present, and report the registers and memory each takes.

Triton brings its own assembler, so that registers, spills, shared memory and instructions of every launch are known
before a program runs. `python -m unity_ir.lowering.measure.aot` does the work in a process of its own, since kernels
defined under the interpreter cannot be compiled, and compiling a kernel runs its source as Python.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.kernels.triton.launch import Compiled
from unity_ir.lowering.measure.sass import Loop, loop_of

SHARED_LIMITS: Mapping[str, int] = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}
"""Most shared memory of one program, in bytes, by target."""

INSTRUCTIONS: Mapping[str, str] = {
    "cp.async": r"\bcp\.async\.c[ag]\b",
    "tma": r"\bcp\.async\.bulk\b",
    "mma.sync": r"\bmma\.sync\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "mfma": r"\bv_mfma",
    "wide loads": r"\bld\.global[a-z0-9_.:]*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64)\b|\b(?:global|buffer)_load_dwordx4\b",
}
"""Pattern in PTX or AMD's assembly for each kind of instruction; wide loads have 16 bytes or more per thread."""


@dataclass(frozen=True, slots=True)
class Resources:
    """
    The GPU resources that a compiled kernel takes: registers, stack frame, spills, shared memory, and its instructions.
    """

    kernel: str
    registers: int
    """Per thread (vector registers on AMD)."""
    frame_bytes: int
    """Stack frame per thread; 0 if everything is in registers."""
    spills: int
    """Registers that did not fit: bytes stored per thread on NVIDIA, registers on AMD."""
    shared_bytes: int
    """Shared memory per program."""
    seconds: float
    """Time it took to compile."""
    instructions: tuple[str, ...]
    """The kinds of `INSTRUCTIONS` in its code."""
    loop: Loop | None = None
    """The innermost loop over matrix products of a kernel with `wgmma`; None for other kernels."""

    @property
    def pipelined(self) -> bool:
        """Whether the kernel copies to shared memory asynchronously (Ampere and later)."""
        return "cp.async" in self.instructions or "tma" in self.instructions

    @property
    def mma(self) -> bool:
        """Whether the kernel uses a matrix unit (tensor core)."""
        return not {"mma.sync", "wgmma", "mfma"}.isdisjoint(self.instructions)


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation to do: a kernel's text, and its specialisation for a launch."""

    source: str
    """Defines the kernel, and whatever it uses beside triton, which is imported before."""
    compiled: Compiled


Outcome = Resources | str
"""The resources a kernel takes, or the compiler's message if it does not compile."""


def read_outcome(read: Any) -> Outcome:
    """
    Return the outcome of a compilation from `read`, the JSON value that it was stored as: `Resources` from a dict of
    their fields, the compiler's message from a string.
    """
    if isinstance(read, str):
        return read
    loop = None if read["loop"] is None else Loop(**read["loop"])
    return Resources(**(read | {"instructions": tuple(read["instructions"]), "loop": loop}))


def compile_all(source: str, compiled: Sequence[Compiled], target: str = "cuda:90") -> list[Resources]:
    """
    Compile Triton kernels for `target` (`cuda:80`, `cuda:90`, `hip:gfx942`), a GPU that need not be present. `source`
    is Python text that defines all the kernels; imports of triton are added, and it is run. Each of `compiled` names a
    kernel in it, with the argument types and constants to compile it for.

    Returns the resources that each of `compiled` takes, in order. Raises `UnityError` with the compiler's message if
    one does not compile.
    """
    found: list[Resources] = []
    for outcome in compile_each([Job(source, c) for c in compiled], target):
        if isinstance(outcome, str):
            raise UnityError(f"compile: {outcome}")
        found.append(outcome)
    return found


def compile_each(jobs: Sequence[Job], target: str) -> Iterator[Outcome]:
    """
    Yield the outcome (resources, or the compiler's message) of compiling each job for `target`, such as `cuda:90`, in
    the order of the jobs, as soon as it is done.

    All are compiled by one new process, which runs the jobs' sources as Python and ends with the iterator; if it dies,
    the jobs left over yield its last message. The first `next` raises `UnityError` for a target other than `cuda:..`,
    `hip:..`.
    """
    backend, _, arch = target.partition(":")
    if backend not in ("cuda", "hip") or not arch:
        raise UnityError(f"compile: target {target!r} is not known; use {', '.join(SHARED_LIMITS)}")
    sources = {_key(job.source): job.source for job in jobs}
    asked = [{"source": _key(job.source), "compiled": asdict(job.compiled.on(backend))} for job in jobs]
    request = {"sources": sources, "jobs": asked, "backend": backend, "arch": arch}
    with tempfile.TemporaryDirectory() as directory:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": directory, "TRITON_DEFAULT_FP_FUSION": "1"}
        file, errors = Path(directory, "request.json"), Path(directory, "errors")
        file.write_text(json.dumps(request))
        command = [sys.executable, "-m", "unity_ir.lowering.measure.aot", directory]
        with (
            errors.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as process,
        ):
            assert process.stdout is not None
            try:
                done = 0
                for line in process.stdout:
                    yield read_outcome(json.loads(line))
                    done += 1
            finally:
                process.kill()
            for job in jobs[done:]:
                last = (errors.read_text().strip().splitlines() or ["no message"])[-1]
                yield f"{job.compiled.kernel}: the compiler ended: {last}"


def _key(source: str) -> str:
    return sha256(source.encode()).hexdigest()[:16]


def _main(directory: str) -> None:
    request: dict[str, Any] = json.loads(Path(directory, "request.json").read_text())
    _name_no_version()
    modules: dict[str, ModuleType] = {}
    for job in request["jobs"]:
        key, compiled = job["source"], Compiled(**job["compiled"])
        answer: object
        try:
            if key not in modules:
                modules[key] = _load(request["sources"][key], Path(directory), key)
            answer = asdict(_compile(modules[key], compiled, request["backend"], request["arch"]))
        except Exception as error:
            answer = f"{compiled.kernel}: {' '.join(str(error).split())[:500]}"
        print(json.dumps(answer), flush=True)


def _name_no_version() -> None:
    """
    Leave Triton's version out of the keys of its cache, which ends with this process and so never meets another.

    Triton finds it by hashing all of its own files, half a gigabyte: a second, as long as several kernels.
    """
    cache: Any = importlib.import_module("triton.runtime.cache")
    cache.triton_key = lambda: ""


def _load(source: str, directory: Path, key: str) -> ModuleType:
    """Import kernels from a file, which they must come from, since Triton reads their source again."""
    path = directory / f"kernels_{key}.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
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
        text: str = kernel.asm["ptx"]
        registers, frame = _cubin_resources(kernel.asm["cubin"])
        # A frame may also hold an array; the assembler tells.
        spills = _spilled(text, arch) if frame else 0
    else:
        text = kernel.asm["amdgcn"]
        registers, frame = _metadata(text, "vgpr_count"), _metadata(text, "private_segment_fixed_size")
        spills = _metadata(text, "vgpr_spill_count") + _metadata(text, "sgpr_spill_count")
    found = tuple(name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, text))
    loop = loop_of(kernel.asm["cubin"]) if "wgmma" in found else None
    return Resources(compiled.kernel, registers, frame, spills, shared, seconds, found, loop)


def _spilled(ptx: str, arch: str) -> int:
    """Return the bytes of spill stores per thread, as the assembler reports them."""
    compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.ptx")
        path.write_text(ptx)
        options = ["-v", f"--gpu-name={compiler.sm_arch_from_capability(int(arch))}", "-o", os.devnull]
        command = [compiler.get_ptxas(int(arch)).path, *options, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", said)
    return int(found[1]) if found else 0


def _metadata(amdgcn: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s+(\d+)", amdgcn)
    return int(found[1]) if found else 0


_SECTION = struct.Struct("<IIQQQQIIQQ")
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11
"""Numbers of two attributes of `.nv.info`, whose values are a symbol and a number."""


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """
    Return the registers and the stack frame bytes per thread of a cubin's kernel, as `ptxas -v` prints them.

    They are in the section `.nv.info` of the ELF file.
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

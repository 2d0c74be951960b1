# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Launch Triton's kernels with less work of the host; a program has this before its kernels."""

from __future__ import annotations

import itertools
import sys

import torch
import triton

# --- copied into the program from here on ---


# --- launches


class Launches(dict):
    """
    A dict from a grid to a function that launches one Triton kernel: `kernel[grid](x_ptr, y_ptr, 64, BLOCK=32)`. Triton
    looks at all arguments of each launch to find the compiled kernel. These functions look once for each combination of
    element types and numbers, and then pass plain addresses, to Triton's function in C where they can. Pointers come
    first, with `_ptr` in their names. Triton itself launches if hooks (profilers) are set, or an address is no multiple
    of 16.
    """

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.pointers = sum(1 for _ in itertools.takewhile(lambda name: "_ptr" in name, kernel.arg_names))

    def __missing__(self, grid):
        kernel, pointers, known = self.kernel, self.pointers, {}
        whole, hooks = (*grid, 1, 1)[:3], triton.knobs.runtime

        def by_triton(key, together, given, options):
            compiled = kernel[grid](*given, **options)
            if together % 16 == 0 and compiled is not None:
                rest = (*given[pointers:], *(options[name] for name in kernel.arg_names[len(given) :]))
                driver = triton.runtime.driver.active
                stream, device = driver.get_current_stream, driver.get_current_device()
                run, fixed, as_one = directly(compiled.run, (compiled.packed_metadata, None, None, None))
                known[key] = run, stream, device, compiled.function, fixed, as_one, rest

        def launch(*given, **options):
            key, addresses, together = [*given[pointers:], *options.values()], [], 0
            for x in given[:pointers]:
                address = x.data_ptr()
                addresses.append(address)
                key.append(x.dtype)
                together |= address
            key = (*key,)
            found = known.get(key)
            # Tensors at other addresses have kernels of their own.
            if found is None or together % 16 or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
                by_triton(key, together, given, options)
            else:
                run, stream, device, function, fixed, as_one, rest = found
                if as_one:
                    run(*whole, stream(device), function, *fixed, (*addresses, *rest))
                else:
                    run(*whole, stream(device), function, *fixed, *addresses, *rest)

        self[grid] = launch
        return launch


def directly(run, metadata):
    """
    Return (function, its arguments between the kernel and what the kernel takes, whether it takes the latter as one
    tuple): `run`, of a compiled kernel, and the four of `metadata`, or the function in C that it calls. Triton 3.7's
    `run` only adds attributes of its own, unless the kernel needs memory.
    """
    if not hasattr(run, "kernel_signature") or run.global_scratch_size or run.profile_scratch_size:
        return run, metadata, False
    fixed = run.launch_cooperative_grid, run.launch_pdl, *metadata, None, None
    return run.launch, (*fixed, run.arg_annotations, run.kernel_signature), True


def launched(kernel):
    """
    Return what launches the Triton kernel `kernel` when called as `result[grid](..)`: `kernel` itself or, with
    --quick-launches, a Launches of it (not in the interpreter, on AMD's GPUs, or for unknown versions of Triton).
    """
    if "--quick-launches" not in sys.argv:
        return kernel
    is_known = triton.__version__.startswith(("3.6.", "3.7.")) and not torch.version.hip
    return Launches(kernel) if is_known and isinstance(kernel, triton.JITFunction) else kernel

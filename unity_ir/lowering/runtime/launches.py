# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Launch Triton's kernels with less work of the host; a program has this before its kernels."""

from __future__ import annotations

import torch
import triton

# --- copied into the program from here on ---


# --- launches


class Launches(dict):
    """
    A kernel's launches by grid: `kernel[grid](x, y, 64, BLOCK=32)`, tensors first, as in Triton. Triton's own look at
    each argument anew to find the compiled kernel; these do so for the first of each combination of types and numbers.
    """

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def __missing__(self, grid):
        kernel, known, whole, hooks = self.kernel, {}, (*grid, 1, 1)[:3], triton.knobs.runtime

        def find(key, given, options):
            compiled = kernel[grid](*given, **options)
            tensors = sum(isinstance(x, torch.Tensor) for x in given)
            if key is not None and compiled is not None:
                rest = (*given[tensors:], *(options[name] for name in kernel.arg_names[len(given) :]))
                active = triton.runtime.driver.active
                stream, device = active.get_current_stream, active.get_current_device()
                known[key] = compiled.run, stream, device, compiled.function, compiled.packed_metadata, rest

        def launch(*given, **options):
            addresses, types, together = [], [], 0
            for x in given:
                if not isinstance(x, torch.Tensor):
                    break
                addresses.append(address := x.data_ptr())
                types.append(x.dtype)
                together |= address
            key = (*types, *given[len(types) :], *options.values())
            found = known.get(key)
            is_aligned = together % 16 == 0  # else it is another kernel
            if found is None or not is_aligned or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
                find(key if is_aligned else None, given, options)
            else:
                run, stream, device, function, metadata, rest = found
                run(*whole, stream(device), function, metadata, None, None, None, *addresses, *rest)

        self[grid] = launch
        return launch


def launched(kernel):
    """Return the Launches of a kernel; itself in the interpreter, on AMD's GPUs, and for versions not known here."""
    is_known = triton.__version__.startswith(("3.6.", "3.7.")) and not torch.version.hip
    return Launches(kernel) if is_known and isinstance(kernel, triton.JITFunction) else kernel

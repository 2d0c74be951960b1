# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Launch Triton's kernels with less work of the host; a program has this before its kernels."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import contextmanager

import torch
import triton

from unity_ir.lowering.runtime.plan import NAME

# --- copied into the program from here on ---


# --- launches


class Launches(dict):
    """
    A dict from a grid to a function that launches one Triton kernel: `kernel[grid](x_ptr, y_ptr, 64, BLOCK=32)`. Triton
    looks at all arguments of each launch to find the compiled kernel. These functions look for each combination of
    element types and numbers, and then pass plain addresses, to Triton's function in C where they can. Pointers come
    first, with `_ptr` in their names.

    Triton itself does the first two launches of each combination. What it hands to the driver in the second is compared
    with what would be handed without it; if they differ, Triton does all others of that kernel, too. It also does those
    that hooks (profilers) are set for, or of which an address is no multiple of 16.
    """

    said = False
    """Whether it was said that Triton goes on launching."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.pointers = sum(1 for _ in itertools.takewhile(lambda name: "_ptr" in name, kernel.arg_names))

    def __missing__(self, grid):
        kernel, pointers, known, compiled = self.kernel, self.pointers, {}, {}
        whole, hooks = (*grid, 1, 1)[:3], triton.knobs.runtime

        def by_triton(key, together, given, options):
            if together % 16 or key in known or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
                kernel[grid](*given, **options)
            elif key not in compiled:
                compiled[key] = kernel[grid](*given, **options)
            else:
                compare(key, given, options)

        def compare(key, given, options):
            """Launch by Triton, and find out whether later launches can be without it."""
            one, count, is_done = compiled[key], len(kernel.arg_names), False
            try:
                rest = (*given[pointers:], *(options[name] for name in kernel.arg_names[len(given) :]))
                with handed(one.run, count, one.run.launch) as wanted:
                    kernel[grid](*given, **options)
                    is_done = True
                with handed(one.run, count, lambda *handed: None) as found:
                    known[key] = directly(one, rest)
                    launch(*given, **options)
                if found != wanted or len(found) != 1:
                    raise ValueError(f"{found} is handed to the driver, not {wanted}")
                known[key] = directly(one, rest)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                known[key] = None
                Launches.say(f"{kernel.__name__}: {error}")
                if not is_done:
                    kernel[grid](*given, **options)

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

    @staticmethod
    def say(why):
        """Say, once, that kernels are launched by Triton although there is --quick-launches."""
        if not Launches.said and os.environ.get("RANK", "0") == "0":
            line = f"{NAME}: --quick-launches: kernels are launched by Triton: {why}"
            sys.stderr.write(f"{' '.join(line.split())[:300]}\n")
        Launches.said = True


@contextmanager
def handed(run, count, launch):
    """
    Collect, for each launch by `run`, of a compiled kernel, what it hands to Triton's function in C: the numbers and
    texts that say where and how, without memory of its own and hooks, and `count` arguments of the kernel, with
    addresses in place of tensors. `launch` is called in place of that function.
    """
    found, own = [], run.launch

    def record(*given):
        # Triton 3.6 passes arguments one by one, 3.7 as one tuple.
        where, arguments = (given[:-1], given[-1]) if isinstance(given[-1], tuple) else (given[:-count], given[-count:])
        plain = [x if isinstance(x, (int, str, bytes, tuple)) else None for x in where]
        found.append((plain, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]))
        return launch(*given)

    run.launch = record
    try:
        yield found
    finally:
        run.launch = own


def directly(compiled, rest):
    """
    Return what a launch of a compiled kernel without Triton needs: the function to call, the driver's that returns the
    stream, the device, the kernel's handle, the arguments of the function between that and what the kernel takes,
    whether it takes the latter as one tuple, and `rest`, with which they end. The function is the compiled kernel's
    `run`, or the one in C that it calls: Triton 3.7's `run` only adds attributes of its own, unless the kernel needs
    memory.
    """
    driver = triton.runtime.driver.active
    run, fixed = compiled.run, (compiled.packed_metadata, None, None, None)
    where = driver.get_current_stream, driver.get_current_device(), compiled.function
    if not hasattr(run, "kernel_signature") or run.global_scratch_size or run.profile_scratch_size:
        return run, *where, fixed, False, rest
    fixed = run.launch_cooperative_grid, run.launch_pdl, *fixed, None, None, run.arg_annotations, run.kernel_signature
    return run.launch, *where, fixed, True, rest


def launched(kernel):
    """
    Return what launches the Triton kernel `kernel` when called as `result[grid](..)`: `kernel` itself or, with
    --quick-launches, a Launches of it (not in the interpreter, on AMD's GPUs, or for unknown versions of Triton).
    """
    if "--quick-launches" not in sys.argv:
        return kernel
    if torch.version.hip or not triton.__version__.startswith(("3.6.", "3.7.")):
        Launches.say("it is not known how, " + ("on GPUs of AMD" if torch.version.hip else f"in {triton.__version__}"))
        return kernel
    return Launches(kernel) if isinstance(kernel, triton.JITFunction) else kernel

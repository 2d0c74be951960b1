"""Generate the cast of many float32 weights to one type, as one kernel."""

from __future__ import annotations

from unity_ir.kernels.triton.launch import Compiled, Launcher, pointer

BLOCK = 4096
WARPS = 8

_KERNEL = """\
@triton.jit
def {name}_kernel(weight_ptr, rows_ptr, blocks_ptr, out_ptr, BLOCK: tl.constexpr):
    row = rows_ptr + 4 * tl.load(blocks_ptr + 2 * tl.program_id(0))
    weight_ptr = tl.load(row).to(weight_ptr.dtype)
    out_ptr = tl.multiple_of(out_ptr + tl.load(row + 1), 16)
    size = tl.load(row + 2)
    index = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    tl.store(out_ptr + index, tl.load(weight_ptr + index, mask=mask), mask=mask)
"""

_LAUNCH = '''\
def {name}(weights, most):
    """The weights of at most so many elements, cast to {dtype} in one launch, by name."""
    given = {{n: w for n, w in weights.items() if w.numel() <= most and w.dtype == torch.float32}}
    like, *_ = given.values()
    table = cast_table(given.values(), block={block})
    out = like.new_empty((table.size,), dtype={torch_dtype})
    {name}_kernel[(len(table.blocks),)](like, table.rows, table.blocks, out, BLOCK={block}, num_warps={warps})
    return {{n: out.as_strided(w.shape, w.stride(), at) for (n, w), at in zip(given.items(), table.places)}}
'''


def casts_launcher(dtype: str, torch_dtype: str) -> Launcher:
    """
    Return the launcher `all_bf16(weights, most)`, with the element type `dtype` in its name (`torch_dtype` as Python
    has it): given tensors by name, returns casts of those in float32 of at most so many elements, by name, which are
    parts of one tensor. The kernel reads a table of their addresses (`lowering.runtime.tables.cast_table`).
    """
    name = f"all_{dtype}"
    types = {"weight_ptr": pointer("f32"), "rows_ptr": "*i64", "blocks_ptr": "*i32", "out_ptr": pointer(dtype)}
    compiled = Compiled(f"{name}_kernel", {**types, "BLOCK": "constexpr"}, {"BLOCK": BLOCK}, WARPS, 3)
    source = _LAUNCH.format(name=name, dtype=dtype, torch_dtype=torch_dtype, block=BLOCK, warps=WARPS)
    return Launcher(name, source, {f"{name}_kernel": _KERNEL.format(name=name)}, (compiled,))

"""Generate the optimizer's update of one parameter, in place, as one kernel; equal to that of `torch.optim`."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.kernels.triton.launch import Compiled, Launcher, pointer
from unity_ir.pcg.graph import HYPERPARAMETERS

BLOCK = 4096
WARPS = 16

_SGD_KERNEL = """\
@triton.jit
def sgd_kernel(p_ptr, g_ptr, size, lr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    p = tl.load(p_ptr + index, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_ptr + index, p - lr * g, mask=mask)
"""

_SGD = f'''\
def sgd(p, g, lr):
    """p -= lr * g, as torch.optim.SGD, in place."""
    size = p.numel()
    sgd_kernel[(triton.cdiv(size, {BLOCK}),)](p, g, size, lr, BLOCK={BLOCK}, num_warps={WARPS})
'''

_SGD_TORCH = '''\
def sgd_torch(p, g, lr):
    """p -= lr * g, as torch.optim.SGD, in place."""
    p.sub_(lr * g)
'''

_ADAM_KERNEL = """\
@triton.jit
def NAME_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    size,
    step_size,
    root_correction,
    keep1,
    take1,
    keep2,
    take2,
    eps,
    decay,  # AdamW
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    p = tl.load(p_ptr + index, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + index, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = keep1 * m + take1 * g
    v = keep2 * v + take2 * g * g
    p = p - decay * p  # AdamW
    p = p - step_size * m / (tl.sqrt(v) / root_correction + eps)
    tl.store(p_ptr + index, p, mask=mask)
    tl.store(m_ptr + index, m, mask=mask)
    tl.store(v_ptr + index, v, mask=mask)
"""

_ADAM = f'''\
def NAME(p, g, m, v, step, lr, beta1, beta2, epsDECAY):
    """One step (from 1 on) of torch.optim.CLASS, in place: m and v are the running means of g and g * g."""
    size = p.numel()
    step_size = lr / (1.0 - beta1**step)
    root_correction = (1.0 - beta2**step) ** 0.5
    NAME_kernel[(triton.cdiv(size, {BLOCK}),)](
        p, g, m, v, size, step_size, root_correction, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps,
        lr * weight_decay,  # AdamW
        BLOCK={BLOCK}, num_warps={WARPS},
    )
'''

_ADAM_TORCH = '''\
def NAME_torch(p, g, m, v, step, lr, beta1, beta2, epsDECAY):
    """One step (from 1 on) of torch.optim.CLASS, in place: m and v are the running means of g and g * g."""
    p.mul_(1.0 - lr * weight_decay)  # AdamW
    m.mul_(beta1).add_(g, alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    root_correction = (1.0 - beta2**step) ** 0.5
    p.addcdiv_(m, (v.sqrt() / root_correction).add_(eps), value=-lr / (1.0 - beta1**step))
'''

_ADAMW_ONLY = "  # AdamW\n"
"""
Marker at the end of lines that only AdamW has. Adam's text leaves them out, rather than multiply by a decay of 0, so
that `--check` covers every line of it.
"""


def _named(text: str, name: str, class_name: str) -> str:
    """Fill in a template for an optimizer; Adam's text is AdamW's without the lines of the decay."""
    lines = text.replace("NAME", name).replace("CLASS", class_name).splitlines(keepends=True)
    kept = (line for line in lines if name == "adamw" or not line.endswith(_ADAMW_ONLY))
    decay = ", weight_decay" if name == "adamw" else ""
    return "".join(line.replace(_ADAMW_ONLY, "\n") for line in kept).replace("DECAY", decay)


_SGD_SCALARS = ("lr",)
_ADAM_SCALARS = ("step_size", "root_correction", "keep1", "take1", "keep2", "take2", "eps")


def optimizer_launcher(
    name: str, dtype: str = "f32", impl: str = "triton", gradient: str = "f32", state: str = "f32"
) -> Launcher:
    """
    Return the launcher of an optimizer's update: `sgd(p, g, lr)`, `adam(p, g, m, v, step, lr, beta1, beta2, eps)`, or
    `adamw`, which takes `weight_decay` after these.

    The launcher updates the parameter `p` and its moments `m` and `v` in place by the gradient `g`: contiguous tensors
    of one shape. `step` counts from 1. `dtype`, `gradient` and `state` are the element types of p, of g, and of m and
    v; `impl` is `triton` or `torch`. Raises `UnityError` for another name or implementation.
    """
    if name not in HYPERPARAMETERS or impl not in ("triton", "torch"):
        known = ", ".join(HYPERPARAMETERS)
        raise UnityError(f"lowering: no {impl} optimizer {name}; known are {known}, with triton or torch")
    adam = name != "sgd"
    class_name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[name]
    if impl == "torch":
        return Launcher(f"{name}_torch", _named(_ADAM_TORCH if adam else _SGD_TORCH, name, class_name), {}, ())
    tensors = {"p_ptr": dtype, "g_ptr": gradient, **({"m_ptr": state, "v_ptr": state} if adam else {})}
    signature = {n: pointer(d) for n, d in tensors.items()} | {"size": "i32"}
    scalars = _ADAM_SCALARS if name == "adam" else (*_ADAM_SCALARS, "decay") if adam else _SGD_SCALARS
    signature |= dict.fromkeys(scalars, "fp32") | {"BLOCK": "constexpr"}
    kernel = f"{name}_kernel"
    compiled = Compiled(kernel, signature, {"BLOCK": BLOCK}, WARPS, 3)
    source = _named(_ADAM if adam else _SGD, name, class_name)
    return Launcher(
        name, source, {kernel: _named(_ADAM_KERNEL if adam else _SGD_KERNEL, name, class_name)}, (compiled,)
    )

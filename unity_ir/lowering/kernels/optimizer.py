"""Fused updates of one parameter in place, equal to those of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.step import Compiled, Launcher, pointer

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
def adam_kernel(
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
    p = p - step_size * m / (tl.sqrt(v) / root_correction + eps)
    tl.store(p_ptr + index, p, mask=mask)
    tl.store(m_ptr + index, m, mask=mask)
    tl.store(v_ptr + index, v, mask=mask)
"""

_ADAM = f'''\
def adam(p, g, m, v, step, lr, beta1, beta2, eps):
    """One step (from 1 on) of torch.optim.Adam, in place: m and v are the running means of g and g * g."""
    size = p.numel()
    step_size = lr / (1.0 - beta1**step)
    root_correction = (1.0 - beta2**step) ** 0.5
    adam_kernel[(triton.cdiv(size, {BLOCK}),)](
        p, g, m, v, size, step_size, root_correction, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps,
        BLOCK={BLOCK}, num_warps={WARPS},
    )
'''

_ADAM_TORCH = '''\
def adam_torch(p, g, m, v, step, lr, beta1, beta2, eps):
    """One step (from 1 on) of torch.optim.Adam, in place: m and v are the running means of g and g * g."""
    m.mul_(beta1).add_(g, alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    root_correction = (1.0 - beta2**step) ** 0.5
    p.addcdiv_(m, (v.sqrt() / root_correction).add_(eps), value=-lr / (1.0 - beta1**step))
'''

_KERNELS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {"sgd": (_SGD, _SGD_KERNEL, _SGD_TORCH), "adam": (_ADAM, _ADAM_KERNEL, _ADAM_TORCH)}
)
_SCALARS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sgd": ("lr",), "adam": ("step_size", "root_correction", "keep1", "take1", "keep2", "take2", "eps")}
)


def optimizer_launcher(
    name: str, dtype: str = "f32", impl: str = "triton", gradient: str = "f32", state: str = "f32"
) -> Launcher:
    """
    The launcher of an optimizer's update: `sgd(p, g, lr)` or `adam(p, g, m, v, step, lr, beta1, beta2, eps)`.

    It updates `p` (and `m`, `v`) in place and takes contiguous tensors of any shape, all alike; `step` counts from 1.
    `dtype`, `gradient` and `state` are the element types of p, of g, and of m and v. Raises `UnityError` for another
    name.
    """
    if name not in _KERNELS or impl not in ("triton", "torch"):
        raise UnityError(f"lowering: no {impl} optimizer {name}; known are {', '.join(_KERNELS)}, with triton or torch")
    source, kernel, in_torch = _KERNELS[name]
    if impl == "torch":
        return Launcher(f"{name}_torch", in_torch, {}, ())
    tensors = {"p_ptr": dtype, "g_ptr": gradient, **({"m_ptr": state, "v_ptr": state} if name == "adam" else {})}
    signature = {n: pointer(d) for n, d in tensors.items()} | {"size": "i32"}
    signature |= dict.fromkeys(_SCALARS[name], "fp32") | {"BLOCK": "constexpr"}
    compiled = Compiled(f"{name}_kernel", signature, {"BLOCK": BLOCK}, WARPS, 3)
    return Launcher(name, source, {f"{name}_kernel": kernel}, (compiled,))

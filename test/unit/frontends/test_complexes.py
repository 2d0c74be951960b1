"""Complex numbers, which an import holds by their parts: loss and gradients of small functions against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_agree import agree, weighted

from unity_ir.errors import UnityError
from unity_ir.frontends.torch import from_torch
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.optimizer import Optimizer

ANGLES = torch.outer(torch.arange(3.0, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))
TURNS = torch.polar(torch.ones_like(ANGLES), ANGLES)
"""Turns [3, 2], of two frequencies at three positions."""
WHERE = torch.tensor([True, False])


def paired(a: Tensor) -> Tensor:
    """Complex numbers [2, 3, 2] of a [2, 3, 4], neighbours one number."""
    return torch.view_as_complex(a.reshape(2, 3, 2, 2))


def flat(z: Tensor) -> Tensor:
    """The parts of complex numbers, so that they can be weighted."""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _turned_in_place(a: Tensor) -> Tensor:
    z = paired(a * 2)
    z.mul_(TURNS)
    z[:, 1] += 1j * z[:, 0]
    return z


def _written_through_the_real_view(a: Tensor) -> Tensor:
    real = a * 2
    z = paired(real)
    real[:, 0] = 3 * a[:, 1]
    torch.view_as_real(z)[..., 1].mul_(2)
    return torch.cat([flat(z), real, flat(z)[..., :2]], -1)


def _of_given_positions(a: Tensor) -> Tensor:
    """Turns that depend on data, as of positions that are an input."""
    angles = torch.outer(a[0, :, 0], torch.tensor([1.0, 0.1], dtype=a.dtype))
    return paired(a) * torch.polar(a[0, :, :2], angles)


def _known_in_place(a: Tensor) -> Tensor:
    turns = TURNS.clone()
    turns[1] = turns[0] * 2j
    turns.real.add_(1)
    return paired(a) * turns


def _without_gradient(a: Tensor) -> Tensor:
    with torch.no_grad():
        turns = paired(a).exp()
    return paired(a) * turns


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # a [2, 3, 4], positive
    "turned": lambda a: paired(a) * TURNS,
    "turned_by_broadcast": lambda a: paired(a).transpose(0, 1)[:, :, None] * TURNS[:, None, None],
    "turned_back": lambda a: paired(a) * TURNS.conj(),
    "turned_after_permutation": lambda a: torch.view_as_complex(a.permute(1, 2, 0).contiguous()) * TURNS[:, :1],
    "of_halves": lambda a: torch.complex(a[..., :2], a[..., 2:]) * TURNS,
    "of_given_positions": _of_given_positions,
    "real_by_complex": lambda a: a[..., :2] * TURNS + TURNS * a[..., 2:],
    "complex_by_number": lambda a: 2.0 * paired(a) - (1 - 2j) * paired(a) / 4,
    "scalar_view": lambda a: torch.view_as_complex(a[0, 0, :2]) * TURNS,
    "sums": lambda a: (paired(a) + TURNS) - a[..., :2] + (1 - paired(a)).sub(TURNS, alpha=2),
    "quotients": lambda a: paired(a) / paired(a + 1) + TURNS / paired(a) + 1 / paired(a),
    "exponentials": lambda a: paired(a).exp(),
    "conjugates": lambda a: paired(a).conj() * paired(a) + paired(a).conj().resolve_conj(),
    "products": lambda a: paired(a).transpose(1, 2) @ paired(a) + TURNS[:2] @ paired(a)[:, :2],
    "shapes": lambda a: paired(a).reshape(-1).unflatten(0, (3, 4)).unsqueeze(1).expand(3, 2, 4).permute(2, 0, 1),
    "parts_of_it": lambda a: torch.cat([paired(a)[:, 1:], paired(a)[:, [0]]], 1) * paired(a).chunk(2, -1)[1],
    "stacked": lambda a: torch.stack([paired(a), paired(a) * TURNS], 1).flip(1).roll(1, 0),
    "chosen": lambda a: torch.where(WHERE, paired(a), TURNS) + torch.where(paired(a).real > 1, paired(a), 2 * TURNS),
    "reduced": lambda a: (paired(a) * TURNS).sum(1) + (paired(a) * TURNS).mean(1).cumsum(-1),
    "detached": lambda a: paired(a).detach() * paired(a),
    "without_gradient": _without_gradient,
    "converted": lambda a: paired(a).to(torch.complex64).to(torch.complex128) + a[..., :2].to(torch.complex128),
    "filled_like": lambda a: paired(a) * torch.ones_like(paired(a)).cumsum(1) + torch.zeros_like(paired(a)),
    "in_place": _turned_in_place,
    "known_in_place": _known_in_place,
}
REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "real_and_imag": lambda a: (paired(a) * TURNS).real * (paired(a) * TURNS).imag,
    "absolute": lambda a: (paired(a) * TURNS).abs(),
    "absolute_at_0": lambda a: (paired(a - a.detach()) * TURNS).abs() + paired(a).abs(),
    "to_real": lambda a: (paired(a) * TURNS).real.to(torch.float32).to(torch.float64),
    "written_through_the_real_view": _written_through_the_real_view,
}


class Function(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64):
        super().__init__()
        self.of = of
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter((torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) + 0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.of(self.a * x)
        return weighted(flat(y) if y.is_complex() else y)


@pytest.mark.parametrize("name", [*FUNCTIONS, *REAL])
def test_function(name: str):
    agree(Function({**FUNCTIONS, **REAL}[name]), torch.ones((), dtype=torch.float64))


def rotary(a: Tensor) -> Tensor:
    """As DeepSeek-V2 and Llama 4 write it: in float32, whatever the element type."""
    turns = torch.polar(torch.ones(3, 2), ANGLES.float())
    return torch.view_as_real(paired(a.float()) * turns).flatten(2).type_as(a)


def test_rotary_of_bf16_is_computed_in_f32():
    module = Function(rotary, torch.bfloat16)
    x = torch.ones((), dtype=torch.bfloat16)
    imported = from_torch(module, x)
    by_type = {n.op: n.types[0].dtype for n in imported.graph.nodes() if n.op in ("slice", "sub", "concat", "cast")}
    assert by_type == {"slice": "f32", "sub": "f32", "concat": "f32", "cast": "bf16"}
    graph = differentiate(imported.graph, Optimizer())
    given = {k: v.float().numpy() for k, v in {"x": x, **imported.tables}.items()}
    weights = {k: w.float().numpy() for k, w in imported.weights.items()}
    values = interpret(graph, given, weights)
    loss = module(x)
    loss.backward()
    assert float(values[graph.outputs[0]]) == pytest.approx(loss.item(), rel=1e-2)
    (update,) = graph.updates
    assert module.a.grad is not None
    np.testing.assert_allclose(values[update.grad], module.a.grad.double().numpy(), rtol=2e-2)


def test_rotary_is_that_of_real_numbers():
    """The same operators as of models that write it in real numbers, but for the order of the elements."""

    def written(a: Tensor) -> Tensor:
        even, odd = a[..., 0::2], a[..., 1::2]
        cos, sin = ANGLES.cos(), ANGLES.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(2)

    x = torch.ones((), dtype=torch.float64)
    complex_one, real_one = (from_torch(Function(f), x) for f in (lambda a: flat(paired(a) * TURNS), written))
    assert complex_one.graph.outputs == real_one.graph.outputs


def _overlapping(a: Tensor) -> Tensor:
    z = paired(a * 2)
    turned = z.conj()
    z += 1
    return turned.resolve_conj()


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sine": (lambda a: paired(a).sin(), r"aten\.sin\.default: no mapping of complex numbers; compute with their real"),
    "conjugate_of_what_is_written": (_overlapping, "resolve_conj it before"),
    "joined_with_real": (lambda a: torch.cat([paired(a), a[..., :2]], 1), "convert the real ones"),
    "fourier": (lambda a: torch.fft.fft(a), r"aten\.fft_fft\.default: no mapping, as it is made of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    function, why = REFUSED[name]
    with pytest.raises(UnityError, match=why):
        from_torch(Function(function), torch.ones((), dtype=torch.float64))


def test_complex_inputs_and_parameters_are_refused_with_what_to_do():
    module = Function(lambda a: a)
    with pytest.raises(UnityError, match=r"input x: element type complex128 is not supported; .*view_as_real"):
        from_torch(module, torch.ones((), dtype=torch.complex128), lambda y: y.real)
    module.a = nn.Parameter(TURNS.clone())
    with pytest.raises(UnityError, match=r"element type complex128 is not supported; .*view_as_real"):
        from_torch(module, torch.ones((), dtype=torch.float64))

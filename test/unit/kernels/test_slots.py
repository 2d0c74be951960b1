"""Tokens to slots and back, in groups: whole, and in pieces of the slots, of tokens, and of the groups."""

from typing import Any

import pytest
import torch
from covered import operand_dtypes
from extent import sample
from operator_twins import TORCH

from unity_ir.forms.classify import Reduction, classify
from unity_ir.forms.scatter import Scatter
from unity_ir.kernels.launchers import launcher
from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line

GROUPS, TOKENS, CHOSEN, HIDDEN, SLOTS = 3, 40, 2, 33, 24
PIECES = 4


def numbers(how: str) -> torch.Tensor:
    """A slot for each choice of each token: any, the same for all of a group, or only some of the slots."""
    random = torch.Generator().manual_seed(1)
    at = torch.randint(0, SLOTS, (GROUPS, CHOSEN, TOKENS), generator=random)
    return {"any": at, "one": torch.full_like(at, SLOTS - 1), "few": at % 3 * 7}[how]


def operands(name: str, how: str) -> list[torch.Tensor]:
    """Floating ones in f64."""
    torch.manual_seed(2)
    x, y = torch.randn(GROUPS, TOKENS, HIDDEN).double(), torch.randn(SLOTS, GROUPS, HIDDEN).double()
    s = torch.randn(GROUPS, CHOSEN, TOKENS).double()
    at = numbers(how)
    return {"to_slots": [x, at, s], "from_slots": [y, at, s], "slot_shares": [x, y, at]}[name]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("how", sample(["any", "one", "few"], 2))
@pytest.mark.parametrize("name", ["to_slots", "from_slots", "slot_shares"])
def test_pieces_of_slots(name: str, how: str, impl: str, runner: Any) -> None:
    """
    Each piece has 0 for the slots of other pieces, though their numbers are those of its neighbours; of slots made in
    pieces, the pieces are side by side.
    """
    given = operands(name, how)
    made = name == "to_slots"
    attributes = {"size": SLOTS, "degrees": (1,)} if made else {}
    whole = TORCH[name](*given, **attributes)
    part = SLOTS // PIECES
    attributes = {"size": part, "degrees": (1,)} if made else {}
    pieces: list[torch.Tensor] = []
    for start in range(0, SLOTS, part):
        own = [x[start : start + part] if x.shape[0] == SLOTS else x for x in given]
        one = operator(name)
        bound = one.bind(tuple(tuple(x.shape) for x in own), one.attributes(attributes)).bound
        built = launcher(bound, operand_dtypes(bound, "f32"), impl, offsets=("v",))
        (got,) = runner.run(built, [x.float() if x.is_floating_point() else x for x in own], start)
        pieces.append(got.double())
    got = torch.cat(pieces) if made else torch.stack(pieces).sum(0)
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("to", "at", "integers", "form"),
    [
        ("v, g, e", "g, b", (2, 40), Scatter),
        ("v, g, e", "g, 2 * b", (2, 79), Reduction),
        ("v, g, e", "g, g, b", (2, 2, 40), Reduction),
        ("v, g, e", "v, b", (5, 40), Reduction),
        ("v, g, e", "b, b", (40, 40), Reduction),
        ("v, g, e", "b, g", (40, 2), Reduction),
        ("v, e", "2 * b", (79,), Reduction),
    ],
)
def test_what_is_sorted_has_an_integer_for_each_position(to: str, at: str, integers: tuple[int, ...], form: type):
    g, x = ("g, ", (2, 40, 33)) if "g" in to else ("", (40, 33))
    line = f"f(x, t: int)  out[{to}] = sum[b](where(eq(v, t[{at}]), x[{g}b, e], 0))  where size(v) = 5"
    assert isinstance(classify(bind(parse_line(line), (x, integers), {}), {}), form)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_integers_out_of_range_are_in_no_place_of_their_neighbours(impl: str, runner: Any) -> None:
    line = "f(x, t: int)  out[v, g, e] = sum[b](where(eq(v, t[g, b]), x[g, b, e], 0))  where size(v) = 5"
    at = torch.randint(-2, 8, (2, 40), generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 40, 33, generator=torch.Generator().manual_seed(2))
    (got,) = runner.run(launcher(bind(parse_line(line), ((2, 40, 33), (2, 40)), {}), ("f32", "i64"), impl), [x, at])
    want = torch.einsum("gbv,gbe->vge", (at[..., None] == torch.arange(5)).float(), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_no_slot_looks_at_every_token() -> None:
    """Positions are sorted, and a program makes one slot of one group; few positions are looked at by each."""
    one = operator("to_slots")
    for tokens, sorted_first in ((4096, True), (8, False)):
        shapes = (2, tokens, 512), (2, 2, tokens), (2, 2, tokens)
        bound = one.bind(shapes, one.attributes({"size": 64, "degrees": (1,)})).bound
        built = launcher(bound, operand_dtypes(bound, "f32"))
        assert ("torch.sort(" in built.source) == sorted_first
    bound = one.bind(((2, 4096, 512), (2, 2, 4096), (2, 2, 4096)), one.attributes({"size": 64, "degrees": (1,)})).bound
    (launch,) = launcher(bound, operand_dtypes(bound, "f32")).work
    assert launch.programs == 2 * 64 * 2

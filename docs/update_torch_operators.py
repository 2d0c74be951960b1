"""Write docs/torch_operators.md anew: `python docs/update_torch_operators.py`. A test keeps it true."""

from __future__ import annotations

from pathlib import Path

import torch

from unity_ir.frontends.torch.importer import BY_SHAPE
from unity_ir.frontends.torch.site import COMPLEX, MAPPINGS

PATH = Path(__file__).parent / "torch_operators.md"

HEAD = """\
# ATen operators with a mapping

Made by `docs/update_torch_operators.py`. An operator counts once, whatever its overloads. Where its operands are all
known at import it needs no mapping: it is computed then. One without a mapping is taken apart by PyTorch's
decompositions, if it has one.

"""


def core() -> set[str]:
    """The operators PyTorch tags as core ATen, without their overloads."""
    found: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, packet):
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operator is not None and torch.Tag.core in operator.tags:
                found.add(packet)
    return found


def creates(name: str) -> bool:
    """Whether an operator has no tensor to work on, or uses but its shape: it is always known at import."""
    packet = getattr(torch.ops.aten, name)
    operators = [getattr(packet, overload) for overload in packet.overloads()]
    tensors = any("Tensor" in str(a.type) and a.name != "out" for o in operators for a in o._schema.arguments)
    is_random = any(torch.Tag.nondeterministic_seeded in o.tags for o in operators)
    return name in BY_SHAPE or (not tensors and not is_random)


def listed(names: set[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names)) + "\n"


def table() -> str:
    wanted = core()
    every = MAPPINGS.keys() | COMPLEX.keys()
    mapped = wanted & every
    known = {name for name in wanted - mapped if creates(name)}
    return (
        f"{HEAD}**Core ATen: {len(mapped)} of {len(wanted)}** have a mapping, "
        f"{len(known)} more are always known at import.\n"
        f"\n## Core, with a mapping\n\n{listed(mapped)}"
        f"\n## Core, always known at import\n\n{listed(known)}"
        f"\n## Core, without a mapping\n\n{listed(wanted - mapped - known)}"
        f"\n## Of complex numbers, with a mapping\n\n{listed(set(COMPLEX))}"
        f"\n## Others, with a mapping\n\n{listed(every - wanted)}"
    )


if __name__ == "__main__":
    PATH.write_text(table())

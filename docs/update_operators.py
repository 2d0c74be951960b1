"""Write docs/operator_table.md anew: `python docs/update_operators.py`. A test keeps it true."""

from __future__ import annotations

from pathlib import Path

from unity_ir.ops import operators
from unity_ir.ops.operator import Operator
from unity_ir.rules.proof.samples import analysed
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.regions import halo, region, sharding_variable
from unity_ir.tdl.syntax import (
    Window,
)
from unity_ir.tdl.syntax import accesses as bound_accesses

BAR = "\\|"
"""A bar inside a table's cell."""

PATH = Path(__file__).parent / "operator_table.md"

HEAD = """\
# Every operator

Made by `docs/update_operators.py` from the lines themselves, with packs of one variable and variadic operands twice.
Under *divided* are the index variables that may have a degree and leave the results divided (with what worker p of d
then reads or adds to, where that is more than its piece); under *summed* those that leave addends; under *addends* the
sets of operands that may come in addends together. All other variables need their dims whole.

| operator | line | divided | summed | addends |
|---|---|---|---|---|
"""


def halos(analysis: Analysis, variable: str) -> str:
    """The symbolic regions of a variable that reach beyond a piece."""
    indices = {
        i for r in analysis.bound.results for i in (*r.indices, *(i for a in bound_accesses(r.expr) for i in a.indices))
    }
    windows = [i for i in indices if isinstance(i, Window) and sharding_variable(i, analysis.bound.extents) == variable]
    texts = sorted({f"`{region(i, variable)}`" for i in windows if any(halo(i, variable, analysis.bound.extents))})
    return f" {' and '.join(texts)}" if texts else ""


def row(operator: Operator) -> str:
    analysis = analysed(operator)
    bound = analysis.bound
    divided = [v + halos(analysis, v) for v in analysis.splittable if any(v in dims for dims in analysis.result_dims)]
    summed = [v for v in analysis.splittable if any(v not in dims for dims in analysis.result_dims)]
    sets = [" + ".join(sorted(s)) for s in analysis.carriers]
    line = operator.tdl if isinstance(operator.tdl, str) else f"{operator.signature} (made from the shapes)"
    cells = (bound.operator, f"`{' '.join(line.split())}`", ", ".join(divided), ", ".join(summed), "; ".join(sets))
    return f"| {' | '.join(c.replace('|', BAR) for c in cells)} |"


def table() -> str:
    rows = [row(operator) for operator in operators().values()]
    whole = sum(r.endswith("|  |  |  |") for r in rows)
    count = f"{len(rows)} operators, {len(rows) - whole} of which can be divided in some way.\n"
    return HEAD + "\n".join(rows) + "\n\n" + count


if __name__ == "__main__":
    PATH.write_text(table())

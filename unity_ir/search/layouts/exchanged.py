"""
Let operators' tables have ways to divide experts whose rows are exchanged (`plan.routes`), not gathered.

A product of rows that exchanges them needs rows, and makes results, in the layouts of tokens: the axes that divide its
experts divide rows in dim 0 there. So what it makes passes from product to product without a move, and sends count as
seconds of the product (`cost.routes`). In plans the role of these axes is that of the experts' index variable.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from unity_ir.cost.routes import EXPERTS
from unity_ir.pcg.sharding import Assignment, GridRole, operand_role, result_role
from unity_ir.tdl.parallel import Analysis

_most: ContextVar[float] = ContextVar("most rows exchanged", default=0.0)


def exchange_rows() -> float:
    """Return `Graph.exchange_rows` of the plans that are searched for: above 0, rows may be exchanged."""
    return _most.get()


@contextmanager
def exchanging(most: float) -> Generator[None]:
    """Search for plans that may exchange rows for the length of a `with` statement; `most` as `Graph.exchange_rows`."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)


class ExchangedExperts(str):
    """The role of axes that divide the experts of a product whose rows are exchanged: that of the index variable."""


EXCHANGED = ExchangedExperts(EXPERTS)


def exchanges_rows(assignments: Iterable[Assignment]) -> bool:
    """Return whether one of some operators exchanges rows in a search's choice."""
    return any(isinstance(what, ExchangedExperts) for of in assignments for what in of)


def needed_role(analysis: Analysis, operand: int, what: GridRole) -> int:
    """Return the role, in the layout of an operand as it is needed, of an axis with the role `what` in an operator."""
    is_row = isinstance(what, ExchangedExperts) and EXPERTS not in _dims(analysis, operand)
    return 0 if is_row else operand_role(analysis, operand, what)


def made_role(analysis: Analysis, result: int, what: GridRole) -> int:
    """Return the role, in the layout of a result as it is made, of an axis with the role `what` in an operator."""
    return 0 if isinstance(what, ExchangedExperts) else result_role(analysis, result, what)


def _dims(analysis: Analysis, operand: int) -> tuple[str | None, ...]:
    return analysis.operand_dims[analysis.bound.operands[operand].name]

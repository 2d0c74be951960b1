"""Rows of a printed step are merged only where the order of collectives and the life of variables stay as they are."""

from __future__ import annotations

from unity_ir.lowering.emit.rows import MOVES, Row, merged


def move(target: str, operand: str, kind: str = "keep_part", dies: tuple[str, ...] = ()) -> Row:
    around = (f"{kind}(", ")")
    row = Row([target], operand.join(around), "of x", (1,), list(dies), operand=operand, around=around)
    row.moves = [(kind, "copy")]
    return row


def codes(*rows: Row) -> list[str]:
    return [row.text()[0] for row in merged(rows)]


def test_a_move_takes_in_the_one_before() -> None:
    """Catches a nested operand that is deleted after it is gone."""
    assert codes(move("a", "x"), move("b", "a", dies=("a",))) == ["b = keep_part(keep_part(x))"]


def test_a_value_that_lives_on_keeps_its_row() -> None:
    """Catches a variable nested away that a later line reads."""
    assert codes(move("a", "x"), move("b", "a")) == ["a = keep_part(x)", "b = keep_part(a)"]


def test_no_line_nests_more_moves_than_can_be_read() -> None:
    """Catches lines that grow with the number of moves."""
    rows = [move(f"x{i + 1}", f"x{i}", dies=(f"x{i}",)) for i in range(2 * MOVES)]
    assert [text.count("keep_part") for text in codes(*rows)] == [MOVES, MOVES]


def test_a_wait_follows_its_own_collective_alone() -> None:
    """Catches a wait moved to the start of another collective, which would end the overlap."""
    own, other = (Row(["a"], awaits=(n,), waits=True) for n in (1, 2))
    assert codes(move("a", "x", "all_reduce"), own) == ["a = all_reduce(x).wait()"]
    assert codes(move("a", "x", "all_reduce"), other) == ["a = all_reduce(x)", "a = a.wait()"]

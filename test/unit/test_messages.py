"""Messages are one line of bounded length that steers no terminal."""

from __future__ import annotations

import pytest

from unity_ir.messages import LENGTH, one_line, tell


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pcg.relu: fits", "pcg.relu: fits"),
        ("a\nb\t c\r\n", "a b c"),
        ("a\u2028b\x85c", "a b c"),
        ("nul \x00, bell \x07, escape \x1b[31m", "nul \\x00, bell \\x07, escape \\x1b[31m"),
        ("right \u202e to left \ufeff", "right \\u202e to left \\ufeff"),
        ("half \udcff", "half \\udcff"),
        ("é, 日本, α", "é, 日本, α"),
    ],
)
def test_lines(text: str, line: str):
    assert one_line(text) == line


def test_long_words_lose_their_middle_first():
    line = one_line(f"m.pcg:1:2: `{'x' * 400_000}` is no type; write f32")
    assert len(line) <= LENGTH
    assert line.startswith("m.pcg:1:2: `xxx")
    assert line.endswith("` is no type; write f32")


def test_how_a_long_message_begins_and_ends_is_kept():
    line = one_line("pcg.concat: " + "[2, 3] and " * 100_000 + "differ; reshape one")
    assert len(line) == LENGTH
    assert line.startswith("pcg.concat: [2, 3] and")
    assert line.endswith("differ; reshape one")


def test_what_is_short_enough_is_not_cut():
    path = "/a/very/long/path" * 10
    assert one_line(f"{path}: no such file") == f"{path}: no such file"


def test_a_report_keeps_its_indent(capsys: pytest.CaptureFixture[str]):
    tell("  aten.foo: no\nmapping")
    assert capsys.readouterr().err == "  aten.foo: no mapping\n"

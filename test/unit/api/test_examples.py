"""The examples of docs/api.md do what they show."""

from __future__ import annotations

from doctest import ELLIPSIS, DocTestParser, DocTestRunner
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_on_python_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().replace("```", "")
    test = DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 10
    said: list[str] = []
    DocTestRunner(optionflags=ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)

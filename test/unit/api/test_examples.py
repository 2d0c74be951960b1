"""The examples of docs/api.md and docs/pytorch.md do what they show."""

from __future__ import annotations

from doctest import ELLIPSIS, DocTestParser, DocTestRunner
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "least"), [("api.md", 10), ("pytorch.md", 4)])
def test_pages_on_python_show_what_happens(page: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text().replace("```", "")
    test = DocTestParser().get_doctest(text, {}, page, str(DOCS / page), 0)
    assert len(test.examples) > least
    said: list[str] = []
    DocTestRunner(optionflags=ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)

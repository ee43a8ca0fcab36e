"""The page on routing has the tables of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from waymark.decide.policies.tables import TABLES

PAGE = Path(__file__).parents[3] / "docs" / "routing.md"


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table_of_the_code(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    assert text.count(start) == text.count(end) == 1
    table = text.partition(start)[2].partition(end)[0].strip()
    assert table == TABLES[name](), f"put this between the marks in docs/routing.md:\n\n{TABLES[name]()}\n"

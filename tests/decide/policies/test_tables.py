"""The page on routing has the tables of the code; ``python -m tests.decide.policies.test_tables`` writes them."""

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
    assert table == TABLES[name](), "run `python -m tests.decide.policies.test_tables`"


def write() -> None:
    """Write every table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()

"""The README tells the truth about the settings."""

from __future__ import annotations

from pathlib import Path

from app.settings import markdown_table

ROOT = Path(__file__).parents[1]


def test_the_readme_holds_the_table_of_settings() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = "<!-- settings -->", "<!-- /settings -->"
    assert readme.count(start) == readme.count(end) == 1
    table = readme.partition(start)[2].partition(end)[0].strip()
    assert table == markdown_table(), f"put this between the markers in README.md:\n\n{markdown_table()}\n"

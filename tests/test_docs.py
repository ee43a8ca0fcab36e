"""The docs tell the truth about the settings."""

from __future__ import annotations

from pathlib import Path

from app.settings import markdown_table

ROOT = Path(__file__).parents[1]


def test_the_page_of_settings_holds_their_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    start, end = "<!-- settings -->", "<!-- /settings -->"
    assert page.count(start) == page.count(end) == 1
    table = page.partition(start)[2].partition(end)[0].strip()
    assert table == markdown_table(), f"put this between the markers in docs/configuration.md:\n\n{markdown_table()}\n"

"""The docs tell the truth about the settings, and their requests are understood."""

from __future__ import annotations

import re
from pathlib import Path

from app.settings import markdown_table
from tests.live import start

ROOT = Path(__file__).parents[1]


def test_the_page_of_settings_holds_their_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    start, end = "<!-- settings -->", "<!-- /settings -->"
    assert page.count(start) == page.count(end) == 1
    table = page.partition(start)[2].partition(end)[0].strip()
    assert table == markdown_table(), f"put this between the markers in docs/configuration.md:\n\n{markdown_table()}\n"


async def test_the_requests_of_the_runbooks_are_understood_as_they_stand(redis_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    name, header = re.findall(r"the header\s+`(Content-Type): (\S+)`", page)[0]
    requests = re.findall(r"`curl[^`$]* \$WAYMARK(/(?:query|register|unregister)\S*)([^`]*)`", page)
    assert [path for path, _ in requests] == ["/unregister", "/query"]
    async with start("serve", redis_url, tmp_path / "log") as live, live.client() as client:
        for path, flags in requests:
            given = re.fullmatch(r""" -H "\$JSON" -d '(.*)'""", flags)
            assert given is not None, f"{path} needs a body of a kind that is named"
            answer = await client.post(path, content=given[1], headers={name: header})
            assert answer.status_code in (200, 404), answer.text

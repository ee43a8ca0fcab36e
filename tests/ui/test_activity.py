"""What has happened, as the page says it: in one tense, with its day, in colours of statuses, and how far back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from waymark.api import activity as feed
from waymark.store.activity import LENGTH, ActivityKind

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

#: What each kind is called, and the status whose colour it has.
SAID = {
    "registered": ("registered", ""), "unregistered": ("unregistered", ""), "drain": ("drained", "drained"),
    "resume": ("resumed", "active"), "weight": ("weight changed", ""), "takeover": ("taken over", "degraded"),
    "restart": ("restarted", "degraded"), "unreachable": ("became unreachable", "unreachable"),
    "reachable": ("became reachable", "active"), "lost": ("lost", "lost"), "found": ("found again", "active"),
    "sweep": ("swept", ""), "snapshot": ("read by snapshot", ""), "drift": ("drifted", "degraded"),
    "other": ("other", ""),
}  # fmt: skip


async def test_each_event_is_said_in_one_tense_with_its_day_and_the_list_says_how_far_back_it_goes(
    tmp_path: Path,
) -> None:
    assert set(SAID) == {*ActivityKind, "other"}
    at = 1760000000.5

    async def given(route: Route) -> None:
        events = [
            {"at": at + number, "kind": kind, "instance_id": "a", "model": "m"} for number, kind in enumerate(SAID)
        ]
        text = "".join(f"id: {number}-0\ndata: {json.dumps(event)}\n\n" for number, event in enumerate(events))
        await route.fulfill(status=200, content_type="text/event-stream", body=text)

    async with start_live("serve", "memory://", tmp_path / "log") as live, tab(live.url) as looking:
        page = looking.page
        await page.unroute_all()
        await page.goto("about:blank")
        await page.route("**/activity", given, times=1)
        await page.goto(f"{live.url}/ui#activity")
        rows = page.locator("#events tr")
        await expect(rows).to_have_count(len(SAID))
        for row, (said, status) in zip(reversed(await rows.all()), SAID.values(), strict=True):
            await expect(row.locator("td").nth(1)).to_have_text(said)
            await expect(row.locator("td").nth(1)).to_have_attribute("class", status)
            await expect(row.locator("td").first).to_have_text(re.compile(r"^\d+ Oct, \d\d:\d\d:\d\d$"))
        first = await rows.last.locator("td").first.inner_text()
        counts = "A tab begins with the newest 100 and shows 500 at most; Redis keeps about 10,000."
        await expect(page.locator("#how-far")).to_have_text(f"{len(SAID)} events, back to {first}. {counts}")
    assert (feed._FIRST, LENGTH) == (100, 10_000)

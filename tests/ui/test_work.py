"""How much the page does with 100 engines: counted, as the time it takes is the machine's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.conftest import wait_until
from tests.live import Live
from tests.patience import patient
from tests.ui.browser import impatient, tab
from tests.ui.frames import BLOCKS, ENGINES, answer, ask

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

#: Counts what is drawn, and how often a style has to be computed.
_COUNT = """() => {
window.counts = {drawn: 0, styles: 0};
for (const name of ["fillRect", "stroke"]) {
  const real = CanvasRenderingContext2D.prototype[name];
  CanvasRenderingContext2D.prototype[name] = function (...given) { counts.drawn++; return real.apply(this, given); };
}
const computed = window.getComputedStyle;
window.getComputedStyle = (...given) => { counts.styles++; return computed(...given); };
}"""
_WATCH = """window.changes = [];
new MutationObserver((records) => changes.push(...records.map((each) => each.type))).observe(
  document.getElementById("groups"), {childList: true, subtree: true, characterData: true, attributes: true});"""

PAINTED = """canvas => canvas.width && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
  .filter((value, i) => i % 4 === 3 && value).length"""


def workers(**of_the_first: Any) -> dict[str, Any]:
    """Of ``/workers``: an engine with one rank each."""
    publishers = [
        {
            "instance_id": f"vllm-{number}", "tenant_id": "default", "dp_rank": 0, "model_name": "m", "endpoint": "",
            "scope": "instance", "status": "active", "blocks": {"GPU": number}, "lag_seconds": 0.1, "weight": 1.0,
            "load": {"requests": number, "tokens": 0}, "counters": {"blocks_stored": 0}, "complaint": None,
        }
        for number in range(ENGINES)
    ]  # fmt: skip
    publishers[0] |= of_the_first
    return {"publishers": publishers, "workers": ["w"]}


async def next_poll(page: Page) -> None:
    """Wait until the page has looked again and has drawn that."""
    async with page.expect_response("**/workers"):
        pass
    async with page.expect_response("**/workers"):
        pass


async def test_a_look_changes_only_what_has_changed(empty: Live) -> None:
    found = workers()

    async def given(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(found))

    async with impatient(empty.url, {("main", "EVERY_MS"): 500}) as page:
        await page.route("**/workers", given)
        await page.goto(f"{empty.url}/ui")
        await expect(page.locator("#groups tbody tr:visible")).to_have_count(1 + ENGINES)
        await next_poll(page)  # rates are known from the second look on
        await page.evaluate(_WATCH)
        await next_poll(page)
        assert await page.evaluate("changes") == []
        found = workers(status="lost", complaint="gone")
        await expect(page.locator("#groups .status.lost")).to_have_count(1)
        await next_poll(page)
        # The status, its colour, the blocks and their bar, and the complaint, which is seen now, of one engine.
        assert sorted(await page.evaluate("changes")) == [*["attributes"] * 3, *["childList"] * 4]


async def test_a_line_of_cells_is_drawn_once_when_it_is_near_and_by_its_runs(empty: Live) -> None:
    async with tab(empty.url, "#prompt") as looking:
        page = looking.page
        await page.evaluate(_COUNT)
        await ask(page)
        lines = page.locator("#answer .line:not(.part)")
        drawn = page.locator("#answer canvas")
        await expect(drawn.first).to_be_attached()
        assert await drawn.count() < await lines.count() / 2
        for _ in range(2):
            for number in range(0, ENGINES, 5):
                await lines.nth(number).scroll_into_view_if_needed()
            await lines.last.scroll_into_view_if_needed()
            await expect(drawn).to_have_count(ENGINES)
        counts = await page.evaluate("counts")
    runs = sum(len(holder["runs"]) for each in answer()["instances"] for holder in each["holders"])
    # A rectangle for each run, one more for the run of each medium in which the match ends, and two for each line.
    assert counts["drawn"] <= runs + 4 * ENGINES < 2 * ENGINES * BLOCKS / 4
    assert counts["styles"] <= 10


async def test_lines_out_of_sight_give_back_their_pixels_and_are_drawn_again(empty: Live) -> None:
    room = 10_000  # pixels of less than one line, in place of those of many

    async def script(route: Route) -> None:
        text, count = re.subn(r"PIXELS_MAX = \d+;", f"PIXELS_MAX = {room};", await (await route.fetch()).text())
        assert count == 1
        await route.fulfill(content_type="text/javascript", body=text)

    async with tab(empty.url) as looking:
        page = looking.page
        await page.route("**/ui/cells.js", script)
        await page.goto(f"{empty.url}/ui#prompt")
        await page.reload()
        await ask(page)
        drawn = page.locator("#answer canvas")
        lines = page.locator("#answer .line:not(.part)")
        for number in range(0, ENGINES, 5):
            await lines.nth(number).scroll_into_view_if_needed()
        await lines.last.scroll_into_view_if_needed()
        await expect(drawn).to_have_count(ENGINES)

        async def are_few() -> bool:
            with_pixels: int = await drawn.evaluate_all("all => all.filter((each) => each.width).length")
            return with_pixels < ENGINES / 2

        async def is_painted() -> bool:
            return bool(await drawn.first.evaluate(PAINTED) > 50)

        await wait_until(are_few, "lines out of sight have no pixels")
        size = await drawn.first.evaluate("canvas => [canvas.width, canvas.offsetWidth > 0, canvas.offsetHeight]")
        assert size == [0, True, 14], "it keeps its place"
        await lines.first.scroll_into_view_if_needed()
        await wait_until(is_painted, "the first line is drawn again")

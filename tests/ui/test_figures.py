"""The first line of the page, which comes from Redis; an empty Waymark; and five engines on one screen."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect
from redis import Redis

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui import day
from tests.ui.browser import tab
from tests.ui.test_work import workers
from waymark.cli import demonstration as demo
from waymark.domain.books import Sums

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

ENGINE = {"type": "standard", "modelname": "m", "instance_id": "a", "block_size": 4, "address": "http://a:1"}
PROMPT = {"model": "m", "token_ids": [1, 2, 3, 4]}
#: How many pixels of a curve are painted.
_PAINTED = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
  .filter((value, i) => i % 4 === 3 && value).length"""


async def test_an_empty_waymark_says_how_to_begin_and_a_new_tab_has_the_last_day(
    redis_url: str, tmp_path: Path
) -> None:
    async with start_live("serve", redis_url, tmp_path / "log") as live, live.client() as client:
        async with tab(live.url) as looking:
            page = looking.page
            await expect(page.locator("#empty")).to_contain_text(f"register http://ENGINE:8000 --url {live.url}")
            await expect(page.locator("#empty")).to_contain_text(f"simulate --engines 3 --register {live.url}")
            await expect(page.locator("#groups")).to_be_hidden()
            await expect(page.locator("#figures")).to_contain_text("no request in 24 h")
            await expect(page.locator("#figures")).to_contain_text("none is registered")
            await expect(page.locator("#figures .since").first).to_be_empty()
            await expect(page.locator("#figures .value")).to_have_text(["none"] * 4)
            assert (await client.post("/register", json=ENGINE)).status_code == 200
            await expect(page.locator("#groups")).to_contain_text("starting")
            # It has never been there, so it is not well.
            await expect(page.locator("#figures")).to_contain_text("0 well1 starting")
            await expect(page.locator("#empty")).to_be_hidden()
        hour = Sums(requests=100, delivered=6000, random=1500, prompt=10000)
        with Redis.from_url(redis_url) as redis:
            # One of them is older than a day.
            day.write(redis, {(1, 1, 60): hour, (1, 1, 700): hour, (1, 1, 1500): hour})
        async with tab(live.url) as looking:
            page = looking.page
            figures = page.locator("#figures")
            await expect(figures).to_contain_text("200 in 24 h")
            await expect(figures).to_contain_text("12 h ago")
            await expect(figures).to_contain_text("9K")
            await expect(figures).to_contain_text("of 20K prompt tokens")
            await expect(figures).to_contain_text("60 %")
            for number in range(3):
                assert await figures.locator("canvas").nth(number).evaluate(_PAINTED) > 50
            selected = (await client.post("/select", json=PROMPT)).json()
            usage = {"reservation": selected["reservation"], "cached_tokens": 3, "prompt_tokens": 4}
            assert (await client.post("/release", json=usage)).json()["released"] == 1
            await expect(figures).to_contain_text("201 in 24 h")


async def test_the_rate_is_that_of_the_time_that_is_known(empty: Live) -> None:
    async def books(route: Route) -> None:
        row = {"time": time.time() // 60 * 60, "requests": 600, "unreported": 0, "earned": 0, "delivered": 0}
        await route.fulfill(json={"by_minute": [row | {"prompt_tokens": 0}]})

    async with tab(empty.url) as looking:
        page = looking.page
        await page.route("**/books?*", books)
        await page.reload()
        await expect(page.locator("#figures")).to_contain_text("600 in 24 h")
        assert float(await page.locator("#figures .value strong").first.inner_text()) >= 10


#: The left and the right end of what is painted of a curve, as shares of its width.
_ENDS = """canvas => {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const columns = Array.from({ length: width }, (_, x) => x).filter(
    (x) => Array.from({ length: height }, (_, y) => data[4 * (y * width + x) + 3]).some(Boolean));
  return [columns[0] / width, columns.at(-1) / width];
}"""


async def test_the_curves_begin_at_the_first_known_minute_and_grow(empty: Live) -> None:
    known = 0
    row = {"requests": 60, "unreported": 0, "earned": 600, "delivered": 30, "prompt_tokens": 60}

    async def books(route: Route) -> None:
        first = time.time() // 60 - known
        await route.fulfill(json={"by_minute": [row | {"time": 60 * (first + each)} for each in range(known + 1)]})

    async with tab(empty.url) as looking:
        page = looking.page
        await page.route("**/books?*", books)
        figures = page.locator("#figures")
        for minutes, since in ((0, "60 s|2 min"), (4, "5 min|6 min"), (10, "11 min|12 min"), (1439, "24 h")):
            known = minutes
            await page.reload()
            # A minute may end between the answer and the curve.
            await expect(figures.locator(".since").first).to_have_text(re.compile(f"^({since}) ago$"))
            for number in range(3):
                left, right = await figures.locator("canvas").nth(number).evaluate(_ENDS)
                assert left < 0.02, (minutes, number)
                assert right > 0.97, (minutes, number)
            # Whoever points at its left end sees the first minute.
            await figures.locator("canvas").first.hover(position={"x": 1, "y": 20})
            await expect(figures).to_contain_text(re.compile(r"\d\d:\d\d to \d\d:\d\d: \d+ requests"))


async def test_what_an_emptied_redis_had_is_forgotten(empty: Live) -> None:
    known = 30
    row = {"requests": 600, "unreported": 0, "earned": 0, "delivered": 0, "prompt_tokens": 0}

    async def books(route: Route) -> None:
        minutes = int(route.request.url.partition("since=")[2].removesuffix("m"))
        first = time.time() // 60 - min(known, minutes) + 1
        await route.fulfill(
            json={"by_minute": [row | {"time": 60 * (first + each)} for each in range(min(known, minutes))]}
        )

    async with tab(empty.url) as looking:
        page = looking.page
        await page.route("**/books?*", books)
        await page.reload()
        figures = page.locator("#figures")
        await expect(figures).to_contain_text("18K in 24 h")
        known = 0
        await expect(figures).to_contain_text("no request in 24 h")


def answer_of_five() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of ``/inspect/prompt`` and of ``/score``, for which one engine is no target."""
    names = [f"vllm-{number}" for number in range(5)]
    keys = [f"{number:016x}" for number in range(40)]
    found = {
        "tenant_id": "default", "model": "m", "block_size": 16, "total_tokens": 640, "total_blocks": 40,
        "longest_matched": 640, "blocks_held": 40, "reasons": [], "instances_left_out": 0, "keys": keys,
        "rows": keys[::32],
        "instances": [
            {
                "instance_id": name, "is_pool": False, "longest_matched": 640 - 160 * number,
                "note": f"block {40 - 10 * number} is next, and no instance has it" if number else None,
                "holders": [{"dp_rank": 0, "medium": "GPU", "not_counted": None, "runs": [[0, 40 - 10 * number]]}],
            }
            for number, name in enumerate(names)
        ],
    }  # fmt: skip
    row = {
        "dp_rank": 0, "address": None, "score": None, "device_tokens": 0, "host_tokens": 0, "disk_tokens": 0,
        "new_tokens": 9, "wait_tokens": 0, "active_requests": 0, "parts": {"new": 9.0},
    }  # fmt: skip
    # The engine with the most of the prompt cannot be reached, and the last one costs least.
    scores = [row | {"instance_id": name, "cost": float(cost)} for cost, name in enumerate(reversed(names[1:]))]
    return found, {"policy": "least-work", "scores": scores}


async def test_the_unwell_are_first_and_a_cause_that_several_have_is_said_once(empty: Live) -> None:
    state = workers()
    state["publishers"] = state["publishers"][:8]
    for number, each in enumerate(state["publishers"]):
        each["endpoint"] = f"tcp://10.0.0.{number}:5557"
    for number in (3, 5, 6, 7):
        endpoint = state["publishers"][number]["endpoint"]
        state["publishers"][number] |= {"status": "unreachable", "complaint": f"no connection to {endpoint}: refused"}
    state["publishers"][4] |= {"status": "lost", "complaint": "gone", "model_name": "other", "weight": 0}
    state["publishers"][0] |= {"load": {"requests": 1, "tokens": 1}}
    state["publishers"][1] |= {"status": "starting", "tenant_id": "t"}
    state["publishers"][2] |= {"weight": 0, "load": {"requests": 0, "tokens": 0}}
    async with tab(empty.url) as looking:
        page = looking.page
        await give(page, "workers", state)
        await expect(page.locator("#figures")).to_contain_text("1 well5 unwell, 1 starting, 1 drained")
        await expect(page.locator("#figures .bad")).to_have_text("5 unwell")
        await expect(page.locator("#groups")).to_contain_text("1 (1 token)")
        await expect(page.locator("#sort")).to_have_value("unwell")
        names = page.locator("#groups tbody th")
        await expect(names).to_have_text(
            ["other", "vllm-4", "m", "vllm-3", "vllm-5", "vllm-6", "vllm-7", "vllm-0", "vllm-2", "m of t", "vllm-1"]
        )
        await expect(page.locator("#groups td.said:visible")).to_have_text(
            ["gone", f"These 4: no connection to {', '.join(f'tcp://10.0.0.{n}:5557' for n in (3, 5, 6, 7))}: refused"]
        )
        await expect(page.locator("#groups .status").last).to_have_text("starting")
        await expect(page.locator("#groups .drained")).to_have_text("drained")
        await expect(page.locator("#groups .status").first).to_have_text("lost, draining")


_COLUMNS = """() => [...document.querySelectorAll("#groups thead th")].map((each) => each.getBoundingClientRect().x)"""


async def test_no_column_moves_when_a_status_or_a_number_grows(empty: Live) -> None:
    state = workers()
    state["publishers"] = state["publishers"][:2]
    size = {"width": 1280, "height": 800}
    async with tab(empty.url, viewport=size) as looking:
        page = looking.page
        await give(page, "workers", state)
        await expect(page.locator("#groups .active")).to_have_count(2)
        before = await page.evaluate(_COLUMNS)
        assert len(before) == 8
        grown = {"requests": 123, "tokens": 1234567}
        state["publishers"][0] |= {"status": "unreachable", "weight": 0, "load": grown, "lag_seconds": 98765.0}
        state["publishers"][0]["blocks"] = {"GPU": 123456, "CPU": 1234567, "DISK": 12345678}
        await page.unroute_all()
        await give(page, "workers", state)
        await expect(page.locator("#groups")).to_contain_text("unreachable, draining")
        await expect(page.locator("#groups")).to_contain_text("123 (1.2M tokens)")
        assert await page.evaluate(_COLUMNS) == before
        # A name of a pod has room, and the button is in the window, in smaller ones too.
        for width in (1280, 1200, 1024):
            await page.set_viewport_size({"width": width, "height": 800})
            assert await page.locator("#groups .scroll").evaluate("box => box.scrollWidth - box.clientWidth") == 0
            name = await page.locator("#groups thead th").first.bounding_box()
            assert name is not None
            assert name["width"] > 120, width


async def give(page: Page, path: str, content: object) -> None:
    """Answer a path with this."""

    async def given(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(content))

    await page.route(f"**/{path}", given)


async def test_five_engines_are_on_one_screen_in_the_order_of_the_decision(empty: Live) -> None:
    size = {"width": 1280, "height": 800}
    found, scores = answer_of_five()
    state = workers(status="unreachable")
    state["publishers"] = state["publishers"][:5]
    async with tab(empty.url, viewport=size) as looking:
        page = looking.page
        for path, content in (("workers", state), ("inspect/prompt", found), ("score", scores)):
            await give(page, path, content)
        await expect(page.locator("#figures")).to_contain_text("4 well")
        await expect(page.locator("#figures")).to_contain_text("1 unwell")
        await page.click('nav a[href="#prompt"]')
        await expect(page.locator("#model")).to_have_value("m")
        async with page.expect_request("**/inspect/prompt") as asked:
            await page.fill("#text", "Once upon a time")
            await page.click("#ask button")
        assert json.loads((await asked.value).post_data or "")["prompt"] == "Once upon a time"
        lines = page.locator("#lines section")
        await expect(lines.locator("h3")).to_have_text(["vllm-4", "vllm-3", "vllm-2", "vllm-1", "vllm-0"])
        await expect(lines.locator(".place")).to_have_text(["1.", "2.", "3.", "4.", ""])
        await expect(lines.locator(".why").last).to_have_text("unreachable · it has the whole prompt")
        await expect(page.locator("#targets tbody tr").last).to_have_text("vllm-0not considered: unreachable")
        await expect(page.locator("#targets tbody tr")).to_have_count(5)
        last = await lines.last.bounding_box()
        assert last is not None
        assert last["y"] + last["height"] <= size["height"]


async def test_text_that_no_tokenizer_reads_leads_to_token_ids(tmp_path: Path) -> None:
    async with start_live("serve", "memory://", tmp_path / "log") as live, live.client() as client:
        bare = {name: value for name, value in ENGINE.items() if name != "address"}
        assert (await client.post("/register", json=bare)).status_code == 200
        async with tab(live.url, "#prompt") as looking:
            page = looking.page
            await expect(page.locator("#model")).to_have_value("m")
            await expect(page.locator("#text")).to_have_value(demo.TEXT)
            await expect(page.locator("#ask-ids")).to_be_hidden()
            await page.click("#ask .main")
            await expect(page.locator("#ask-error")).to_contain_text("there is no tokenizer for the model")
            await expect(page.locator("#state")).to_have_text("live")
            await page.click("#ask-ids button")
            await expect(page.locator("#text")).to_have_value("1000-1159")
            await expect(page.locator("#summary")).to_contain_text("40 blocks of 4 tokens")
            await expect(page.locator("#ask-ids")).to_be_hidden()
            await expect(page.locator("#ask-error")).to_be_empty()

"""Why an engine is picked for a prompt, and what of the page is in the way of seeing it."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Route, expect

from tests.live import Live
from tests.patience import patient
from tests.ui.browser import tab
from tests.ui.test_figures import answer_of_five, give
from tests.ui.test_work import workers

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))


async def test_a_prompt_is_asked_for_once_there_is_a_model(empty: Live) -> None:
    async with tab(empty.url) as looking:
        page = looking.page
        state = workers()

        async def nobody(route: Route) -> None:
            await route.fulfill(status=503, content_type="application/json", body="{}")

        await page.route("**/workers", nobody)
        await page.goto(f"{empty.url}/ui?again#prompt")
        await expect(page.locator("#show")).to_be_disabled()
        await page.fill("#model", "m")
        await expect(page.locator("#show")).to_be_enabled()
        await page.fill("#model", "")
        await expect(page.locator("#show")).to_be_disabled()
        await page.unroute_all()
        await give(page, "workers", state)
        await expect(page.locator("#model")).to_have_value("m")
        await expect(page.locator("#show")).to_be_enabled()


async def test_the_pick_has_a_reason_beside_it_and_the_parts_of_its_cost_are_explained(empty: Live) -> None:
    found, scores = answer_of_five()
    state = workers(status="unreachable")
    state["publishers"] = state["publishers"][:5]
    state["publishers"][0] |= {"status": "active"}
    row = scores["scores"][0]
    idle = row | {"instance_id": "vllm-4", "cost": 48.0, "parts": {"wait": 0.0, "new": 48.0, "active": 0.0}}
    busy = row | {"instance_id": "vllm-0", "cost": 1072.0, "parts": {"wait": 0.0, "new": 48.0, "active": 1024.0}}
    busy |= {"device_tokens": 640, "new_tokens": 0, "active_requests": 2}
    async with tab(empty.url, "#prompt") as looking:
        page = looking.page
        for path, content in (("workers", state), ("inspect/prompt", found)):
            await give(page, path, content)
        has_all = {"device_tokens": 640, "new_tokens": 0}
        waits = busy | {"parts": {"wait": 99.0, "new": 48.0, "active": 0.0}, "wait_tokens": 99, "active_requests": 0}
        far = busy | {"parts": {"wait": 0.0, "new": 48.0, "active": 0.0, "over": 1024.0}, "active_requests": 0}
        scored = busy | {"cost": None, "score": 0.25}
        less = "vllm-0 has 640 of the 640 tokens and this one 0, but "
        other = idle | {"instance_id": "vllm-3"}
        equal, part = "as 1 other target does.", {**idle["parts"], "over": 0.0}
        none = "and no other target has as many."
        away = " vllm-0 has more, but it is no target: active."
        costs, full = "it costs 1072, against 48", busy | {"cost": 24.0, "active_requests": 1}
        though = " Though 1 request is ahead of it there, against 0 on vllm-4,"
        slow = {"device_tokens": 40, "host_tokens": 500, "disk_tokens": 100}
        but = f" and this one 0, but 2 requests are ahead of it there, against 0: {costs}."
        for first, second, said in (
            (idle, busy, f"{less}2 requests are ahead of it there, against 0: {costs}."),
            (idle, waits, f"{less}99 tokens are to be computed there before, against 0: {costs}."),
            (idle | {"parts": part}, far, f"{less}it costs 1072, against 48."),
            (idle | {"cost": None, "score": 0.5}, scored, f"{less}its score is 0.25, against 0.5."),
            (idle | has_all, busy, f"It has 640 of the 640 tokens, {equal}"),
            (busy, busy, f"It has 640 of the 640 tokens, {equal} Chance decides among equals."),
            (full, idle, f"It has 640 of the 640 tokens, {none}{though} it costs 24, against 48."),
            (idle, busy | slow, f"vllm-0 has 640 of the 640 tokens (600 of them not on the GPU){but}"),
            (idle | {"device_tokens": 480}, other, f"It has 480 of the 640 tokens, {none}{away}"),
            (idle, other, f"No target has a block of the prompt.{away}"),
        ):  # fmt: skip
            await page.unroute("**/score")
            await give(page, "score", scores | {"scores": [first, second]})
            await page.click("#show")
            await expect(page.locator("#why-picked")).to_have_text(said)
        await expect(page.locator("#meanings")).to_contain_text("Parts: wait is the tokens that wait there; new is")
        await expect(page.locator("#meanings")).to_contain_text("so it can be more than the column says")


async def test_what_is_said_of_a_block_is_never_over_its_line(empty: Live) -> None:
    found, scores = answer_of_five()
    each = found["instances"][1]
    found["instances"] += [each | {"instance_id": f"more-{number}"} for number in range(20)]
    size = {"width": 390, "height": 844}
    async with tab(empty.url, viewport=size) as looking:
        page = looking.page
        for path, content in (("workers", workers()), ("inspect/prompt", found), ("score", scores)):
            await give(page, path, content)
        await page.click('nav a[href="#prompt"]')
        await page.click("#show")
        await expect(page.locator("#lines section")).to_have_count(25)
        said = page.locator("#cell .said")
        await expect(said).to_be_hidden()
        for number in (0, 3, 8, 24):
            line = page.locator("#lines .line").nth(number)
            await line.evaluate("line => line.scrollIntoView({ block: 'end' })")
            await line.evaluate("line => line.focus({ preventScroll: true })")
            await expect(said).to_contain_text("Block 0")
            over, own = await said.bounding_box(), await line.bounding_box()
            assert over is not None
            assert own is not None
            assert own["y"] + own["height"] <= over["y"] or own["y"] >= over["y"] + over["height"], number


async def test_what_the_lines_of_a_prompt_say_is_short_and_whole_and_has_its_time(empty: Live) -> None:
    found, scores = answer_of_five()
    refused = "it is refused, as nothing listens there; start the engine with its KV events enabled"
    for number in (2, 3, 4):
        said = f"it has sent no event, status unreachable (no connection to tcp://10.0.0.{number}:5557: {refused})"
        found["instances"][number] |= {"longest_matched": 0, "note": said, "holders": []}
    found["instances"][0]["note"] = 'no instance has it except "x" (not counted)'
    found["instances"][1] |= {"longest_matched": 1, "note": "none of its 88 blocks is of this prompt"}
    scores["scores"] = [each for each in scores["scores"] if each["instance_id"] == "vllm-1"]
    state = workers()
    state["publishers"] = [each | {"status": "unreachable"} for each in state["publishers"][:5]]
    size = {"width": 1280, "height": 800}
    async with tab(empty.url, viewport=size) as looking:
        page = looking.page
        for path, content in (("workers", state), ("inspect/prompt", found), ("score", scores)):
            await give(page, path, content)
        await page.click('nav a[href="#prompt"]')
        await page.click("#show")
        await expect(page.locator("#summary")).to_have_text(re.compile(r"Asked at \d\d:\d\d:\d\d\.$"))
        notes = page.locator("#lines .why")
        away = "unreachable · it has sent no event; Engines says why"
        whole = 'unreachable · no instance has it except "x" (not counted)'
        await expect(notes).to_have_text(["none of its 88 blocks is of this prompt", whole, away, away, away])
        await expect(page.locator("#lines .has").first).to_have_text("1 token")
        # In the wide window, too, nothing of it is cut off.
        cut = "all => all.filter((each) => each.scrollHeight > each.clientHeight).length"
        assert await notes.evaluate_all(cut) == 0
        # A few blocks fill the place that there is.
        line = page.locator("#lines .cells").first
        assert await line.evaluate("box => box.firstChild.clientWidth / box.clientWidth") > 0.85


async def test_a_new_tab_has_the_rates_of_the_last_minutes_at_once(empty: Live) -> None:
    state = workers(counters={"blocks_stored": 5000, "blocks_removed": 1000})
    state["publishers"] = state["publishers"][:2]
    stored = [*[0] * 8, *[500] * 8, 0, 0, *[50] * 6]
    state["publishers"][0]["recent"] = {"seconds": 5, "stored": stored, "removed": [0] * 24}
    painted = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
      .filter((value, i) => i % 4 === 3 && value).length"""
    async with tab(empty.url) as looking:
        page = looking.page
        await page.goto("about:blank")
        looks = 0

        async def once(route: Route) -> None:
            nonlocal looks
            looks += 1
            if looks == 1:
                await route.fulfill(json=state)

        await page.route("**/workers", once)
        await page.goto(f"{empty.url}/ui")
        rates = page.locator("#groups td[data-name='Blocks a second']")
        # 50 blocks in each of the last slots, of which the present one has just begun or is about to end.
        await expect(rates.first).to_have_text(re.compile(r"^\+1[0-4] \u22120$"))
        assert await rates.first.locator("canvas").evaluate(painted) > 50
        # Of the other one nothing is known but the present.
        await expect(rates.nth(1)).to_have_text("")


async def test_a_view_that_is_not_there_is_named(empty: Live) -> None:
    async with tab(empty.url, "#nothing") as looking:
        await expect(looking.page.locator("#no-view")).to_have_text("There is no view #nothing. These are the engines.")
        await looking.page.click('nav a[href="#activity"]')
        await expect(looking.page.locator("#no-view")).to_be_hidden()

"""What the page says if answers fail, are late, never come, or come from another release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import OFTEN, impatient
from tests.ui.test_work import workers

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

#: As ``OFTEN``.
NOT_FOR_LONG = {("service", "LOOK_MS"): 300, ("activity", "SILENT_MS"): 300}


@pytest.fixture(scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    async with start_live("serve", "memory://", tmp_path_factory.mktemp("live") / "log") as running:
        yield running


async def answers(page: Page, path: str, body: Any, *, status: int = 200, media: str = "application/json") -> None:
    """Have the path answered like this from now on: of several routes, the last one answers. If the one before were
    taken away first, the page could ask the real service in between.
    """

    async def given(route: Route) -> None:
        await route.fulfill(status=status, content_type=media, body=body if isinstance(body, str) else json.dumps(body))

    await page.route(path, given)


async def test_the_state_says_what_is_wrong_as_long_as_it_is(live: Live) -> None:
    async with impatient(live.url) as page:
        state = page.locator("#state")
        await answers(page, "**/workers", workers())
        await page.goto(f"{live.url}/ui")
        await expect(page.locator("#groups")).to_contain_text("vllm-0")
        await expect(state).to_have_text("live")
        # That of a proxy whose service is away is no JSON; the figures are answered all the time.
        await answers(page, "**/workers", "<h1>Bad Gateway</h1>", status=502, media="text/html")
        await expect(state).to_have_text("/workers was answered with 502; trying again")
        await expect(page.locator("#groups")).to_contain_text("vllm-0")
        async with page.expect_response("**/books?*"):
            pass
        async with page.expect_request("**/books?*"):
            pass
        assert await state.inner_text() == "/workers was answered with 502; trying again"
        await answers(page, "**/workers", "<h1>Log in</h1>", media="text/html")
        await expect(state).to_have_text("The answer of Waymark cannot be read; trying again")
        await answers(page, "**/workers", {"publishers": [{"name": "of a later release"}], "workers": []})
        await expect(state).to_have_text("Waymark has another release than this page; load it again")
        await answers(page, "**/workers", workers())
        await expect(state).to_have_text("live")


async def test_what_never_answers_is_not_waited_for(live: Live) -> None:
    async def hung(_: Route) -> None:
        pass

    async with impatient(live.url, OFTEN | NOT_FOR_LONG) as page:
        for path in ("workers", "activity"):
            await page.route(f"**/{path}", hung)
        await page.goto(f"{live.url}/ui#activity")
        await expect(page.locator("#state")).to_have_text("Waymark does not answer; trying again")
        sentence = "The activity cannot be read now: Waymark does not answer; trying again."
        await expect(page.locator("#how-far")).to_have_text(sentence)
        for path in ("workers", "activity"):
            await page.unroute(f"**/{path}")
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.locator("#how-far")).to_have_text("Nothing has happened yet.")


async def test_a_late_answer_takes_nothing_back(live: Live) -> None:
    """The look that follows a drain overtakes the one before."""
    weight, is_held, go_on = 1.0, False, asyncio.Event()

    async def looked(route: Route) -> None:
        nonlocal is_held
        found = json.dumps(workers(weight=weight, instance_id="a"))
        if is_held:
            is_held = False
            await go_on.wait()
        await route.fulfill(content_type="application/json", body=found)

    async def drained(route: Route) -> None:
        nonlocal weight
        weight = 0.0
        await route.fulfill(content_type="application/json", body="{}")

    async with impatient(live.url, {("main", "EVERY_MS"): 500}) as page:
        await page.route("**/workers", looked)
        await page.route("**/weight", drained)
        await page.goto(f"{live.url}/ui")
        await page.get_by_role("button", name="Drain a", exact=True).click()
        async with page.expect_request("**/workers"):
            is_held = True
        await page.click("#drain-yes")
        resume = page.get_by_role("button", name="Resume a", exact=True)
        await expect(resume).to_be_visible()
        async with page.expect_response("**/workers"):
            go_on.set()
        await page.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert await resume.is_visible()


async def test_a_slow_drain_ends_no_question_about_another_engine(live: Live) -> None:
    go_on = asyncio.Event()
    changed: list[str] = []

    async def drained(route: Route) -> None:
        changed.append(json.loads(route.request.post_data or "")["instance_id"])
        if len(changed) == 1:
            await go_on.wait()
        await route.fulfill(content_type="application/json", body="{}")

    async with impatient(live.url) as page:
        question = page.locator("#drain")
        await answers(page, "**/workers", workers())
        await page.route("**/weight", drained)
        await page.goto(f"{live.url}/ui")
        await page.get_by_role("button", name="Drain vllm-0", exact=True).click()
        await page.click("#drain-yes")
        await page.click("#drain-cancel")
        await page.get_by_role("button", name="Drain vllm-1", exact=True).click()
        async with page.expect_response("**/weight"):
            go_on.set()
        await page.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert await question.is_visible()
        await page.click("#drain-yes")
        await expect(question).to_be_hidden()
        assert changed == ["vllm-0", "vllm-1"]


async def test_a_row_follows_what_its_engine_becomes(live: Live) -> None:
    """A second rank comes, and the first socket of a rank goes, so that its further one is a target."""
    first, *_ = workers()["publishers"]
    further = first | {"instance_id": "b", "endpoint": "tcp://b:2", "is_further": True, "weight": 0.0}
    async with impatient(live.url) as page:
        names = page.locator("#groups .engine .name")
        await answers(page, "**/workers", {"publishers": [first, further], "workers": ["w"]})
        await page.goto(f"{live.url}/ui")
        await expect(names).to_have_text(["b", "vllm-0"])
        await expect(page.get_by_role("button", name="Drain b")).to_have_count(0)
        ranks = [first, first | {"dp_rank": 1}, further | {"is_further": False, "weight": 1.0}]
        # Another model and tenant, whose names make the same title.
        other = first | {"instance_id": "c", "model_name": "m of t"}
        same = first | {"instance_id": "d", "tenant_id": "t"}
        await answers(page, "**/workers", {"publishers": [*ranks, other, same], "workers": ["w"]})
        await expect(page.get_by_role("button", name="Drain b")).to_be_visible()
        await expect(page.locator("#groups .model")).to_have_text(["m", "m of t", "m of t"])
        await expect(names).to_have_text(["b", "vllm-0 rank 0", "vllm-0 rank 1", "c", "d"])


async def test_an_error_of_an_earlier_prompt_takes_no_offer_away(live: Live) -> None:
    go_on = asyncio.Event()
    asked = 0

    async def refused(route: Route) -> None:
        nonlocal asked
        asked += 1
        reason = "no_tokenizer"
        if asked == 1:
            await go_on.wait()
            reason = "unavailable"
        error = {"error": f"refused for {reason}", "reason": reason}
        await route.fulfill(status=400, content_type="application/json", body=json.dumps(error))

    async with impatient(live.url) as page:
        await page.route("**/inspect/prompt", refused)
        await page.goto(f"{live.url}/ui#prompt")
        await page.fill("#model", "m")
        await page.click("#show")
        await page.click("#show")
        await expect(page.locator("#ask-error")).to_have_text("refused for no_tokenizer")
        async with page.expect_response("**/inspect/prompt"):
            go_on.set()
        await page.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert await page.locator("#ask-ids").is_visible()
        assert await page.inner_text("#ask-error") == "refused for no_tokenizer"


async def test_an_activity_that_cannot_be_read_is_not_called_empty(live: Live) -> None:
    full = {"error": "32 clients follow /activity of this process", "reason": "unavailable"}
    async with impatient(live.url) as page:
        said = page.locator("#how-far")
        await answers(page, "**/activity", full, status=503)
        await page.goto(f"{live.url}/ui#activity")
        sentence = "The activity cannot be read now: 32 clients follow /activity of this process; trying again."
        await expect(said).to_have_text(sentence)
        # Redis is well: that a replica has enough clients is no trouble of the others.
        await expect(page.locator("#state")).to_have_text("live")
        await page.unroute("**/activity")
        await expect(said).to_have_text("Nothing has happened yet.")


async def test_a_token_that_no_header_can_have_is_not_taken(live: Live) -> None:
    """With it no request could be made any more, also after the page is loaded again."""

    async def closed(route: Route) -> None:
        is_known = await route.request.header_value("Authorization") == "Bearer known"
        body = json.dumps(workers())
        await route.fulfill(status=200 if is_known else 401, content_type="application/json", body=body)

    async with impatient(live.url) as page:
        await page.route("**/workers", closed)
        await page.goto(f"{live.url}/ui")
        await expect(page.locator("#login")).to_be_visible()
        await page.fill("#token", "\N{SNOWMAN}")
        await page.keyboard.press("Enter")
        await expect(page.locator("#token:invalid")).to_be_visible()
        await page.fill("#token", " known ")
        await page.keyboard.press("Enter")
        await expect(page.locator("#groups")).to_contain_text("vllm-0")
        await expect(page.locator("#state")).to_have_text("live")


async def test_a_browser_that_blocks_storage_shows_the_page_and_takes_a_token(live: Live) -> None:
    async def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            await route.fulfill(json=workers())
        else:
            await route.fulfill(status=401, json={"error": "a token is needed"})

    async with impatient(live.url) as page:
        await page.add_init_script(
            "Object.defineProperty(window, 'sessionStorage', {get() { throw new DOMException('', 'SecurityError'); }})"
        )
        await page.route("**/workers", guarded)
        await page.goto(f"{live.url}/ui")
        await page.fill("#token", "secret")
        await page.keyboard.press("Enter")
        await expect(page.locator("#groups")).to_contain_text("vllm-0")

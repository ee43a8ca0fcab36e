"""An engine is drained from the page, and gets requests again: after a question, with a token that may do so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from waymark.domain.names import Origin
from waymark.store.store import Store

pytestmark = pytest.mark.outside

ENGINE = {"type": "none", "modelname": "m", "instance_id": "a", "block_size": 4, "address": "http://a:1"}
READER, WRITER = "reader-" + "r" * 20, "writer-" + "w" * 20
PROMPT = {"model": "m", "token_ids": [1, 2, 3, 4]}
expect.set_options(timeout=1000 * patient(20.0))


@pytest.fixture
async def live(redis_url: str, tmp_path: Path) -> AsyncIterator[Live]:
    """A Waymark with an engine of two ranks, which everybody may read and two tokens may write to or not."""
    tokens = tmp_path / "tokens.json"
    entries = [
        {"name": access, "sha256": sha256(token.encode()).hexdigest(), "access": access, "tenants": ["*"]}
        for token, access in ((READER, "read"), (WRITER, "write"))
    ]
    tokens.write_text(json.dumps(entries))
    async with start_live("serve", redis_url, tmp_path / "log", api_tokens_file=tokens) as running:
        running = replace(running, token=WRITER)
        async with running.client() as client:
            for rank in (0, 1):
                answer = await client.post("/register", json=ENGINE | {"dp_rank": rank})
                assert answer.status_code == 200, answer.text
        yield running


async def weights(client: httpx.AsyncClient) -> list[float]:
    return [each["Weight"] for each in (await client.get("/services")).json()["services"]]


async def log_in(page: Page, token: str) -> None:
    await expect(page.locator("#login")).to_be_visible()
    await page.fill("#token", token)
    await page.click("#login >> text=Continue")
    await expect(page.locator("#login")).to_be_hidden()


async def test_an_engine_is_drained_after_a_question_and_gets_requests_again(live: Live) -> None:
    async with live.client() as client, tab(live.url) as looking:
        page = looking.page
        await log_in(page, WRITER)
        assert (await client.post("/select", json=PROMPT)).status_code == 200
        button, question = page.get_by_role("button", name="Drain a").first, page.get_by_role("dialog")
        await expect(page.locator("#groups")).to_contain_text("1 (")
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(question).to_contain_text("Drain a?")
        await expect(question).to_contain_text("All 2 ranks will get no new requests from Waymark")
        await expect(question).to_contain_text("Under way: 1 request, ")
        await expect(page.locator("#drain-weight")).to_be_hidden()
        await question.get_by_text("Cancel").click()
        await expect(button).to_be_focused()
        assert await weights(client) == [1.0, 1.0]
        await page.keyboard.press("Enter")
        await page.click("#drain-yes")
        await expect(page.locator("#groups")).to_contain_text("draining")
        await expect(page.locator("#groups")).to_contain_text("drained")
        await expect(page.locator("#groups .status.drained")).to_have_count(2)
        await expect(page.locator("#figures")).to_contain_text("1 drained")
        assert await weights(client) == [0.0, 0.0]
        # The row is the same element: it keeps the focus while what it shows changes.
        resume = page.get_by_role("button", name="Resume a")
        await expect(resume.first).to_be_focused()
        await page.fill("#filter", "drain")
        await expect(resume).to_have_count(2)
        await page.fill("#filter", "")
        await resume.first.focus()
        await page.keyboard.press("Enter")
        await page.fill("#drain-weight", "2")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Drain a")).to_have_count(2)
        assert await weights(client) == [2.0, 2.0]
        await page.click('nav a[href="#activity"]')
        for kind, detail in (("drained", "weight 1, now 0"), ("resumed", "weight 0, now 2")):
            rows = page.locator("#events tr", has=page.get_by_role("cell", name=kind, exact=True))
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text(detail)


async def test_a_token_that_may_only_read_is_refused_and_another_one_may_be_given(live: Live) -> None:
    async with live.client() as client, tab(live.url) as looking:
        page = looking.page
        await log_in(page, READER)
        await page.get_by_role("button", name="Drain a").first.click()
        await page.click("#drain-yes")
        await expect(page.locator("#login-error")).to_contain_text("may read only")
        await page.click("#login-cancel")
        await expect(page.locator("#drain-error")).to_have_text("No token was given, and nothing has changed.")
        assert await weights(client) == [1.0, 1.0]
        await page.click("#drain-yes")
        await log_in(page, WRITER)
        await expect(page.locator("#drain")).to_be_hidden()
        assert await weights(client) == [0.0, 0.0]


async def test_why_an_engine_cannot_be_drained_here_is_shown(live: Live, redis_url: str) -> None:
    store = Store.open(redis_url)
    try:
        (first, *_) = await store.directory.registrations()
        found: dict[str, Any] = {"instance_id": "found", "origin": Origin("discovery", "ns/pod")}
        await store.registry.register(replace(first, **found))
    finally:
        await store.close()
    async with live.client() as client, tab(live.url) as looking:
        page = looking.page
        await log_in(page, WRITER)
        await page.get_by_role("button", name="Drain found").click()
        await page.click("#drain-yes")
        await expect(page.locator("#drain-error")).to_contain_text("comes from the annotations of its pod")
        await client.post("/unregister", json={"instance_id": "found"})
        await page.click("#drain-yes")
        await expect(page.locator("#drain-error")).to_contain_text("service not found")

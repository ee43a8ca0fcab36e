"""The contract on the page and in ``/docs``: an operation is found, and an example is sent and answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, expect

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from waymark.domain.hashing import extend, token_bytes

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

ENGINE = {"type": "standard", "modelname": "m", "instance_id": "a", "block_size": 16, "address": "http://a:1"}
#: What prompts of the demo begin with.
TOKENS = list(range(1000, 1160))


async def test_an_example_that_reads_asks_for_a_model_that_is_here(tmp_path: Path) -> None:
    async with start_live("serve", "memory://", tmp_path / "log") as live, live.client() as client:
        assert (await client.post("/register", json=ENGINE | {"block_size": 16})).status_code == 200
        async with tab(live.url) as looking:
            page = looking.page
            await page.goto(f"{live.url}/docs")
            await page.get_by_role("button", name="Send POST /query", exact=True).click()
            await expect(page.get_by_label("answer to POST /query", exact=True)).to_contain_text('"default": {"a":')
            body = json.loads(await page.get_by_label("body of POST /query", exact=True).input_value())
            assert (body["model"], body["block_size"]) == ("m", 16)
            await page.get_by_role("button", name="Send POST /unregister", exact=True).click()
            await expect(page.get_by_label("body of POST /unregister", exact=True)).not_to_have_value("")
            await page.get_by_role("link", name="The page of this Waymark").click()
            await expect(page.locator("#groups")).to_contain_text("starting")


async def test_an_example_is_sent_and_one_that_changes_something_only_after_a_look(tmp_path: Path) -> None:
    async with (
        start_live("serve", "memory://", tmp_path / "log", api_token="secret") as live,
        tab(live.url) as looking,
    ):
        page = looking.page
        await page.goto(f"{live.url}/docs")
        await page.get_by_role("button", name="Send GET /workers", exact=True).click()
        await expect(page.get_by_label("answer to GET /workers", exact=True)).to_contain_text('"publishers": []')
        await page.goto(f"{live.url}/ui#api")
        register = page.get_by_role("button", name="Send POST /register", exact=True)
        answer = page.get_by_label("answer to POST /register", exact=True)
        await register.click()
        await expect(page.locator("#contract")).to_contain_text("This request changes something.")
        await expect(answer).to_be_hidden()
        await page.get_by_label("body of POST /register", exact=True).fill(json.dumps(ENGINE))
        await register.click()
        await page.fill("#token", "secret")
        await page.click("#login >> text=Continue")
        await expect(answer).to_contain_text("registered")
        await page.click('nav a[href="#engines"]')
        await expect(page.locator("#groups tbody th.name")).to_have_text("a")


async def test_the_example_of_query_can_show_a_hit_and_what_is_sent_is_the_command_above(tmp_path: Path) -> None:
    size = {"width": 390, "height": 844}
    async with start_live("serve", "memory://", tmp_path / "log") as live, live.client() as client:
        assert (await client.post("/register", json=ENGINE)).status_code == 200
        hashes = list(extend(None, token_bytes(TOKENS), 16))
        event = {"event_id": 1, "event_type": "stored", "backend_id": "a", "model_name": "m", "block_size": 16}
        event |= {"token_ids": TOKENS, "seq_hashes": hashes, "base_block_idx": 0, "timestamp": 1.0, "medium": "gpu"}
        assert (await client.post("/events", json=event | {"dp_rank": 0})).json()["applied"] == 1
        async with tab(live.url, viewport=size) as looking:
            page = looking.page
            await page.goto(f"{live.url}/docs")
            await page.get_by_role("button", name="Send POST /query", exact=True).click()
            answer = page.get_by_label("answer to POST /query", exact=True)
            await expect(answer).to_contain_text('"longest_matched": 160')
            body = page.get_by_label("body of POST /query", exact=True)
            sent = await body.input_value()
            assert json.loads(sent)["token_ids"] == TOKENS
            # Some lines of it are seen in a narrow window.
            assert await body.evaluate("each => each.clientHeight / parseFloat(getComputedStyle(each).fontSize)") > 5
            command = page.locator("section", has=page.locator("#post-query")).get_by_label("example of request")
            await expect(command).to_contain_text(f"curl {live.url}/query -H 'Content-Type: application/json'")
            assert f"-d '{sent}'" in await command.inner_text()
            # Of another model the note says why there is nothing.
            await body.fill(sent.replace('"m"', '"it\'s another"'))
            await page.get_by_role("button", name="Send POST /query", exact=True).click()
            await expect(page.locator("#post-query ~ .send")).to_contain_text("no engine is registered")
            assert """it'"'"'s another""" in await command.inner_text()


async def test_an_answer_of_json_gets_lines_and_keeps_its_numbers(empty: Live) -> None:
    big = (
        '{"hash":18446744073709551615,"text":"a \\"b\\", [c]: {d}","empty":[],"none":{},"list":['
        + ",".join(["0.10"] * 40)
        + "]}"
    )
    texts = [big, "[1, 2", "[" * 20_000 + "]" * 20_000]

    async def given(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=texts[0])

    async with tab(empty.url) as looking:
        page = looking.page
        await page.goto(f"{empty.url}/docs")
        await page.route("**/services", given)
        button = page.get_by_role("button", name="Send GET /services", exact=True)
        answer = page.get_by_label("answer to GET /services", exact=True)
        await button.click()
        await expect(answer).to_contain_text("0.10")
        lines = (await answer.inner_text()).splitlines()
        assert lines[:6] == [
            "{", '  "hash": 18446744073709551615,', '  "text": "a \\"b\\", [c]: {d}",',
            '  "empty": [],', '  "none": {},', '  "list": [',
        ]  # fmt: skip
        assert lines[6:] == [*["    0.10,"] * 39, "    0.10", "  ]", "}"]
        for text in texts[1:]:
            texts[0] = text
            await button.click()
            await expect(answer).to_have_text(text)


async def looks_for_operations(page: Page) -> None:
    """Find operations by their words, fold their errors, and go up again."""
    field, count = page.get_by_label("Find an operation"), page.locator(".find [role=status]")
    sections, lines = page.locator("xpath=//section[h3//code]"), page.locator("nav li")
    await expect(field).to_be_visible()
    total = await sections.count()
    assert total == await lines.count() > 50
    await field.fill("POST weight")
    await expect(sections.locator("visible=true").locator("h3")).to_have_text(re.compile("^POST /weight"))
    await expect(lines.locator("visible=true")).to_have_count(1)
    await expect(page.locator("nav h2:visible")).to_have_count(1)
    await expect(count).to_have_text(f"1 of {total}")
    errors = page.locator("#post-weight ~ details", has_text="Errors: 400, 401")
    await expect(errors.locator("summary")).to_be_visible()
    await expect(errors.locator("p").first).to_be_hidden()
    # A word of no path and of no summary: a field of an answer.
    await field.fill("longest_matched")
    await expect(sections.locator("visible=true").locator("#post-query")).to_be_visible()
    assert 0 < await sections.locator("visible=true").count() < total
    await field.fill("no such word")
    await expect(count).to_have_text(f"0 of {total}")
    await field.fill("")
    await expect(sections.locator("visible=true")).to_have_count(total)
    for _ in range(2):  # the second time the address does not change
        await sections.last.scroll_into_view_if_needed()
        await expect(page.locator("nav li").first).not_to_be_in_viewport()
        await page.get_by_role("link", name="Contents", exact=True).click()
        await expect(page.locator("nav li").first).to_be_in_viewport()


@pytest.mark.parametrize("path", ["/docs", "/ui#api"])
async def test_an_operation_is_found_by_its_words_and_the_contents_are_a_click_away(path: str, empty: Live) -> None:
    async with tab(empty.url) as looking:
        await looking.page.goto("about:blank")
        await looking.page.goto(empty.url + path)
        await looks_for_operations(looking.page)

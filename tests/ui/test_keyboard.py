"""Each view of the page without a mouse: Tab reaches every control, the focus is seen, and everything has a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from waymark.domain.hashing import extend, token_bytes

pytestmark = pytest.mark.outside

TOKENS = list(range(100, 132))
TOKEN = "secret"
#: What a person who does not see the page asks for by its name.
NAMED = {
    *("button", "checkbox", "combobox", "link", "radio", "searchbox", "slider", "spinbutton", "textbox"),
    *("alertdialog", "dialog", "figure", "image", "img", "navigation", "radiogroup", "region", "table"),
}
expect.set_options(timeout=1000 * patient(20.0))

#: The controls that are seen, outside a dialog that is open only those in it. Of radios of one name Tab reaches one.
_CONTROLS = """() => {
  const inside = document.querySelector("dialog[open]") || document;
  const all = [...inside.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")];
  const seen = all.filter((each) => each.tabIndex >= 0 && each.checkVisibility() && !each.disabled);
  window.controls = seen.filter((each) => each.type !== "radio" || each.checked);
  return window.controls.length;
}"""
#: Which control has the focus, and whether that is seen.
_FOCUSED = """() => {
  const focused = document.activeElement, style = getComputedStyle(focused);
  return {
    number: window.controls.indexOf(focused),
    isBody: focused === document.body,
    isSeen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    name: focused.outerHTML.slice(0, 100),
  };
}"""


async def nameless(page: Page) -> list[str]:
    """What has no name, and controls with the name of another control."""
    session = await page.context.new_cdp_session(page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    await session.detach()
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in NAMED
    ]
    assert found
    twice = [f"{role} {name!r}, {count} times" for (role, name), count in Counter(found).items() if count > 1]
    return [f"{role} without a name" for role, name in found if not name] + twice


async def unreachable(page: Page) -> list[str]:
    """The controls that Tab does not reach, and those that do not show that they have the focus."""
    problems = []
    count = await page.evaluate(_CONTROLS)
    assert count
    reached: set[int] = set()
    await page.evaluate("document.activeElement.blur()")
    for _ in range(count + 3):
        await page.keyboard.press("Tab")
        focused: dict[str, Any] = await page.evaluate(_FOCUSED)
        if focused["isBody"]:
            continue
        if focused["number"] < 0:
            problems.append(f"{focused['name']} gets the focus and is no control")
        if not focused["isSeen"]:
            problems.append(f"{focused['name']} does not show that it has the focus")
        reached.add(focused["number"])
    missed = set(range(count)) - reached
    return problems + [
        await page.evaluate("(i) => `${controls[i].outerHTML.slice(0, 100)} is not reached`", i) for i in sorted(missed)
    ]


async def show_engines(page: Page) -> None:
    await page.click('nav a[href="#engines"]')
    await expect(page.locator("#groups button")).to_have_count(2)


async def show_no_engine(page: Page) -> None:
    await page.fill("#filter", "nothing fits")
    await expect(page.locator("#groups")).to_have_text("None fits the filter.")


async def show_drain(page: Page) -> None:
    await page.fill("#filter", "")
    await page.click("text=Drain >> nth=0")
    await expect(page.locator("#drain")).to_be_visible()


async def show_resume(page: Page) -> None:
    await page.click("#drain-yes")
    await page.click("text=Resume")
    await expect(page.locator("#drain-weight")).to_be_visible()


async def show_prompt(page: Page) -> None:
    await page.keyboard.press("Escape")
    await page.click('nav a[href="#prompt"]')
    await expect(page.locator("#model")).to_have_value("m")


async def show_answer(page: Page) -> None:
    await page.fill("#text", " ".join(map(str, TOKENS)))
    await page.click("#ask button")
    await expect(page.locator("#answer .line")).to_have_count(2)
    await expect(page.locator("#targets")).to_be_visible()


async def show_refusal(page: Page) -> None:
    await page.fill("#text", "no numbers")
    await page.click("#ask button")
    await expect(page.locator("#ask-error")).not_to_be_empty()


async def show_activity(page: Page) -> None:
    await page.click('nav a[href="#activity"]')
    await expect(page.locator("#events tr").first).to_be_visible()


async def show_contract(page: Page) -> None:
    await page.set_extra_http_headers({"Authorization": f"Bearer {TOKEN}"})  # a link sends none
    await page.click('nav a[href="docs"]')
    await expect(page.locator("h1")).to_contain_text("Waymark")


VIEWS: list[Callable[[Page], Awaitable[None]]] = [
    show_engines, show_no_engine, show_drain, show_resume, show_prompt, show_answer, show_refusal, show_activity,
]  # fmt: skip


async def test_each_view_has_names_and_is_reached_by_tab(tmp_path: Path) -> None:
    problems = {}
    async with start_live("serve", "memory://", tmp_path / "log", api_token=TOKEN, protect_reads=True) as live:
        await register(live)
        async with tab(live.url) as looking:
            page = looking.page
            await expect(page.locator("#login")).to_be_visible()
            problems["login"] = await nameless(page) + await unreachable(page)
            await page.fill("#token", TOKEN)
            await page.keyboard.press("Enter")
            for view in VIEWS:
                await view(page)
                problems[view.__name__] = await nameless(page) + await unreachable(page)
            await show_contract(page)  # plain HTML, with hundreds of links
            problems["contract"] = await nameless(page)
    assert {name: found for name, found in problems.items() if found} == {}


async def register(live: Live) -> None:
    """Two engines, of which ``a`` has the whole prompt and ``b`` a half."""
    async with live.client() as client:
        for name, blocks in (("a", 8), ("b", 4)):
            body = {"type": "standard", "modelname": "m", "instance_id": name, "block_size": 4}
            assert (await client.post("/register", json=body | {"address": f"http://{name}:1"})).status_code == 200
            hashes = list(extend(None, token_bytes(TOKENS), 4))[:blocks]
            event = {"event_id": 1, "event_type": "stored", "backend_id": name, "model_name": "m", "block_size": 4}
            event |= {"token_ids": TOKENS[: 4 * blocks], "seq_hashes": hashes, "base_block_idx": 0, "timestamp": 1.0}
            answer = await client.post("/events", json=event | {"medium": "gpu", "dp_rank": 0})
            assert answer.json().get("applied") == 1, answer.text

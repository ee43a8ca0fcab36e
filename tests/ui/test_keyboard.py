"""Each view of the page without a mouse: Tab reaches every control, the focus is seen, and everything has a name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from tests.ui.views import TOKEN, VIEWS, log_in, register, show_contract

pytestmark = pytest.mark.outside

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


async def test_each_view_has_names_and_is_reached_by_tab(tmp_path: Path) -> None:
    problems = {}
    async with start_live("serve", "memory://", tmp_path / "log", api_token=TOKEN, protect_reads=True) as live:
        await register(live)
        async with tab(live.url) as looking:
            page = looking.page
            await expect(page.locator("#login")).to_be_visible()
            problems["login"] = await nameless(page) + await unreachable(page)
            await log_in(page)
            for view in VIEWS:
                await view(page)
                problems[view.__name__] = await nameless(page) + await unreachable(page)
            await show_contract(page)  # hundreds of links
            problems["contract"] = await nameless(page)
    assert {name: found for name, found in problems.items() if found} == {}

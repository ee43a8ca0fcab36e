"""How the page looks: it can be read in both themes, fits windows of each width, and cells are as the legend says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Locator, Page, expect

from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from tests.ui.views import TOKEN, VIEWS, log_in, register, show_contract
from waymark.domain.hashing import extend, token_bytes

pytestmark = pytest.mark.outside
expect.set_options(timeout=1000 * patient(20.0))

THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
#: The usual one is the last, so that the next view is not painted at the widest.
WIDTHS = (360, 640, 2560, 1280)
#: Ratios of WCAG 2.2: of text, and of graphics and the edges of controls.
TEXT, GRAPHICS = 4.5, 3.0

#: What is seen, with its colour and the one behind it: texts, edges of controls, legends, and each colour of a canvas.
_SEEN = """() => {
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!/, 0\\)$|^transparent$/.test(colour)) return colour;
    }
  };
  const found = [];
  const add = (kind, node, colour, back) => found.push([kind, colour, back, node.outerHTML.slice(0, 120)]);
  const inside = document.querySelector("dialog[open]") || document.body;
  for (const node of inside.querySelectorAll("*")) {
    if (!node.checkVisibility() || !node.getBoundingClientRect().width) continue;
    const style = getComputedStyle(node);
    const isText = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    const isField = node.matches("input:not([type=radio]), textarea, select, button");
    if (isText || isField) add("text", node, style.color, behind(node));
    if (node.placeholder) add("text", node, getComputedStyle(node, "::placeholder").color, behind(node));
    if (isField) add("edge", node, style.borderTopColor, behind(node.parentElement));
    if (node.matches(".legend i")) add("legend", node, style.backgroundColor, behind(node.parentElement));
    if (node.matches(":focus-visible")) add("focus", node, style.outlineColor, behind(node.parentElement));
    if (node.tagName !== "CANVAS" || !node.width) continue;
    const { data } = node.getContext("2d").getImageData(0, 0, node.width, node.height);
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] === 255) colours.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);
    }
    for (const colour of colours) add("canvas", node, colour, behind(node));
  }
  return found;
}"""


def channels(colour: str) -> tuple[float, ...]:
    """Red, green and blue of 0 to 255; a colour that shines through is a mistake of the test."""
    assert colour.startswith("rgb("), colour
    return tuple(float(each) for each in colour.removeprefix("rgb(").removesuffix(")").split(","))


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in
              (channel / 255 for channel in channels(colour))]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """1 to 21."""
    least, most = sorted((luminance(one), luminance(other)))
    return (most + 0.05) / (least + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)


async def unreadable(page: Page) -> set[str]:
    """What cannot be told from what is behind it, in both themes."""
    problems = set()
    for theme in THEMES:
        await choose(page, theme)
        seen = await page.evaluate(_SEEN)
        assert len(seen) > 5
        for kind, colour, back, what in seen:
            ratio = contrast(colour, back)
            if ratio < (TEXT if kind == "text" else GRAPHICS):
                problems.add(f"{theme}: {kind} {colour} on {back} has {ratio:.2f}: {what}")
    return problems


async def too_wide(page: Page) -> set[int]:
    """The widths of a window in which the page itself scrolls sideways."""
    found = set()
    for width in WIDTHS:
        await page.set_viewport_size({"width": width, "height": 700})
        if await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"):
            found.add(width)
    return found


async def test_each_view_can_be_read_in_both_themes_and_fits_each_window(tmp_path: Path) -> None:
    problems: dict[str, Any] = {}
    async with start_live("serve", "memory://", tmp_path / "log", api_token=TOKEN, protect_reads=True) as live:
        await register(live)
        async with tab(live.url) as looking:
            page = looking.page
            await log_in(page)
            for view in (*VIEWS, show_contract):
                await view(page)
                await page.keyboard.press("Tab")
                problems[view.__name__] = await unreadable(page), await too_wide(page)
        async with tab(live.url) as looking:  # a tab of its own: it has no token yet
            await expect(looking.page.locator("#login")).to_be_visible()
            problems["login"] = await unreadable(looking.page), await too_wide(looking.page)
    assert {name: found for name, found in problems.items() if any(found)} == {}


async def test_the_contract_can_be_read_in_both_themes_and_fits_each_window(tmp_path: Path) -> None:
    async with start_live("serve", "memory://", tmp_path / "log") as live, tab(live.url) as looking:
        await looking.page.goto(f"{live.url}/docs")
        assert await unreadable(looking.page) == set()
        assert await too_wide(looking.page) == set()


# ---- cells -----------------------------------------------------------------------------------------

BLOCKS = 8
PROMPT = list(range(1, 1 + 4 * BLOCKS))
#: What each holder stores: an engine on four media, and a pool; another engine has no block of its own.
STORED = {
    ("engine", "gpu"): (0,), ("engine", "cpu"): (1,), ("engine", "disk"): (2,), ("engine", "cxl"): (3,),
    ("pool", "disk"): (0, 1, 2, 3, 4),
}  # fmt: skip
#: The engine stores blocks 4 to 6 on its GPU, too, and removes 4 and 5: 5 is a hole, and so 6 is behind the match.
CELLS = {
    "": ["gpu", "cpu", "disk", "other", "pool", "", "behind", ""],
    "GPU": ["gpu", "pool", "pool", "pool", "pool", "", "behind", ""],
    "CPU": ["pool", "cpu", "pool", "pool", "pool", "", "", ""],
    "DISK": ["pool", "pool", "disk", "pool", "pool", "", "", ""],
    "CXL": ["pool", "pool", "pool", "other", "pool", "", "", ""],
}
_CELLS = """(canvas, blocks) => {
  const scale = devicePixelRatio, width = parseFloat(canvas.style.width) / blocks;
  const context = canvas.getContext("2d");
  const at = (x, y) => {
    const [r, g, b, a] = context.getImageData(Math.round(x * scale), Math.round(y * scale), 1, 1).data;
    return a ? `rgb(${r}, ${g}, ${b})` : "";
  };
  // Of each cell: high up, where only what the holder has itself is painted; where a pool is; and in the middle.
  return Array.from({ length: blocks }, (_, i) => [2, 5, 7].map((y) => at((i + 0.3) * width, y)));
}"""


_LEGEND = """all => Object.fromEntries(
  all.map((each) => [each.className.slice(3), getComputedStyle(each).backgroundColor]))"""


async def choose(page: Page, theme: Literal["light", "dark"]) -> None:
    """Have a theme, and what is painted painted again."""
    await page.emulate_media(color_scheme=theme)
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def store(live: Live) -> None:
    """Register the engines and the pool, and store their blocks."""
    hashes = list(extend(None, token_bytes(PROMPT), 4))
    events = [(name, medium, "stored", block) for (name, medium), blocks in STORED.items() for block in blocks]
    events += [("engine", "gpu", "stored", block) for block in (4, 5, 6)]
    events += [("engine", "gpu", "removed", block) for block in (4, 5)]
    async with live.client() as client:
        for name in ("engine", "empty", "pool"):
            body = {"type": "standard", "modelname": "m", "instance_id": name, "block_size": 4}
            body |= {"scope": "shared"} if name == "pool" else {"address": f"http://{name}:1"}
            assert (await client.post("/register", json=body)).status_code == 200
        numbers: Counter[tuple[str, str]] = Counter()
        for name, medium, kind, block in events:
            numbers[name, medium] += 1
            event = {"event_id": numbers[name, medium], "event_type": kind, "backend_id": name, "model_name": "m"}
            event |= {"block_size": 4, "seq_hashes": [hashes[block]], "medium": medium, "dp_rank": 0, "timestamp": 1.0}
            if kind == "stored":
                event |= {"token_ids": PROMPT[4 * block : 4 * block + 4], "base_block_idx": block}
                event |= {"parent_hash": hashes[block - 1]} if block else {}
            answer = await client.post("/events", json=event)
            assert answer.json().get("applied") == 1, answer.text


async def drawn(line: Locator) -> list[list[str]]:
    found: list[list[str]] = await line.locator("canvas").evaluate(_CELLS, BLOCKS)
    return found


async def test_a_cell_has_the_colour_that_the_legend_says(tmp_path: Path) -> None:
    async with start_live("serve", "memory://", tmp_path / "log") as live, tab(live.url, "#prompt") as looking:
        await store(live)
        page = looking.page
        await page.reload()
        await expect(page.locator("#model")).to_have_value("m")
        await page.check("input[value=token_ids]")
        await page.fill("#text", " ".join(map(str, PROMPT)))
        await page.click("#ask button")
        lines = page.locator("#answer .line")
        # A line for each of the two engines and the pool, and then for each medium of the engine.
        await expect(lines.locator("canvas")).to_have_count(3)
        await page.check("#by-holder")
        await expect(lines.locator("canvas")).to_have_count(7)
        whole = page.get_by_role("slider", name="engine, 5 of 8 blocks", include_hidden=True)
        for theme in THEMES:
            await choose(page, theme)
            legend: dict[str, str] = await page.locator(".legend i").evaluate_all(_LEGEND)
            assert set(legend) == {"gpu", "cpu", "disk", "other", "pool", "behind", "none"}
            assert len(set(legend.values())) == 6, "only what is not held has a colour twice, and a form of its own"
            for medium, expected in CELLS.items():
                line = lines.filter(has_text=f"rank 0 {medium}:").first if medium else whole
                cells = await drawn(line)
                for number, (name, (own, pooled, middle)) in enumerate(zip(expected, cells, strict=True)):
                    is_own = name not in ("", "pool")
                    colours = (
                        (legend[name],) * 3 if is_own else ("", legend["pool"] if name else "", legend[name or "none"])
                    )
                    assert (own, pooled, middle) == colours, f"{theme}, {medium}, block {number}"
            empty = await drawn(page.get_by_role("slider", name="empty, 0 of 8 blocks"))
            assert [each[1] for each in empty] == [*[legend["pool"]] * 5, *[""] * 3], theme
        await hover(page, lines.filter(has_text="rank 0 DISK:").first, 2)
        await expect(page.locator("#cell")).to_contain_text("Block 2")
        await expect(page.locator("#cell")).to_contain_text("engine rank 0 has it on DISK")
        await hover(page, lines.filter(has_text="rank 0 CPU:").first, 4)
        await expect(page.locator("#cell")).to_contain_text("engine rank 0 does not have it on CPU")
        await expect(page.locator("#cell")).to_contain_text("Holders: pool (pool) rank 0 DISK")
        # No redis-cli reaches the Redis within this process.
        await expect(page.locator("#cell")).to_contain_text("waymark inspect block")
        await expect(page.locator("#cell")).not_to_contain_text("redis-cli")
        await hover(page, lines.filter(has_text="rank 0 CPU:").first, 5)
        await expect(page.locator("#cell")).to_contain_text("Holders: none")


async def hover(page: Page, line: Locator, block: int) -> None:
    """Point at a block of a line."""
    canvas = line.locator("canvas")
    width = await canvas.evaluate(f"canvas => parseFloat(canvas.style.width) / {BLOCKS}")
    await canvas.hover(position={"x": (block + 0.4) * width, "y": 7})

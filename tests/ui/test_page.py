"""The page of ``/ui`` in a real browser: each view, what changes while it is looked at, and what it loads."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.api.conftest import MakeClient, make_client, memory_store
from tests.e2e.conftest import Engines, Start, starting
from tests.e2e.redis_server import redis_server
from tests.live import Live
from tests.live import start as start_live
from tests.patience import patient
from tests.ui.browser import tab
from waymark.api.probes import HEADERS
from waymark.domain.rows import PIECE_BLOCKS
from waymark.simulator.workload import SimulatedPrompt
from waymark.store.store import Store

__all__ = ["make_client", "memory_store"]
pytestmark = pytest.mark.outside

CHAT = tuple(range(100, 124))
ODD = "<script>document.title='x'</script><b>\u202e" + "x" * 180
expect.set_options(timeout=1000 * patient(20.0))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with starting(tmp_path) as started:
        yield started


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        yield Engines(stack, "default")


async def test_an_engine_that_dies_while_it_is_looked_at_is_shown_as_lost(
    redis_url: str, start: Start, engines: Engines, free_port: int
) -> None:
    service = await start("serve", redis_url, port=free_port, publisher_timeout=1)
    engine = await engines.open(service, "dies")
    await engines.open(service, ODD)
    async with tab(f"http://127.0.0.1:{free_port}") as looking:
        page = looking.page
        await expect(page.locator("#state")).to_have_text("live")
        row = page.locator("#groups tr", has=page.get_by_text("dies", exact=True))
        await expect(row.locator(".active")).to_have_text("active")
        await engine.prefill(SimulatedPrompt(CHAT))
        await expect(row).to_contain_text("GPU 6")
        await expect(row.locator("td", has=page.locator("canvas"))).to_contain_text("\u22120")
        await expect(page.locator("#figures")).to_contain_text("2 well")
        # A name from a stranger is text.
        await expect(page.locator("#groups .name", has_text="<script>document.title")).to_have_count(1)
        await expect(page).to_have_title("Waymark")
        assert await page.locator("main b, main script").count() == 0
        names = page.locator("#groups .name")
        await page.select_option("#sort", "name")
        await expect(names.first).to_contain_text("<script>")
        await page.select_option("#sort", "blocks")
        await expect(names.first).to_have_text("dies")
        await page.select_option("#sort", "name")
        await engine.publisher.close()
        await expect(row.locator(".lost")).to_have_text("lost")
        await expect(page.locator("#figures")).to_contain_text("1 unwell")
        await page.select_option("#sort", "unwell")
        await expect(names.first).to_have_text("dies")
        await expect(row).to_contain_text("GPU 6 (not counted)")
        said = page.locator("#groups td.said:visible span")
        await expect(said).to_contain_text("no connection to tcp://")
        await can_be_read_in_a_narrow_window(page)
        await page.set_viewport_size({"width": 1280, "height": 700})
        await page.fill("#filter", "nothing fits")
        await expect(page.locator("#groups")).to_have_text("None fits the filter.")
        await page.click('nav a[href="#activity"]')
        lost = page.locator("#events tr", has_text="lost").first
        await expect(lost).to_contain_text("dies")
        await expect(lost).to_contain_text("no connection to tcp://")
        await expect(lost.locator(".when")).to_have_text(re.compile(r"^\d+ \w+, \d\d:\d\d:\d\d$"))
        await expect(page.locator("#engines-view")).to_be_hidden()
        await cuts_nothing_off_in_a_narrow_window(page, "#activity-view")


async def test_a_prompt_over_the_fleet_shows_blocks_reasons_targets_and_a_link(
    redis_url: str, start: Start, engines: Engines, free_port: int
) -> None:
    service = await start("serve", redis_url, port=free_port)
    for name, tokens in (("whole", CHAT), ("half", CHAT[:12])):
        engine = await engines.open(service, name)
        await engine.prefill(SimulatedPrompt(tokens))
    await engines.agree([service], CHAT)
    url = f"http://127.0.0.1:{free_port}"
    async with tab(url, "#prompt") as looking:
        page = looking.page
        await expect(page.locator("#model")).to_have_value("m")
        await page.check("input[value=token_ids]")
        await page.fill("#text", ", ".join(map(str, CHAT)))
        await page.click("#ask button")
        answer = page.locator("#answer")
        held = "6 blocks of 4 tokens, 6 of them held; the longest match has 24 tokens."
        await expect(page.locator("#summary")).to_have_text(re.compile(held + r" Asked at \d\d:\d\d:\d\d\.$"))
        order = "(policy least-work: least cost first, as the engines below)"
        await expect(answer).to_contain_text(f"POST /select would pick whole rank 0 {order}")
        await has_first(page, "whole", "24 tokens", "it has the whole prompt")
        await expect(answer.locator("#targets tbody tr").first).to_contain_text("whole")
        await expect(answer.locator("#targets")).to_contain_text("new")
        line = answer.locator(".line").first
        await line.focus()
        await expect(page.locator("#cell")).to_contain_text("Block 0 (tokens 0 to 3): whole rank 0 has it on GPU")
        await expect(page.locator("#cell code").first).to_have_text(f"{first_key(page.url)}")
        await expect(page.locator("#cell")).to_contain_text("Holders: whole rank 0 GPU, half rank 0 GPU")
        await expect(page.locator("#cell")).to_contain_text("redis-cli GET 'wm:")
        for key, block in (("ArrowRight", 1), ("End", 5), ("ArrowRight", 5), ("PageDown", 0)):
            await page.keyboard.press(key)
            await expect(line).to_have_attribute("aria-valuenow", str(block))
            await expect(page.locator("#cell strong")).to_have_text(f"Block {block}")
        shared = page.url
        assert "100" not in shared.partition("hashes=")[0].partition("#")[2]
        await page.fill("#text", "7 8 9 10 11 12 13 14")
        await page.click("#ask button")
        await expect(answer.locator(".reason").first).not_to_be_empty()
        await page.fill("#text", ", ".join(map(str, CHAT)))
        await page.click("#namespace summary")
        for field in ("#lora", "#salt"):  # another namespace, in which nobody has a block
            await page.fill(field, "sql")
            await page.click("#ask button")
            await expect(page.locator("#summary")).to_contain_text("6 blocks of 4 tokens, 0 of them held")
            await page.fill(field, "")
        for text, problem in (
            ("1, no", '"no" at 1 is no token id'),
            ("4294967296", '"4294967296" at 0 is no token id'),
            ("5-4", '"5-4" at 0 is no token id'),
        ):
            await page.fill("#text", text)
            await page.click("#ask button")
            await expect(page.locator("#ask-error")).to_contain_text(problem)
        await page.fill("#text", f"{CHAT[0]}-{CHAT[-1]}")
        await page.click("#ask button")
        await expect(page.locator("#summary")).to_have_text(re.compile(held + r" Asked at \d\d:\d\d:\d\d\.$"))
        await page.fill("#text", "1 2 3")
        await page.click("#ask button")
        await expect(answer.locator(".reason")).to_contain_text("less than one block of 4")
        await expect(answer.locator("section")).to_have_count(0)
        await expect(page.locator("#targets")).to_be_visible()  # a target is picked all the same, by its load
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.post("/weight", json={"instance_id": "half", "weight": 0})).status_code == 200
        await expect(page.locator("#groups")).to_contain_text("drained")
        await page.fill("#text", f"{CHAT[0]}-{CHAT[-1]}")
        await page.click("#ask button")
        await expect(answer.locator("#targets tr").last).to_have_text("halfnot considered: drained")
        await expect(answer.locator("section").last).to_contain_text("half")
        await expect(answer.locator("#targets")).to_contain_text("wait 0")
        await cuts_nothing_off_in_a_narrow_window(page, "#answer")
    async with tab(url, "#" + shared.partition("#")[2]) as looking:
        await has_first(looking.page, "whole", "24 tokens", "it has the whole prompt")
        await expect(looking.page.locator("#answer")).to_contain_text("A link has only the hashes of a prompt.")


async def cuts_nothing_off_in_a_narrow_window(page: Page, part: str) -> None:
    """The table in this part scrolls in a window, but not sideways."""
    await page.set_viewport_size({"width": 390, "height": 700})
    assert await page.locator(f"{part} .scroll:has(table)").evaluate("box => box.scrollWidth - box.clientWidth") == 0


async def can_be_read_in_a_narrow_window(page: Page) -> None:
    """The complaint, the names and the buttons are seen whole, and nothing scrolls sideways."""
    await cuts_nothing_off_in_a_narrow_window(page, "#groups")
    # The button ends where the row does.
    button, row = [await page.locator(f"#groups {each}").first.bounding_box() for each in ("button", "tr.engine")]
    assert button is not None
    assert row is not None
    assert row["x"] + row["width"] - button["x"] - button["width"] == 8
    for part in ("td.said:visible span", "tbody th.name", "button"):
        box = await page.locator(f"#groups {part}").first.bounding_box()
        assert box is not None
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= 390, part


async def has_first(page: Page, name: str, has: str, why: str) -> None:
    """The first line of a prompt says this."""
    line = page.locator("#lines section").first
    for part, text in (("h3", name), (".has", has), (".why", why)):
        await expect(line.locator(part)).to_have_text(text)


def first_key(url: str) -> str:
    return url.partition("hashes=")[2][:16]


async def test_a_token_is_asked_for_and_a_wrong_one_is_refused(redis_url: str, tmp_path: Path) -> None:
    async with start_live("serve", redis_url, tmp_path / "log", api_token="secret", protect_reads=True) as live:
        await register(live)
        async with tab(live.url) as looking:
            page = looking.page
            await expect(page.locator("#login")).to_be_visible()
            await page.fill("#token", "wrong")
            await page.keyboard.press("Enter")
            await expect(page.locator("#login-error")).to_have_text("This token was refused.")
            await page.fill("#token", "secret")
            await page.keyboard.press("Enter")
            await expect(page.locator("#groups")).to_contain_text("engine-x")
            await page.reload()
            await expect(page.locator("#groups")).to_contain_text("engine-x")


async def register(live: Live) -> None:
    async with live.client() as client:
        body = {"type": "standard", "modelname": "m", "instance_id": "engine-x", "block_size": 4}
        assert (await client.post("/register", json=body)).status_code == 200


async def test_the_page_says_that_redis_is_away_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with redis_server() as server:
        await server.start()
        async with start_live("serve", server.url, tmp_path / "log", redis_timeout_seconds=0.5) as live:
            await register(live)
            async with tab(live.url) as looking:
                page = looking.page
                await expect(page.locator("#groups")).to_contain_text("engine-x")
                server.freeze()
                try:
                    await expect(page.locator("#state")).to_have_text("Redis is unavailable; trying again")
                    await expect(page.locator("#groups")).to_contain_text("engine-x")
                finally:
                    server.thaw()
                await expect(page.locator("#state")).to_have_text("live")


async def test_nothing_stands_out_of_a_narrow_or_a_wide_window(
    redis_url: str, start: Start, engines: Engines, free_port: int
) -> None:
    service = await start("serve", redis_url, port=free_port)
    await engines.open(service, ODD)
    async with tab(f"http://127.0.0.1:{free_port}") as looking:
        page = looking.page
        await expect(page.locator("#groups .name")).to_have_count(1)
        for view in ("engines", "prompt"):
            await page.click(f'nav a[href="#{view}"]')
            for width in (360, 2560):
                await page.set_viewport_size({"width": width, "height": 700})
                assert await too_wide(page) == 0, (view, width)


async def too_wide(page: Page) -> int:
    return int(await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


async def test_the_page_can_be_switched_off_and_every_file_has_the_policy(
    make_client: MakeClient, memory_store: Store
) -> None:
    client = await make_client(memory_store)
    assert (await client.get("/")).headers["location"] == "ui"
    names = [path.name for path in (Path(__file__).parents[2] / "app/waymark/api/ui").iterdir()]
    paths = ["/ui", *(f"/ui/{name}" for name in names if name != "index.html")]
    assert len(paths) > 5
    for path in paths:
        answer = await client.get(path)
        assert answer.status_code == 200
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "http://" not in answer.text.replace("http://ENGINE:8000", "")  # of a command that is shown
        assert "https://" not in answer.text
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert (await client.get("/ui/..%2Fpage.py")).status_code == 404
    await is_off(await make_client(memory_store, ui=False))


async def is_off(client: httpx.AsyncClient) -> None:
    for path in ("/ui", "/ui/main.js"):
        answer = await client.get(path)
        assert answer.status_code == 404


def test_the_page_knows_how_many_blocks_a_row_has() -> None:
    cells = (Path(__file__).parents[2] / "app/waymark/api/ui/cells.js").read_text(encoding="utf-8")
    assert f"const ROW_BLOCKS = {PIECE_BLOCKS};" in cells

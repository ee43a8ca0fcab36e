"""Each view of the page with something in it, as a person gets there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from playwright.async_api import Page, expect

from tests.live import Live
from waymark.domain.hashing import extend, token_bytes

TOKENS = list(range(100, 132))
TOKEN = "secret"


async def log_in(page: Page) -> None:
    await expect(page.locator("#login")).to_be_visible()
    await page.fill("#token", TOKEN)
    await page.keyboard.press("Enter")


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
    await page.check("input[value=token_ids]")
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
    await page.click('nav a[href="#api"]')
    await expect(page.locator("#get-workers")).to_be_visible()


VIEWS: list[Callable[[Page], Awaitable[None]]] = [
    show_engines, show_no_engine, show_drain, show_resume, show_prompt, show_answer, show_refusal, show_activity,
]  # fmt: skip


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

"""How smoothly the page scrolls over 100 engines of 2,000 blocks, in a real Chromium: ``python -m tests.ui.frames``."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Page, Route, expect

from tests.live import start
from tests.patience import patient
from tests.ui.browser import tab

ENGINES, BLOCKS, STEPS = 100, 2_000, 200
_SCROLL = """steps => new Promise((resolve) => {
  const times = [];
  const height = (document.documentElement.scrollHeight - innerHeight) / steps;
  let before = performance.now();
  const step = (now) => {
    times.push(now - before);
    before = now;
    if (times.length > steps) resolve(times.slice(1));
    else { scrollBy(0, height); requestAnimationFrame(step); }
  };
  requestAnimationFrame(step);
})"""


def answer() -> dict[str, Any]:
    """Of ``/inspect/prompt``: each engine has some of the blocks on its GPU and in host memory."""
    instances = [
        {
            "instance_id": f"vllm-{number}",
            "is_pool": False,
            "longest_matched": 16 * (BLOCKS - 10 * number),
            "note": None,
            "holders": [
                {"dp_rank": 0, "medium": "GPU", "not_counted": None, "runs": [[0, BLOCKS - 15 * number]]},
                {"dp_rank": 0, "medium": "CPU", "not_counted": None, "runs": [[i, 3] for i in range(0, BLOCKS - 3, 7)]},
            ],
        }
        for number in range(ENGINES)
    ]
    keys = [f"{number:016x}" for number in range(BLOCKS)]
    return {
        "tenant_id": "default", "model": "m", "block_size": 16, "total_tokens": 16 * BLOCKS, "total_blocks": BLOCKS,
        "longest_matched": 16 * BLOCKS, "blocks_held": BLOCKS, "reasons": [], "instances": instances,
        "instances_left_out": 0, "keys": keys, "rows": keys[::32],
    }  # fmt: skip


async def ask(page: Page) -> None:
    """Show that answer: a line for each engine, and one that is hidden for each of its two media."""

    async def given(route: Route) -> None:
        await route.fulfill(status=200, content_type="application/json", body=json.dumps(answer()))

    await page.route("**/inspect/prompt", given)
    await page.fill("#model", "m")
    await page.check("input[value=seq_hashes]")
    await page.fill("#text", "1")
    await page.click("#ask button")
    await expect(page.locator("#answer .line")).to_have_count(3 * ENGINES)


async def main() -> None:
    expect.set_options(timeout=1000 * patient(30.0))
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        async with start("serve", "memory://", Path(directory) / "log") as live, tab(live.url, "#prompt") as looking:
            page = looking.page
            await ask(page)
            for name in ("first time", "again"):
                times = await page.evaluate(_SCROLL, STEPS)
                await page.evaluate("scrollTo(0, 0)")
                slow = sum(time > 50 for time in times)
                centiles = statistics.quantiles(times, n=100)
                print(
                    f"{ENGINES} engines, {BLOCKS} blocks, {name}: a frame takes {centiles[49]:.1f} ms (p50), "
                    f"{centiles[94]:.1f} ms (p95), {max(times):.1f} ms (most); {slow} of {len(times)} take over 50 ms"
                )


if __name__ == "__main__":
    asyncio.run(main())

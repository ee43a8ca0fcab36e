"""Takes the pictures of the page in ``docs/images``: ``make screenshots``."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import expect

from tests.e2e.conftest import Engines, starting
from tests.e2e.redis_server import redis_server
from tests.patience import patient
from tests.ports import unused_port
from tests.ui import day
from tests.ui.browser import tab
from waymark.simulator.workload import SimulatedPrompt

IMAGES = Path(__file__).parents[2] / "docs" / "images"
expect.set_options(timeout=patient(15_000))
SYSTEM = tuple(range(1000, 1160))
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


async def main() -> None:
    with redis_server() as server, tempfile.TemporaryDirectory(prefix="wm-") as directory:
        await server.start()
        async with starting(Path(directory)) as start, AsyncExitStack() as stack:
            port = unused_port()
            service = await start("serve", server.url, port=port, publisher_timeout=1)
            engines = Engines(stack, "default")
            for number in range(4):
                engine = await engines.open(service, f"vllm-{number}", gpu_blocks=60, cpu_blocks=40)
                chat = tuple(range(2000 + 1000 * number, 2080 + 1000 * number))
                await engine.prefill(SimulatedPrompt(SYSTEM[: 40 * (number + 1)] + chat))
            await engines.agree([service], SYSTEM)
            await engines.engines["vllm-3"].publisher.close()
            await service.post("/weight", instance_id="vllm-2", weight=0)
            with server.admin() as redis:
                day.write(redis, day.usual(1, [1, 2]))
            for theme in THEMES:
                options: dict[str, Any] = {"color_scheme": theme, "viewport": {"width": 1200, "height": 700}}
                async with tab(f"http://127.0.0.1:{port}", **options) as looking:
                    await expect(looking.page.locator("#groups .status.lost")).to_be_visible()
                    await looking.page.screenshot(path=IMAGES / f"engines-{theme}.png")
                async with tab(f"http://127.0.0.1:{port}", "#prompt", **options) as looking:
                    await looking.page.check("input[value=token_ids]")
                    await looking.page.fill("#text", f"{SYSTEM[0]}-{SYSTEM[-1]}")
                    await looking.page.click("#ask button")
                    await expect(looking.page.locator("#targets")).to_be_visible()
                    await looking.page.locator("#answer").scroll_into_view_if_needed()
                    # Further down, what stays at the top of the window would cover a line of the picture.
                    await looking.page.evaluate("scrollTo(0, 0)")
                    await looking.page.screenshot(path=IMAGES / f"prompt-{theme}.png", full_page=True)


if __name__ == "__main__":
    asyncio.run(main())

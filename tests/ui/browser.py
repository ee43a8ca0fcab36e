"""A real Chromium that looks at the page, and what it has met: errors on its console, and requests elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from tests.patience import patient


@dataclass
class Tab:
    """A page in the browser."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        # Chromium itself reports each answer of 4xx and 5xx, and each connection that ends.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.elsewhere.append(request.url)


@asynccontextmanager
async def browser(*more: str) -> AsyncIterator[Browser]:
    """The system's Chromium, without a window, with ``more`` flags."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "there is no Chromium; 'make chromium' installs it"
    async with async_playwright() as playwright:
        # In a container there is no user namespace for its sandbox; it sees our own page only.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", *more]
        opened = await playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def tab(url: str, fragment: str = "", **options: Any) -> AsyncIterator[Tab]:
    """The page of a service in a tab, which must meet no error and ask nobody else."""
    async with browser() as opened:
        page = await opened.new_page(**options)
        page.set_default_timeout(1000 * patient(15.0))
        made = Tab(page, url)
        made.watch()
        await page.goto(f"{url}/ui{fragment}")
        yield made
        assert not made.errors, made.errors
        assert not made.elsewhere, made.elsewhere

"""A real Chromium that looks at the page, and what it has met: errors on its console, and requests elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Request, Route, async_playwright

from tests.patience import patient

#: How long the page waits in a tab of most tests, in milliseconds, by script and constant, and where answers fail.
SOON = {("main", "EVERY_MS"): 500, ("figures", "EVERY_MS"): 1000}
OFTEN = {("main", "EVERY_MS"): 100, ("figures", "EVERY_MS"): 100, ("activity", "AGAIN_MS"): 100}


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
async def browser() -> AsyncIterator[Browser]:
    """The system's Chromium, without a window. The program that never has one takes a fifth of the CPU."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    assert path is not None, "there is no Chromium; 'make chromium' installs it"
    async with async_playwright() as playwright:
        # In a container there is no user namespace for its sandbox; it sees our own page only.
        # Names of .test are this machine, for pages of other sites. An emulated graphics card takes a fifth of the CPU.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-software-rasterizer"]
        flags.append("--host-resolver-rules=MAP *.test 127.0.0.1")
        opened = await playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield opened
        finally:
            await opened.close()


class _Shared:
    """A browser for many visitors, which the first of them starts."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._browser: Browser | None = None

    async def get(self) -> Browser:
        if self._browser is None or not self._browser.is_connected():
            self._browser = await self._stack.enter_async_context(browser())
        return self._browser


_shared: _Shared | None = None


@asynccontextmanager
async def one_browser() -> AsyncIterator[None]:
    """Meanwhile all visitors have one browser, which takes as long to start as a test. None has cookies of another."""
    global _shared
    async with AsyncExitStack() as stack:
        _shared = _Shared(stack)
        try:
            yield
        finally:
            _shared = None


@asynccontextmanager
async def visitor(**options: Any) -> AsyncIterator[Page]:
    """An empty page."""
    async with AsyncExitStack() as stack:
        opened = await (_shared or _Shared(stack)).get()
        page = await opened.new_page(**options)
        stack.push_async_callback(page.close)
        page.set_default_timeout(1000 * patient(15.0))
        yield page


@asynccontextmanager
async def tab(url: str, fragment: str = "", **options: Any) -> AsyncIterator[Tab]:
    """The page of a service in a tab, which must meet no error and ask nobody else."""
    async with visitor(**options) as page:
        made = Tab(page, url)
        made.watch()
        await hurry(page, SOON)
        await page.goto(f"{url}/ui{fragment}")
        yield made
        await page.unroute_all(behavior="ignoreErrors")
        assert not made.errors, made.errors
        assert not made.elsewhere, made.elsewhere


async def hurry(page: Page, waits: Mapping[tuple[str, str], int]) -> None:
    """Let the scripts of the page wait for less."""

    async def script(route: Route) -> None:
        text = await (await route.fetch()).text()
        for (name, constant), milliseconds in waits.items():
            if route.request.url.endswith(f"/{name}.js"):
                text, count = re.subn(rf"const {constant} = \d+;", f"const {constant} = {milliseconds};", text)
                assert count == 1
        await route.fulfill(content_type="text/javascript", body=text)

    await page.route(re.compile(rf"/ui/({'|'.join(name for name, _ in waits)})\.js$"), script)


@asynccontextmanager
async def impatient(url: str, waits: Mapping[tuple[str, str], int] = OFTEN) -> AsyncIterator[Page]:
    """An empty tab for the page, whose scripts will wait for less."""
    async with visitor() as page:
        made = Tab(page, url)
        made.watch()
        await hurry(page, waits)
        yield page
        await page.unroute_all(behavior="ignoreErrors")
        assert not made.errors, made.errors

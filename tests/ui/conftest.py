"""One browser for the tests of a process, and one empty Waymark for those that change nothing in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.live import Live, start
from tests.ui.browser import one_browser


@pytest.fixture(scope="package", autouse=True)
async def _one_browser(anyio_backend: str) -> AsyncIterator[None]:
    async with one_browser():
        yield


@pytest.fixture(scope="package")
async def empty(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """A Waymark that nobody changes: where something is to be seen, the test makes up the answers."""
    async with start("serve", "memory://", tmp_path_factory.mktemp("empty") / "log") as live:
        yield live

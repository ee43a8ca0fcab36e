"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.ui.browser import one_browser


@pytest.fixture(scope="module", autouse=True)
async def _one_browser(anyio_backend: str) -> AsyncIterator[None]:
    async with one_browser():
        yield

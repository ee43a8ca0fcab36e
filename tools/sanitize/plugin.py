"""A pytest plugin that runs the tests with the sanitized C module (``-p tools.sanitize.plugin``).

After each test the objects that the whole process shares must be unchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from tools.sanitize.build import check_preloaded, preload

if TYPE_CHECKING:
    from tools.sanitize.shared import SharedObjects

preload()
_shared: list[SharedObjects] = []


def pytest_configure() -> None:
    from tools.sanitize.shared import SharedObjects  # imported only here, because it imports the preloaded module

    check_preloaded()
    _shared.append(SharedObjects())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    yield
    for shared in _shared:
        assert (changed := shared.changed()) is None, changed

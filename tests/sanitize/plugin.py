"""A pytest plugin: the tests run with the sanitized C module (``-p tests.sanitize.plugin``)."""

from __future__ import annotations

from tests.sanitize.build import check_preloaded, preload

preload()


def pytest_configure() -> None:
    check_preloaded()

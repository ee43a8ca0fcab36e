"""A pytest plugin: the tests run with the sanitized C module (``-p tools.sanitize.plugin``)."""

from __future__ import annotations

from tools.sanitize.build import check_preloaded, preload

preload()


def pytest_configure() -> None:
    check_preloaded()

"""``waymark status`` and ``waymark inspect``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waymark.cli.parser import EXIT_OK, settings_with
from waymark.cli.remote import print_answer
from waymark.console.arguments import DEFAULT_URL, add_inspect, add_status

if TYPE_CHECKING:
    from waymark.console.screen import Screen
    from waymark.console.service import RemoteService


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    {"status": add_status, "inspect": add_inspect}[command](parser)


def run(arguments: argparse.Namespace) -> int:
    from waymark.console.screen import Screen

    screen = Screen()
    if arguments.command == "inspect" and arguments.what == "namespace":  # needs no service
        return show(None, arguments, screen)
    with _service(arguments) as service:
        return show(service, arguments, screen)


def show(service: RemoteService | None, arguments: argparse.Namespace, screen: Screen) -> int:
    """Ask the service, and print its answer; without a service, only a namespace can be computed."""
    if service is None:
        from waymark.console import views

        screen.show(views.of_namespace(arguments))
        return EXIT_OK
    if arguments.command == "inspect":
        _inspect(service, arguments, screen)
        return EXIT_OK
    from waymark.console.inspections import drains_of, status_of
    from waymark.console.views import parts_of_status

    try:
        return print_answer(
            service,
            arguments,
            screen,
            status_of,
            lambda answer: parts_of_status(answer, is_plain=screen.is_plain, drains=drains_of(service, answer)),
        )
    except KeyboardInterrupt:
        if arguments.watch:
            return EXIT_OK  # the page has been seen
        raise


@contextmanager
def _service(arguments: argparse.Namespace) -> Iterator[RemoteService]:
    """Yield a running Waymark, as for other commands; with only a URL of Redis, the same handlers in this process."""
    is_redis_named = arguments.redis_url or (os.environ.get("WAYMARK_REDIS_URL") or "memory://") != "memory://"
    url = arguments.url or (None if arguments.redis_url else os.environ.get("WAYMARK_URL") or None)
    if url is None and is_redis_named:
        from waymark.base import logs
        from waymark.console.service import LocalService
        from waymark.runtime.commands import inspecting

        settings = settings_with({"redis_url": arguments.redis_url})
        logs.configure("error", "text")
        with inspecting(settings) as (application, runner):
            yield LocalService(application, runner)
    else:
        from waymark.console.service import RemoteService

        token = arguments.api_token or os.environ.get("WAYMARK_API_TOKEN") or None
        with RemoteService(url or DEFAULT_URL, token) as service:
            yield service


def _inspect(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> None:
    from waymark.console import inspections, views

    if arguments.what == "keys" or arguments.keys:
        screen.write(str(inspections.keys_of(service, arguments)))
    elif arguments.what == "prompt":
        screen.show(inspections.drawn(inspections.inspected(service, arguments), screen, top=arguments.top))
    elif arguments.what == "block":
        screen.show(views.block(inspections.block_of(service, arguments).rows))
    else:
        screen.show(views.holder(inspections.holder_of(service, arguments).holders))

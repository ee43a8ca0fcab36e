"""``waymark status`` and ``waymark inspect``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from waymark.cli.exits import EXIT_FAILED, EXIT_OK
from waymark.cli.service import DEFAULT_URL
from waymark.console.arguments import add_inspect, add_status

if TYPE_CHECKING:
    from waymark.console.screen import Screen, ScreenPart
    from waymark.console.service import RemoteService


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    {"status": add_status, "inspect": add_inspect}[command](parser)


def run(arguments: argparse.Namespace) -> int:
    import os

    # As its sisters, it asks a running Waymark; but with only a URL of Redis, it looks into that.
    if hasattr(arguments, "url") and not arguments.url and not arguments.redis_url:
        is_redis_named = os.environ.get("WAYMARK_REDIS_URL", "memory://") != "memory://"
        arguments.url = os.environ.get("WAYMARK_URL") or (None if is_redis_named else DEFAULT_URL)
    return _over_http(arguments) if getattr(arguments, "url", None) else _through_redis(arguments)


def _over_http(arguments: argparse.Namespace) -> int:
    """Run the command against a running Waymark. No Redis is needed here."""
    import asyncio
    import json
    import os

    from waymark.console.screen import Screen
    from waymark.console.service import RemoteService

    screen = Screen()
    with RemoteService(arguments.url, arguments.api_token or os.environ.get("WAYMARK_API_TOKEN") or None) as service:
        if arguments.command == "inspect":
            _inspect(service, arguments, screen)
            return EXIT_OK
        from waymark.console import status_view
        from waymark.console.inspections import status_of
        from waymark.inspection import status_json

        if arguments.json:
            screen.write(json.dumps(status_of(service, arguments), indent=2))
        elif arguments.watch:

            async def draw() -> Sequence[ScreenPart]:
                answer = await asyncio.to_thread(status_of, service, arguments)
                return status_view.parts(status_json.of_json(answer), is_plain=screen.is_plain)

            asyncio.run(screen.watch(arguments.watch, draw))
        else:
            screen.show(status_view.parts(status_json.of_json(status_of(service, arguments)), is_plain=screen.is_plain))
    return EXIT_OK


def _inspect(service: RemoteService, arguments: argparse.Namespace, screen: Screen) -> None:
    from waymark.console import inspections, lookups
    from waymark.console.run_inspect import drawn
    from waymark.inspection import blocks, explanation, holders
    from waymark.inspection.explanation import ShellCommands

    match arguments.what:
        case "prompt":
            result = explanation.of_json(inspections.inspected(service, arguments))
            screen.show(drawn(result, screen, top=arguments.top))
        case "block":
            screen.show(lookups.block(blocks.of_json(inspections.block_of(service, arguments))))
        case "holder":
            screen.show(lookups.holder(holders.of_json(inspections.holder_of(service, arguments))))
        case _:
            screen.write(str(ShellCommands(**inspections.keys_of(service, arguments))))


def _through_redis(arguments: argparse.Namespace) -> int:
    import asyncio
    import signal

    from waymark.base import logs
    from waymark.cli import loop
    from waymark.console.screen import Screen

    settings = loop.settings_with({"redis_url": getattr(arguments, "redis_url", None)})
    logs.configure("error", "text")
    if arguments.command == "status":
        from waymark.console.run_status import run_status as run_command
    else:
        from waymark.console.run_inspect import run_inspect as run_command

    async def until_stopped() -> None:
        task, running = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, task.cancel)
        await run_command(arguments, settings, Screen())

    try:
        loop.run(until_stopped())
    except asyncio.CancelledError:
        # With --watch the page has been seen; without it there is no answer.
        return EXIT_OK if getattr(arguments, "watch", None) else EXIT_FAILED
    return EXIT_OK

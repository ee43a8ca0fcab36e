"""``waymark status`` and ``waymark inspect``."""

from __future__ import annotations

import argparse

from waymark.cli.exits import EXIT_FAILED, EXIT_OK
from waymark.console.arguments import add_inspect, add_status


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    {"status": add_status, "inspect": add_inspect}[command](parser)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import signal

    from waymark import logs
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

"""The ``waymark`` command: arguments and environment to one role. The only module that prints.

Settings come from the environment, once, here; the few flags are for what one changes by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import typing
from collections.abc import Coroutine, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvloop

from app import __version__, logs
from app.demo import DemoFailed, run_demo, table
from app.embedded import run
from app.errors import WaymarkError
from app.settings import PREFIX, Settings
from app.simulator import Faults, SimulateOptions, simulate

EXIT_OK = 0
"""It did what it was asked for."""
EXIT_FAILED = 1
"""It ran, and what it was to show did not come out."""
EXIT_USAGE = 2
"""An argument or a setting is wrong; nothing was started."""
EXIT_NO_PORT = 3
"""The port could not be opened. uvicorn ends the process with it, after a log line that names the port."""

_EXAMPLES = """\
examples:
  # everything in one process, on an embedded Redis: for a trial
  $ waymark serve

  # the same against a real Redis
  $ WAYMARK_REDIS_URL=redis://127.0.0.1:6379/0 waymark serve

  # production: any number of query replicas, any number of ingest workers
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark query
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark ingest

  # two engines that publish what vLLM would, registered with a running Waymark
  $ waymark simulate --engines 2 --register http://127.0.0.1:13333 --stay

  # see it work
  $ waymark demo

Settings are environment variables; docs/configuration.md lists them all.
"""

_ROLES = {
    "serve": ("the HTTP API and an ingest worker in one process", True, True),
    "query": ("a query replica: the HTTP API", True, False),
    "ingest": ("an ingest worker: subscribes to publishers and applies their events", False, True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "demo":
            return _demo()
        if arguments.command == "simulate":
            return _simulate(arguments)
        return _role(arguments)
    except WaymarkError as exc:
        print(f"waymark {arguments.command}: {exc}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waymark",
        description="Which engine already holds a prompt's KV cache: an index in Redis, fed by the engines' events.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"waymark {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (sentence, has_api, _) in _ROLES.items():
        role = commands.add_parser(name, help=sentence, description=sentence)
        role.add_argument("--redis-url", help="instead of WAYMARK_REDIS_URL")
        if has_api:
            role.add_argument("--host", help="instead of WAYMARK_HOST")
            role.add_argument("--port", help="instead of WAYMARK_PORT")
    commands.add_parser("demo", help="see the whole service work on this machine, in a table")
    _add_simulate(commands)
    return parser


def _run(main_coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main_coroutine)


def _role(arguments: argparse.Namespace) -> int:
    _, has_api, has_worker = _ROLES[arguments.command]
    flags = {name: getattr(arguments, name, None) for name in ("redis_url", "host", "port")}
    given = {PREFIX + name.upper(): value for name, value in flags.items() if value is not None}
    settings = Settings.from_env(dict(os.environ) | given)
    logs.configure(settings.log_level, settings.log_format)
    if settings.redis_url == "memory://":
        if not (has_api and has_worker):
            print(
                f"waymark {arguments.command}: WAYMARK_REDIS_URL is memory://, which other processes cannot reach; "
                "give a redis:// URL, or run 'waymark serve'",
                file=sys.stderr,
            )
            return EXIT_USAGE
        print(
            f"waymark {__version__} on an embedded, emulated Redis: for a trial. It forgets all at its end and is "
            f"about nine times slower than a real one. Listening on port {settings.port}.",
            file=sys.stderr,
        )
    _run(run(settings, has_api=has_api, has_worker=has_worker))
    return EXIT_OK


def _demo() -> int:
    try:
        lines = _run(run_demo())
    except DemoFailed as exc:
        print(f"waymark demo: {exc}", file=sys.stderr)
        return EXIT_FAILED
    print("Two simulated engines, one shared system prompt. What /query says each of them has:\n")
    print(table(lines))
    print("\nEvery number is what the engines' own caches hold.")
    return EXIT_OK


# ---- simulate --------------------------------------------------------------------------------------


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """One flag per field of the options, and of the faults."""
    parser = commands.add_parser("simulate", help="simulated engines that publish what real ones would")
    for options, prefix in ((SimulateOptions, ""), (Faults, "fault-")):
        kinds = typing.get_type_hints(options)
        for field in fields(options):
            kind, flag = kinds[field.name], f"--{prefix}{field.name.replace('_', '-')}"
            if kind is bool and field.default is True:
                flag = flag.replace("--has-", "--no-")
                parser.add_argument(flag, dest=field.name, action="store_false", default=None)
            elif kind is bool:
                parser.add_argument(flag, dest=field.name, action="store_true", default=None)
            elif kind is not Faults:
                parser.add_argument(flag, dest=field.name, type=_reader(kind), metavar=field.name.upper())


def _reader(kind: Any) -> Any:
    """What turns a flag's text into a field's value."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is tuple:
        return lambda text: tuple(text.split(","))
    return next((each for each in (Path, int, float) if each in kinds), str)


def _simulate(arguments: argparse.Namespace) -> int:
    logs.configure("warning", "text")

    def given(options: Any) -> dict[str, Any]:
        values = {field.name: getattr(arguments, field.name, None) for field in fields(options)}
        return {name: value for name, value in values.items() if value is not None}

    options = SimulateOptions(**given(SimulateOptions), faults=Faults(**given(Faults)))

    async def until_stopped() -> str:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return str(await simulate(options, stop=stop, on_start=lambda engine: print(engine, flush=True)))

    print(_run(until_stopped()))
    return EXIT_OK

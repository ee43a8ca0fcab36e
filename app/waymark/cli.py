"""The ``waymark`` command: arguments and environment to one role. Beside ``console``, the only module that prints.

Settings come from the environment, once, here; the few flags are for what one changes by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Coroutine, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvloop

from waymark import __version__, logs, native
from waymark.console.arguments import add_commands
from waymark.console.run import run_inspect, run_status
from waymark.console.screen import Screen
from waymark.demo import DemoFailed, run_demo, table
from waymark.embedded import run
from waymark.errors import NotFound, StoreUnavailable, WaymarkError
from waymark.settings import PREFIX, Settings
from waymark.simulator import Faults, SimulateOptions, simulate
from waymark.simulator.options import field_sentences

EXIT_OK = 0
"""It did what it was asked for."""
EXIT_FAILED = 1
"""It ran, and what it was to show did not come out."""
EXIT_USAGE = 2
"""An argument or a setting is wrong; nothing was started."""
EXIT_NO_PORT = 3
"""The port could not be opened. uvicorn ends the process with it, after a log line that names the port."""
EXIT_NO_REDIS = 4
"""Redis cannot be reached, does not answer in time, or refuses."""

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

  # look at a running installation, straight from its Redis
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark status
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark inspect prompt --model llama --tokens "1 2 3 4 5 6 7 8"

exit codes:
  0  it did what it was asked for
  1  it ran, and what it was to show did not come out, or there is no such thing
  2  an argument or a setting is wrong; nothing was started
  3  the port could not be opened
  4  Redis cannot be reached, does not answer in time, or refuses

Settings are environment variables; docs/configuration.md lists them all.
"""

_ROLES = {
    "serve": ("the HTTP API and an ingest worker in one process", True, True),
    "query": ("a query replica: the HTTP API", True, False),
    "ingest": ("an ingest worker: subscribes to publishers and applies their events", False, True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["bench"]:  # all its words, options too, are the benchmarks' own
        return _bench(words[1:])
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        if arguments.command in ("status", "inspect"):
            return _console(arguments)
        if arguments.command == "demo":
            return _demo(arguments)
        if arguments.command == "simulate":
            return _simulate(arguments)
        return _role(arguments)
    except WaymarkError as exc:
        print(f"waymark {arguments.command}: {exc}", file=sys.stderr)
        if isinstance(exc, StoreUnavailable):
            return EXIT_NO_REDIS
        return EXIT_FAILED if isinstance(exc, NotFound) else EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waymark",
        description="Which engine already holds a prompt's KV cache: an index in Redis, fed by the engines' events.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"waymark {__version__} ({native.implementation()})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (sentence, has_api, _) in _ROLES.items():
        role = commands.add_parser(name, help=sentence, description=sentence)
        role.add_argument("--redis-url", help="instead of WAYMARK_REDIS_URL")
        if has_api:
            role.add_argument("--host", help="instead of WAYMARK_HOST")
            role.add_argument("--port", help="instead of WAYMARK_PORT")
    sentence = "see the whole service work on this machine, in a table"
    demo = commands.add_parser("demo", help=sentence, description=sentence)
    demo.add_argument("--url", help="show the Waymark that runs there, instead of starting one")
    demo.add_argument("--api-token", help="the token that Waymark asks for")
    add_commands(commands)
    _add_simulate(commands)
    commands.add_parser("bench", help="the benchmarks, from a checkout: 'waymark bench --help' says more")
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


def _demo(arguments: argparse.Namespace) -> int:
    try:
        lines = _run(run_demo(arguments.url, arguments.api_token))
    except DemoFailed as exc:
        print(f"waymark demo: {exc}", file=sys.stderr)
        return EXIT_FAILED
    print("Two simulated engines, one shared system prompt. What /query says each of them has:\n")
    print(table(lines))
    print("\nEvery number is what the engines' own caches hold.")
    return EXIT_OK


# ---- looking -----------------------------------------------------------------------------------------


def _console(arguments: argparse.Namespace) -> int:
    given = {PREFIX + "REDIS_URL": url} if (url := getattr(arguments, "redis_url", None)) is not None else {}
    settings = Settings.from_env(dict(os.environ) | given)
    logs.configure("error", "text")
    run_command = run_status if arguments.command == "status" else run_inspect

    async def until_stopped() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        await run_command(arguments, settings, Screen())

    try:
        _run(until_stopped())
    except asyncio.CancelledError:
        # Whoever watches has seen enough; whoever waits for an answer has not got it.
        return EXIT_OK if getattr(arguments, "watch", None) else EXIT_FAILED
    except BrokenPipeError:
        # `| head`: what is left in the buffer has nowhere to go, and the interpreter would complain of that at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK


# ---- bench -----------------------------------------------------------------------------------------


def _bench(words: Sequence[str]) -> int:
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file() or not (root / "tests" / "benchmarks").is_dir():
        print(
            "waymark bench: the benchmarks are not in the installed package; run it in a checkout of the repository, "
            "where 'make bench' installs what they need",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return subprocess.call([sys.executable, "-m", "tests.benchmarks", *words], cwd=root)


# ---- simulate --------------------------------------------------------------------------------------


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """One flag per field of the options, and of the faults."""
    sentence = "simulated engines that publish what real ones would"
    parser = commands.add_parser("simulate", help=sentence, description=sentence)
    faults = parser.add_argument_group("faults", "What goes wrong on purpose. Numbers count batches; 0 is never.")
    for options, prefix, group in ((SimulateOptions, "", parser), (Faults, "fault-", faults)):
        kinds, sentences = typing.get_type_hints(options), field_sentences(options)
        for field in fields(options):
            kind, flag = kinds[field.name], f"--{prefix}{field.name.replace('_', '-')}"
            sentence = sentences.get(field.name, "").replace("%", "%%")
            if kind is bool and field.default is True:
                flag = flag.replace("--has-", "--no-")
                group.add_argument(flag, dest=field.name, action="store_false", default=None, help=sentence)
            elif kind is bool:
                group.add_argument(flag, dest=field.name, action="store_true", default=None, help=sentence)
            elif kind is not Faults:
                shown = "" if field.default in (None, "", ()) else f" ({field.default})"
                group.add_argument(
                    flag, dest=field.name, type=_reader(kind), metavar=field.name.upper(), help=sentence + shown
                )


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

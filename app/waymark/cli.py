"""The ``waymark`` command: arguments and environment to one role. Beside ``console``, the only module that prints.

Settings come from the environment, once, here; the few flags are for what one changes by hand. A command's modules
are imported when the command is chosen, so that ``--help`` needs none of them, and neither does another command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from waymark import __version__, logs, native
from waymark.errors import NotFound, StoreUnavailable, WaymarkError

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
  # run everything in one process on an embedded Redis, for a trial
  $ waymark serve

  # run the same on a real Redis
  $ WAYMARK_REDIS_URL=redis://127.0.0.1:6379/0 waymark serve

  # in production, run any number of query replicas and of ingest workers
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark query
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark ingest

  # simulate two vLLM engines and register them with a running Waymark
  $ waymark simulate --engines 2 --register http://127.0.0.1:13333 --stay

  # register an engine by its URL with a running Waymark
  $ waymark register http://127.0.0.1:8000
  $ waymark unregister http://127.0.0.1:8000

  # watch the whole service work
  $ waymark demo

  # look at a running installation through its Redis
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark status
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark inspect prompt --model llama --tokens "1 2 3 4 5 6 7 8"

exit codes:
  0  the command succeeded
  1  the command failed, or what it looked for does not exist
  2  an argument or a setting is wrong, and nothing was started
  3  the port could not be opened
  4  Redis cannot be reached, does not answer in time, or refuses the command

Settings are environment variables; docs/configuration.md lists them all.
"""

#: A role -> whether it has the HTTP API, whether it has an ingest worker.
_ROLES = {"serve": (True, True), "query": (True, False), "ingest": (False, True)}

#: A command that only needs to be tried -> the extra that has what it needs; every other one needs ``server``.
_EXTRAS = {"demo": "demo"}
#: A package that only a trial needs.
_TRIAL_PACKAGES = {"fakeredis", "lupa"}


class _Command(NamedTuple):
    """One word after ``waymark``."""

    sentence: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["bench"]:  # all its words, options too, are the benchmarks' own
        return _bench(words[1:])
    command = words[0] if words else ""
    try:
        arguments = parse(words)
        return _COMMANDS[arguments.command].run(arguments)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "waymark"):
            raise
        extra = "demo" if package in _TRIAL_PACKAGES else _EXTRAS.get(command, "server")
        print(f"waymark {command}: {package} is not installed; pip install 'waymark[{extra}]'", file=sys.stderr)
        return EXIT_USAGE
    except WaymarkError as exc:
        print(f"waymark {command}: {exc}", file=sys.stderr)
        if isinstance(exc, StoreUnavailable):
            return EXIT_NO_REDIS
        return EXIT_FAILED if isinstance(exc, NotFound) else EXIT_USAGE


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command's arguments; ends the process with the usage where they do not fit."""
    return _parser(words[0] if words else "").parse_args(words)


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser, with the flags of one command; of the others only the sentence."""
    parser = argparse.ArgumentParser(
        prog="waymark",
        description="Waymark reports which inference engine already holds the KV cache of a prompt.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"waymark {__version__} ({native.implementation()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, each in _COMMANDS.items():
        form = argparse.RawDescriptionHelpFormatter
        of_command = commands.add_parser(name, help=each.sentence, description=each.sentence, formatter_class=form)
        if name == command:
            each.add_flags(of_command)
    commands.add_parser("bench", help="run the benchmarks in a checkout; 'waymark bench --help' lists them")
    return parser


def _run(main_coroutine: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main_coroutine)


# ---- roles -----------------------------------------------------------------------------------------


def _add_role(parser: argparse.ArgumentParser, *, has_api: bool) -> None:
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")
    if has_api:
        parser.add_argument("--host", help="the address to listen on, in place of WAYMARK_HOST")
        parser.add_argument("--port", help="the port to listen on, in place of WAYMARK_PORT")


def _role(arguments: argparse.Namespace) -> int:
    from waymark import runtime
    from waymark.settings import PREFIX, Settings

    has_api, has_worker = _ROLES[arguments.command]
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
            f"waymark {__version__} runs on an embedded, emulated Redis, for a trial. The index is lost when the "
            f"process ends, and it is about nine times slower than a real Redis. Listening on port {settings.port}.",
            file=sys.stderr,
        )
    _run(runtime.run(settings, has_api=has_api, has_worker=has_worker))
    return EXIT_OK


# ---- demo ------------------------------------------------------------------------------------------


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="use the Waymark at this URL, and start none")
    parser.add_argument("--api-token", help="the bearer token, if that Waymark requires one")


def _demo(arguments: argparse.Namespace) -> int:
    from waymark.console.demo_view import parts
    from waymark.console.screen import Screen
    from waymark.demo import DemoFailed, run_demo

    try:
        lines = _run(run_demo(arguments.url, arguments.api_token))
    except DemoFailed as exc:
        print(f"waymark demo: {exc}", file=sys.stderr)
        return EXIT_FAILED
    Screen().show(parts(lines))
    return EXIT_OK


# ---- looking -----------------------------------------------------------------------------------------


def _add_status(parser: argparse.ArgumentParser) -> None:
    from waymark.console.arguments import add_status

    add_status(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    from waymark.console.arguments import add_inspect

    add_inspect(parser)


def _console(arguments: argparse.Namespace) -> int:
    from waymark.console.run import run_inspect, run_status
    from waymark.console.screen import Screen
    from waymark.settings import PREFIX, Settings

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


# ---- registering -----------------------------------------------------------------------------------


def _add_registering(parser: argparse.ArgumentParser, command: str) -> None:
    from waymark import registering

    {"register": registering.add_register, "unregister": registering.add_unregister}[command](parser)


def _registering(arguments: argparse.Namespace) -> int:
    from waymark import registering

    lines = {"register": registering.register, "unregister": registering.unregister}[arguments.command]

    async def show() -> None:
        async for line in lines(arguments):
            print(line, flush=True)

    try:
        asyncio.run(show())
    except registering.NotRegistered as exc:
        print(f"waymark {arguments.command}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


# ---- simulate --------------------------------------------------------------------------------------


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from waymark.simulator.flags import add_flags

    add_flags(parser)


def _simulate(arguments: argparse.Namespace) -> int:
    from waymark import simulator
    from waymark.simulator.flags import options_of

    logs.configure("warning", "text")
    options = options_of(arguments)

    async def until_stopped() -> str:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return str(await simulator.simulate(options, stop=stop, on_start=lambda engine: print(engine, flush=True)))

    print(_run(until_stopped()))
    return EXIT_OK


_COMMANDS = {
    "serve": _Command("run the HTTP API and an ingest worker in one process", partial(_add_role, has_api=True), _role),
    "query": _Command("run a query replica, which serves the HTTP API", partial(_add_role, has_api=True), _role),
    "ingest": _Command(
        "run an ingest worker, which applies the events of publishers", partial(_add_role, has_api=False), _role
    ),
    "register": _Command(
        "register an engine by its URL, and show its streams",
        partial(_add_registering, command="register"),
        _registering,
    ),
    "unregister": _Command(
        "unregister an engine by its name or URL", partial(_add_registering, command="unregister"), _registering
    ),
    "demo": _Command("run the whole service with simulated engines and show a table", _add_demo, _demo),
    "status": _Command("show publishers, streams, ingest workers and the state of Redis", _add_status, _console),
    "inspect": _Command(
        "show which instances have the blocks of a prompt, and what Redis contains", _add_inspect, _console
    ),
    "simulate": _Command("run simulated engines that publish events as real ones do", _add_simulate, _simulate),
}

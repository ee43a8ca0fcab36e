"""``waymark demo``, ``simulate`` and ``bench``: trials of the service, of engines, and of the speed of a checkout."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from waymark.cli.parser import EXIT_FAILED, EXIT_OK, EXIT_USAGE


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the flags; none for the benchmarks, which read their own."""
    if command == "demo":
        parser.add_argument("--url", help="use the Waymark at this URL, and start none")
        parser.add_argument("--api-token", help="the bearer token, if that Waymark requires one")
        parser.add_argument("--once", action="store_true", help="end after the table, on a terminal, too")
        parser.add_argument("--json", action="store_true", help="print JSON")
    elif command == "simulate":
        from waymark.simulator import options as flags

        flags.add_flags(parser)
        parser.add_argument(
            "--json", action="store_true", help="print a line of JSON for each engine, and one at the end"
        )


def run(arguments: argparse.Namespace) -> int:
    return {"demo": _demo, "simulate": _simulate}[arguments.command](arguments)


def run_words(words: Sequence[str]) -> int:
    """Run the benchmarks with these words. Return their exit code."""
    root = Path(__file__).parents[3]
    if not (root / "pyproject.toml").is_file() or not (root / "tools" / "benchmarks").is_dir():
        print(
            "waymark bench: the benchmarks are not in the installed package; run it in a checkout of the repository, "
            "where 'make bench' installs what they need",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return subprocess.call([sys.executable, "-m", "tools.benchmarks", *words], cwd=root)


def _path() -> str:
    """Return the line that another terminal needs, if this environment's commands are not on every PATH."""
    commands = Path(sys.executable).parent
    command = shutil.which("waymark")
    if command is not None and Path(command).parent != commands:
        return ""
    return f'  export PATH="{commands}:$PATH"\n'


def _demo(arguments: argparse.Namespace) -> int:
    import uvloop

    from waymark.cli.demonstration import DemoFailed, run_demo
    from waymark.console.progress import Progress, PromptMatch, parts
    from waymark.console.screen import Screen

    is_shown = False

    def stay(lines: list[PromptMatch], url: str) -> None:
        nonlocal is_shown
        progress.clear()
        Screen().show(parts(lines))
        _print_invitation(url)
        is_shown = True

    stays = sys.stdout.isatty() and not (arguments.once or arguments.json or arguments.url)
    try:
        with Progress("waymark demo") as progress:
            lines = uvloop.run(run_demo(arguments.url, arguments.api_token, progress.step, stay if stays else None))
    except KeyboardInterrupt:
        if not is_shown:
            raise
        print("\nThe demo has ended: its Waymark and its engines are stopped.")
        return EXIT_OK
    except DemoFailed as exc:
        print(f"waymark demo: {exc}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        Screen().show(parts(lines))
    return EXIT_OK


def _print_invitation(url: str) -> None:
    """Print what a person can do with the demo that goes on at this URL."""
    from waymark.cli.demonstration import BEGINNING, DRAINED, ENGINES, MODEL, STOPPED
    from waymark.console.arguments import DEFAULT_URL

    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
    of_url = "" if url == DEFAULT_URL else f" --url {url}"
    if of_url and not os.environ.get("WAYMARK_PORT"):
        print(f"\nAnother process listens on the usual port, so this Waymark is at {url}.")
    print(
        f"\nIt goes on with {ENGINES} engines and with requests until you press Ctrl-C: {DRAINED} is drained, and "
        f"{STOPPED} has been stopped.\nThe page: {url}/ui\nIn another terminal:\n{_path()}"
        f"  waymark top{of_url}\n  waymark publishers --bad{of_url}\n"
        f"  waymark ask --model {MODEL} --text '{BEGINNING}'{of_url}\n"
        f"  waymark ask --model {MODEL} --tokens 1000-1159{of_url}\n"
        f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        flush=True,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    import asyncio
    import signal

    import uvloop

    from waymark.base import logs
    from waymark.cli.registering import register_of
    from waymark.console.progress import Progress
    from waymark.simulator.options import options_of
    from waymark.simulator.run import EngineStarted, Summary, simulate

    logs.configure("warning", "text")
    options = options_of(arguments)

    def shown(event: EngineStarted | Summary) -> str:
        return json.dumps(asdict(event)) if arguments.json else str(event)

    async def until_stopped(progress: Progress) -> str:
        stop, running = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, stop.set)
        total = "" if options.prompts is None else f" of {options.prompts}"
        summary = await simulate(
            options,
            stop=stop,
            on_start=lambda engine: print(shown(engine), flush=True),
            on_prompt=lambda count: progress.count(f"{count}{total} prompts"),
            register=register_of(options),
        )
        return shown(summary)

    with Progress("waymark simulate") as progress:
        last = uvloop.run(until_stopped(progress))
    print(last)
    return EXIT_OK

"""``waymark simulate``."""

from __future__ import annotations

import argparse

from waymark.cli.parser import EXIT_OK

_EXAMPLES = """\
examples:
  # two vLLM engines, registered with a running Waymark, until Ctrl-C
  $ waymark simulate --engines 2 --register http://127.0.0.1:13333 --stay

  # an SGLang engine that drops every fourth batch
  $ waymark simulate --dialect sglang --prompts 100 --fault-drop-every 4
"""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    from waymark.simulator import options as flags

    parser.epilog = _EXAMPLES
    flags.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each engine, and one at the end")


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import json
    import signal
    from dataclasses import asdict

    from waymark.base import logs
    from waymark.cli import loop
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
        last = loop.run(until_stopped(progress))
    print(last)
    return EXIT_OK

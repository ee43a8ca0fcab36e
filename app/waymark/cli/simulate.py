"""``waymark simulate``."""

from __future__ import annotations

import argparse

from waymark.cli.exits import EXIT_OK

_EXAMPLES = """\
examples:
  # two vLLM engines, registered with a running Waymark, until Ctrl-C
  $ waymark simulate --engines 2 --register http://127.0.0.1:13333 --stay

  # an SGLang engine that drops every fourth batch
  $ waymark simulate --dialect sglang --prompts 100 --fault-drop-every 4
"""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    from waymark.cli import option_flags

    parser.epilog = _EXAMPLES
    option_flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import signal

    from waymark import logs, simulator
    from waymark.cli import loop
    from waymark.simulator.flags import options_of

    logs.configure("warning", "text")
    options = options_of(arguments)

    async def until_stopped() -> str:
        stop, running = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, stop.set)
        return str(await simulator.simulate(options, stop=stop, on_start=lambda engine: print(engine, flush=True)))

    print(loop.run(until_stopped()))
    return EXIT_OK

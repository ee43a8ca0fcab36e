"""``waymark register`` and ``waymark unregister``."""

from __future__ import annotations

import argparse
import sys

from waymark.base.shown import printable
from waymark.cli.parser import EXIT_FAILED, EXIT_OK
from waymark.console.arguments import add_service, settle, wait_seconds_of

#: Fields of ``POST /register`` with a flag.
_FIELDS = {
    "instance_id": "the name of the engine in answers; the default is host:port of the URL",
    "type": "the type of the engine, if its API does not report it",
    "model": "the name of the model, if the engine serves several names",
    "block_size": "the number of tokens per block, if the engine's API does not report it",
    "endpoint": "the event socket, if the engine's API does not report it",
    "replay_endpoint": "the replay socket, if the engine's API does not report it",
    "snapshot_endpoint": "the socket for snapshots, if the engine's API does not report it",
    "dp_rank": "register this rank only",
    "role": "the role: prefill, decode or both",
}
_NUMBERS = {"block_size", "dp_rank"}


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    {"register": _add_register, "unregister": _add_unregister}[command](parser)


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from waymark.cli import registering

    settle(arguments)
    lines = {"register": registering.register, "unregister": registering.unregister}[arguments.command]

    async def show() -> None:
        async for line in lines(arguments):
            print(line.as_json() if arguments.json else printable(str(line)), flush=True)

    try:
        asyncio.run(show())
    except registering.NotRegistered as exc:
        print(f"waymark {arguments.command}: {printable(str(exc))}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _add_register(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("engine", metavar="URL", help="the HTTP API of the engine, such as http://127.0.0.1:8000")
    for name, sentence in _FIELDS.items():
        kind = int if name in _NUMBERS else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=sentence)
    parser.add_argument(
        "--wait-seconds", type=wait_seconds_of, default=10.0, help="how long to wait for the streams of the engine (10)"
    )


def _add_unregister(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("engine", metavar="NAME", help="the instance_id, or the URL that the engine was registered by")
    parser.add_argument("--dp-rank", type=int, help="unregister this rank only")

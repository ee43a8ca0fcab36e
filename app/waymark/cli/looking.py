"""``waymark status`` and ``waymark inspect``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waymark.cli.parser import EXIT_OK, examples_of, settings_with
from waymark.cli.remote import print_answer
from waymark.console.arguments import DEFAULT_TENANT, DEFAULT_URL, STREAM_STATUSES, TEXT, add_tokens, add_watch

if TYPE_CHECKING:
    from waymark.console.screen import Screen
    from waymark.console.service import RemoteService

#: The kinds of ``inspect``.
_KINDS = {
    "prompt": "show which instance has which block of a prompt, in a line per rank and medium",
    "block": "show which holders (engine, rank, medium), live or dead, have the block with this key",
    "holder": "show which engine, rank and medium a holder id stands for, and the rows that list this holder",
    "keys": "print redis-cli commands that show everything except the blocks",
    "namespace": "compute the namespace of an adapter and salts, and the key of a block",
}


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    {"status": _add_status, "inspect": _add_inspect}[command](parser)


def _add_status(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``status``."""
    _add_redis(parser)
    _add_url(parser)
    parser.add_argument("--tenant", help="show only publishers of this tenant")
    parser.add_argument("--model", help="show only publishers of this model")
    parser.add_argument(
        "--status",
        action="append",
        default=[],
        choices=STREAM_STATUSES,
        metavar="STATUS",
        help=f"show only streams with this status; may be repeated: {', '.join(STREAM_STATUSES)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_watch(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of ``inspect``, and their flags."""
    examples = examples_of("inspect").splitlines()
    kinds = parser.add_subparsers(dest="what", required=True, metavar="|".join(_KINDS))
    for kind, sentence in _KINDS.items():
        of_kind = kinds.add_parser(kind, help=sentence, description=sentence)
        of_kind.epilog = "\n".join(["examples:", *(line for line in examples if f" inspect {kind} " in line)])
        _add_flags_of(kind, of_kind)


def _add_flags_of(kind: str, parser: argparse.ArgumentParser) -> None:
    if kind == "namespace":
        _add_space(parser)
        parser.add_argument("--seq-hash", help="the rolling hash of a block; the key of the block is printed, too")
        return
    _add_redis(parser)
    _add_url(parser)
    if kind != "keys":
        parser.add_argument(
            "--keys", action="store_true", help="print the redis-cli commands that show the same, and exit"
        )
    match kind:
        case "prompt":
            _add_prompt(parser)
            return
        case "block":
            parser.add_argument(
                "key", help="the key of the block, as 16 hex digits; 'waymark inspect namespace --seq-hash' computes it"
            )
        case "holder":
            parser.add_argument("id", type=int, help="the id of the holder, as rows contain it")
    parser.add_argument("--group", type=int, help="search only the group with this id, such as 3 for 'wm:{3}:...'")
    parser.add_argument("--model", help="search only groups of this model")
    parser.add_argument("--tenant", help="search only groups of this tenant")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the name of the model; it may be left out if only one is registered")
    parser.add_argument("--tenant", default=DEFAULT_TENANT, help=f"the tenant (default: {DEFAULT_TENANT})")
    parser.add_argument("--block-size", type=int, help="tokens per block (default: the registered number)")
    exclusive = parser.add_mutually_exclusive_group(required=True)
    add_tokens(exclusive)
    exclusive.add_argument("--text", help=TEXT)
    exclusive.add_argument("--messages", help="the messages of a chat request as JSON; - reads standard input")
    exclusive.add_argument("--hashes", help="rolling hashes, in 16 hex digits or decimal; - reads standard input")
    _add_space(parser)
    parser.add_argument("--top", type=int, default=20, help="the most instances to show (20)")


def _add_redis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="ask the Waymark at this URL; the default is WAYMARK_URL, else the Redis of WAYMARK_REDIS_URL, else "
        f"{DEFAULT_URL}",
    )
    parser.add_argument("--api-token", help="the bearer token for that Waymark; the default is WAYMARK_API_TOKEN")


def _add_space(parser: argparse.ArgumentParser) -> None:
    adapter = parser.add_mutually_exclusive_group()
    adapter.add_argument("--lora", help="the name of the adapter")
    adapter.add_argument("--lora-id", type=int, help="the id of the adapter, if its engine reports no name")
    parser.add_argument(
        "--salt",
        action="append",
        default=[],
        help="a salt; for two salts give it twice: first additional_salt, then cache_salt",
    )


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

"""The flags, and their help, of commands that ask a running Waymark or look at its Redis."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from waymark.base.shown import shown
from waymark.domain.names import DEFAULT_TENANT
from waymark.domain.status import StreamStatus

DEFAULT_URL = "http://127.0.0.1:13333"
PUBLISHER_STATUSES = (*map(str, StreamStatus), "draining", "drained")
"""The words of ``--status`` of ``waymark publishers``."""
Subcommands = Any
"""The result of ``add_subparsers``; argparse has no public name for its type."""

_STATUS_EXAMPLES = """\
examples:
  $ waymark status                                   show everything once
  $ waymark status --watch                           show it every two seconds, until Ctrl-C
  $ waymark status --url http://waymark:13333         ask a running Waymark in place of Redis
  $ waymark status --status failed --status lost     show only streams that need attention
  $ waymark status --json | jq '.publishers[] | select(.lag_seconds > 60)'
"""

#: Kind of inspection -> its examples.
_INSPECT_EXAMPLES = {
    "prompt": """\
  $ waymark inspect prompt --model llama --tokens "1 2 3 4 5 6 7 8"     which instances have it, or why none does
  $ waymark inspect prompt --model llama --text "Once upon a time"      the model's tokenizer makes the tokens
  $ cat token-ids.txt | waymark inspect prompt --model llama --tokens -
""",
    "block": """\
  $ waymark inspect block cb38e4d7fb2dca5c --model llama               which holders have this block
  $ waymark inspect block cb38e4d7fb2dca5c --url http://waymark:13333   ask a running Waymark in place of Redis
""",
    "holder": """\
  $ waymark inspect holder 17                                          which engine, rank and medium holder 17 is
""",
    "namespace": """\
  $ waymark inspect namespace --lora sql --salt tenant-7               the number that is XORed into a block's key
""",
    "keys": """\
  $ waymark inspect keys --model llama                                 redis-cli commands that show everything
""",
}
_INSPECT_ENDING = "\nThe flag --keys of prompt, block and holder prints the redis-cli commands that show the same.\n"
_TEXT = "a text, which the model's tokenizer makes into tokens; - reads standard input"


def add_service(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the service's address, the tenant, and the output."""
    parser.add_argument("--url", help=f"the URL of Waymark; the default is WAYMARK_URL, else {DEFAULT_URL}")
    parser.add_argument("--tenant-id", help="the tenant; the default is 'default'")
    parser.add_argument("--api-token", help="the bearer token; the default is WAYMARK_API_TOKEN")
    parser.add_argument("--json", action="store_true", help="print JSON")


def settle(arguments: argparse.Namespace) -> None:
    """Fill in from the environment the values of ``add_service`` without a flag."""
    arguments.url = arguments.url or os.environ.get("WAYMARK_URL") or DEFAULT_URL
    arguments.api_token = arguments.api_token or os.environ.get("WAYMARK_API_TOKEN") or None


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the prompt: exactly one of its forms, and its options."""
    parser.add_argument("--model", help="the name of the model; the default is the only one that is registered")
    exclusive = parser.add_mutually_exclusive_group(required=True)
    add_tokens(exclusive)
    exclusive.add_argument("--text", help=_TEXT)
    exclusive.add_argument("--file", help="a file with the text of the prompt; - reads standard input")
    exclusive.add_argument(
        "--messages", metavar="FILE", help="a JSON file with the messages of a chat; - for standard input"
    )
    parser.add_argument("--block-size", type=int, help="tokens per block; the default is the block size of the engines")
    parser.add_argument("--lora", help="the name of the adapter")
    parser.add_argument("--cache-salt", help="the cache salt of the request")


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``status``."""
    parser.epilog = _STATUS_EXAMPLES
    _add_redis(parser)
    _add_url(parser)
    parser.add_argument("--tenant", help="show only publishers of this tenant")
    parser.add_argument("--model", help="show only publishers of this model")
    parser.add_argument(
        "--status",
        action="append",
        default=[],
        choices=[status.value for status in StreamStatus],
        metavar="STATUS",
        help=f"show only streams with this status; may be repeated: {', '.join(StreamStatus)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_watch(parser)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a command that draws again and again."""
    parser.add_argument(
        "--watch", nargs="?", type=seconds_of, const=2.0, metavar="SECONDS",
        help="update every SECONDS (2), until Ctrl-C",
    )  # fmt: skip


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of ``inspect``, and their flags."""
    parser.epilog = f"examples:\n{''.join(_INSPECT_EXAMPLES.values())}{_INSPECT_ENDING}"
    kinds = parser.add_subparsers(dest="what", required=True)
    _add_inspections(kinds)
    kinds.metavar = "|".join(kinds.choices)  # named if it is missing


def _add_inspections(kinds: Subcommands) -> None:
    prompt = _inspection(
        kinds, "prompt", "show which instance has which block of a prompt, in a line per rank and medium"
    )
    prompt.add_argument("--model", help="the name of the model; it may be left out if only one is registered")
    prompt.add_argument("--tenant", default=DEFAULT_TENANT, help=f"the tenant (default: {DEFAULT_TENANT})")
    prompt.add_argument("--block-size", type=int, help="tokens per block (default: the registered number)")
    exclusive = prompt.add_mutually_exclusive_group(required=True)
    add_tokens(exclusive)
    exclusive.add_argument("--text", help=_TEXT)
    exclusive.add_argument("--messages", help="the messages of a chat request as JSON; - reads standard input")
    exclusive.add_argument("--hashes", help="rolling hashes, in 16 hex digits or decimal; - reads standard input")
    _add_space(prompt)
    prompt.add_argument("--top", type=int, default=20, help="the most instances to show (20)")
    block = _inspection(
        kinds, "block", "show which holders (engine, rank, medium), live or dead, have the block with this key"
    )
    block.add_argument(
        "key", help="the key of the block, as 16 hex digits; 'waymark inspect namespace --seq-hash' computes it"
    )
    _add_group(block)
    holder = _inspection(
        kinds, "holder", "show which engine, rank and medium a holder id stands for, and the rows that list this holder"
    )
    holder.add_argument("id", type=int, help="the id of the holder, as rows contain it")
    _add_group(holder)
    common = _inspection(
        kinds, "keys", "print redis-cli commands that show everything except the blocks", has_keys=False
    )
    _add_group(common)
    sentence = "compute the namespace of an adapter and salts, and the key of a block"
    space = kinds.add_parser(
        "namespace", help=sentence, description=sentence, epilog=f"examples:\n{_INSPECT_EXAMPLES['namespace']}"
    )
    _add_space(space)
    space.add_argument("--seq-hash", help="the rolling hash of a block; the key of the block is printed, too")


def add_tokens(exclusive: Any) -> None:
    """Add the flags of a prompt in token ids, to a group of flags that exclude each other."""
    exclusive.add_argument(
        "--tokens", help="token ids or ranges such as 100-163, separated by commas or blanks; - reads standard input"
    )
    exclusive.add_argument("--tokens-file", type=Path, help="a file of token ids and ranges; - reads standard input")


def _inspection(kinds: Subcommands, name: str, sentence: str, *, has_keys: bool = True) -> argparse.ArgumentParser:
    examples = f"examples:\n{_INSPECT_EXAMPLES[name]}"
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=sentence, description=sentence, epilog=examples)
    _add_redis(parser)
    _add_url(parser)
    if has_keys:
        parser.add_argument(
            "--keys", action="store_true", help="print the redis-cli commands that show the same, and exit"
        )
    return parser


def _add_redis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", help="the URL of Redis, in place of WAYMARK_REDIS_URL")


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="ask the Waymark at this URL; the default is WAYMARK_URL, else the Redis of WAYMARK_REDIS_URL, else "
        f"{DEFAULT_URL}",
    )
    parser.add_argument("--api-token", help="the bearer token for that Waymark; the default is WAYMARK_API_TOKEN")


def _add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", type=int, help="search only the group with this id, such as 3 for 'wm:{3}:...'")
    parser.add_argument("--model", help="search only groups of this model")
    parser.add_argument("--tenant", help="search only groups of this tenant")


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


def seconds_of(word: str, least: float = 0.1, most: float = 3600.0) -> float:
    """Return the number of seconds that a flag has. Raise ``ArgumentTypeError``."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise argparse.ArgumentTypeError(f"{shown(word)} is not a number of seconds from {least:g} to {most:g}")
    return seconds


def wait_seconds_of(word: str) -> float:
    """Return for how many seconds a command waits, at most a week."""
    return seconds_of(word, 0.0, 604_800.0)

"""The flags, and their help, that several commands have."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from waymark.base.shown import shown
from waymark.domain.names import DEFAULT_TENANT as DEFAULT_TENANT
from waymark.domain.status import StreamStatus

DEFAULT_URL = "http://127.0.0.1:13333"
STREAM_STATUSES = tuple(map(str, StreamStatus))
PUBLISHER_STATUSES = (*STREAM_STATUSES, "draining", "drained")
"""The words of ``--status`` of ``waymark publishers``."""


TEXT = "a text, which the model's tokenizer makes into tokens; - reads standard input"


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
    exclusive.add_argument("--text", help=TEXT)
    exclusive.add_argument("--file", help="a file with the text of the prompt; - reads standard input")
    exclusive.add_argument(
        "--messages", metavar="FILE", help="a JSON file with the messages of a chat; - for standard input"
    )
    parser.add_argument("--block-size", type=int, help="tokens per block; the default is the block size of the engines")
    parser.add_argument("--lora", help="the name of the adapter")
    parser.add_argument("--cache-salt", help="the cache salt of the request")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a command that draws again and again."""
    parser.add_argument(
        "--watch", nargs="?", type=seconds_of, const=2.0, metavar="SECONDS",
        help="update every SECONDS (2), until Ctrl-C",
    )  # fmt: skip


def add_tokens(exclusive: Any) -> None:
    """Add the flags of a prompt in token ids, to a group of flags that exclude each other."""
    exclusive.add_argument(
        "--tokens", help="token ids or ranges such as 100-163, separated by commas or blanks; - reads standard input"
    )
    exclusive.add_argument("--tokens-file", type=Path, help="a file of token ids and ranges; - reads standard input")


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

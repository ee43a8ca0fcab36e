"""The flags of ``waymark status`` and ``waymark inspect``, in words; ``run`` is what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from waymark.domain.names import DEFAULT_TENANT
from waymark.domain.status import StreamStatus

Commands = Any
"""What ``add_subparsers`` returns; argparse has no public name for it."""

_STATUS_EXAMPLES = """\
examples:
  $ waymark status                                   what there is, once
  $ waymark status --watch                           again every two seconds, until Ctrl-C
  $ waymark status --status failed --status lost     only what needs somebody
  $ waymark status --json | jq '.publishers[] | select(.lag_seconds > 60)'
"""

_INSPECT_EXAMPLES = """\
examples:
  $ waymark inspect prompt --model llama --tokens "1 2 3 4 5 6 7 8"     who has it, and why nobody has
  $ tokenize prompt.txt | waymark inspect prompt --model llama --tokens -
  $ waymark inspect block cb38e4d7fb2dca5c --model llama               who has this block
  $ waymark inspect holder 17                                          what the 17 in a block stands for
  $ waymark inspect namespace --lora sql --salt tenant-7               the number XORed into a block's key
  $ waymark inspect keys --model llama                                 the redis-cli commands that show it all
Each but namespace takes --keys: it prints the redis-cli commands for the same, instead of looking.
"""


def add_status(parser: argparse.ArgumentParser) -> None:
    """The flags of ``status``."""
    parser.epilog = _STATUS_EXAMPLES
    _add_redis(parser)
    parser.add_argument("--tenant", help="only publishers of this tenant")
    parser.add_argument("--model", help="only publishers of this model")
    parser.add_argument(
        "--status",
        action="append",
        default=[],
        choices=tuple(StreamStatus),
        help="only streams with this status; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS",
        help="draw again every so many seconds (2), until Ctrl-C",
    )  # fmt: skip


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """The kinds of ``inspect``, and their flags."""
    parser.epilog = _INSPECT_EXAMPLES
    _add_inspections(parser.add_subparsers(dest="what", required=True, metavar="what"))


def _add_inspections(kinds: Commands) -> None:
    prompt = _inspection(kinds, "prompt", "who has which block of a prompt: a line of cells per rank and medium")
    prompt.add_argument("--model", required=True, help="the model's name, as registered")
    prompt.add_argument("--tenant", default=DEFAULT_TENANT, help=f"the tenant ({DEFAULT_TENANT})")
    prompt.add_argument("--block-size", type=int, help="tokens per block; without it, the registered one")
    given = prompt.add_mutually_exclusive_group(required=True)
    given.add_argument("--tokens", help="token ids between blanks or commas; - reads them from standard input")
    given.add_argument("--tokens-file", type=Path, help="a file of token ids; - is standard input")
    given.add_argument("--hashes", help="rolling hashes, 16 hex digits or decimal each; - as above")
    _add_space(prompt)
    prompt.add_argument("--top", type=int, default=20, help="how many instances are drawn at most (20)")
    block = _inspection(kinds, "block", "who has the block with this key, ended holders too")
    block.add_argument("key", help="16 hex digits, as they stand in the key: seq_hash XOR namespace")
    _add_group(block)
    holder = _inspection(kinds, "holder", "what a holder id in a block stands for, and how much it has")
    holder.add_argument("id", type=int, help="the id, as it stands in a block's value")
    _add_group(holder)
    every = _inspection(kinds, "keys", "the redis-cli commands that show all there is, but the blocks", has_keys=False)
    _add_group(every)
    sentence = "the number that stands for an adapter and salts, and what XOR makes of a hash"
    space = kinds.add_parser("namespace", help=sentence, description=sentence)
    _add_space(space)
    space.add_argument("--seq-hash", help="a block's rolling hash, to see its key")


def _inspection(kinds: Commands, name: str, sentence: str, *, has_keys: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=sentence, description=sentence)
    _add_redis(parser)
    if has_keys:
        parser.add_argument("--keys", action="store_true", help="print the redis-cli commands that show it, and stop")
    return parser


def _add_redis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", help="instead of WAYMARK_REDIS_URL")


def _add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", type=int, help="only in the group with this id: the 3 in 'wm:{3}:...'")
    parser.add_argument("--model", help="only in groups of this model")
    parser.add_argument("--tenant", help="only in groups of this tenant")


def _add_space(parser: argparse.ArgumentParser) -> None:
    adapter = parser.add_mutually_exclusive_group()
    adapter.add_argument("--lora", help="the adapter's name")
    adapter.add_argument("--lora-id", type=int, help="the adapter's id, where its engine tells only that")
    parser.add_argument(
        "--salt",
        action="append",
        default=[],
        help="a salt; of two, the additional salt first, then the cache salt",
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of seconds; give 0.1 to 3600")
    return seconds

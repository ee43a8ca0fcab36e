"""Words to arguments. A wrong word gets the usage, and the nearest right one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from waymark import __version__
from waymark.cli.commands import COMMANDS, ending, listed

_CHOICE = re.compile(r"(?P<head>.*)invalid choice: '(?P<word>[^']*)' \(choose from (?P<known>.*)\)", re.DOTALL)
_FLAG = re.compile(r"(?P<head>)unrecognized arguments: (?P<word>--[\w-]+)")

#: Other words for a command -> the command.
MEANT = {
    **dict.fromkeys(("resume", "undrain"), "drain NAME --resume"),
    **dict.fromkeys(("engines", "instances", "list", "ls", "ps", "services", "workers"), "publishers"),
    **dict.fromkeys(("prompt", "who"), "ask"),
}
#: Never suggested: a slip must not lead there.
NEVER_MEANT = frozenset({"reset"})


class Parser(argparse.ArgumentParser):
    """A parser, also of each command, that suggests a word in place of a misspelt one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse; but an extra word is an error of its own command."""
        namespace_found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace_found, rest

    def error(self, message: str) -> NoReturn:
        """End the process with the usage and the message."""
        super().error(_with_nearest(message, self.format_help()))


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from waymark.base import native  # only here: a C module that cannot be used is then an error of the command

        print(f"waymark {__version__} ({native.implementation()})")
        parser.exit()


def _with_nearest(message: str, text: str) -> str:
    choice = _CHOICE.match(message)
    misspelt = choice or _FLAG.match(message)
    if misspelt is None:
        return message
    if "COMMAND" in misspelt["head"] and misspelt["word"] in MEANT:
        return f"{misspelt['head']}there is no '{misspelt['word']}'; use 'waymark {MEANT[misspelt['word']]}'"
    words = re.findall(r"[\w-]+", choice["known"]) if choice else re.findall(r"(?<!\S)--[a-z][\w-]*", text)
    near = [match for match in get_close_matches(misspelt["word"], words, n=2) if match not in NEVER_MEANT][:1]
    return f"{misspelt['head']}there is no '{misspelt['word']}'; did you mean '{near[0]}'?" if near else message


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command's arguments; end the process with the usage if they do not fit."""
    return parser_of(words[0] if words else "").parse_args(words)


def parser_of(command: str) -> Parser:
    """Return the parser, with the flags of one command only."""
    parser = Parser(
        prog="waymark",
        usage="waymark COMMAND [options]",
        description=f"Waymark reports which inference engine already holds the KV cache of a prompt.\n\n{listed()}",
        epilog=ending(),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="waymark", help=argparse.SUPPRESS
    )
    for name, candidate in COMMANDS.items():
        of_command = commands.add_parser(name, help=candidate.sentence, description=candidate.sentence)
        if name == command:
            candidate.load().add_flags(of_command, name)
    return parser

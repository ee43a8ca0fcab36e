"""The words after ``waymark``: commands in groups, their help, arguments and exit codes.

A command is a module of this package with ``add_flags(parser, command)`` and ``run(arguments)``, which returns the exit
code. Only the module of the chosen command is imported, and it imports the rest of Waymark in ``run``: ``--help`` and
``--version`` do not need it. The flags of ``simulate`` alone are read from the models of its options. A wrong word ends
the process with the usage and the nearest valid word.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from waymark import __version__

if TYPE_CHECKING:
    from waymark.base.settings import Settings

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_PORT = 3
EXIT_NO_REDIS = 4
EXIT_NO_SERVICE = 5
EXIT_INTERRUPTED = 130
"""As shells report it: 128 plus the number of SIGINT."""

MEANINGS = {
    EXIT_OK: "the command succeeded",
    EXIT_FAILED: "the command failed, or found nothing",
    EXIT_USAGE: "an argument or a setting is wrong, and nothing was started",
    EXIT_NO_PORT: "the port could not be opened",
    EXIT_NO_REDIS: "a command that asks Redis itself: Redis cannot be reached, does not answer in time, or refuses the "
    "command. If a running Waymark lacks its Redis, it says so, and the code is 1",
    EXIT_NO_SERVICE: "no Waymark answers at the URL",
    EXIT_INTERRUPTED: "Ctrl-C ended the command",
}


class CliCommand(NamedTuple):
    """One word after ``waymark``."""

    module: str
    sentence: str
    extra: str = "server"
    """The extra of the package with the command's requirements."""

    def load(self) -> Any:
        """Import its module."""
        return importlib.import_module(f"waymark.cli.{self.module}")


GROUPS: dict[str, dict[str, CliCommand]] = {
    "run Waymark": {
        "serve": CliCommand("roles", "run the HTTP API and an ingest worker in one process"),
        "query": CliCommand("roles", "run a query replica, which serves the HTTP API"),
        "ingest": CliCommand("roles", "run an ingest worker, which applies the events of publishers"),
        "gateway": CliCommand(
            "roles", "run a gateway, which sends OpenAI and Anthropic requests to engines", extra="gateway"
        ),
        "epp": CliCommand("roles", "run an endpoint picker: Envoy asks it for the engine of each request", extra="epp"),
    },
    "engines of a running Waymark": {
        "register": CliCommand("registrations", "register an engine by its URL, and show its streams"),
        "unregister": CliCommand("registrations", "unregister an engine by its name or URL"),
        "publishers": CliCommand("remote", "list the publishers (one per engine rank) with their state"),
        "repair": CliCommand("remote", "ask an engine for a snapshot of its cache, or for all its batches again"),
        "drain": CliCommand("remote", "stop new requests to an engine, and wait for those under way"),
    },
    "ask a running Waymark about a prompt": {
        "ask": CliCommand("remote", "show how much of a prompt each engine has"),
        "select": CliCommand("remote", "show which engine a prompt would be sent to, and the score of each engine"),
    },
    "look at a running Waymark": {
        "top": CliCommand("remote", "show the engines live; keys sort and filter them"),
        "events": CliCommand("remote", "show what has happened: registrations, drains, restarts, losses; -f follows"),
        "books": CliCommand("remote", "show what decisions promised, what engines delivered, and what routing earned"),
        "policies": CliCommand("remote", "try other policies on kept decisions: compare the shadows, or replay a file"),
        "placement": CliCommand("remote", "show how many tokens would be lost with the cache of each engine"),
        "doctor": CliCommand("remote", "check an installation, and say what to do"),
        "status": CliCommand("looking", "show publishers, streams, ingest workers and the state of Redis"),
        "inspect": CliCommand("looking", "show which instances have the blocks of a prompt, and what Redis contains"),
    },
    "keep, move and delete data": {
        "export": CliCommand("moving", "write the index to a file: registrations and blocks, while traffic goes on"),
        "import": CliCommand("moving", "put the index of a file into a Redis"),
        "reset": CliCommand("moving", "delete all keys of Waymark in Redis; stop all its processes first"),
    },
    "try and measure": {
        "demo": CliCommand("trials", "run the whole service with simulated engines and show a table", extra="demo"),
        "simulate": CliCommand("trials", "run simulated engines that publish events as real ones do"),
        "bench": CliCommand("trials", "run the benchmarks in a checkout; 'waymark bench --help' lists them"),
    },
    "your shell": {"completion": CliCommand("completion", "print the completion script for your shell")},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def listed() -> str:
    """List the commands by group, a line each."""
    width = max(map(len, COMMANDS))
    groups = [
        "\n".join([f"{title}:", *(f"    {name:{width}}  {command.sentence}" for name, command in commands.items())])
        for title, commands in GROUPS.items()
    ]
    return "\n\n".join(groups)


def ending() -> str:
    """Return the text below the commands: examples, exit codes, and the place of the settings."""
    codes = "\n".join(f"  {code:<3}  {meaning}" for code, meaning in MEANINGS.items())
    settings = "Settings are environment variables; docs/configuration.md lists them all."
    return f"{examples_of('waymark')}\n\nexit codes:\n{codes}\n\n{settings}\n"


def examples_of(command: str) -> str:
    """Return the examples in the help of a command: its section of ``examples.txt``."""
    text = (Path(__file__).parent / "examples.txt").read_text(encoding="utf-8")
    return text.partition(f"[{command}]\n")[2].partition("\n\n[")[0]


_VERSION = "--version"
_CHOICE = re.compile(r"(?P<head>.*)invalid choice: '(?P<word>[^']*)' \(choose from (?P<known>.*)\)", re.DOTALL)
_FLAG = re.compile(r"(?P<head>)unrecognized arguments: (?P<word>--[\w-]+)")

#: Other words for a command -> the command.
MEANT = {
    **dict.fromkeys(("resume", "undrain"), "drain NAME --resume"),
    **dict.fromkeys(("engines", "instances", "list", "ls", "ps", "services", "workers"), "publishers"),
    **dict.fromkeys(("prompt", "who"), "ask"),
}
#: Commands never to suggest, because a slip must not lead there.
NEVER_MEANT = frozenset({"reset"})


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter of help. argparse makes one for each flag, too, and would then import ``shutil`` to measure
    the terminal.
    """
    return argparse.RawDescriptionHelpFormatter(prog, width=None if Parser.is_complete else 80)


class Parser(argparse.ArgumentParser):
    """A parser of the command line, or of one command, that suggests a word in place of a misspelt one."""

    is_complete = False
    """Whether all flags were added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_formatter, **options)

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
    from difflib import get_close_matches  # only an error needs it

    near = [match for match in get_close_matches(misspelt["word"], words, n=2) if match not in NEVER_MEANT][:1]
    return f"{misspelt['head']}there is no '{misspelt['word']}'; did you mean '{near[0]}'?" if near else message


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command's arguments; end the process with the usage if they do not fit."""
    return parser_of(words[0] if words else "").parse_args(words)


def parser_of(command: str) -> Parser:
    """Return the parser, with the flags of one command only."""
    Parser.is_complete = False
    parser = Parser(
        prog="waymark",
        usage="waymark COMMAND [options]",
        description=f"Waymark reports which inference engine already holds the KV cache of a prompt.\n\n{listed()}",
        epilog=ending(),
    )
    parser.add_argument(_VERSION, action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="waymark", help=argparse.SUPPRESS
    )
    for name, candidate in _meant_by(command).items():
        of_command = commands.add_parser(name, help=candidate.sentence, description=candidate.sentence)
        if name == command:
            of_command.epilog = examples_of(name)
            candidate.load().add_flags(of_command, name)
    Parser.is_complete = True
    return parser


def _meant_by(word: str) -> Mapping[str, CliCommand]:
    """Return the commands that a line with this first word may mean. The error for a wrong word lists all commands;
    their parsers take a tenth of the time of ``--version``.
    """
    if word in COMMANDS:
        return {word: COMMANDS[word]}
    return {} if word == _VERSION else COMMANDS


def settings_with(flags: Mapping[str, str | None]) -> Settings:
    """Read the settings from the environment; a flag wins. Raise SettingsError for a mistake."""
    from waymark.base.settings import PREFIX, Settings

    overrides = {PREFIX + name.upper(): value for name, value in flags.items() if value is not None}
    return Settings.from_env(dict(os.environ) | overrides)

"""The words after ``waymark``, in groups, and the help that lists them.

A command is a module of this package with ``add_flags(parser, command)`` and ``run(arguments)``, the exit code. Only
the module of the chosen command is imported, and it imports the rest of Waymark in ``run``: ``--help`` and
``--version`` do without. The flags of ``simulate`` alone are read from the models of its options.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from waymark.cli.exits import MEANINGS


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
        "epp": CliCommand("epp", "run an endpoint picker: Envoy asks it for the engine of each request", extra="epp"),
    },
    "engines of a running Waymark": {
        "register": CliCommand("registrations", "register an engine by its URL, and show its streams"),
        "unregister": CliCommand("registrations", "unregister an engine by its name or URL"),
        "publishers": CliCommand("remote", "list the publishers (one per engine rank) with their state"),
        "repair": CliCommand("remote", "ask an engine for a snapshot of its cache or all its events, and know it anew"),
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
        "reset": CliCommand("reset", "delete all keys of Waymark in Redis; stop all its processes first"),
    },
    "try and measure": {
        "demo": CliCommand("demo", "run the whole service with simulated engines and show a table", extra="demo"),
        "simulate": CliCommand("simulate", "run simulated engines that publish events as real ones do"),
        "bench": CliCommand("bench", "run the benchmarks in a checkout; 'waymark bench --help' lists them"),
    },
    "your shell": {
        "completion": CliCommand("completion", "print the completion script for your shell"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

_EXAMPLES = """\
examples:
  # run everything in one process on an embedded Redis, for a trial
  $ waymark serve

  # run the same on a real Redis
  $ WAYMARK_REDIS_URL=redis://127.0.0.1:6379/0 waymark serve

  # register an engine by its URL with a running Waymark
  $ waymark register http://127.0.0.1:8000

  # show which engine has how much of a prompt
  $ waymark ask --model llama --tokens 1,2,3,4,5,6,7,8

  # watch the whole service work
  $ waymark demo

  # look at a running Waymark through its Redis
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark status
  $ WAYMARK_REDIS_URL=redis://redis:6379/0 waymark inspect prompt --model llama --tokens "1 2 3 4 5 6 7 8"

'waymark COMMAND --help' has the flags of a command, and more examples.
"""


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
    return f"{_EXAMPLES}\nexit codes:\n{codes}\n\n{settings}\n"

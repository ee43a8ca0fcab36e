"""``waymark demo``."""

from __future__ import annotations

import argparse
import sys

from waymark.cli.exits import EXIT_FAILED, EXIT_OK

_EXAMPLES = """\
examples:
  $ waymark demo                                 start a Waymark on an embedded Redis, and stop it at the end
  $ waymark demo --url http://127.0.0.1:13333    use one that runs
"""


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("--url", help="use the Waymark at this URL, and start none")
    parser.add_argument("--api-token", help="the bearer token, if that Waymark requires one")


def run(arguments: argparse.Namespace) -> int:
    from waymark.cli import loop
    from waymark.console.demo_view import parts
    from waymark.console.screen import Screen
    from waymark.demo import DemoFailed, run_demo

    try:
        lines = loop.run(run_demo(arguments.url, arguments.api_token))
    except DemoFailed as exc:
        print(f"waymark demo: {exc}", file=sys.stderr)
        return EXIT_FAILED
    Screen().show(parts(lines))
    return EXIT_OK

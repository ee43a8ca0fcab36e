"""``waymark completion``: the script by which a shell completes the words of ``waymark``, and the answers to it.

A shell asks the command itself, by variables that ``argcomplete`` defines, so that it completes the words of this
release.
"""

from __future__ import annotations

import argparse
import os

from waymark.cli.parser import EXIT_OK

SHELLS = ("bash", "zsh", "fish")
#: Set if a shell asks for words.
ASKED = "_ARGCOMPLETE"


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["waymark"], shell=arguments.shell))
    return EXIT_OK


def answer() -> None:
    """Give the shell the words that fit, and end the process."""
    import argcomplete

    from waymark.cli.parser import parser_of

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(parser_of(words[1] if len(words) > 1 else ""))

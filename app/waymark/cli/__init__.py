"""The ``waymark`` command: arguments and environment to one role. Besides ``console``, the only package that prints.

Settings come from the environment, once; the few flags are for values that a person changes by hand. ``entry`` runs a
command, ``parser`` lists them, reads their words and has the exit codes, ``loop`` the event loop and the settings; each
other module is a command, or several.
"""

from __future__ import annotations

from waymark.cli.entry import main
from waymark.cli.parser import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_PORT,
    EXIT_NO_REDIS,
    EXIT_NO_SERVICE,
    EXIT_OK,
    EXIT_USAGE,
    parse,
)

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NO_PORT",
    "EXIT_NO_REDIS",
    "EXIT_NO_SERVICE",
    "EXIT_OK",
    "EXIT_USAGE",
    "main",
    "parse",
]

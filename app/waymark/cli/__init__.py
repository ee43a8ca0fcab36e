"""The ``waymark`` command, which runs one role with its arguments and environment. It is the only package that prints,
besides ``console``.

Settings come from the environment, once; the few flags are for values that a person changes by hand. ``main`` runs a
command. ``parser`` lists the commands, reads their words and settings, and has the exit codes. Each other module has
one or several commands, or a part of one.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from waymark.base import errors
from waymark.base.shown import printable, shown
from waymark.cli import completion
from waymark.cli.parser import (
    COMMANDS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_PORT,
    EXIT_NO_REDIS,
    EXIT_NO_SERVICE,
    EXIT_OK,
    EXIT_USAGE,
    parse,
    parser_of,
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

#: A package that only a trial needs.
_TRIAL_PACKAGES = {"fakeredis", "lupa"}
#: The exit codes of errors; any other error has ``EXIT_USAGE``.
_CODES: dict[type[errors.WaymarkError], int] = {
    errors.StoreUnavailable: EXIT_NO_REDIS,
    errors.PortUnavailable: EXIT_NO_PORT,
    errors.ServiceUnreachable: EXIT_NO_SERVICE,
    errors.ServiceRefused: EXIT_FAILED,
    errors.NotFound: EXIT_FAILED,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    _complete_streams()
    code = EXIT_OK
    try:
        try:
            code = _run(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        _discard_output()
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        print(f"waymark: {exc.filename or 'the output'} cannot be written: {exc.strerror}", file=sys.stderr)
        _discard_output()
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _discard_output() -> None:
    """Discard the rest of the buffer, which cannot be written. The interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete_streams() -> None:
    """Open the standard streams that were closed, and let the output escape characters that its encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(words: Sequence[str]) -> int:
    if completion.ASKED in os.environ:
        completion.answer()
    if not words:
        parser_of("").print_help()
        return EXIT_OK
    command = words[0]
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            print(f"waymark: the argument {shown(word)} is not UTF-8", file=sys.stderr)
            return EXIT_USAGE
    if command == "bench":  # the benchmarks parse all of its words themselves
        return int(COMMANDS[command].load().run_words(words[1:]))
    try:
        arguments = parse(words)
        return int(COMMANDS[command].load().run(arguments))
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "waymark"):
            raise
        extra = "demo" if package in _TRIAL_PACKAGES else COMMANDS[command].extra
        print(f"waymark {command}: {package} is not installed; pip install 'waymark[{extra}]'", file=sys.stderr)
        return EXIT_USAGE
    except errors.WaymarkError as exc:
        text = "\n".join(map(printable, str(exc).split("\n")))
        print(f"waymark {command}: {text}", file=sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(exc, kind)), EXIT_USAGE)

"""The program of a process that renders one chat template; ``renderers`` starts it, and talks to it over a socket.

A template comes with a model's files, and messages come from clients. Some templates double a text at each step, and
some end the library that renders them. So each template is rendered in a process of its own, with bounds on memory and
CPU that the kernel enforces. The process ends at the end of its socket, and so with the process that started it.

It is run as a file without importing Waymark, so that it begins within a few milliseconds.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO

#: Instructions of one rendering: some ten thousand messages, or less than a tenth of a second.
STEPS_MAX = 1_000_000
SECONDS_MAX = 1.0
#: The address space of the process.
MEMORY_BYTES_MAX = 256 * 2**20

#: The length of a message, and the most bytes of its rendered text; before a template the second number is 0.
REQUEST = struct.Struct("<II")
#: The kind of an answer, and its length.
ANSWER = struct.Struct("<cI")
TEXT, REFUSED, TOO_LARGE, OUT_OF_STEPS, OUT_OF_MEMORY, TEMPLATE_ERROR, UNFIT = b"t", b"r", b"l", b"s", b"m", b"e", b"u"
#: The reason for a missing answer: the process was ended by its bound of CPU, or in another way.
OUT_OF_CPU, ENDED = b"c", b"x"


class _TemplateRefused(Exception):
    """The template called ``raise_exception``."""


class _TooLarge(Exception):
    """The output is longer than it may be."""


class _TemplateFault(Exception):
    """The library's error: the template cannot be compiled or rendered."""


class Template:
    """A compiled template, and the rest of the ceiling of the current rendering."""

    def __init__(self, source: str) -> None:
        # The process that starts this program reads its constants, and need not load the library.
        from minijinja import Environment, TemplateError

        self._error = TemplateError
        self._left = 0
        self._now = datetime.min
        self._environment = Environment(
            templates={"chat": source},
            filters={"tojson": _tojson, "trim": _trim},
            globals={"raise_exception": _raise_exception, "strftime_now": lambda form: self._now.strftime(form)},
            fuel=STEPS_MAX,
            debug=False,
            auto_escape_callback=lambda _: False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalizer=self._counted,
        )
        try:
            self._environment.undeclared_variables_in_template("chat")  # compiles it
        except TemplateError as error:
            raise _TemplateFault(first_line(error)) from None

    def render(self, context: Mapping[str, Any], now: datetime, bytes_max: int) -> str:
        self._left, self._now = bytes_max, now
        try:
            text: str = self._environment.render_template("chat", **context)
        except self._error as error:
            raise _TemplateFault(first_line(error)) from None
        if len(text) > bytes_max:
            raise _TooLarge
        return text

    def _counted(self, value: Any) -> Any:
        self._left -= len(value) if isinstance(value, str) else 1
        if self._left < 0:
            raise _TooLarge
        return NotImplemented  # unchanged: an undefined value comes as None, and is written as an empty text


def answer(template: Template, request: bytes, bytes_max: int) -> tuple[bytes, str]:
    """Render a request: the context, and the moment that the template takes for now. Return a kind and a text."""
    try:
        context, now = marshal.loads(request)
        return TEXT, template.render(context, datetime(*now), bytes_max)
    except _TemplateRefused as refused:
        return REFUSED, str(refused)
    except _TooLarge:
        return TOO_LARGE, ""
    except MemoryError:
        return OUT_OF_MEMORY, ""
    except _TemplateFault as fault:
        return (OUT_OF_STEPS, "") if "out of fuel" in str(fault) else (TEMPLATE_ERROR, str(fault))
    except (TypeError, ValueError, RecursionError) as error:
        return UNFIT, first_line(error)


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text, which may have many lines."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def serve(stream: BinaryIO) -> None:
    """Answer requests until the socket ends. The first one is the template, and its answer says if it compiles."""
    template: Template | None = None
    while len(head := stream.read(REQUEST.size)) == REQUEST.size:
        size, bytes_max = REQUEST.unpack(head)
        request = stream.read(size)
        # The kernel ends the process at the end of this time, whatever it is in the middle of.
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        if template is None:
            kind, text = TEXT, ""
            try:
                template = Template(request.decode())
            except _TemplateFault as fault:
                kind, text = TEMPLATE_ERROR, str(fault)
        else:
            kind, text = answer(template, request, bytes_max)
        signal.setitimer(signal.ITIMER_PROF, 0)
        encoded = text.encode("utf-8", "replace")
        stream.write(ANSWER.pack(kind, len(encoded)) + encoded)
        stream.flush()
        if template is None or kind == OUT_OF_MEMORY:
            return


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A terminal sends these to all of its processes; this one must end at the end of its socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as stream:
        serve(stream)  # type: ignore[arg-type]  # it reads and writes


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as model repositories expect it: as it is, without HTML's escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _trim(value: Any, characters: str | None = None) -> str:
    """Strip characters, by default blanks. Python counts four control characters as blanks that Rust does not."""
    return str(value).strip(characters)


def _raise_exception(message: str = "no reason") -> str:
    raise _TemplateRefused(str(message)[:200])


if __name__ == "__main__":
    main()

"""How a sentence shows a value that came from outside: short, on one line, as JSON writes it.

The caller decides whether the value may be shown at all. Tokens, salts and secrets are named by ``kind`` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

SHOWN_MAX = 80
"""Characters that a value may take."""

#: Control characters, and others that end a line or change the order or the place of their neighbours.
_UNSEEN = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(value: object) -> str:
    """Return the value in at most ``SHOWN_MAX`` characters; a container or an integer beyond 64 bits is shown only by
    its kind.

    Of a longer text only the beginning is shown, and its length follows: ``"the begin..." (1000 characters)``.
    """
    if isinstance(value, str):
        text = _quoted(value) if len(value) <= SHOWN_MAX else ""
        return text if 0 < len(text) <= SHOWN_MAX else _cut(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    return repr(value) if isinstance(value, float) else kind(value)


def is_beyond_64_bits(value: object) -> bool:
    """Return whether a parsed number was an integer beyond 64 bits: the JSON parser turns such numbers into floats."""
    return isinstance(value, float) and value.is_integer() and (value >= 2**64 or value <= -(2**63))


def printable(text: str) -> str:
    """Return a text with a replacement for each character that a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shown_url(text: str) -> str:
    """Return a refused URL as ``shown`` does, without the parts that may be secret: user, query and fragment."""
    # A password may contain any character, so everything before the last @ is left out.
    plain = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*)?.*@", r"\1***@", text, flags=re.DOTALL)
    return shown(re.sub(r"([?#]).*", r"\1***", plain, flags=re.DOTALL))


def hide_password(url: str) -> str:
    """Return the URL without its secrets: ``redis://***@host``, and no password among its parameters."""
    plain = re.sub(r"^([A-Za-z0-9+.-]+://)?.*@", r"\1***@", url)
    return re.sub(r"(?i)([?&][^=&#]*(?:password|username)[^=&#]*=)[^&#]*", r"\1***", plain)


def seen(text: str) -> str:
    """Return a JSON text with an escape for each character that is not seen, which JSON allows."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def kind(value: object) -> str:
    """Return the JSON or msgpack kind of a value, as a noun."""
    for kinds, noun in (
        (str, "a string"),
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a floating-point number"),
        (list, "a list"),
        (Mapping, "an object"),
        (bytes, "binary"),
    ):
        if isinstance(value, kinds):
            return noun
    return "null" if value is None else "an extension type"


def _quoted(text: str) -> str:
    # Half of a surrogate pair has no UTF-8, so it is written in ASCII.
    return seen(json.dumps(text, ensure_ascii=any("\ud800" <= char <= "\udfff" for char in text)))


def _cut(text: str) -> str:
    """Return as much of the beginning of a text as there is room for."""
    end = f'..." ({len(text)} characters)'
    beginning = text[: SHOWN_MAX - len(end) - 1]
    while len(quoted := _quoted(beginning)[:-1] + end) > SHOWN_MAX:
        beginning = beginning[:-1]
    return quoted


def several(count: int, name: str) -> str:
    """Return a count with its unit, such as ``1 request`` or ``2 requests``."""
    return f"{count} {name}{'' if count == 1 else 's'}"

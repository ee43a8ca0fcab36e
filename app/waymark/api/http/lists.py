"""Lists of numbers out of a JSON body, without a Python object for each number."""

from __future__ import annotations

import re

import orjson

from waymark.base import native
from waymark.domain.hashing import pack_tokens

_LIST_FOLLOWS = re.compile(rb"[ \n\r\t]*:[ \n\r\t]*\[")


def cut(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """The position of the list of token ids in a JSON text, and the ids as little-endian u32.

    ``name`` is the key, in its quotes. None where the text or the list is anything but plain, or has more than
    ``count_max`` ids: then the JSON parser reads all of it. The caller believes the answer only if the parser finds an
    empty list under the key in ``body[:start] + b"[]" + body[end:]``.
    """
    if native.selected is not None:
        return native.selected.cut(body, name, count_max)
    # The parser reads the list here too; the gain is that the rest can be recognised by its bytes.
    at = body.find(name)
    colon = _LIST_FOLLOWS.match(body, at + len(name)) if at >= 0 else None
    if colon is None:
        return None
    start = colon.end() - 1
    end = body.find(b"]", start) + 1
    if not end or name in body[end:] or b"\\" in body[:start] or b"\\" in body[end:]:
        return None
    # Nothing is parsed twice only to be refused. A text that is short needs no count of its commas.
    if end - start > 2 * count_max + 2 and body.count(b",", start, end) > count_max:
        return None
    text = body[start:end]
    # The parser turns ``true``, ``false`` and -0 into what passes for an id; objects it would read in vain.
    if b"e" in text or b"-" in text or b"{" in text:
        return None
    try:
        tokens = pack_tokens(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError, OverflowError):
        return None
    return (start, end, tokens) if len(tokens) <= 4 * count_max else None


def cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """As ``cut``, for hashes of 64 bits as little-endian u64: signed, in quotes, or neither.

    In the pure implementation it is always None: the parser is faster.
    """
    return None if native.selected is None else native.selected.cut_hashes(body, name, count_max)

"""Decodes and encodes bodies in JSON and msgpack, and bounds them before they are parsed.

A body is read up to the limit and no further, whether its length is declared or not. If a key is repeated, the last
value counts, in both formats. Unreadable bodies are refused here; schemas check the fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgpack
import orjson
from starlette.types import Receive

from waymark.api.http.errors import InvalidBody
from waymark.api.http.tokens_file import EVERYONE, Caller
from waymark.base import native
from waymark.base.asgi import RawHeaders
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.shape import present
from waymark.base.shown import kind, shown
from waymark.domain.packing import pack_tokens

T = TypeVar("T")


class Format(Enum):
    """The format of a body, and of its answer."""

    JSON = b"application/json"
    MSGPACK = b"application/msgpack"


_FORMATS = {
    b"": Format.JSON,
    b"application/json": Format.JSON,
    b"application/msgpack": Format.MSGPACK,
    b"application/x-msgpack": Format.MSGPACK,
}


#: The most lists and objects in one body. An empty one takes one or two bytes in the body and 64 in memory, so without
#: a bound the largest body would become a gigabyte.
CONTAINERS_MAX = 2**18


# A cache of the parsed fields of queries without their prompts, because most queries of a client differ in the prompt
# only. The key is the whole text of the body, except the elements of its long list, so an entry is never outdated. When
# there is no room, all entries are dropped at once.


CACHE_BYTES_MAX = 2**20
"""The size of the cache, enough for hundreds of texts. A router has a few, and parsing another costs microseconds."""

#: Longer texts seldom occur twice.
_TEXT_BYTES_MAX = 4096
#: The approximate size of an entry besides its bytes: its fields, and their parsed form.
_ENTRY_BYTES = 3000
#: The approximate size of each value in an entry: a list in a list takes three characters, but this many bytes.
_VALUE_BYTES = 80


class ParsedFields:
    """The ``fields`` of a body, with an empty list in place of the long one; ``asked`` is what the operation parses
    them into.
    """

    __slots__ = ("asked", "fields")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.asked: Any = None


class RequestCache:
    """A cache of parsed fields by their text, with at most ``bytes_max`` bytes; with 0 it stays empty."""

    def __init__(self, bytes_max: int, metrics: Metrics) -> None:
        self._bytes_max = bytes_max
        self._known: dict[bytes, ParsedFields] = {}
        self._hits = metrics.text_cache_hits
        self.bytes = 0
        metrics.text_cache_bytes.set_function(lambda: self.bytes)

    def find(self, key: bytes) -> ParsedFields | None:
        text = self._known.get(key)
        if text is not None:
            self._hits.value += 1
        return text

    def keep(self, key: bytes, text: ParsedFields) -> None:
        """Keep a text under a new key, which also names operation and list, because each parses a text differently."""
        values = sum(map(key.count, (b",", b"[", b"{")))
        size = len(key) + _ENTRY_BYTES + _VALUE_BYTES * values
        if size > self._bytes_max or len(key) > _TEXT_BYTES_MAX:
            return
        if self.bytes + size > self._bytes_max:
            self._known.clear()
            self.bytes = 0
        self._known[key] = text
        self.bytes += size


_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


class Body(NamedTuple):
    """A parsed request body."""

    fields: dict[str, Any]
    may_hold_booleans: bool = True
    """False if the text cannot contain a boolean, so the types of the elements of a list of integers need no check."""
    documents: list[Any] | None = None
    """The bodies of an operation that takes one or a list; else None."""
    numbers: bytes | None = None
    """The elements of a long list that was read without the parser, in the form of a ``bin`` of msgpack."""
    text: ParsedFields | None = None
    """The rest of the body, if a long list was read without the parser."""
    format: Format = Format.JSON
    path: Mapping[str, str] = _NO_PARAMETERS
    """The parameters of the path and of the query string, and the headers that the operation reads, by name."""
    caller: Caller = EVERYONE
    """The sender of the request."""

    def asked(self, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return the result of ``parse`` on the fields besides the long list, from a cache if possible."""
        if self.text is None:
            return parse(self.fields)
        if self.text.asked is None:
            self.text.asked = parse(self.text.fields)
        asked: T = self.text.asked
        return asked


class LongField(NamedTuple):
    """A list that may make up most of a body."""

    spellings: tuple[str, ...]
    is_hashes: bool
    """Whether the list has hashes; otherwise it has token ids."""


@record(frozen=True, slots=True)
class LongList:
    """The field that makes up most of a body, and that may be read without the parser."""

    spellings: tuple[str, ...]
    is_hashes: bool
    """Whether the list has hashes; otherwise it has token ids."""
    count_max: int
    cache: RequestCache
    operation: bytes
    """The path of the operation, which is a part of the cache's key."""
    otherwise: LongList | None = None
    """Another field that may make up most of a body instead."""
    names: tuple[tuple[str, bytes, bytes], ...] = field(init=False)
    """Each spelling, its form in a text, and the beginning of the cache keys of its texts."""

    def __post_init__(self) -> None:
        # A blank ends operation and name, so that a body cannot be mistaken for one of another operation or with
        # another list.
        names = [(name, name.encode()) for name in self.spellings]
        keyed = tuple((name, b'"%b"' % text, b"%b %b " % (self.operation, text)) for name, text in names)
        object.__setattr__(self, "names", keyed)


class Disconnected(Exception):
    """The client disconnected while its body was read, so an answer is pointless."""


def format_of(headers: RawHeaders, *, must_be_named: bool = False) -> Format:
    """Return the format that Content-Type names. Without this header it is JSON, unless it must be named.

    A page of another site can send any bytes without a Content-Type, but with one of these only if this server allows
    it.
    """
    body_format = None
    for name, value in headers:
        if name == b"content-type":
            media_type = value if value in _FORMATS else value.partition(b";")[0].strip().lower()
            if media_type not in _FORMATS:
                raise InvalidValue(
                    f"Content-Type is {shown(value.decode('latin-1'))}; send application/json or application/msgpack",
                    reason="unsupported_content_type",
                )
            body_format = _FORMATS[media_type] if media_type else None
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise InvalidValue(
                f"Content-Encoding is {shown(value.decode('latin-1'))}; send the body without compression",
                reason="unsupported_content_type",
            )
    if body_format is None and must_be_named:
        raise InvalidValue(
            "this request has no Content-Type; send application/json or application/msgpack",
            reason="unsupported_content_type",
        )
    return body_format or Format.JSON


async def read_body(headers: RawHeaders, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body. Raise ``InvalidValue`` (too_large) as soon as it is known to be longer than
    ``max_bytes``.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > max_bytes:
            raise _too_large(max_bytes)
    pieces: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece: bytes = message.get("body", b"")
        length += len(piece)
        if length > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(max_bytes: int) -> InvalidValue:
    return InvalidValue(
        f"the body is longer than {max_bytes} bytes; send less, or raise WAYMARK_MAX_BODY_BYTES", reason="too_large"
    )


def decode(body: bytes, body_format: Format, *, may_be_list: bool = False, long_list: LongList | None = None) -> Body:
    """Return the fields of a body. Raise ``InvalidValue`` if it cannot be read, and ``InvalidBody`` if it is not an
    object.

    A plain ``long_list`` may be returned as ``numbers``; its value in ``fields`` is then an empty list.
    """
    if body_format is Format.JSON:
        if long_list is not None and (plain_body := _without_parser(body, long_list)) is not None:
            return plain_body
        # Brackets inside texts count, too; valid bodies do not have so many.
        if len(body) > CONTAINERS_MAX and body.count(b"[") + body.count(b"{") > CONTAINERS_MAX:
            raise _too_many_containers()
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as exc:
            raise InvalidValue(f"the body is not JSON: {exc}; send one JSON object", reason="invalid_json") from None
        may_hold_booleans = _may_hold(body, b"true", b"u") or _may_hold(body, b"false", b"f")
    else:
        count = _Containers()
        try:
            # A str other than UTF-8, an unfinished value and data after the value all raise ValueError.
            value = msgpack.unpackb(
                body, raw=False, strict_map_key=True, list_hook=count, object_hook=count, ext_hook=count.extension
            )
        except ValueError as exc:
            problem = str(exc)[:120] or type(exc).__name__
            raise InvalidValue(f"the body is not msgpack: {problem}; send one map", reason="invalid_msgpack") from None
        may_hold_booleans = True
    if may_be_list:
        return Body({}, may_hold_booleans, value if isinstance(value, list) else [value])
    if not isinstance(value, dict):
        raise InvalidBody(f"the body is {kind(value)}; send an object with the fields by name", reason="invalid_type")
    return Body(value, may_hold_booleans, format=body_format)


def _without_parser(body: bytes, long_list: LongList) -> Body | None:
    """Return a body whose long list can be read without the parser, or None if the parser must read it.

    See ``cut`` for why the rest of the text is enough.
    """
    loops = native.selected
    cut_out: Callable[[bytes, bytes, int], tuple[int, int, bytes] | None]
    if loops is None:
        cut_out = cut_hashes if long_list.is_hashes else cut
    else:
        cut_out = loops.cut_hashes if long_list.is_hashes else loops.cut
    for name, quoted, key in long_list.names:
        piece = cut_out(body, quoted, long_list.count_max)
        if piece is not None:
            start, end, numbers = piece
            rest = b"%b[]%b" % (body[:start], body[end:])
            text = long_list.cache.find(key + rest) or _text(rest, name, key, long_list)
            return None if text is None else Body(text.fields, False, None, numbers, text)
    return None if long_list.otherwise is None else _without_parser(body, long_list.otherwise)


def _text(rest: bytes, name: str, key: bytes, long_list: LongList) -> ParsedFields | None:
    """Return the fields of the rest of a body, if ``name`` is an empty list there and its other spellings are
    absent.
    """
    if len(rest) > CONTAINERS_MAX:
        return None
    try:
        fields = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict) or fields.get(name) != []:
        return None
    # If the field has two spellings, only the parser can compare their lists.
    if len(long_list.spellings) > 1 and any(
        fields.get(spelling) is not None for spelling in long_list.spellings if spelling != name
    ):
        return None
    text = ParsedFields(fields)
    long_list.cache.keep(key + rest, text)
    return text


class _Containers:
    """Counts the lists, maps and extensions of a body while it is parsed, and raises ``InvalidValue`` if there are too
    many.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, value: Any) -> Any:
        self._count += 1
        if self._count > CONTAINERS_MAX:
            raise _too_many_containers()
        return value

    def extension(self, code: int, data: bytes) -> Any:
        return self(msgpack.ExtType(code, data))


def _too_many_containers() -> InvalidValue:
    return InvalidValue(
        f"the body has more than {CONTAINERS_MAX} lists and objects; send less in one request", reason="too_large"
    )


def _may_hold(text: bytes, word: bytes, letter: bytes) -> bool:
    """Return False if ``word`` is certainly not in ``text``, by searching for a letter that numbers do not have.

    One letter is found sixty times faster than a word. The search gives up after a few letters that belong to something
    else.
    """
    letter_index = word.index(letter)
    index = text.find(letter)
    for _ in range(8):
        if index < 0:
            return False
        if text.startswith(word, max(0, index - letter_index)):
            return True
        index = text.find(letter, index + 1)
    return True


def encode(content: Any, body_format: Format) -> bytes:
    """Encode an answer in the format of its request."""
    if body_format is Format.JSON:
        return orjson.dumps(content, present, orjson.OPT_PASSTHROUGH_DATACLASS)
    packed: bytes = msgpack.packb(content, use_bin_type=True, default=present)
    return packed


# Cuts lists of numbers out of a JSON body, without a Python object for each number.


_LIST_FOLLOWS = re.compile(rb"[ \n\r\t]*:[ \n\r\t]*\[")


def cut(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """Return the position of the list of token ids in a JSON text, and the ids as little-endian u32.

    ``name`` is the key, in its quotes. Return None if the text or the list is not plain, or has more than ``count_max``
    ids; then the JSON parser reads the whole body. The caller trusts the result only if the parser finds an empty list
    under the key in ``body[:start] + b"[]" + body[end:]``.
    """
    if native.selected is not None:
        return native.selected.cut(body, name, count_max)
    # The parser reads the list here, too. The gain is that the rest can be recognized by its bytes.
    index = body.find(name)
    colon = _LIST_FOLLOWS.match(body, index + len(name)) if index >= 0 else None
    if colon is None:
        return None
    start = colon.end() - 1
    end = body.find(b"]", start) + 1
    if not end or name in body[end:] or b"\\" in body[:start] or b"\\" in body[end:]:
        return None
    # Too long a list is not parsed, because it will be refused. A short text need not be searched for commas.
    if end - start > 2 * count_max + 2 and body.count(b",", start, end) > count_max:
        return None
    text = body[start:end]
    # With ``true``, ``false`` or -0 the list would pack to valid ids, and objects would be parsed in vain.
    if b"e" in text or b"-" in text or b"{" in text:
        return None
    try:
        tokens = pack_tokens(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError, OverflowError):
        return None
    return (start, end, tokens) if len(tokens) <= 4 * count_max else None


def cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """Cut 64-bit hashes as ``cut`` does, as little-endian u64: signed, in quotes, or neither.

    The pure implementation always returns None, because the parser is faster.
    """
    return None if native.selected is None else native.selected.cut_hashes(body, name, count_max)

"""The targets of the fuzzer: each function of the C module, with its first inputs, and a reference in plain Python.

A reference is written for clarity, not speed, and shares no code with the implementations of Waymark. If a reference
raises an error, the function has to raise one, too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from xxhash import xxh3_64_intdigest

from tests.domain.known_model import STEPS, Model, play
from tools.sanitize import batches, runs, sums
from waymark.base import native
from waymark.domain.known import Spot
from waymark.domain.rows import Place

Arguments = tuple[Any, ...]

U64_MAX = 2**64 - 1
#: Numbers at which the behaviour of 64-bit arguments changes.
EDGES = [-1, 0, 1, 1337, 2**32, 2**63 - 1, 2**63, U64_MAX, 2**64]
COUNTS = [-1, 0, 1, 2, 3, 4, 16, 17, 64, 1000, 2**31, 2**62]


@dataclass(frozen=True)
class Target:
    """A function, its first arguments, and its reference; or a type, and a function that uses the type."""

    reference: Callable[..., object]
    seeds: list[Arguments]
    words: list[bytes] = field(default_factory=list)
    """The parts from which inputs are made, in addition to single bytes."""
    numbers: dict[int, list[int | None]] = field(default_factory=dict)
    """Index of an argument -> the numbers to which it is set."""
    kept: frozenset[int] = frozenset()
    """The indexes of arguments that remain as in the first inputs."""
    use: Callable[..., object] | None = None
    """A function to call instead, with the function or the type of the C module as its first argument."""

    def function(self, name: str) -> Callable[..., object]:
        """Return the function to call with changed inputs."""
        found: Callable[..., object] = getattr(native.selected, name)
        return found if self.use is None else partial(self.use, found)


# ---- an HTTP request --------------------------------------------------------------------------------

POST = re.compile(rb"POST ((?:/[A-Za-z0-9_.-]+)+) HTTP/1\.1\r\n((?:[^\r\n]+\r\n)*)\r\n")
FIELD = re.compile(rb"([A-Za-z0-9_-]+):[ \t]*((?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?)[ \t]*")
HOST = re.compile(rb"[A-Za-z0-9.-]+(?::[0-9]*)?")
#: The header fields of a connection; a plain request has none of them.
OF_CONNECTION = {b"transfer-encoding", b"expect", b"upgrade", b"proxy-connection"}
HEAD_BYTES_MAX = 32768


def plain_post(data: bytes) -> object:
    head = POST.match(data)
    if head is None or head.end() > HEAD_BYTES_MAX:
        return None
    found = [FIELD.fullmatch(line) for line in head[2].split(b"\r\n")[:-1]]
    fields = [(each[1].lower(), each[2]) for each in found if each is not None]
    if len(fields) < len(found) or len(fields) > 100:
        return None
    named = dict(fields)
    hosts, lengths = ([value for name, value in fields if name == wanted] for wanted in (b"host", b"content-length"))
    is_plain = (
        len(hosts) == len(lengths) == 1
        and HOST.fullmatch(hosts[0]) is not None
        and re.fullmatch(rb"[0-9]{1,9}", lengths[0]) is not None
        and all(value.lower() == b"keep-alive" for name, value in fields if name == b"connection")
        and not OF_CONNECTION & named.keys()
    )
    body = data[head.end() :]
    missing = int(lengths[0]) - len(body) if is_plain else -1
    return (head[1], fields, body, missing) if missing >= 0 and int(lengths[0]) else None


_HEAD = b"POST /query HTTP/1.1\r\nHost: x:80\r\nContent-Length: 3\r\n"
POSTS: list[Arguments] = [
    (_HEAD + b"\r\nabc",),
    (_HEAD + b"\r\na",),
    (_HEAD + b"\r\n",),
    (_HEAD + b"Content-Type: application/json\r\nConnection: Keep-Alive\r\nA:\r\n\r\nabc",),
    (_HEAD + b"Connection: close\r\n\r\nabc",),
    (_HEAD + b"A: b\r\n" * 98 + b"\r\nabc",),
    (_HEAD + b"A: b\r\n" * 99 + b"\r\nabc",),
    (_HEAD + b"A: " + b"b" * 32800 + b"\r\n\r\nabc",),
    (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 000000000\r\n\r\n",),
]
POST_WORDS = [
    *(b"\r\n", b"\r", b"\n", b": ", b":", b" ", b"\t", b"/", b"/a", b"POST ", b" HTTP/1.1", b"\0", b"\x7f", b"\xff"),
    *(b"Host: y\r\n", b"Content-Length: 3\r\n", b"Expect: 100-continue\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(
        b"Upgrade: h2c\r\n",
        b"Proxy-Connection: close\r\n",
        b"Connection: ",
        b"keep-alive",
        b"123456789",
        b"a_b-c: d\r\n",
    ),
]


# ---- lists in JSON ---------------------------------------------------------------------------------

BLANKS = rb"[ \n\r\t]*"
TOKEN = re.compile(BLANKS + rb"(0|[1-9][0-9]{0,9})" + BLANKS)
HASH = re.compile(BLANKS + rb'("?)(-?(?:0|[1-9][0-9]*))\1' + BLANKS)
#: The number of quotes that the C module examines before it leaves a text to the parser.
QUOTES_MAX = 256


def _find_list(body: bytes, name: bytes) -> tuple[int, int] | None:
    """Return the start and the end of the list under ``name``, brackets included; None if the text is not plain."""
    at = body.find(name)
    opened = re.compile(BLANKS + b":" + BLANKS + rb"\[").match(body, at + len(name)) if at >= 0 else None
    if opened is None:
        return None
    start, close = opened.end() - 1, body.find(b"]", opened.end())
    if close < 0 or name in body[close:] or b"\\" in body[:start] + body[close:]:
        return None
    # A quote that is closer to the end than the length of the name cannot begin the name.
    behind = body[close : len(body) - len(name) + 1]
    if body[:at].count(b'"') >= QUOTES_MAX or behind.count(b'"') >= QUOTES_MAX:
        return None
    return start, close + 1


def _cut(
    body: bytes, name: bytes, count_max: int, read: Callable[[bytes], bytes | None]
) -> tuple[int, int, bytes] | None:
    if (found := _find_list(body, name)) is None:
        return None
    inside = body[found[0] + 1 : found[1] - 1]
    items = inside.split(b",") if inside.strip(b" \n\r\t") else []
    numbers = [read(item) for item in items]
    return None if None in numbers or len(items) > count_max else (*found, b"".join(filter(None, numbers)))


def _token(item: bytes) -> bytes | None:
    found = TOKEN.fullmatch(item)
    return struct.pack("<I", int(found[1])) if found and int(found[1]) < 2**32 else None


def _hash(item: bytes) -> bytes | None:
    found = HASH.fullmatch(item)
    if found is None or found[2] == b"-0" or not -(2**63) <= int(found[2]) <= U64_MAX:
        return None
    return struct.pack("<Q", int(found[2]) & U64_MAX)


def cut(body: bytes, name: bytes, count_max: int) -> object:
    return _cut(body, name, count_max, _token)


def cut_hashes(body: bytes, name: bytes, count_max: int) -> object:
    return _cut(body, name, count_max, _hash)


#: The name is a key with its quotes. It stays the same, because it comes from the program, not from a client.
NAME = frozenset({1})

LISTS: list[Arguments] = [
    (b'{"t":[1,2,3]}', b'"t"', 9),
    (b'"t":[7]', b'"t"', 9),
    (b'"t":[', b'"t"', 9),
    (b' "t":[12345678,0]', b'"t"', 9),
    (b'   "t":[,1]', b'"t"', 9),
    (b'"":[,1]', b'""', 9),
    (b'  "":[,1]', b'""', 9),
    (
        b'{"model":"m","token_ids":[1,22,333,4444,55555,666666,7777777,88888888,999999999,4294967295]}',
        b'"token_ids"',
        99,
    ),
    (b'{"token_ids": [1, 22, 333, 4444, 55555, 666666, 7777777, 88888888], "model": "m"}', b'"token_ids"', 99),
    (b'{"token_ids":[' + b",".join(b"%d" % (i * i) for i in range(300)) + b"]}", b'"token_ids"', 300),
    (b'{"token_ids":[' + b", ".join(b"%d" % i for i in range(90)) + b"]", b'"token_ids"', 90),
    (b'{"t" :\n[ 1 ,\t2 ] , "u":[]}', b'"t"', 2),
    (b'{"t":[]}', b'"t"', 0),
    (b'{"token_ids":[' + b"," * 300 + b"]}", b'"token_ids"', 1000),
    (b'{"token_ids":[123456789]}', b'"token_ids"', 9),
    (b'{"token_ids":[1234567890,1]}', b'"token_ids"', 9),
    (b'{"token_ids":[0,01]}', b'"token_ids"', 9),
    (b'{"t":[01]}', b'"t"', 9),
    (b'{"h":[0,01]}', b'"h"', 9),
    (b'{"h":[1,"2",-3,"-4",18446744073709551615,"-9223372036854775808"]}', b'"h"', 9),
    (b'{"h":["12345678","1234567812345678",-12345678]', b'"h"', 9),
    (b'{"h":[' + b",".join(b"%d" % (i * 0x9E3779B97F4A7C15 % 2**64) for i in range(80)) + b"]}", b'"h"', 99),
    (b'{"a":1,' * 260 + b'"t":[1]}', b'"t"', 9),
    (b'{"t":[1]}' + b'"' * 260, b'"t"', 9),
]
JSON = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b" ",
        b", ",
        b"\n",
        b"\\",
        b"-",
        b"-0",
        b"0",
        b"1",
        b"00",
        b".5",
        b"e1",
    ),
    *(b'"t"', b'"h"', b'"token_ids"', b'"token_ids":[', b'"":[', b"null", b"4294967295", b"4294967296", b"12345678"),
    *(
        b"18446744073709551615",
        b"18446744073709551616",
        b"9223372036854775808",
        b"99999999999999999999",
        b"\0",
        b"\xff",
    ),
]


# ---- hashing ---------------------------------------------------------------------------------------


def _check_u64(*numbers: int | None) -> None:
    for number in numbers:
        if number is not None and not 0 <= number <= U64_MAX:
            raise OverflowError


def digest(payload: bytes, seed: int) -> object:
    _check_u64(seed)
    return xxh3_64_intdigest(payload, seed)


def chain(local_hashes: bytes, seed: int, parent: int | None) -> bytes:
    _check_u64(seed, parent)
    keys = []
    for (local,) in struct.iter_unpack("<Q", local_hashes[: len(local_hashes) // 8 * 8]):
        parent = local if parent is None else xxh3_64_intdigest(struct.pack("<QQ", parent, local), seed)
        keys.append(struct.pack(">Q", parent))
    return b"".join(keys)


def hash_blocks(tokens: bytes, block_size: int, seed: int, parent: int | None, namespace: int) -> object:
    if not 1 <= block_size < 2**61:
        raise ValueError
    _check_u64(seed, parent, namespace)
    mask = namespace.to_bytes(8, "big")
    width = 4 * block_size
    blocks = [tokens[at : at + width] for at in range(0, len(tokens) - width + 1, width)]
    keys = chain(b"".join(struct.pack("<Q", xxh3_64_intdigest(block, seed)) for block in blocks), seed, parent)
    return bytes(key ^ mask[i % 8] for i, key in enumerate(keys))


def hash_keys(seq_hashes: bytes, namespace: int) -> bytes:
    _check_u64(namespace)
    numbers = struct.iter_unpack("<Q", seq_hashes[: len(seq_hashes) // 8 * 8])
    return b"".join(struct.pack(">Q", number ^ namespace) for (number,) in numbers)


LENGTHS = [0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 96, 97, 128, 129, 143, 144, 160, 239, 240, 241, 256]
LENGTHS += [257, 319, 320, 321, 1023, 1024, 1025, 1088, 1089, 2048, 2049]
CONTENT = bytes(i * i % 251 for i in range(3000))


# ---- events ----------------------------------------------------------------------------------------


def medium_of(name: str | None) -> str | None:
    """Return the medium for a text; None if the text has a digit."""
    return "NONE" if name is None else None if re.search("[0-9]", name) else name.upper()


def use_read_batch(read: Callable[..., Any], *arguments: Any) -> object:
    """Read a batch. The target ``Parts`` compares how events are kept together."""
    found = read(*arguments)
    return None if found is None else (found[0], list(found[1]), *found[2:])


# ---- rows ------------------------------------------------------------------------------------------

ROW = re.compile(rb"((?:[^ ]{17}){0,63}?[^ ]{16}[^ +])(\+?)((?: [1-9][0-9]{0,15}:[1-9a-f][0-9a-f]{0,15})*)", re.DOTALL)


def _own(keys: bytes) -> list[bytes]:
    """Return the slots for the blocks of one piece."""
    digits = b"0123456789abcdefghijklmnopqrstuv"
    return [keys[8 * at : 8 * at + 8].hex().encode() + digits[at : at + 1] for at in range(len(keys) // 8)]


def _row(own: list[bytes], value: bytes) -> tuple[int, bool, list[int | None], dict[int, int]] | None:
    """Return four facts: at which index ``own`` has the row's first slot, or the length of ``own`` if it does not have
    it; whether the row is marked; at which index the row has each slot of ``own``; and the bitmap of each holder.
    Return None if the value is not a row of this piece.
    """
    found = ROW.fullmatch(value)
    if found is None:
        return None
    slots = [found[1][at : at + 17] for at in range(0, len(found[1]), 17)]
    pairs = [(int(holder), int(bitmap, 16)) for holder, bitmap in (word.split(b":") for word in found[3].split())]
    # The first slot of a shared branch row is that of the head, except for two digits.
    is_read = slots[0] in own or slots[0][2:] == own[0][2:]
    if not is_read or len(dict(pairs)) < len(pairs) or any(bitmap >> len(slots) for _, bitmap in pairs):
        return None
    places: list[int | None] = []
    following = 0
    for slot in own:
        here = slots[following : following + 1] == [slot]
        place = following if here else slots.index(slot) if slot in slots else None
        following = following if place is None else place + 1
        places.append(place)
    return own.index(slots[0]) if slots[0] in own else len(own), bool(found[2]), places, dict(pairs)


def _has(place: int | None, bitmap: int) -> bool:
    return place is not None and bool(bitmap >> place & 1)


def _equal_runs(holders: list[set[int]]) -> list[tuple[bytes, int]]:
    head = holders[: holders.index(set())] if set() in holders else holders
    return [(b" ".join(b"%d" % each for each in sorted(ids)), len(list(run))) for ids, run in groupby(head)]


def row_runs(keys: bytes, rows: list[Any]) -> object:
    holders: list[set[int]] = []
    for at, value in enumerate(rows):
        own = _own(keys[256 * at : 256 * at + 256])
        if value is None or not own:
            return _equal_runs(holders), at, True
        if not isinstance(value, bytes):
            raise TypeError
        row = _row(own, value)
        if row is None or row[0] != 0 or (row[1] and None in row[2]):
            return _equal_runs(holders), at, False
        holders += [{each for each, bitmap in row[3].items() if _has(place, bitmap)} for place in row[2]]
        if set() in holders:
            return _equal_runs(holders), at, True
    return _equal_runs(holders), len(rows), False


def piece_runs(keys: bytes, values: list[Any]) -> object:
    own = _own(keys)
    if not 1 <= len(own) <= 32 or len(values) > 128:
        raise ValueError
    holders: list[set[int]] = [set() for _ in own]
    missing = unreadable = 0
    for at, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, bytes):
            raise TypeError
        row = _row(own, value)
        if row is None or (at == 0 and row[0] != 0):
            unreadable |= 1 << at
            continue
        if at == 0 and row[1]:
            missing = sum(1 << i for i, place in enumerate(row[2]) if place is None)
        for i, place in enumerate(row[2]):
            holders[i] |= {each for each, bitmap in row[3].items() if _has(place, bitmap)}
    return _equal_runs(holders), missing, unreadable


KEYS = bytes(range(256)) * 3
_FIRST, _SECOND = b"".join(_own(KEYS[:256])), b"".join(_own(KEYS[256:512]))
ROW_VALUES = [
    _FIRST + b" 17:ffffffff 21:ff",
    _SECOND + b" 17:ffffffff",
    _FIRST[:34] + b"+ 21:3 17:1",
    _FIRST[:17] + b"x" * 17 + _FIRST[17:] + b" 9007199254740991:1fffffffd",
    _FIRST[:17] + b"y" * 17 * 31 + _FIRST[17:] + b" 1:1 2:8000000100000001",
    _FIRST[34:] + b" 17:3fffffff 5:1",
    _FIRST + b"+",
    _FIRST + b" 17:100000000",
    _FIRST + b"z" * 17 * 32 + b" 17:ffffffffffffffff",
    _FIRST + b"z" * 17 * 32 + b"+ 17:ffffffffffffffff",
    _FIRST + b"z" * 17 * 33 + b" 17:1",
    b"17 21",
]
PIECES: list[Arguments] = [
    (KEYS[:512], ROW_VALUES[:2]),
    (KEYS[:512], [ROW_VALUES[0], None]),
    *((KEYS[:length], [value, value]) for length in (8, 16, 100, 256) for value in ROW_VALUES),
    (KEYS[:40], [ROW_VALUES[2], ROW_VALUES[5], None]),
    (b"\xac" + KEYS[1:40], [None, _FIRST[:17] + _FIRST[34:68] + b" 17:6", b"ad" + _FIRST[2:17] + b" 17:1"]),
    (KEYS[:40], [None] * 70 + [ROW_VALUES[5]]),
    (b"", []),
    (KEYS[:8], [5]),
]
ROW_WORDS = [b" ", b"+", b":", b" 7:1", b" 17:f", b"0", b"f", b"9" * 16, b"f" * 16, _FIRST[:17], _FIRST[17:34]]


# ---- the state of a stream ---------------------------------------------------------------------------


def _steps(script: bytes) -> Iterator[tuple[str, int, int, Place, int]]:
    """Yield the steps of a script. Four bytes determine the kind, an engine hash, a key, and a place."""
    for step, one, other, where in zip(*[iter(script)] * 4, strict=False):
        place = Place(where % 16, where // 16 or None)
        yield STEPS[step % len(STEPS)], one << 56 | one % 16, other << 56 | other % 16, place, 1 + step // 64


def use_known(known_blocks: Callable[..., Any], script: bytes) -> object:
    assert native.selected is not None
    table = known_blocks(native.selected.Places(Place, Spot), True)
    return [
        (play(table, *step), table.__sizeof__() > 0, len(table), table.get(step[1]), table.first(step[2]))
        for step in _steps(script)
    ]


def known(script: bytes) -> object:
    model = Model()
    return [(model.step(*step), True, *model.state(step[1], step[2])) for step in _steps(script)]


TARGETS: dict[str, Target] = {
    "cut": Target(cut, LISTS, JSON, {2: [*COUNTS]}, NAME),
    "cut_hashes": Target(cut_hashes, LISTS, JSON, {2: [*COUNTS]}, NAME),
    "plain_post": Target(plain_post, POSTS, POST_WORDS),
    "digest": Target(digest, [(CONTENT[:length], 1337) for length in LENGTHS], [], {1: [*EDGES]}),
    "hash_blocks": Target(
        hash_blocks,
        [(CONTENT[: 4 * size * 3 + 2], size, 1337, None, 5) for size in (1, 2, 3, 4, 5, 16, 32, 33, 60, 61, 128)],
        [],
        {1: [*COUNTS, 5, 15, 32, 33, 60, 61, 2**61], 2: [*EDGES], 3: [None, *EDGES], 4: [*EDGES]},
    ),
    "hash_keys": Target(hash_keys, [(CONTENT[: 9 * count], 5) for count in range(9)], [], {1: [*EDGES]}),
    "chain": Target(
        chain, [(CONTENT[: 8 * count + count % 8], 7, None) for count in range(9)], [], {1: [*EDGES], 2: [None, *EDGES]}
    ),
    "read_batch": Target(
        batches.read_batch,
        [
            (each, 99, *batches.EVENT_TYPES, medium_of, *list_fields)
            for each in batches.BATCHES
            for list_fields in ((10, 3), (7, 2), (0, 1))
        ],
        batches.WORDS,
        {1: [*COUNTS], 8: [-1, 0, 1, 2, 6, 7, 9, 10, 11], 9: [-1, 0, 1, 2, 3, 4]},
        # These arguments stay the same, because they come from the program; only the unpacked bytes come from an
        # engine.
        frozenset({2, 3, 4, 5, 6, 7}),
        use=use_read_batch,
    ),
    "Parts": Target(
        runs.parts,
        [(payload, *each) for payload in runs.PAYLOADS for each in ((0, 32, 1), (11, 4, 1), (0, 1, 3), (11, 2, 256))],
        batches.WORDS,
        {1: [*EDGES], 2: [-1, 0, 1, 2, 4, 32, 33], 3: [-1, 0, 1, 2, 3, 256, 257, 2**64]},
        use=runs.use_parts,
    ),
    "KnownBlocks": Target(
        known, [(bytes(range(256)),), (CONTENT[:1024],), (CONTENT[5:2000],)], [bytes(4)], use=use_known
    ),
    "rank_sums": Target(
        sums.rank_sums,
        [(script, tokens, 16) for script in sums.SCRIPTS for tokens in (0, 16, 33, 100)],
        [bytes(8)],
        {1: [0, 1, 15, 16, 17, 64, 2**20], 2: [1, 3, 16, 60]},
        use=sums.use_rank,
    ),
    "offer_sums": Target(
        sums.offer_sums,
        [(script, tokens, 16, 2) for script in sums.SCRIPTS for tokens in (0, 16, 33, 100)],
        [bytes(8)],
        {1: [0, 1, 15, 16, 17, 64, 2**20], 2: [1, 3, 16, 60], 3: [*COUNTS]},
        use=sums.use_offer,
    ),
    "pack_sums": Target(
        sums.pack_sums,
        [(script, tokens, 16, 2) for script in sums.SCRIPTS for tokens in (0, 16, 33, 100)],
        [bytes(8)],
        {1: [0, 1, 15, 16, 17, 64, 2**20], 2: [1, 3, 16, 60], 3: [*COUNTS]},
        use=sums.use_pack,
    ),
    "add_columns": Target(
        sums.add_columns, [(script, 0) for script in sums.SCRIPTS], [bytes(8)], {1: [0, 1]}, use=sums.use_add
    ),
    "least_of": Target(
        sums.least_of,
        [(script, most, sign) for script in sums.SCRIPTS for most, sign in ((8, 1), (300, -1))],
        [bytes(8)],
        {1: [*COUNTS, 65, 300], 2: [-1, 0, 1]},
        use=sums.use_least,
    ),
    "row_runs": Target(row_runs, PIECES, ROW_WORDS),
    "piece_runs": Target(piece_runs, PIECES, ROW_WORDS),
}

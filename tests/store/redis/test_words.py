"""Words of a command that are packed already: Redis and our own code see the same words as without."""

from __future__ import annotations

import random
from typing import Any

import hiredis

from waymark.store.redis.client import SCRIPTS
from waymark.store.redis.words import MixedWords, PackedWords, packed_call

WORDS = [b"", b"a", b"$3\r\nabc\r\n", bytes(range(256)), b"x" * 1000]


def packed(words: list[bytes]) -> PackedWords:
    return PackedWords(len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def test_packed_words_are_a_sequence_of_them() -> None:
    words = packed(WORDS)
    assert (len(words), list(words), words[2], words[-1], words[1:3]) == (5, WORDS, WORDS[2], WORDS[-1], WORDS[1:3])
    assert list(packed([])) == []


def test_mixed_words_are_a_sequence_of_them_in_order() -> None:
    words = MixedWords([["wm:fence", 3], packed(WORDS), [], packed([b"end"]), [1.5]])
    assert list(words) == ["wm:fence", 3, *WORDS, b"end", 1.5]
    assert (len(words), words[0], words[2:4]) == (9, "wm:fence", WORDS[:2])


def test_a_packed_call_has_the_bytes_of_the_same_call_without_packed_words() -> None:
    chance = random.Random(5)
    for _ in range(200):
        sides: list[list[list[bytes] | PackedWords]] = [[], []]
        for side in sides:
            for _ in range(chance.randrange(4)):
                words = chance.choices(WORDS, k=chance.randrange(4))
                side.append(packed(words) if chance.random() < 0.5 else words)
        keys, args = map(MixedWords, sides)
        plain: Any = ("EVALSHA", "0" * 40, len(keys), *keys, *args)
        expected = hiredis.pack_command(plain)
        assert packed_call("0" * 40, keys, args) == expected
        assert packed_call("0" * 40, list(keys), list(args)) == expected


def test_a_call_of_a_script_keeps_packed_words_packed() -> None:
    """Else each of them would become an object again."""
    names = [parameter.name for parameter in (*SCRIPTS["apply_rows"].keys, *SCRIPTS["apply_rows"].args)]
    values = {name: f"<{name}>" for name in names} | {"engine": ["e1"], "holders": [7], "events": [], "seqs": [1, 2]}
    plain = SCRIPTS["apply_rows"].words({**values, "row": [b"r1", b"r2"], "part": WORDS})
    keys, args = SCRIPTS["apply_rows"].words({**values, "row": packed([b"r1", b"r2"]), "part": packed(WORDS)})
    assert (list(keys), list(args)) == plain
    assert isinstance(keys, MixedWords)
    assert isinstance(args, MixedWords)
    assert [len(piece) for piece in keys.pieces if isinstance(piece, PackedWords)] == [2]
    assert [len(piece) for piece in args.pieces if isinstance(piece, PackedWords)] == [5]
    assert b"r1\r\n$2\r\nr2\r\n$10\r\n<branches>" in packed_call(SCRIPTS["apply_rows"].sha, keys, args)

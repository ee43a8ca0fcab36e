"""Words of a command, as objects, or already packed in the form that Redis reads.

The C module packs the many long words of ``apply_rows``. Packed words can be used like any other sequence of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import hiredis


class PackedWords(Sequence[bytes]):
    """Consecutive words of a command, as bulk strings.

    Code compares the type with this class and with ``MixedWords``, because ``isinstance`` with an abstract class runs
    Python code.
    """

    def __init__(self, count: int, packed: bytes) -> None:
        self.packed = packed
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return self._words[i]

    @cached_property
    def _words(self) -> list[bytes]:
        words, start = list[bytes](), 0
        while start < len(self.packed):
            end = self.packed.index(b"\r\n", start)
            first = end + 2
            last = first + int(self.packed[start + 1 : end])
            words.append(self.packed[first:last])
            start = last + 2
        return words


class MixedWords(Sequence[Any]):
    """Words of which some are packed."""

    def __init__(self, pieces: Sequence[list[Any] | PackedWords]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.pieces)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]


def packed_call(sha: str, keys: Sequence[Any], args: Sequence[Any]) -> bytes:
    """Return a call of a script, packed."""
    words: list[Any] = ["EVALSHA", sha, len(keys)]
    packed, count = list[bytes](), 3 + len(keys) + len(args)
    for further in (keys, args):
        for piece in further.pieces if type(further) is MixedWords else (further,):
            if type(piece) is PackedWords:
                packed += bulks(words), piece.packed
                words = []
            else:
                words += piece
    if not packed:
        command: bytes = hiredis.pack_command(tuple(words))
        return command
    return b"".join((b"*%d\r\n" % count, *packed, bulks(words)))


def bulks(words: list[Any]) -> bytes:
    """Return words as bulk strings."""
    command: bytes = hiredis.pack_command(tuple(words))
    return command[command.index(b"\n") + 1 :]

"""Texts in pieces: each text between two special tokens of a model is encoded on its own, and remembered.

A tokenizer splits a text at its added tokens before it does anything else. So the ids of a piece do not depend on its
surroundings, unless a tokenizer treats the beginning of a text, or the surroundings of a token, in a way of its own;
``local`` tries each tokenizer with samples before it trusts this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from waymark.base.bounded_cache import BoundedCache

#: The most memory that an entry takes beside its ids: key, tuple, sizes, and its share of a table that has just grown.
_ENTRY_BYTES = 350
#: Characters of one search. A search holds the GIL.
_WINDOW = 2**16
#: Characters of an added token, and steps of a search at each character. Those of models have less than half as many. A
#: text is not split at longer or slower tokens, nor into more pieces.
_TOKEN_MAX, _STEPS_MAX, _PIECES_MAX = 128, 512, 2**16


class Pieces(NamedTuple):
    """A text at its added tokens: an ordinary text before each token, and one after the last. Texts may be empty."""

    texts: list[str]
    keys: list[bytes]
    """The key of each text in the memo; the key of an empty text is empty."""
    tokens: list[bytes]
    """The id of each added token as a little-endian u32, one fewer than there are texts; empty between two texts."""

    def joined(self, ids: Sequence[bytes]) -> bytes:
        """Return the ids of the whole text; ``ids`` has the ids of each text."""
        parts = [b""] * (len(self.texts) + len(self.tokens))
        parts[::2], parts[1::2] = ids, self.tokens
        return b"".join(parts)

    def followed_by(self, following: Pieces) -> Pieces:
        """Return the pieces together with those of a text encoded on its own."""
        return Pieces(self.texts + following.texts, self.keys + following.keys, [*self.tokens, b"", *following.tokens])


class SegmentMemo(BoundedCache[bytes, bytes]):
    """The ids of texts, by a hash of the text, up to ``bytes_max``.

    Only the loop's thread reads and writes it. A key is bound to its tokenizer by the seed that ``seed`` gave it.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max=bytes_max, size=len, entry_bytes=_ENTRY_BYTES)

    @staticmethod
    def seed() -> int:
        """Return a seed for one tokenizer. It is secret, so a client cannot search for two texts with one key."""
        return secrets.randbits(64)


class Splitter:
    """Splits texts at added tokens. ``tokens`` are those that match wherever they stand, ``peculiar`` the others.

    A text with a peculiar one in it (one that takes blanks with it, or matches whole words only) is not split.
    """

    def __init__(self, tokens: Mapping[str, int], peculiar: Sequence[str], seed: int) -> None:
        self._ids = {content: number.to_bytes(4, "little") for content, number in tokens.items()}
        self._seed = seed
        self._longest = max(map(len, (*tokens, *peculiar)), default=0)
        patterns = [_any_of(tokens), _any_of(peculiar)]
        can_split = None not in patterns
        self._pattern, self._peculiar = [re.compile(f"({each})") if each and can_split else None for each in patterns]
        self.words = tuple(tokens)

    def split(self, text: str) -> Pieces:
        if self._pattern is None or (self._peculiar is not None and self._has(self._peculiar, text)):
            parts = [text]
        elif len(text) <= _WINDOW:
            parts = self._pattern.split(text)
        else:
            parts = list(islice(self._split_in_windows(self._pattern, text), 2 * _PIECES_MAX))
            if len(parts) == 2 * _PIECES_MAX:
                parts = [text]
        texts, seed, ids = parts[::2], self._seed, self._ids
        keys = [xxh3_128_digest(text_piece.encode(), seed) if text_piece else b"" for text_piece in texts]
        return Pieces(texts, keys, [ids[token] for token in parts[1::2]])

    def whole(self, text: str, kind: bytes) -> Pieces:
        """Return a text as one piece; ``kind`` distinguishes two uses of one text."""
        return Pieces([text], [xxh3_128_digest(kind + text.encode(), self._seed)], [])

    def _has(self, pattern: re.Pattern[str], text: str) -> bool:
        ends = range(_WINDOW, len(text) + _WINDOW, _WINDOW)
        return any(pattern.search(text, end - _WINDOW, end + self._longest) for end in ends)

    def _split_in_windows(self, pattern: re.Pattern[str], text: str) -> Iterator[str]:
        """Yield a text and a token by turns; the last is a text."""
        start = last_end = 0
        while start < len(text):
            # A token that begins in this window may end after it.
            end = min(len(text), start + _WINDOW + self._longest)
            match = pattern.search(text, start, end)
            if match is not None and (match.start() < start + _WINDOW or end == len(text)):
                yield text[last_end : match.start()]
                yield match.group()
                start = last_end = match.end()
            else:
                start = start + _WINDOW if end < len(text) else end
        yield text[last_end:]


_Tree = dict[str, Any]
"""Characters to their possible successors; an empty one ends a word."""


def _any_of(words: Collection[str]) -> str | None:
    """Return a pattern that matches the longest of some words; None if it might look at a character too many times."""
    if max(map(len, words), default=0) > _TOKEN_MAX:
        return None
    tree: _Tree = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree) if _steps(tree) <= _STEPS_MAX else None


def _steps(node: _Tree) -> int:
    """Return how many branches a search tries at most from here on."""
    return len(node) + max(map(_steps, node.values()), default=0)


def _pattern(node: _Tree) -> str:
    branches = []
    for character, children in node.items():
        chain = character
        while character and len(children) == 1 and "" not in children:
            ((character, children),) = children.items()
            chain += character
        if chain:
            branches.append(re.escape(chain) + _pattern(children))
    if not branches:
        return ""
    group = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return group + "?" if "" in node else group

"""Turns a client's prompt, token ids or hashes, into the keys of its blocks, and checks every element.

Lists are checked by packing them, which costs a few nanoseconds per element. The elements are checked one by one only
if packing fails, so that the error names the index. Keys are computed lazily, as far as the walk needs them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from waymark.api.http.bodies import Body, LongField
from waymark.api.http.errors import InvalidBody
from waymark.base.errors import InvalidValue
from waymark.base.shown import is_beyond_64_bits, kind, shown
from waymark.domain.hashing import block_keys, local_keys
from waymark.domain.multimodal import PromptItems, block_keys_with
from waymark.domain.names import U32_MAX, U64_MASK
from waymark.domain.packing import KEY_BYTES, pack, pack_tokens

#: The names of a prompt's fields in a body, the usual one first.
TOKEN_IDS = LongField(("token_ids",), is_hashes=False)
SEQ_HASHES = LongField(("seq_hashes", "block_hash", "block_hashes"), is_hashes=True)

MODEL = ("model", "model_name", "modelname")

_I64_MIN = -(2**63)

_TOKENS = f"token ids are integers of 0..{U32_MAX}"
_HASHES = "a hash is an integer of 64 bits, or its decimal digits as a string"


def token_bytes(value: Any, *, field: str, max_tokens: int, may_hold_booleans: bool = True) -> bytes:
    """Pack token ids as little-endian u32, from a list or a ``bin`` of that form.

    Raise ``InvalidBody`` with field and index, or ``InvalidValue`` (too_large) above ``max_tokens``.
    """
    if isinstance(value, bytes):
        _check_binary(value, 4, field)
        check_count(len(value) // 4, field, max_tokens)
        return value
    _check_list(value, field, max_tokens, "a list of token ids, or in msgpack a bin of little-endian u32")
    if not (may_hold_booleans and bool in set(map(type, value))):
        try:
            return pack_tokens(value)
        except (TypeError, OverflowError):
            pass  # an element is not a token id; the code below finds it
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= U32_MAX:
            raise _element(token, _TOKENS, field, index, "out_of_range" if type(token) is int else "invalid_type")
    raise AssertionError("a list that does not pack has an element that is no token id")


def hashes(value: Any, *, field: str, max_tokens: int, may_hold_booleans: bool = True) -> array[int]:
    """Pack hashes as u64, from a list (negative i64 as two's complement, decimal strings) or a ``bin`` of LE u64."""
    if isinstance(value, bytes):
        _check_binary(value, 8, field)
        check_count(len(value) // 8, field, max_tokens)
        return packed_hashes(value)
    _check_list(value, field, max_tokens, "a list of 64-bit hashes, or in msgpack a bin of little-endian u64")
    if not (may_hold_booleans and bool in set(map(type, value))):
        packed = array("Q")
        try:
            packed.fromlist(value)
            return packed
        except (TypeError, OverflowError):
            pass  # the list has signed hashes, strings, or other values
    return array("Q", (_hash(element, field, index) for index, element in enumerate(value)))


def tokens_in(body: Body, field: str, max_tokens: int) -> bytes:
    """Return the token ids in a field of a body, as ``token_bytes`` does."""
    value = body.fields[field] if body.numbers is None else body.numbers
    return token_bytes(value, field=field, max_tokens=max_tokens, may_hold_booleans=body.may_hold_booleans)


def hashes_in(body: Body, field: str, max_tokens: int) -> array[int]:
    """Return the hashes in a field of a body, as ``hashes`` does."""
    value = body.fields[field] if body.numbers is None else body.numbers
    return hashes(value, field=field, max_tokens=max_tokens, may_hold_booleans=body.may_hold_booleans)


def packed_hashes(value: bytes) -> array[int]:
    """Return hashes from little-endian u64."""
    packed = array("Q", value)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _hash(element: Any, field: str, index: int) -> int:
    number = element
    is_digits = isinstance(element, str) and element.isascii() and element.removeprefix("-").isdigit()
    if is_digits and len(element) <= 20:
        number = int(element)
    if type(number) is int and _I64_MIN <= number <= U64_MASK:
        return number & U64_MASK
    if is_digits or type(number) is int:
        reason = "out_of_range"
    else:
        reason = "invalid_value" if isinstance(element, str) else "invalid_type"
    raise _element(element, _HASHES, field, index, reason)


def _check_binary(value: bytes, width: int, field: str) -> None:
    if len(value) % width:
        raise InvalidBody(
            f"{field} is binary of {len(value)} bytes; send little-endian integers of {width} bytes each",
            reason="invalid_value",
            field=field,
        )


def _check_list(value: Any, field: str, max_tokens: int, wanted: str) -> None:
    if not isinstance(value, list):
        raise InvalidBody(f"{field} is {kind(value)}; it must be {wanted}", reason="invalid_type", field=field)
    check_count(len(value), field, max_tokens)


def check_count(count: int, field: str, max_tokens: int) -> None:
    """Raise ``InvalidValue`` (too_large) on ``field`` above ``max_tokens``."""
    if count > max_tokens:
        raise InvalidValue(
            f"{field} has {count} elements and at most {max_tokens} are read; send less, or raise WAYMARK_MAX_TOKENS",
            reason="too_large",
            field=field,
        )


def _element(element: Any, wanted: str, field: str, index: int, reason: str) -> InvalidBody:
    return InvalidBody(
        f"{field}[{index}] is {shown(element)}; {wanted}",
        reason="out_of_range" if is_beyond_64_bits(element) else reason,
        field=field,
        index=index,
    )


class TokenKeys:
    """The packed block keys of a prompt, computed as far as they are requested."""

    def __init__(self, tokens: bytes, block_size: int, namespace: int, seed: int, items: PromptItems = ()) -> None:
        self._tokens = memoryview(tokens)
        self._items = items
        self._block_size = block_size
        self._namespace = namespace
        self._seed = seed
        self._at = 0
        self._parent: int | None = None

    def __call__(self, n: int) -> bytes:
        """Return the next ``n`` keys, or fewer if there are fewer complete blocks."""
        end = self._at + 4 * self._block_size * n
        piece = self._tokens[self._at : end]
        if self._items:
            keys = block_keys_with(
                self._items,
                self._parent,
                piece,
                self._block_size,
                first=self._at // (4 * self._block_size),
                namespace=self._namespace,
                seed=self._seed,
            )
        else:
            keys = block_keys(self._parent, piece, self._block_size, namespace=self._namespace, seed=self._seed)
        self._at = end
        if keys:
            self._parent = int.from_bytes(keys[-KEY_BYTES:], "big") ^ self._namespace
        return keys


class SeqHashKeys:
    """The packed block keys of seq_hashes that the client computed."""

    def __init__(self, seq_hashes: Sequence[int], namespace: int) -> None:
        self._keys = pack(seq_hashes, namespace)
        self._at = 0

    def __call__(self, n: int) -> bytes:
        """Return the next ``n`` keys; fewer at the end."""
        start = self._at
        self._at += KEY_BYTES * n
        return self._keys[start : self._at]


class LocalHashKeys:
    """The packed block keys of local hashes that the client computed, for the base model without salts."""

    def __init__(self, local_hashes: array[int], seed: int) -> None:
        self._local_hashes = local_hashes
        self._seed = seed
        self._at = 0
        self._parent: int | None = None

    def __call__(self, n: int) -> bytes:
        """Return the next ``n`` keys; fewer at the end."""
        keys = local_keys(self._parent, self._local_hashes[self._at : self._at + n], seed=self._seed)
        self._at += n
        if keys:
            self._parent = int.from_bytes(keys[-KEY_BYTES:], "big")
        return keys

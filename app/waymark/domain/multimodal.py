"""Items of a prompt other than text, such as images, and their part in the keys of their blocks.

An engine puts placeholder tokens in place of an item, and they are the same for all images of one size. So a block's
key has to name the item, too: ``[identifier, offset]``. The offset is that of the item's first placeholder within the
block, and is negative if the item began in an earlier block. This is the list that vLLM hashes and publishes as
``extra_keys``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from waymark.base.errors import InvalidValue
from waymark.domain import packing
from waymark.domain.hashing import DEFAULT_SEED, extend, extra_digest

#: The most items of one prompt.
ITEMS_MAX = 4096
#: The most blocks with items in one prompt. Each costs a few microseconds, other blocks only nanoseconds.
BLOCKS_MAX = 2**15
_IDENTIFIER_CHARACTERS_MAX = 4096
_TOKENS_MAX = 2**32 - 1


class PromptItem(NamedTuple):
    """One image, video or sound of a prompt."""

    offset: int
    """The position of its first placeholder token in the prompt."""
    length: int
    """The length in tokens."""
    identifier: str
    """The engine's name for the item: a hash of its content."""


PromptItems = tuple[PromptItem, ...]
"""Items in the order of their offsets; no two overlap."""


def items_of(features: Any) -> PromptItems:
    """Return the items that ``features`` names, in the form of vLLM's render endpoints: ``mm_hashes``,
    ``mm_placeholders``.

    Raise ``InvalidValue`` with the field ``features`` if they have another form.
    """
    if not isinstance(features, Mapping):
        raise _unfit("is no object; send mm_hashes and mm_placeholders")
    hashes, placeholders = features.get("mm_hashes"), features.get("mm_placeholders")
    if not hashes and not placeholders:
        return ()
    if not isinstance(hashes, Mapping) or not isinstance(placeholders, Mapping):
        raise _unfit("has no mm_hashes or no mm_placeholders by modality; send both")
    if hashes.keys() != placeholders.keys():
        raise _unfit("has not the same modalities in mm_hashes and mm_placeholders; send both of each")
    items: list[PromptItem] = []
    for modality, identifiers in hashes.items():
        ranges = placeholders[modality]
        if not isinstance(identifiers, list) or not isinstance(ranges, list) or len(identifiers) != len(ranges):
            raise _unfit("has not one placeholder for each hash of a modality; send lists of the same length")
        if len(items) + len(ranges) > ITEMS_MAX:
            raise _unfit(f"has more than {ITEMS_MAX} items; send fewer", "out_of_range")
        items += [_item(identifier, range_) for identifier, range_ in zip(identifiers, ranges, strict=True)]
    items.sort()
    if any(right_item.offset < left_item.offset + left_item.length for left_item, right_item in pairwise(items)):
        raise _unfit("has placeholders that overlap; send each token's item once")
    return tuple(items)


def _item(identifier: Any, range_: Any) -> PromptItem:
    if not isinstance(identifier, str) or not 0 < len(identifier) <= _IDENTIFIER_CHARACTERS_MAX:
        raise _unfit(f"has a hash that is no text of 1 to {_IDENTIFIER_CHARACTERS_MAX} characters; send one")
    try:
        identifier.encode()
    except UnicodeEncodeError:
        raise _unfit("has a hash with half of a surrogate pair; send whole characters") from None
    offset, length = (range_.get("offset"), range_.get("length")) if isinstance(range_, Mapping) else (None, None)
    if type(offset) is not int or type(length) is not int or not (0 <= offset <= _TOKENS_MAX):
        raise _unfit("has a placeholder without offset and length; send integers of tokens")
    if not 0 < length <= _TOKENS_MAX:
        raise _unfit("has a placeholder whose length is not within 1..2^32-1; send tokens", "out_of_range")
    return PromptItem(offset, length, identifier)


def _unfit(problem: str, reason: str = "invalid_value") -> InvalidValue:
    return InvalidValue(f"features {problem}", reason=reason, field="features")


def check_blocks(items: PromptItems, tokens: int, block_size: int) -> None:
    """Raise ``InvalidValue`` if the items are in more than ``BLOCKS_MAX`` blocks of a prompt of ``tokens`` tokens."""
    blocks = sum(
        (min(item.offset + item.length, tokens) - 1) // block_size - item.offset // block_size + 1
        for item in items
        if item.offset < tokens
    )
    if blocks > BLOCKS_MAX:
        raise _unfit(f"stands in {blocks} blocks of {block_size} tokens, and at most {BLOCKS_MAX} are read; send less")


def extra_keys(items: PromptItems, block_size: int, blocks: range) -> Iterator[list[list[Any]]]:
    """Yield the extra keys of each block: identifier and place of each of its items, or an empty list if it has
    none.
    """
    index = 0
    for block in blocks:
        start, end = block * block_size, (block + 1) * block_size
        while index < len(items) and items[index].offset + items[index].length <= start:
            index += 1
        block_extras, ahead = [], index
        while ahead < len(items) and items[ahead].offset < end:
            block_extras.append([items[ahead].identifier, items[ahead].offset - start])
            ahead += 1
        yield block_extras


def seq_hashes_with(
    items: PromptItems,
    parent: int | None,
    tokens: bytes | memoryview,
    block_size: int,
    *,
    first: int = 0,
    seed: int = DEFAULT_SEED,
) -> list[int]:
    """Hash a prompt with items as ``hashing.extend`` does. ``first`` is the index of the first block of ``tokens``."""
    blocks = range(first, first + len(tokens) // (4 * block_size))
    digests = [extra_digest(key, seed=seed) if key else None for key in extra_keys(items, block_size, blocks)]
    return extend(parent, tokens, block_size, seed=seed, extras=digests if any(digests) else None)


def block_keys_with(
    items: PromptItems,
    parent: int | None,
    tokens: bytes | memoryview,
    block_size: int,
    *,
    first: int,
    namespace: int,
    seed: int = DEFAULT_SEED,
) -> bytes:
    """Return block keys as ``hashing.block_keys`` does, for a prompt with items."""
    seq_hashes = seq_hashes_with(items, parent, tokens, block_size, first=first, seed=seed)
    return packing.pack(seq_hashes, namespace)

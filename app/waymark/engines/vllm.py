"""Reads vLLM's events, each of which is a list (up to 0.23) or a map (since 0.24).

A list has 6 to 12 elements, by release; missing elements are nil, and further ones are ignored. Dynamo's and
TensorRT-LLM's publishers speak the same maps. The other dialects build on this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from waymark.base.shown import shown
from waymark.domain.events import Cleared, EngineEvent, Removed, Stored, StoredReference, StoredWindow
from waymark.domain.hashing import extra_digest
from waymark.domain.names import U32_MAX, Adapter
from waymark.engines import plain, wire
from waymark.engines.batches import Decoder
from waymark.engines.wire import Ceilings, Ignored, Rejected

STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_EXTRA_KEYS_AT: Final = 1 + STORED_FIELDS.index("extra_keys")
REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
FIELDS: Final = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}

Zero: TypeAlias = Literal["block", "root", "unknown"]
"""The meaning of a parent of 0. ``block``: block 0. ``root``: the root, unless the publisher has a block 0.
``unknown``: the parent is unknown.
"""

_MAIN_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_STATES: Final = frozenset({"mamba"})
_WINDOWS: Final = frozenset({"sliding_window", "sliding_window_mla"})
_ORIGINS: Final = {"NEW": False, "REUSED": True}
_SALT_PREFIX: Final = "dynamo-cache-salt:"


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """Return a decoder of vLLM's batches."""
    return Decoder(partial(read_event, seed=seed), names=FIELDS, ceilings=ceilings, list_fields=plain.LIST_FIELDS)


def read_event(
    event: Any, *, seed: int, zero_of_map: Zero = "block", zero_of_list: Zero = "root"
) -> EngineEvent | Ignored:
    """Read one event of a batch.

    A parent of 0 in a list is the root unless it names a block, because llm-d's simulator writes 0 for a missing parent
    there.
    """
    named: Mapping[Any, Any]
    if isinstance(event, list) and event:
        tag, listed, named = event[0], event, {}
    elif isinstance(event, dict):
        tag, listed, named = event.get("type"), None, event
    else:
        raise Rejected("bad_event", f"an event is {shown(event)}, not a map or a list with a tag")
    if not isinstance(tag, str):
        raise Rejected("bad_event", f"an event's type is {shown(tag)}, not a name")

    locality = named.get("locality")
    if isinstance(locality, str) and locality.upper() == "REMOTE":
        return Ignored.REMOTE
    if tag == "BlockStored":
        tells_salts = listed is None or len(listed) > _EXTRA_KEYS_AT
        values = _values(listed, named, STORED_FIELDS)
        zero = zero_of_map if listed is None else zero_of_list
        return _stored(values, named, seed, zero, tells_salts)
    if tag == "BlockRemoved":
        block_hashes, medium, group = _values(listed, named, REMOVED_FIELDS)
        removed = wire.hashes(block_hashes, "block_hashes")
        copies = _copies_left(named.get("remaining_copy_counts"), len(removed))
        return Removed(removed, wire.medium(medium), _group(group), copies_left=copies) if removed else Ignored.EMPTY
    # No release of vLLM sends a snapshot of a rank; here it would be read as a clear, followed by stores.
    return Cleared() if tag == "AllBlocksCleared" else Ignored.UNKNOWN_TYPE


def _values(listed: list[Any] | None, named: Mapping[Any, Any], fields: tuple[str, ...]) -> list[Any]:
    if listed is None:
        return [named.get(field) for field in fields]
    values = listed[1 : 1 + len(fields)]
    return values + [None] * (len(fields) - len(values))


def _stored(
    values: list[Any], named: Mapping[Any, Any], seed: int, zero: Zero, tells_salts: bool
) -> EngineEvent | Ignored:
    block_hashes, parent_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys, group, kind, window = (
        values
    )
    engine_hashes = wire.hashes(block_hashes, "block_hashes")
    if not engine_hashes:
        return Ignored.EMPTY
    is_paired = isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list)
    tokens = wire.tokens_of_pairs(token_ids) if is_paired else wire.tokens(token_ids)
    parent = None if parent_hash is None else wire.u64(parent_hash, "parent_block_hash")
    is_zero = type(parent_hash) is int and parent_hash == 0
    if is_zero and zero == "unknown":
        if tokens:
            raise Rejected("parent_unknown", "a parent_block_hash of 0 says that the parent is not known")
        parent = None
    if parent in engine_hashes:
        raise Rejected("own_parent", "a block is its own parent")

    size = wire.block_size(block_size)
    if (skipped := named.get("skipped_token_ids")) and len(engine_hashes) == 1 and tokens:
        whole = _with_skipped(named, skipped, tokens, extra_keys)
        if whole is not None:
            parent, tokens = whole
            size, extra_keys = len(tokens) // 4, None

    adapter = _adapter(lora_name, lora_id)
    may_begin = is_zero and zero == "root"
    keys = _per_block(extra_keys, len(engine_hashes), "extra_keys", list)
    images = _per_block(named.get("block_mm_infos"), len(engine_hashes), "block_mm_infos", list, dict)
    salt = _salt(named.get("cache_salt"))
    extras = None
    if keys is not None:
        keys, salt = _without_names(keys, adapter, salt, at_root=parent_hash is None or may_begin)
    if keys is not None or images is not None:
        extras = _digests(keys, images, seed)
    name, group_number = wire.medium(medium), _group(group)
    is_reused = _ORIGINS.get(origin) if isinstance(origin := named.get("origin"), str) else None
    if not _is_main(kind):
        is_dense = extras is None and len(tokens) == 4 * size * len(engine_hashes)
        window_length = _window(kind, window)
        return StoredWindow(engine_hashes, name, group_number, window_length, size, is_dense, is_reused=is_reused)
    if not tokens:
        is_salted = salt is not None or extras is not None
        return StoredReference(engine_hashes, name, size, group_number, is_salted, is_reused=is_reused)
    return Stored(
        engine_hashes=engine_hashes,
        parent=parent,
        tokens=tokens,
        block_size=size,
        medium=name,
        adapter=adapter,
        salts=(salt,) if salt else (),
        extras=extras,
        group=group_number,
        tells_salts=tells_salts,
        may_begin=may_begin,
        is_reused=is_reused,
    )


def _with_skipped(named: Mapping[Any, Any], skipped: Any, tokens: bytes, keys: Any) -> tuple[int | None, bytes] | None:
    """Return the parent and all tokens of a unit inside a physical block that begins with unannounced units.

    The engine computes the whole physical block before it announces the unit, so it has the earlier units, too. Return
    None if the fields are not valid, or if a salt or an image went into the hashes, because the event does not say into
    which unit. The unit is then read as if the fields were missing.
    """
    for keys_of_blocks in (keys, named.get("skipped_extra_keys")):
        if keys_of_blocks is not None and not (
            isinstance(keys_of_blocks, list) and keys_of_blocks.count(None) == len(keys_of_blocks)
        ):
            return None
    parent_hash = named.get("skipped_parent_block_hash")
    try:
        parent = None if parent_hash is None else wire.u64(parent_hash, "skipped_parent_block_hash")
        return parent, wire.tokens(skipped) + tokens
    except Rejected:
        return None


def _copies_left(counts: Any, hashes: int) -> tuple[int | None, ...] | None:
    """Return how many copies of each block are left, with None for an invalid count. The block is removed in any
    case.
    """
    if not isinstance(counts, list) or len(counts) != hashes:
        return None
    copies = tuple([count if wire.is_u32(count) else None for count in counts])
    return None if copies.count(None) == hashes else copies


def _adapter(lora_name: Any, lora_id: Any) -> Adapter:
    if isinstance(lora_name, str) and lora_name:
        return lora_name
    if lora_name is None or lora_name == "":
        if lora_id is None or type(lora_id) is int:
            return lora_id
        raise Rejected("bad_lora", f"lora_id is {shown(lora_id)}, not an integer")
    raise Rejected("bad_lora", f"lora_name is {shown(lora_name)}, not a name")


def _group(value: Any) -> int | None:
    if value is None:
        return None
    if wire.is_u32(value):
        return value
    raise Rejected("bad_group", f"group_idx is {shown(value)}, not an integer of 0..{U32_MAX}")


def _is_main(kind: Any) -> bool:
    """Return whether a store is of main attention. A store that names no kind of attention is."""
    if kind is None:
        return True
    if isinstance(kind, str):
        return kind in _MAIN_ATTENTION
    raise Rejected("bad_group", f"kv_cache_spec_kind is {shown(kind)}, not a name")


def _window(kind: Any, tokens: Any) -> int | None:
    """Return how many tokens before a boundary a group must have, or None if it needs something else."""
    if kind in _STATES:
        return 1
    if kind in _WINDOWS and wire.is_u32(tokens) and tokens > 0:
        return max(1, tokens - 1)  # the window includes the next token to compute
    return None


# ---- extra keys ------------------------------------------------------------------------------------


def _salt(value: Any) -> str | None:
    """Return a salt without its prefix, or None for an empty one."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.removeprefix(_SALT_PREFIX) or None
    raise Rejected("bad_salt", f"cache_salt is a {type(value).__name__}, not text")


def _per_block(value: Any, count: int, field: str, *kinds: type) -> list[Any] | None:
    """Return the element of ``value`` for each block, or None if all are empty."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != count:
        length = f"{len(value)} elements" if isinstance(value, list) else f"a {type(value).__name__}"
        raise Rejected("bad_extra_keys", f"{field} is {length} for {count} blocks")
    if value.count(None) == count:
        return None
    if not all(item is None or isinstance(item, kinds) for item in value):
        raise Rejected("bad_extra_keys", f"{field} holds something that is neither nil nor a list for its block")
    return value


def _without_names(
    keys: list[Any], adapter: Adapter, salt: str | None, *, at_root: bool
) -> tuple[list[list[Any]], str | None]:
    """Return each block's keys without adapter and salt, and the salt if the keys name it."""
    remaining = [list(block or ()) for block in keys]
    if isinstance(adapter, str):
        for block in remaining:
            if adapter in block:
                block.remove(adapter)
    first = remaining[0]
    names = [key for key in first if isinstance(key, str)]
    if salt is not None:
        names = [name for name in names if _salt(name) == salt]
    elif not at_root:
        names = []
    if names:
        # If there are several texts, the last one is the salt. vLLM puts images before it, and only bytes after it.
        first.remove(names[-1])
        salt = _salt(names[-1])
    return remaining, salt


def _digests(keys: list[Any] | None, images: list[Any] | None, seed: int) -> tuple[int | None, ...] | None:
    """Return the digest of each block's other keys, or None if no block has any."""
    blocks: list[list[Any]] = keys if keys is not None else [[] for _ in images or ()]
    if images is not None:
        blocks = [block if image is None else [*block, image] for block, image in zip(blocks, images, strict=True)]
    if not any(blocks):
        return None
    try:
        return tuple([extra_digest(block, seed=seed) if block else None for block in blocks])
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Rejected(
            "bad_extra_keys", "extra_keys are nested too deeply, or have a value that msgpack cannot encode"
        ) from None

"""The standard envelope of the published KV Events API, over ZMQ and over HTTP.

Without ``token_ids`` the hashes are seq_hashes, so the blocks are identified without their parent. With ``token_ids``
the hashes are the publisher's own, and an event with an unknown parent is refused, because its blocks must not be
mistaken for the beginning of a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from waymark.base.errors import InvalidValue
from waymark.base.shown import is_beyond_64_bits, shown
from waymark.base.shown import kind as kind_of
from waymark.domain.events import Cleared, Envelope, Event, Removed, RemovedIdentity, Stored, StoredIdentity
from waymark.domain.media import normal_medium
from waymark.domain.names import DEFAULT_TENANT, U32_MAX, U64_MASK
from waymark.engines import wire
from waymark.engines.batches import Decoder
from waymark.engines.wire import Ceilings, Ignored, Rejected

_DECIMAL: Final = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_TOO_LONG_DECIMAL: Final = re.compile(r"-?[0-9]{21,}", re.ASCII)

_HASH: Final = "a hash of 64 bits: an integer, or its decimal digits as a string"
_TOKEN: Final = f"an integer of 0..{U32_MAX}"

#: Field of an event over HTTP -> its description in an error.
_WANTED: Final = {
    "event_type": "stored, removed or cleared",
    "event_id": f"an integer of 0..{U64_MASK}, or its decimal digits as a string",
    "backend_id": "a text, the registered instance_id",
    **dict.fromkeys(("tenant_id", "model_name", "lora_name", "additional_salt"), "a Unicode text"),
    "block_size": f"an integer of 1..{wire.BLOCK_SIZE_MAX}",
    **dict.fromkeys(("dp_rank", "base_block_idx"), f"an integer of 0..{U32_MAX}"),
    "medium": "a name of at most 32 letters, digits and underscores, and not DP",
    "seq_hashes": "a list of hashes, or in msgpack a bin of little-endian u64",
    "parent_hash": _HASH,
    "token_ids": "a list of token ids, or in msgpack a bin of little-endian u32",
}
_WANTED_INSIDE: Final = {"seq_hashes": _HASH, "token_ids": _TOKEN}
_INTEGERS: Final = frozenset({"event_id", "block_size", "dp_rank", "base_block_idx", "parent_hash"})
_DECIMALS: Final = frozenset({"event_id", "parent_hash", "seq_hashes"})
_LMCACHE: Final = (
    "batches is what LMCache's servers send to their coordinator; it does not say which chunk comes before another, so "
    "the blocks cannot be identified. Register the vLLM of each LMCache server with its endpoint: it publishes the "
    "same chunks"
)
#: An error does not quote the value of such a field, but only says what kind of value it is.
_SECRET: Final = frozenset({"additional_salt", "token_ids"})


def decode_event(document: Mapping[str, object]) -> Event:
    """Decode one event that came by HTTP.

    A u64 may be an integer, a negative i64 or a decimal string; ``token_ids`` and ``seq_hashes`` may be bytes
    (little-endian u32 and u64), if the body was msgpack. ``InvalidValue`` names the field and the value.
    """
    if "batches" in document and "event_type" not in document:
        raise InvalidValue(_LMCACHE, field="batches")
    try:
        event = read_event(document)
    except Rejected as bad:
        raise _invalid_value(bad, document) from None
    if event is Ignored.EMPTY:
        raise InvalidValue("seq_hashes is an empty list; name at least one block", field="seq_hashes")
    if isinstance(event, Ignored):
        kind = shown(document.get("event_type"))
        raise InvalidValue(f"event_type is {kind}; it must be {_WANTED['event_type']}", field="event_type")
    return event


def _invalid_value(bad: Rejected, document: Mapping[str, object]) -> InvalidValue:
    """Return the error in terms of JSON. The sentence stays the same if it is not about the value of one field."""
    field, index, reason = bad.field, bad.index, bad.reason
    if field is None or not bad.kind.startswith("bad_"):
        return InvalidValue(bad.sentence, reason=reason, field=field, index=index)
    value = document.get(field)
    wanted = _WANTED[field]
    if index is not None and isinstance(value, list):
        value, wanted = value[index], _WANTED_INSIDE[field]
    if (field in _INTEGERS or index is not None) and is_beyond_64_bits(value):
        reason = "out_of_range"
    if field in _DECIMALS and isinstance(value, str) and _TOO_LONG_DECIMAL.fullmatch(value):
        reason = "out_of_range"
    if value is None and reason == "missing":
        text = "missing"
    else:
        text = kind_of(value) if field in _SECRET and index is None else shown(value)
    sentence = f"{wire.at(field, index)} is {text}; it must be {wanted}"
    return InvalidValue(sentence, reason=reason, field=field, index=index)


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """Return a decoder of standard batches, and of bare events. No event depends on ``seed``."""
    return Decoder(read_event, names={}, bare=True, ceilings=ceilings)


def read_event(event: Any) -> Event | Ignored:
    """Read one event of a batch, a map with ``event_type``."""
    if not isinstance(event, Mapping):
        raise Rejected("bad_event", f"an event is {shown(event)}, not a map")
    kind = event.get("event_type")
    if not isinstance(kind, str):
        reason = "missing" if kind is None else "invalid_type"
        raise Rejected("bad_event", f"event_type is {shown(kind)}, not a name", field="event_type", reason=reason)
    if kind not in ("stored", "removed", "cleared"):
        return Ignored.UNKNOWN_TYPE

    envelope = read_envelope(event)
    if kind == "cleared":
        medium = None if event.get("medium") is None else wire.medium(event["medium"])
        return Cleared(medium, envelope)

    medium = wire.medium(event.get("medium"))
    engine_hashes = _hashes(event.get("seq_hashes"))
    if not engine_hashes:
        return Ignored.EMPTY
    tokens = _tokens(event.get("token_ids"))
    if kind == "removed":
        if tokens:
            return Removed(engine_hashes, medium, envelope=envelope)
        return RemovedIdentity(engine_hashes, medium, envelope)
    parent = _parent(event, is_identity=not tokens)
    if parent in engine_hashes:
        raise Rejected("own_parent", f"parent_hash {parent} is one of the event's own blocks", field="parent_hash")
    if not tokens:
        is_deep = parent is None and _is_deep(event)
        return StoredIdentity(engine_hashes, parent, medium, envelope, is_deep)
    return Stored(
        engine_hashes=engine_hashes,
        parent=parent,
        tokens=tokens,
        block_size=envelope.block_size or 0,
        medium=medium,
        adapter=envelope.adapter,
        salts=envelope.salts,
        envelope=envelope,
    )


# ---- fields ----------------------------------------------------------------------------------------


def read_envelope(event: Mapping[Any, Any], *, has_names: bool = True) -> Envelope:
    """Read the envelope of an event, which names its stream; with ``has_names``, also adapter and salt."""
    backend_id = _text(event, "backend_id")
    if backend_id is None:
        raise Rejected("bad_envelope", "backend_id is missing or empty", field="backend_id", reason="missing")
    envelope = Envelope(
        event_id=_event_id(event.get("event_id")),
        backend_id=backend_id,
        tenant_id=_text(event, "tenant_id") or DEFAULT_TENANT,
        model_name=_text(event, "model_name"),
        block_size=None if event.get("block_size") is None else wire.block_size(event["block_size"]),
        dp_rank=_u32(event, "dp_rank"),
        spelling=_spelling(event.get("medium")),
    )
    if not has_names:
        return envelope
    adapter, salt = _text(event, "lora_name"), _text(event, "additional_salt", secret=True)
    return (
        envelope
        if adapter is None and salt is None
        else replace(envelope, adapter=adapter, salts=(salt,) if salt else ())
    )


def _spelling(medium: Any) -> str:
    """Return the name of the medium in upper case; empty if it is the medium's normal name, or missing."""
    if not isinstance(medium, str) or medium.upper() == normal_medium(medium):
        return ""
    return medium.upper()


def _text(event: Mapping[Any, Any], field: str, *, secret: bool = False) -> str | None:
    """Read a name. Return None if it is absent or empty."""
    value = event.get(field)
    if value is None:
        return None
    if isinstance(value, str):
        # JSON can contain half of a surrogate pair, which cannot be encoded as UTF-8.
        if value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value):
            return value or None
        raise Rejected("bad_envelope", f"{field} is not a Unicode text", field=field)
    text = f"a {type(value).__name__}" if secret else shown(value)
    raise Rejected("bad_envelope", f"{field} is {text}, not text", field=field, reason="invalid_type")


def _u32(event: Mapping[Any, Any], field: str) -> int | None:
    value = event.get(field)
    if value is None:
        return None
    if wire.is_u32(value):
        return value
    reason = "out_of_range" if type(value) is int else "invalid_type"
    sentence = f"{field} is {shown(value)}, not an integer of 0..{U32_MAX}"
    raise Rejected("bad_envelope", sentence, field=field, reason=reason)


def _event_id(value: Any) -> int:
    number = int(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value
    if type(number) is int and 0 <= number <= U64_MASK:
        return number
    reason = "missing" if value is None else "out_of_range" if type(number) is int else "invalid_type"
    sentence = f"event_id is {shown(value)}, not an integer of 0..{U64_MASK}"
    raise Rejected("bad_envelope", sentence, field="event_id", reason=reason)


def _u64(value: Any, field: str, index: int | None = None) -> int:
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return wire.u64(int(value), field, index)
    return wire.u64(value, field, index)


def _hashes(value: Any) -> tuple[int, ...]:
    if isinstance(value, bytes) and len(value) % 8 == 0:
        value = [int.from_bytes(value[i : i + 8], "little") for i in range(0, len(value), 8)]
    return wire.hashes(value, "seq_hashes", _u64)


def _tokens(value: Any) -> bytes:
    if isinstance(value, bytes) and len(value) % 4 == 0:
        return value
    return wire.tokens(value)


def _is_deep(event: Mapping[Any, Any]) -> bool:
    """Return whether an event without a usable parent begins elsewhere than at the root."""
    index = event.get("base_block_idx")
    return index != 0 and not (index is None and event.get("parent_hash") is None)


def _parent(event: Mapping[Any, Any], *, is_identity: bool) -> int | None:
    """Return the hash of the block before the first one; None at the root, or for an identity that needs no parent."""
    if "base_block_idx" not in event and "parent_hash" not in event:
        sentence = "a stored event needs base_block_idx or parent_hash, to say where in the prompt it is"
        raise Rejected("no_position", sentence, field="base_block_idx", reason="missing")
    index = _u32(event, "base_block_idx")
    parent = None if event.get("parent_hash") is None else _u64(event["parent_hash"], "parent_hash")
    if index == 0 or (index is None and parent is None):
        return None
    if parent:
        return parent
    if is_identity:
        return None
    sentence = f"parent_hash is {shown(parent)} at base_block_idx {shown(index)}: the parent is not known"
    raise Rejected("parent_unknown", sentence, field="parent_hash")

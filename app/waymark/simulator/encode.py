"""The events of a simulated engine, in vLLM's vocabulary, and their bytes, as each engine and version sends them; pure.

| Dialect | Who sends it |
|---|---|
| ``vllm-list-6`` | vLLM 0.9.0 to 0.10.0 |
| ``vllm-list-7`` | 0.10.2 to 0.13 |
| ``vllm-list-8`` | 0.14 to 0.16 |
| ``vllm-list-9`` | 0.17 to 0.19: from here on with images and salts |
| ``vllm-list-10`` | 0.20, 0.21 |
| ``vllm-list-12`` | 0.22, 0.23 |
| ``vllm-map`` | 0.24 to 0.32 |
| ``vllm-map-wide`` | 0.33: the same maps, but stored ones have a two-byte header |
| ``sglang-list-6``, ``-7``, ``sglang-list`` | SGLang before 0.5.20; the last has a map with the salt at index 7 |
| ``sglang-map`` | SGLang from 0.5.20 |
| ``standard`` | the KV Events envelope; ``seq_hashes`` are the identity, no tokens |
| ``standard-tokens`` | the same with the publisher's own hashes and tokens |

An index cannot know the fields that a dialect leaves out: lists of 6 lack the medium, ``vllm-list-6`` and ``-7`` have
only the adapter's id, SGLang's lists lack the adapter. Only ``vllm-list-9`` and later, ``sglang-list`` and
``sglang-map`` name a salt.

The bytes are the same as the engines', down to which keys are left out: tests compare them with captured batches.

Fields carry the names of the wire (``block_hashes``, ``parent_block_hash``, ...), because ``encode`` only arranges
them. The same events as an index sees them are in ``domain.events``; the two are kept apart so that a mistake in a
decoder cannot hide behind the same mistake here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgpack

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown

GPU = "GPU"
CPU = "CPU"
DISK = "DISK"

ExtraKeys: TypeAlias = tuple[tuple[str, int], ...]
"""The images in a block: (digest of an image, offset of the image in the block)."""


@record(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks entered a medium, ancestor first."""

    block_hashes: tuple[int, ...]
    """u64, opaque; a standard publisher's are seq_hashes."""
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    """Empty in a placeholder."""
    block_size: int
    """Tokens per hash; 0 in a placeholder."""
    medium: str = GPU
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    """Per hash; images only: an encoding adds adapter and salt if its engine does."""
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    session_id: str | None = None


@record(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left a medium: one copy of each."""

    block_hashes: tuple[int, ...]
    medium: str | None = GPU
    group_idx: int | None = 0
    lora_name: str | None = None
    cache_salt: str | None = None


@record(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block left every medium."""


@record(frozen=True, slots=True)
class UnknownEvent:
    """A type that no decoder knows, as a newer engine might send."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


_VLLM_LISTS = {f"vllm-list-{length}": length for length in (6, 7, 8, 9, 10, 12)}
_SGLANG_LISTS = {"sglang-list-6": 6, "sglang-list-7": 7, "sglang-list": 8}
_SGLANG_MEDIA = {CPU: "CPU_TIER1", DISK: "CPU_TIER2"}

DIALECTS: tuple[str, ...] = (
    *_VLLM_LISTS, "vllm-map", "vllm-map-wide", *_SGLANG_LISTS, "sglang-map", "standard", "standard-tokens",
)  # fmt: skip
KIND_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "standard": "standard"}
"""The type in a registration of an engine, by the first word of its dialect."""
WITHOUT_MEDIUM = ("vllm-list-6", "sglang-list-6")
"""Dialects whose engines have one medium, the GPU."""

ReplayFraming: TypeAlias = Literal["seq", "topic"]
"""``["", seq, payload]`` (vLLM up to 0.25, SGLang up to 0.5.21) or ``["", topic, seq, payload]`` (later)."""


@record(frozen=True, slots=True)
class Dimensions:
    """The fields that a standard publisher repeats in every event."""

    model_name: str | None = None
    block_size: int | None = None
    tenant_id: str = "default"
    backend_id: str = "engine-0"


class Encoder:
    """Writes the batches of one publisher. Only the standard dialects have a state: their event ids."""

    def __init__(self, dialect: str, dimensions: Dimensions | None = None) -> None:
        if dialect not in DIALECTS:
            raise InvalidValue(
                f"dialect {shown(dialect)} is not known; it is one of {', '.join(DIALECTS)}", field="dialect"
            )
        self.dialect = dialect
        self.publisher_id: bytes | None = None
        """The id of the process, the fourth element of each batch; None if it has no id."""
        self._standard = _Standard(dialect == "standard-tokens", dimensions or Dimensions())

    def payload(self, events: Sequence[WireEvent], *, ts: float, rank: int | None = 0) -> bytes:
        """Pack ``[ts, events, rank]``; vLLM 0.9.0 had no rank: ``vllm-list-6`` leaves out a rank of None."""
        packed = [event_bytes for event in events for event_bytes in self._packed(event, ts, rank)]
        without_rank = rank is None and self.dialect == "vllm-list-6"
        head = msgpack.Packer(autoreset=False)
        head.pack_array_header(2 if without_rank else 3 if self.publisher_id is None else 4)
        head.pack(float(ts))
        head.pack_array_header(len(packed))
        tail = b"" if without_rank else _pack(rank)
        return b"".join([head.bytes(), *packed, tail, b"" if self.publisher_id is None else _pack(self.publisher_id)])

    def reset(self) -> None:
        """Restart the process: event ids begin again."""
        self._standard.reset()

    def _packed(self, event: WireEvent, ts: float, rank: int | None) -> list[bytes]:
        """Pack one event; a standard publisher reports a clear once per stream."""
        if self.dialect in _VLLM_LISTS:
            return [_pack(_vllm_list(event, _VLLM_LISTS[self.dialect]))]
        if self.dialect in _SGLANG_LISTS:
            return [_pack(_sglang_list(event, _SGLANG_LISTS[self.dialect]))]
        if self.dialect == "sglang-map":
            return [_pack(_sglang_map(event))]
        if self.dialect.startswith("standard"):
            return [_pack(event_map) for event_map in self._standard.maps(event, ts, rank)]
        packed = _pack(_vllm_map(event))
        if self.dialect == "vllm-map-wide" and isinstance(event, BlockStored):
            packed = b"\xde\x00" + bytes([packed[0] & 0x0F]) + packed[1:]
        return [packed]


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


# ---- vLLM ------------------------------------------------------------------------------------------


def _extra_keys(event: BlockStored) -> list[list[Any] | None] | None:
    """Return adapter, images and salt of each block in this order; None for a block without any."""
    if event.extra_keys is None:
        return None
    keys: list[list[Any] | None] = []
    for i, images in enumerate(event.extra_keys):
        of_block: list[Any] = [] if event.lora_name is None else [event.lora_name]
        of_block += [list(image) for image in images or ()]
        if i == 0 and event.parent_block_hash is None and event.cache_salt is not None:
            of_block.append(event.cache_salt)
        keys.append(of_block or None)
    return keys


def _vllm_list(event: WireEvent, length: int) -> list[Any]:
    if isinstance(event, BlockStored):
        fields = [
            "BlockStored", event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
            event.lora_id, event.medium, event.lora_name, _extra_keys(event), event.group_idx,
            event.kv_cache_spec_kind, None,
        ]  # fmt: skip
        return fields[:length]
    if isinstance(event, BlockRemoved):
        fields = ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
        return fields[: 2 if length == 6 else 3 if length < 10 else 4]
    return ["BlockMoved", []] if isinstance(event, UnknownEvent) else ["AllBlocksCleared"]


def _vllm_map(event: WireEvent) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        optional = {
            "extra_keys": _extra_keys(event),
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": event.kv_cache_spec_kind,
            "session_id": event.session_id,
        }
        return {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
            **_there(optional),
        }
    if isinstance(event, BlockRemoved):
        optional = {"medium": event.medium, "group_idx": event.group_idx}
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, **_there(optional)}
    return {"type": "BlockMoved" if isinstance(event, UnknownEvent) else "AllBlocksCleared"}


def _there(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


# ---- SGLang ----------------------------------------------------------------------------------------


def signed(engine_hash: int | None) -> int | None:
    """Return a hash as SGLang writes it."""
    return engine_hash if engine_hash is None or engine_hash < 2**63 else engine_hash - 2**64


def _sglang_list(event: WireEvent, length: int) -> list[Any]:
    fields = list(_sglang_map(event).values())
    if not isinstance(event, BlockStored):
        return fields[:2] if length == 6 else fields
    salt = [] if event.cache_salt is None else [{"cache_salt": event.cache_salt}]
    return (fields[:7] + salt)[:length]


def _sglang_map(event: WireEvent) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        return {
            "type": "BlockStored",
            "block_hashes": [signed(engine_hash) for engine_hash in event.block_hashes],
            "parent_block_hash": signed(parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": _SGLANG_MEDIA.get(event.medium, event.medium),
            **_there({"cache_salt": event.cache_salt, "session_id": event.session_id, "lora_name": event.lora_name}),
        }
    if isinstance(event, BlockRemoved):
        medium = None if event.medium is None else _SGLANG_MEDIA.get(event.medium, event.medium)
        hashes = [signed(engine_hash) for engine_hash in event.block_hashes]
        return {"type": "BlockRemoved", "block_hashes": hashes, **_there({"medium": medium})}
    return {"type": "BlockMoved" if isinstance(event, UnknownEvent) else "AllBlocksCleared"}


# ---- the KV Events envelope ------------------------------------------------------------------------

_StreamName: TypeAlias = tuple[int | None, str | None, str | None, str]
"""dp_rank, lora_name, additional_salt, medium: the fields that can differ within one publisher."""


class _Standard:
    """The envelope, and the last event id of every stream; ids of a stream begin at 1."""

    def __init__(self, with_tokens: bool, dimensions: Dimensions) -> None:
        self._with_tokens = with_tokens
        self._dimensions = dimensions
        self.reset()

    def reset(self) -> None:
        self._last_ids: dict[_StreamName, int] = {}

    def maps(self, event: WireEvent, ts: float, rank: int | None) -> list[dict[str, Any]]:
        if isinstance(event, BlockStored):
            stream = (rank, event.lora_name, event.cache_salt, event.medium.lower())
            stored = {
                "seq_hashes": event.block_hashes,
                "base_block_idx": 0 if event.parent_block_hash is None else None,
                "parent_hash": event.parent_block_hash,
                "token_ids": event.token_ids if self._with_tokens else None,
            }
            return [self._envelope("stored", stream, ts) | stored]
        if isinstance(event, BlockRemoved):
            stream = (rank, event.lora_name, event.cache_salt, (event.medium or "gpu").lower())
            return [self._envelope("removed", stream, ts) | {"seq_hashes": event.block_hashes}]
        if isinstance(event, AllBlocksCleared):
            return [self._envelope("cleared", stream, ts) for stream in list(self._last_ids) if stream[0] == rank]
        return [{"event_type": "moved"}]

    def _envelope(self, kind: str, stream: _StreamName, ts: float) -> dict[str, Any]:
        self._last_ids[stream] = event_id = self._last_ids.get(stream, 0) + 1
        rank, lora_name, salt, medium = stream
        return {
            "event_id": event_id,
            "timestamp": int(ts * 1000),
            "event_type": kind,
            "model_name": self._dimensions.model_name,
            "block_size": self._dimensions.block_size,
            "additional_salt": salt,
            "lora_name": lora_name,
            "tenant_id": self._dimensions.tenant_id,
            "backend_id": self._dimensions.backend_id,
            "medium": medium,
            "dp_rank": rank,
        }

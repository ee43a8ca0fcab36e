"""SGLang's events: vLLM's, with a few differences.

Hashes are signed. A parent of 0 says that the parent is not known. The salt is named in every store, in the map's
``cache_salt``, or (0.5.18 and 0.5.19) in a map where the adapter's name stands. Tokens may be pairs; media are
those of HiCache.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from waymark.domain.events import Event
from waymark.engines import plain, vllm
from waymark.engines.batches import Decoder
from waymark.engines.ceilings import Ceilings
from waymark.engines.wire import Ignored

_NAME: Final = 1 + vllm.STORED_FIELDS.index("lora_name")


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """A decoder of SGLang's batches."""
    return Decoder(partial(read_event, seed=seed), names=vllm.FIELDS, ceilings=ceilings, read_plain=plain.read)


def read_event(event: Any, *, seed: int) -> Event | Ignored:
    """One event of a batch, as a list or as a map."""
    if isinstance(event, list) and len(event) > _NAME and event[0] == "BlockStored" and isinstance(event[_NAME], dict):
        event = {"type": event[0], **dict(zip(vllm.STORED_FIELDS, event[1:], strict=False))}
    if isinstance(event, dict) and isinstance(named := event.get("lora_name"), dict):
        salt = event.get("cache_salt") or named.get("cache_salt")
        event = event | {"lora_name": named.get("lora_name"), "cache_salt": salt}
    return vllm.read_event(event, seed=seed, zero_is_unknown=True)

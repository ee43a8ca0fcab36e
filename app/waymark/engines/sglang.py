"""SGLang's events: vLLM's, with a few differences.

Hashes are signed. A parent of 0 says that the parent is not known; in a list without a salt it is the root unless it
names a block, as with vLLM: llm-d's simulator writes such lists whatever engine it stands for. A list has at most seven
fields of a store and two of a removal: what is behind is not what vLLM has there. The salt is named in every store, in
the map's ``cache_salt``, or (0.5.18 and 0.5.19) in a map where the adapter's name stands. Tokens may be pairs; media
are those of HiCache.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from waymark.domain.events import Event
from waymark.engines import plain, vllm
from waymark.engines.batches import Decoder
from waymark.engines.ceilings import Ceilings
from waymark.engines.wire import Ignored

STORED_FIELDS: Final = vllm.STORED_FIELDS[:7]
REMOVED_FIELDS: Final = vllm.REMOVED_FIELDS[:2]
FIELDS: Final = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}
_NAME: Final = 1 + vllm.STORED_FIELDS.index("lora_name")


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """A decoder of SGLang's batches."""
    return Decoder(
        partial(read_event, seed=seed),
        names=FIELDS,
        ceilings=ceilings,
        read_plain=partial(plain.read, list_fields=(len(STORED_FIELDS), len(REMOVED_FIELDS))),
    )


def read_event(event: Any, *, seed: int, zero_of_list: vllm.Zero = "root") -> Event | Ignored:
    """One event of a batch, as a list or as a map."""
    if isinstance(event, list) and event and isinstance(event[0], str) and event[0] in FIELDS:
        event = event[: 1 + len(FIELDS[event[0]])]
    if isinstance(event, list) and len(event) > _NAME and event[0] == "BlockStored" and isinstance(event[_NAME], dict):
        event = {"type": event[0], **dict(zip(vllm.STORED_FIELDS, event[1:], strict=False))}
    if isinstance(event, dict) and isinstance(named := event.get("lora_name"), dict):
        salt = event.get("cache_salt") or named.get("cache_salt")
        event = event | {"lora_name": named.get("lora_name"), "cache_salt": salt}
    return vllm.read_event(event, seed=seed, zero_of_map="unknown", zero_of_list=zero_of_list)

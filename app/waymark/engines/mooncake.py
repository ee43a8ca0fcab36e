"""Mooncake: the standard envelope from its master, vLLM's or SGLang's events from engines in front of the pool.

The master's maps may carry ``type`` and ``block_hashes`` beside ``event_type`` and ``seq_hashes``, as aliases for
readers of engine events; where both are there the standard names count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from waymark.domain.events import Event
from waymark.engines import sglang, standard, vllm
from waymark.engines.batches import Decoder
from waymark.engines.ceilings import Ceilings
from waymark.engines.wire import Ignored


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """Of its batches, and of bare events."""
    return Decoder(partial(read_event, seed=seed), names=vllm.FIELDS, bare=True, ceilings=ceilings)


def read_event(event: Any, *, seed: int) -> Event | Ignored:
    """One event of a batch, decided by whether it has an ``event_type``."""
    if isinstance(event, dict) and "event_type" in event:
        return standard.read_event(event)
    # SGLang's reading is the wider one: it takes whatever vLLM sends, and does not trust a parent of 0.
    return sglang.read_event(event, seed=seed)

"""Payloads of engines to domain events: one module per dialect, chosen here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from waymark.domain.events import Batch
from waymark.domain.names import EngineKind
from waymark.engines import mooncake, sglang, standard, vllm, wire

Decoder: TypeAlias = Callable[[bytes], Batch]


def decoder(kind: EngineKind, *, seed: int) -> Decoder:
    """The decoder of a publisher's payloads (frame 2). It raises ``Undecodable`` for what is no batch, nothing else.

    ``seed`` is that of all hashes; decoding needs it for what an event tells of a block besides its tokens.
    """
    match kind:
        case EngineKind.VLLM:
            return partial(wire.read_batch, read_event=partial(vllm.read_event, seed=seed))
        case EngineKind.SGLANG:
            return partial(wire.read_batch, read_event=partial(sglang.read_event, seed=seed))
        case EngineKind.MOONCAKE:
            return partial(wire.read_batch, read_event=partial(mooncake.read_event, seed=seed), bare=True)
        case EngineKind.STANDARD:
            return partial(wire.read_batch, read_event=standard.read_event, bare=True)

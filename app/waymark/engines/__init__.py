"""Payloads of engines to domain events: one module per dialect, chosen here and nowhere else."""

from __future__ import annotations

from functools import partial

from waymark.domain.names import EngineKind
from waymark.engines import mooncake, sglang, standard, vllm
from waymark.engines.batches import Decoder
from waymark.engines.ceilings import Ceilings, OverCeiling

__all__ = ["Ceilings", "Decoder", "OverCeiling", "decoder"]


def decoder(kind: EngineKind, *, seed: int, ceilings: Ceilings | None = None) -> Decoder:
    """The decoder of a publisher's payloads (frame 2). It raises ``Undecodable`` for what is no batch, nothing else.

    ``seed`` is that of all hashes; decoding needs it for what an event tells of a block besides its tokens.
    """
    match kind:
        case EngineKind.VLLM:
            return Decoder(partial(vllm.read_event, seed=seed), names=vllm.FIELDS, ceilings=ceilings)
        case EngineKind.SGLANG:
            return Decoder(partial(sglang.read_event, seed=seed), names=vllm.FIELDS, ceilings=ceilings)
        case EngineKind.MOONCAKE:
            read_event = partial(mooncake.read_event, seed=seed)
            return Decoder(read_event, names=vllm.FIELDS, bare=True, ceilings=ceilings)
        case EngineKind.STANDARD | EngineKind.NONE:
            return Decoder(standard.read_event, names={}, bare=True, ceilings=ceilings)

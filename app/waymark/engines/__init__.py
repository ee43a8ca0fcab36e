"""Decodes the payloads of engines into domain events. Each dialect has a module, and ``decoder`` chooses among them.

A dialect's module has a function ``decoder(*, seed, ceilings)``, and ``waymark.domain.engines`` says which kinds of
publishers speak it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from waymark.domain.engines import TRAITS, EngineKind
from waymark.engines.batches import Decoder
from waymark.engines.wire import Ceilings, OverCeiling

__all__ = ["Ceilings", "Decoder", "OverCeiling", "decoder"]


class _MakeDecoder(Protocol):
    def __call__(self, *, seed: int, ceilings: Ceilings | None) -> Decoder: ...


_DIALECTS: dict[str, _MakeDecoder] = {
    dialect: import_module(f"waymark.engines.{dialect}").decoder
    for dialect in sorted({traits.dialect for traits in TRAITS.values()})
}


def decoder(kind: EngineKind, *, seed: int, ceilings: Ceilings | None = None) -> Decoder:
    """Return the decoder of a publisher's payloads. Its only exception is ``Undecodable``, for a payload other than a
    batch, or above a ceiling.

    ``seed`` is the seed of all hashes. Decoding needs it to hash the contents of a block other than tokens.
    """
    return _DIALECTS[kind.traits.dialect](seed=seed, ceilings=ceilings)

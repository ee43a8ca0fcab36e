"""Events in, domain events out: what the tests of all dialects begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Event
from waymark.engines import decoder

SEED = 1337


@pytest.fixture(scope="session")
def decode() -> Callable[..., Batch]:
    """The batch of some events, as a publisher of that kind would send them."""

    def decode(*events: object, kind: EngineKind = EngineKind.VLLM) -> Batch:
        return decoder(kind, seed=SEED)(msgpack.packb([1.5, list(events), 0]))

    return decode


@pytest.fixture(scope="session")
def one(decode: Callable[..., Batch]) -> Callable[..., Event]:
    """The one domain event of one event."""

    def one(event: object, kind: EngineKind = EngineKind.VLLM) -> Event:
        batch = decode(event, kind=kind)
        assert (batch.rejected, batch.ignored) == ({}, {}), batch.samples
        return batch.events[0]

    return one


@pytest.fixture(scope="session")
def refusal(decode: Callable[..., Batch]) -> Callable[..., str]:
    """The kind under which an event is counted; a good sibling on each side of it is kept."""

    def refusal(event: object, kind: EngineKind = EngineKind.VLLM) -> str:
        sibling: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [1]}
        if kind is EngineKind.STANDARD:
            sibling = {"event_type": "removed", "event_id": 1, "backend_id": "b", "seq_hashes": [1]}
        batch = decode(sibling, event, sibling, kind=kind)
        assert len(batch.events) == 2
        assert batch.ignored == {}
        (counted,) = batch.rejected.items()
        assert counted[1] == 1
        assert list(batch.samples) == [counted[0]]
        return counted[0]

    return refusal

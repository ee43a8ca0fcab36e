"""Appliers as a lease holder makes them."""

from __future__ import annotations

from tests.store.factories import Stream
from waymark.apply.applier import Applier
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed
from waymark.base.metrics import Metrics
from waymark.store.store import Store


async def applier_of(stream: Stream, store: Store | None = None, metrics: Metrics | None = None) -> Applier:
    """One that knows what the record knows; over ``store`` where that is not the stream's."""
    applier, _ = await resumed(stream.grant, store or stream.store, metrics or Metrics(), ApplyOptions())
    return applier

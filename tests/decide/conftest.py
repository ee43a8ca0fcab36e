"""A store with targets that are registered as clients register them, and the selection over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from tests.patience import patient, patient_settings
from tests.tokenization.bounds import be_patient
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.fail_open import StartupGate
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.runtime import parts
from waymark.store.store import Store


class MakeSelector(Protocol):
    def __call__(self, store: Store, **settings: Any) -> RequestSelector: ...


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def make_selector(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeSelector]:
    be_patient(monkeypatch)
    async with AsyncExitStack() as stack:

        def make(store: Store, **settings: Any) -> RequestSelector:
            given = Settings(**patient_settings() | settings)
            tokenizers = parts.tokenizers(given, metrics)
            stack.push_async_callback(tokenizers.close)
            selector = Selector(store, parts.selection_options(given), metrics)
            gate = StartupGate(store.polled_claims, given.min_initial_workers)
            return RequestSelector(store, parts.prompt_options(given), metrics, selector, tokenizers, gate)

        yield make


@pytest.fixture
async def memory_store() -> AsyncIterator[Store]:
    """For what does not depend on Redis: one that is emulated, and empty."""
    store = Store.open("memory://")
    yield store
    await store.close()


@pytest.fixture(params=["emulated", "real"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store, once emulated, once real."""
    url = "memory://" if request.param == "emulated" else request.getfixturevalue("redis_url")
    store = Store.open(url, timeout_seconds=patient(2.0))
    yield store
    await store.close()

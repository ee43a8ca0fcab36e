"""An application over a store on an emulated and a real Redis, and a way to fill caches behind its back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import httpx
import pytest

from tests.patience import patient, patient_settings
from tests.store.factories import Change, apply_changes
from tests.tokenization.bounds import be_patient
from waymark.api.application import create_app
from waymark.base.metrics import Metrics
from waymark.base.settings import SETTINGS, Settings
from waymark.domain.hashing import extend, namespace, token_bytes
from waymark.domain.names import Adapter, Holder, HolderName
from waymark.runtime import parts
from waymark.store.records import NewHolder
from waymark.store.scripts import Verdict
from waymark.store.store import Store


class MakeClient(Protocol):
    async def __call__(self, store: Store, *, metrics: Metrics | None = None, **settings: Any) -> httpx.AsyncClient: ...


class Hold(Protocol):
    async def __call__(
        self,
        instance_id: str,
        tokens: Sequence[int],
        *,
        rank: int = 0,
        batch_rank: int | None = None,
        medium: str = "GPU",
        tenant_id: str = "default",
        blocks: Sequence[int] | None = None,
        adapter: Adapter = None,
        salts: Sequence[str] = (),
    ) -> None: ...


@pytest.fixture
async def make_client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeClient]:
    """Builds clients of an application; what the application raises becomes its 500. It has the options of decisions
    that are not settings, too.
    """
    be_patient(monkeypatch)
    async with AsyncExitStack() as stack:

        async def make(store: Store, *, metrics: Metrics | None = None, **settings: Any) -> httpx.AsyncClient:
            own = {name: settings.pop(name) for name in settings.keys() - set(SETTINGS)}
            given = Settings(**patient_settings() | settings)
            options = replace(parts.selection_options(given), **own)
            asker = parts.asker(given)
            stack.push_async_callback(asker.close)
            numbers = metrics or Metrics()
            of_text = parts.tokenizers(given, numbers, store)
            stack.push_async_callback(of_text.close)
            app = create_app(store, parts.api_options(given), options, numbers, of_text, asker=asker)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            return await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://waymark"))

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


@pytest.fixture
async def away(free_port: int) -> AsyncIterator[Store]:
    """A store whose Redis is not there."""
    store = Store.open(f"redis://127.0.0.1:{free_port}", timeout_seconds=0.5)
    yield store
    await store.close()


@pytest.fixture
async def api(memory_store: Store, make_client: MakeClient) -> httpx.AsyncClient:
    return await make_client(memory_store)


@pytest.fixture
async def client(store: Store, make_client: MakeClient) -> httpx.AsyncClient:
    return await make_client(store)


@pytest.fixture
def register(client: httpx.AsyncClient) -> Callable[..., Awaitable[None]]:
    """Registers a vLLM instance of model ``m`` with blocks of two tokens, unless told otherwise."""

    async def register(instance_id: str, **fields: Any) -> None:
        body = {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557", "modelname": "m", "block_size": 2} | fields
        answer = await client.post("/register", json=body | {"instance_id": instance_id})
        assert answer.status_code == 200, answer.text

    return register


async def hold_blocks(
    store: Store,
    seqs: Iterator[int],
    instance_id: str,
    tokens: Sequence[int],
    *,
    rank: int = 0,
    batch_rank: int | None = None,
    medium: str = "GPU",
    tenant_id: str = "default",
    blocks: Sequence[int] | None = None,
    adapter: Adapter = None,
    salts: Sequence[str] = (),
) -> None:
    """Let a registered publisher hold the blocks of a prompt, or those of them at the indexes ``blocks``."""
    name = (instance_id, tenant_id, rank)
    claim = next(claim for claim in await store.directory.claims() if claim.registration.name.rank == name)
    grant = await store.leases.take(claim, "test", 60.0, force=True)
    assert grant is not None
    of = claim.registration
    dp_rank = rank if batch_rank is None else batch_rank
    holder = Holder(0, claim.publisher, instance_id, dp_rank, medium, of.block_size, instance_id, of.scope)
    begin = NewHolder(HolderName(dp_rank, medium), holder)
    ids = await store.records.new_life(grant, unit="", is_restart=False, begin=[begin], above=grant.above)
    assert ids is not None
    ns = namespace(adapter, salts)
    hashes = extend(None, token_bytes(tokens), of.block_size)
    path = [each ^ ns for each in hashes]
    keys = [path[i] for i in (range(len(hashes)) if blocks is None else blocks)]
    change = Change("+", ids[0], next(seqs), 1, keys, keys, ns, path=path)
    verdict = await apply_changes(store, grant, change, mode="set")
    assert verdict is Verdict.APPLIED


@pytest.fixture
def hold(store: Store) -> Hold:
    """Lets a registered publisher hold the blocks of a prompt, or those of them at the indexes ``blocks``."""
    return partial(hold_blocks, store, count(1))

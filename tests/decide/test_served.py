"""Names by which no model is registered: what they mean, and which known one was probably meant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import wait_until
from tests.store.factories import Readings, registration
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.shown import SHOWN_MAX
from waymark.decide import served
from waymark.decide.served import ServedModel, ServedNames
from waymark.domain.names import GroupName, Registration
from waymark.domain.targets import Target
from waymark.store.directory import Directory, PolledClaims
from waymark.store.reader import Reader
from waymark.store.store import Store


class Redis:
    """The registrations, and the tables at hand; it can be away."""

    def __init__(self, *registrations: Registration) -> None:
        self.registered: Sequence[Registration] = registrations
        self.at_hand: set[GroupName] = set()
        self.is_away = False
        self.reads = self.writes = 0
        self.deadlines: list[float] = []

    async def registrations(self) -> Sequence[Registration]:
        self.reads += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return self.registered

    def has_targets(self, group: GroupName) -> bool:
        return group in self.at_hand

    async def table(self, group: GroupName, *, deadline_seconds: float) -> Any:
        self.deadlines.append(deadline_seconds)
        if self.is_away:
            raise StoreUnavailable("away")
        return SimpleNamespace(publishers={1: 1}) if group in {each.group for each in self.registered} else None


def names_of(redis: Redis) -> ServedNames:
    return ServedNames(
        cast(Directory, redis), cast(PolledClaims, redis), cast(Reader, redis), asyncio.ensure_future, 1.0
    )


def pod(
    name: str, model: str = "base", tenant: str = "default", lora: str | None = None, **target: Any
) -> Registration:
    return registration(name, model_name=model, tenant_id=tenant, lora_name=lora, target=Target(**target))


def group(model: str, tenant: str = "default") -> GroupName:
    return GroupName(tenant, model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", None),
        ("alias", ServedModel(group("base"))),
        ("adapter", ServedModel(group("base"), "adapter")),
        ("registered-adapter", ServedModel(group("base"), "registered-adapter")),
        ("unknown", None),
    ],
)
async def test_a_name_is_an_alias_or_an_adapter(name: str, expected: ServedModel | None) -> None:
    names = names_of(
        Redis(
            pod("pod-1", aliases=("alias",)),
            pod("pod-2", aliases=("alias",), adapters=("adapter",)),
            pod("pod-3", lora="registered-adapter"),
        )
    )

    assert await names.of(group(name)) == expected
    assert names.at_hand(group(name)) == expected


async def test_a_name_belongs_to_its_tenant() -> None:
    names = names_of(Redis(pod("pod-1", tenant="acme", adapters=("adapter",))))

    assert await names.of(group("adapter")) is None
    assert await names.of(group("adapter", "acme")) == ServedModel(group("base", "acme"), "adapter")


async def test_a_model_of_its_own_is_not_the_adapter_of_another_one() -> None:
    redis = Redis(pod("pod-1", adapters=("small",)), pod("pod-2", "small"))
    names = names_of(redis)

    assert await names.of(group("small")) is None
    assert redis.reads == 0, "its table says it all"
    assert redis.deadlines == [1.0]
    await names.of(group("unknown"))
    assert names.at_hand(group("small")) is None, "not even by the names that are known"


async def test_a_model_with_targets_at_hand_asks_nobody() -> None:
    redis = Redis(pod("pod-1"))
    redis.at_hand.add(group("base"))
    redis.is_away = True
    assert await names_of(redis).of(group("base")) is None
    assert redis.deadlines == []


async def test_a_name_of_several_models_is_refused_with_all_of_them() -> None:
    names = names_of(Redis(pod("pod-1", "b", adapters=("x",)), pod("pod-2", "a", adapters=("x",))))

    for _ in range(2):
        with pytest.raises(InvalidValue, match='"x" is a name of several models: "a", "b"; send one') as refused:
            await names.of(group("x"))
        assert refused.value.field == "model"


async def test_known_names_are_used_for_a_while_and_read_again_behind_a_request() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    for _ in range(20):
        assert await names.of(group("x")) == ServedModel(group("base"), "x")
    assert redis.reads == 1

    redis.registered = [pod("pod-1", "other", adapters=("x",))]
    names._read_at = float("-inf")  # as after a while
    assert await names.of(group("x")) == ServedModel(group("base"), "x"), "nobody waits"

    async def is_new() -> bool:
        return await names.of(group("x")) == ServedModel(group("other"), "x")

    await wait_until(is_new, "the new meaning is read")


async def test_names_are_read_again_after_a_registration_by_this_process() -> None:
    redis = Redis(pod("pod-1"))
    names = names_of(redis)
    assert await names.of(group("x")) is None

    redis.registered, redis.writes = [pod("pod-1", adapters=("x",))], 1
    assert await names.of(group("x")) == ServedModel(group("base"), "x")


async def test_requests_of_one_moment_read_the_names_once() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    found = await asyncio.gather(*(names.of(group("x")) for _ in range(30)))

    assert set(found) == {ServedModel(group("base"), "x")}
    assert redis.reads == 1


async def test_known_names_stay_while_redis_is_away() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    await names.of(group("x"))
    redis.is_away, names._read_at = True, float("-inf")

    assert await names.of(group("x")) == ServedModel(group("base"), "x")
    with pytest.raises(StoreUnavailable):
        await names.of(group("never-heard"))


async def test_what_was_read_before_redis_came_back_empty_is_forgotten() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    reading = asyncio.ensure_future(names.of(group("x")))
    await asyncio.sleep(0)
    names.clear()
    await reading
    redis.registered = []

    assert await names.of(group("x")) is None
    assert names.nearest(group("bas")) is None


@pytest.mark.parametrize(
    ("name", "tenant", "expected"),
    [
        ("llama-70", "default", "llama-70b"),
        ("adaptor", "default", "adapter"),
        ("llama-70", "acme", None),
        ("qwen", "default", None),
        ("l" * 500_000, "default", None),
    ],
)
async def test_the_nearest_name_is_one_of_the_tenant(name: str, tenant: str, expected: str | None) -> None:
    names = names_of(Redis(pod("pod-1", "llama-70b", adapters=("adapter",)), pod("pod-2", "secret", "acme")))
    await names.of(group("unknown"))

    assert names.nearest(group(name, tenant)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("alias", "base"), ("adapter", "base"), ("bas", "base"), ("adaptor", "adapter"), ("both", None), ("qwen", None)],
)
async def test_the_nearest_name_of_now_is_the_model_of_a_further_one(name: str, expected: str | None) -> None:
    redis = Redis(
        pod("pod-1", aliases=("alias",), adapters=("adapter", "both")), pod("pod-2", "other", adapters=("both",))
    )
    names = names_of(redis)
    assert await names.nearest_now(group(name)) == expected
    redis.is_away, names._read_at = True, float("-inf")
    assert await names.nearest_now(group("base2")) == "base", "by the names that were known last"


async def test_an_unknown_name_asks_redis_once_in_a_while() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    for _ in range(10):
        assert await names.of(group("nobody")) is None
    assert redis.reads == 1
    redis.is_away = True
    assert await names.of(group("nobody")) is None, "it was asked a moment ago"


async def test_known_names_are_not_read_again_before_their_time() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    await names.of(group("x"))
    for _ in range(10):
        await names.of(group("x"))
        await asyncio.sleep(0)
    assert redis.reads == 1
    names._read_at = float("-inf")  # as after a while
    await names.of(group("x"))
    await asyncio.sleep(0)
    assert redis.reads == 2


async def test_a_new_adapter_is_known_within_seconds_and_no_request_reads_the_names_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redis, now = Redis(pod("pod-1", adapters=("x",))), 1000.0
    names = names_of(redis)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    await names.of(group("x"))
    redis.registered = [pod("pod-1", adapters=("x", "y"))]
    for _ in range(100):  # of a busy replica
        now += 0.003
        assert await names.of(group("y")) is None
    assert redis.reads == 1
    now += 2.0
    assert await names.of(group("y")) == ServedModel(group("base"), "y")


async def test_a_name_is_compared_with_every_one_of_hundreds_and_not_with_all_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, compared = names_of(Redis(*(pod(f"pod-{n}", f"model-{n:05}") for n in range(500)))), 0
    await names.of(group("unknown"))
    assert {names.nearest(group(f"model-{n:05}-instruct")) for n in range(0, 500, 9)} == {
        f"model-{n:05}" for n in range(0, 500, 9)
    }

    def close(_: str, possibilities: Iterable[str], n: int) -> list[str]:
        nonlocal compared
        compared = len(list(possibilities))
        return []

    monkeypatch.setattr("difflib.get_close_matches", close)
    names = names_of(Redis(*(pod(f"pod-{n}", f"model-{n}") for n in range(5000))))
    assert await names.nearest_now(group("unknown")) is None
    assert 500 <= compared <= 2000, "five thousand would hold up others for tens of milliseconds"


async def test_a_name_that_gets_targets_of_its_own_is_a_model_of_its_own() -> None:
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)
    assert await names.of(group("x")) == ServedModel(group("base"), "x")
    redis.at_hand.add(group("x"))
    assert await names.of(group("x")) is None
    assert names.at_hand(group("x")) is None


async def test_a_model_without_an_engine_may_be_a_further_name() -> None:
    """Its table is still there, empty: the name may be an adapter of another model by now."""
    redis = Redis(pod("pod-1", adapters=("x",)))
    names = names_of(redis)

    async def table(group: GroupName, *, deadline_seconds: float) -> Any:
        return SimpleNamespace(publishers={})

    redis.table = table  # type: ignore[method-assign]
    assert await names.of(group("x")) == ServedModel(group("base"), "x")


@pytest.mark.parametrize("length", [2, SHOWN_MAX, SHOWN_MAX + 1])
async def test_a_name_up_to_the_length_of_an_error_has_a_nearest_one(length: int) -> None:
    known = "l" * length
    names = names_of(Redis(pod("pod-1", known)))
    await names.of(group("unknown"))
    assert names.nearest(group(known)) == (known if length <= SHOWN_MAX else None)


async def test_names_are_read_again_only_when_a_registration_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_FRESH_SECONDS", 0.0)
    store = Store.open("memory://")
    readings = Readings(store, monkeypatch)
    computed, compute = list[int](), served._names_of

    def counted_names(registrations: Sequence[Registration]) -> dict[GroupName, frozenset[ServedModel]]:
        computed.append(len(registrations))
        return compute(registrations)

    monkeypatch.setattr(served, "_names_of", counted_names)

    names = ServedNames(store.directory, store.polled_claims, store.reader, store.begin, 30.0)
    await Store(store.client).registry.register(pod("pod-1", aliases=("alias",)))
    for _ in range(5):
        assert await names.of(group("unknown")) is None
    assert (await names.of(group("alias")), readings()) == (ServedModel(group("base")), 1)
    await Store(store.client).registry.register(pod("pod-2", aliases=("alias", "other")))
    assert await names.of(group("other")) == ServedModel(group("base"))
    assert (readings(), computed) == (1, [1, 2])
    names.clear()
    assert await names.of(group("other")) == ServedModel(group("base"))
    assert computed == [1, 2, 2]
    await store.close()

"""Failures of Redis are counted by kind."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from redis import exceptions

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.store.redis.client import RedisClient
from waymark.store.redis.failures import kind_of
from waymark.store.store import Store


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (exceptions.ConnectionError("gone"), "connection"),
        (ConnectionRefusedError(), "connection"),
        (exceptions.TimeoutError("late"), "timeout"),
        (TimeoutError(), "timeout"),
        (exceptions.BusyLoadingError("loading"), "loading"),
        (exceptions.ReadOnlyError("replica"), "read_only"),
        (exceptions.OutOfMemoryError("full"), "out_of_memory"),
        (exceptions.MasterDownError("down"), "no_primary"),
        (exceptions.ClusterDownError("down"), "no_primary"),
        (exceptions.AuthenticationError("who"), "not_allowed"),
        (exceptions.NoPermissionError("no"), "not_allowed"),
        (ssl.SSLCertVerificationError("no"), "tls"),
        (exceptions.ResponseError("what"), "other"),
    ],
)
def test_a_failure_has_a_kind(failure: Exception, kind: str) -> None:
    assert kind_of(failure) == kind


def test_a_failure_behind_another_is_the_kind() -> None:
    told = exceptions.ConnectionError("cannot connect")
    told.__cause__ = ssl.SSLError("wrong version")
    assert kind_of(told) == "tls"


async def test_a_redis_that_is_not_there_is_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    store = Store(RedisClient.open(f"unix://{tmp_path}/nobody"), metrics=metrics)
    try:
        with pytest.raises(StoreUnavailable):
            await store.directory.claims()
    finally:
        await store.close()
    assert metrics.registry.get_sample_value("waymark_redis_errors_total", {"reason": "connection"}) == 1

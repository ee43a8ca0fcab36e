"""Events of Continuum's stream: which name counts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from waymark.base.errors import Undecodable
from waymark.domain.prefixes import Change, PrefixEvent, PrefixSource, change_of
from waymark.engines.continuum import PrefixReport, read_event

HASH = "9f2c" * 16


def event(**fields: Any) -> str:
    return json.dumps({"prefix_hash": HASH} | fields)


@pytest.mark.parametrize("kind", PrefixEvent)
def test_each_event_is_read(kind: PrefixEvent) -> None:
    assert read_event(kind, event(token_count=2048)) == PrefixReport(kind, HASH, 2048, None)
    assert read_event("message", event(event=kind, tenant_id="t")) == PrefixReport(kind, HASH, None, "t")


def test_the_name_of_the_stream_wins_over_that_of_the_json() -> None:
    report = read_event("cache_evicted", event(event="cache_created"))
    assert report is not None
    assert report.event is PrefixEvent.EVICTED
    assert read_event("heartbeat", event(event="cache_created")) is None


def test_an_unknown_event_needs_no_fields() -> None:
    assert read_event("heartbeat", "not JSON") is None
    assert read_event("message", event(event="heartbeat")) is None


@pytest.mark.parametrize(
    ("type", "data", "kind"),
    [
        ("cache_created", "{", "prefix_json"),
        ("cache_created", "[" * 100_000, "prefix_json"),
        ("cache_created", "[]", "prefix_json"),
        ("message", event(), "prefix_event"),
        ("message", event(event=7), "prefix_event"),
        ("message", event(event=["cache_created"]), "prefix_event"),
        ("cache_created", "{}", "prefix_hash"),
        ("cache_created", event(prefix_hash="xyz"), "prefix_hash"),
        ("cache_created", event(prefix_hash=""), "prefix_hash"),
        ("cache_created", event(prefix_hash="a" * 129), "prefix_hash"),
        ("cache_created", event(prefix_hash=["a"]), "prefix_hash"),
        ("cache_created", event(token_count=-1), "prefix_tokens"),
        ("cache_created", event(token_count=True), "prefix_tokens"),
        ("cache_created", event(token_count=2**53), "prefix_tokens"),
        ("cache_created", event(token_count="9"), "prefix_tokens"),
        ("cache_created", event(tenant_id=7), "prefix_tenant"),
    ],
)
def test_what_cannot_be_read_is_refused_by_kind(type: str, data: str, kind: str) -> None:
    with pytest.raises(Undecodable) as refused:
        read_event(type, data)
    assert refused.value.kind == kind
    assert len(refused.value.sentence) < 300


#: The table of the contract: with offloading, without, and where an eviction removes.
OFFLOADING = PrefixSource(storage_offloading=True)
REMOVING = PrefixSource(storage_offloading=True, treat_eviction_as_offload=False)


@pytest.mark.parametrize(
    ("kind", "offloading", "removing", "plain"),
    [
        (PrefixEvent.CREATED, Change.HOT, Change.HOT, Change.HOT),
        (PrefixEvent.RELOADED, Change.HOT, Change.HOT, Change.HOT),
        (PrefixEvent.OFFLOADED, Change.WARM, Change.WARM, Change.REMOVE),
        (PrefixEvent.EVICTED, Change.DEMOTE, Change.REMOVE, Change.REMOVE),
        (PrefixEvent.PURGED, Change.REMOVE, Change.REMOVE, Change.REMOVE),
    ],
)
def test_what_an_event_does_depends_on_the_options(
    kind: PrefixEvent, offloading: Change, removing: Change, plain: Change
) -> None:
    assert change_of(kind, OFFLOADING) is offloading
    assert change_of(kind, REMOVING) is removing
    assert change_of(kind, PrefixSource()) is plain

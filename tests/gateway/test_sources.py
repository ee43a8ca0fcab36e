"""An engine learns from the gateway which other engine has the beginning of its prompt."""

from __future__ import annotations

from itertools import count
from typing import Any

import orjson
import pytest

from tests.api.conftest import hold_blocks
from tests.gateway.conftest import Running, Start
from tests.store.factories import registration
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.targets import Target
from waymark.store.reservations import Offer, ReservationTerms

TOKENS = list(range(2048))
PLACE = "x-kv-cache-source-host-port"


async def with_source(running: Running, *, takes_kv_hints: bool) -> None:
    """The first engine has the prompt and much to do, so that the second one gets it."""
    for name, engine, target in (
        ("has", running.engines[0], {"kv_source": "tcp://10.0.0.1:7777"}),
        ("lacks", running.engines[1], {"takes_kv_hints": takes_kv_hints}),
    ):
        said: dict[str, Any] = {"address": engine.url, **target}
        endpoint = f"tcp://10.0.0.{len(name)}:5557"
        await running.store.registry.register(
            registration(name, model_name="m", block_size=16, endpoint=endpoint, target=Target(**said))
        )
    await hold_blocks(running.store, count(1), "has", TOKENS)
    claim = next(each for each in await running.store.directory.claims() if each.registration.instance_id == "has")
    terms = ReservationTerms(context=0)
    await running.store.reservations.reserve(claim.group_id, [Offer(claim.publisher, 100_000)], terms)


@pytest.mark.parametrize("takes_kv_hints", [True, False])
async def test_a_source_is_named_in_a_header_and_as_the_engine_takes_it(start: Start, *, takes_kv_hints: bool) -> None:
    running = await start(2)
    await with_source(running, takes_kv_hints=takes_kv_hints)
    body = {"model": "m", "prompt": TOKENS, "kv": 1}
    answer = await running.post(body, "/v1/completions", headers={PLACE: "10.6.6.6:1"})
    assert answer.status_code == 200, answer.text
    ((request, sent),) = running.engines[1].asked
    assert request.headers.getall(PLACE) == ["10.0.0.1:7777"]
    received = orjson.loads(sent)
    hints = received.pop("kv_hints", None)
    assert received == body
    assert (hints is not None) == takes_kv_hints
    if takes_kv_hints:
        (action,) = hints["actions"]
        assert (hints["protocol_version"], action["action_type"], action["action_version"]) == (
            "0.1",
            "kv.fetch",
            "1.0",
        )
        hashes = extend(None, token_bytes(TOKENS), 16)
        assert action["payload"] == {"source_control_endpoint": "tcp://10.0.0.1:7777", "block_hashes": hashes}

"""The Dynamo API's selector: as recorded of the release, under ids that any replica knows."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.conftest import wait_until
from tests.patience import within
from tools.conformance.selector import BLOCK_SIZE, TOKENS, steps, told
from waymark.api.dynamo import select
from waymark.base.errors import StoreUnavailable
from waymark.decide.question import Question, SelectedTarget
from waymark.decide.selector import Selector
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Verdict
from waymark.store.selections import Selections
from waymark.store.steps import Steps, Waiting
from waymark.store.store import Store

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "dynamo" / "select.json").read_text())
SOCKETS = ("tcp://127.0.0.1:15557", "tcp://127.0.0.1:15558")
WORKER = {
    "worker_id": 1,
    "endpoint": "http://10.0.0.1:8000",
    "model_name": "m",
    "block_size": BLOCK_SIZE,
    "kv_events_endpoint": "tcp://10.0.0.1:5557",
}
PROMPT: dict[str, Any] = {"model_name": "m", "token_ids": TOKENS}


@pytest.fixture
async def replica(store: Store, make_client: MakeClient) -> httpx.AsyncClient:
    return await make_client(store, loads_ms=0)


async def active(replica: httpx.AsyncClient) -> list[int]:
    answer = await replica.get("/dynamo/loads", params={"model_name": "m"})
    return [each["active_requests"] for group in answer.json() for each in group["loads"]]


@pytest.mark.peer
async def test_recorded_session(replica: httpx.AsyncClient, hold: Hold) -> None:
    recorded = iter(RECORDED)
    for method, path, body in steps(*SOCKETS):
        if method == "WAIT":
            await hold("1", TOKENS[: 3 * BLOCK_SIZE])
            continue
        expected = next(recorded)
        assert (method, path) == (expected["method"], expected["path"]), "record the session again"
        sent: dict[str, Any] = {} if body is None else {"json": body}
        text = json.dumps(told(await replica.request(method, "/dynamo" + path, **sent)))
        for number, socket in enumerate(SOCKETS):
            text = text.replace(socket, f"socket {number}")
        assert json.loads(text) == expected["answer"], (method, path, body)
    assert next(recorded, None) is None


async def test_an_id_is_given_once_however_many_ask_and_any_replica_ends_it(
    store: Store, replica: httpx.AsyncClient, make_client: MakeClient
) -> None:
    other = await make_client(store, loads_ms=0)
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    body = PROMPT | {"selection_id": "one"}
    answers = await asyncio.gather(
        *(each.post("/dynamo/select_and_reserve", json=body) for each in (replica, other) * 5)
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
    assert await active(other) == [1]
    assert (await other.delete("/dynamo/reservations/one")).status_code == 200
    assert await active(replica) == [0]


async def test_a_client_that_goes_away_during_a_selection_leaves_its_id_free(
    replica: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    def hang(*_: Any, **__: Any) -> Steps[Any]:
        yield Waiting(never())

    monkeypatch.setattr(select, "_PENDING_MS", 3_600_000)  # it does not become free by its age
    body = PROMPT | {"selection_id": "one"}
    with monkeypatch.context() as patch:
        patch.setattr(Selector, "selecting", hang)
        asked = asyncio.create_task(replica.post("/dynamo/select_and_reserve", json=body))
        async with within(10):
            await begun.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def is_free() -> bool:
        return (await replica.post("/dynamo/select_and_reserve", json=body)).status_code == 200

    await wait_until(is_free, "the id is free")


async def test_a_selection_that_fails_leaves_its_id_and_no_load(replica: httpx.AsyncClient) -> None:
    body = PROMPT | {"selection_id": "one"}
    assert (await replica.post("/dynamo/select_and_reserve", json=body)).status_code == 503
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    refused = await replica.post("/dynamo/select_and_reserve", json=body | {"token_ids": [-1]})
    assert refused.status_code == 422
    assert await active(replica) == [0]
    assert (await replica.post("/dynamo/select_and_reserve", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/dynamo/select_and_reserve", "/dynamo/reservations"])
@pytest.mark.parametrize("state", ["begun ", "reserved "])
@pytest.mark.parametrize("is_away", [False, True], ids=["client", "redis"])
async def test_an_id_whose_reply_does_not_come_is_free_again_and_so_is_its_load(
    replica: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, state: str, is_away: bool
) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    begun, change = asyncio.Event(), Selections.change

    async def interrupted(self: Selections, name: str, earlier: str, value: str, milliseconds: int = 1) -> bool:
        is_changed = await change(self, name, earlier, value, milliseconds)
        if not value.startswith(state):
            return is_changed
        begun.set()
        if is_away:
            raise StoreUnavailable("Redis is away")
        await asyncio.Event().wait()
        return is_changed

    monkeypatch.setattr(select, "_PENDING_MS", 3_600_000)  # it does not become free by its age
    body = PROMPT | {"selection_id": "one", "worker_id": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Selections, "change", interrupted)
        asked = asyncio.create_task(replica.post(path, json=body))
        async with within(10):
            await begun.wait()
        if not is_away:
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def is_free() -> bool:
        return (await replica.post(path, json=body)).status_code in (200, 201)

    await wait_until(is_free, "the id is free")

    async def is_alone() -> bool:
        return await active(replica) == [1]

    await wait_until(is_alone, "only the second one is under way")


@pytest.mark.parametrize(("tokens", "status"), [(2**32 - 1, 200), (2**32, 422)])
async def test_a_prompt_is_as_long_as_its_reservation_can_say(
    replica: httpx.AsyncClient, tokens: int, status: int
) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    prompt = {"model_name": "m", "block_hashes": [1], "sequence_hashes": [1], "isl_tokens": tokens}
    answer = await replica.post("/dynamo/select_and_reserve", json=prompt | {"selection_id": "one"})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert (await replica.delete("/dynamo/reservations/one")).status_code == 200
    assert await active(replica) == [0]


async def test_the_adapter_of_a_request_is_known_to_its_policy(
    replica: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    asked, selecting = list[str | None](), Selector.selecting

    def noted(self: Selector, question: Question, *further: Any, **named: Any) -> Steps[SelectedTarget]:
        asked.append(question.lora_name)
        return selecting(self, question, *further, **named)

    monkeypatch.setattr(Selector, "selecting", noted)
    for name in ("french", ""):
        answer = await replica.post("/dynamo/select", json=PROMPT | {"lora_name": name})
        assert answer.status_code == 200, answer.text
    assert asked == ["french", None]


async def test_what_was_selected_is_reserved_afterwards(replica: httpx.AsyncClient) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    selected = await replica.post("/dynamo/select", json=PROMPT | {"selection_id": "one"})
    assert (selected.json()["selection_id"], await active(replica)) == ("one", [0])
    reserved = await replica.post("/dynamo/reservations", json={"selection_id": "one", "model_name": "m"})
    assert (reserved.status_code, reserved.json()["worker_id"], await active(replica)) == (201, 1, [1])
    again = await replica.post("/dynamo/reservations", json={"selection_id": "one", "model_name": "m"})
    assert again.status_code == 404
    taken = await replica.post("/dynamo/select", json=PROMPT | {"selection_id": "one"})
    assert taken.status_code == 409


async def test_a_worker_is_reserved_at_a_replica_that_has_selected_none(replica: httpx.AsyncClient) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    reserved = await replica.post(
        "/dynamo/reservations", json={"selection_id": "one", "model_name": "m", "worker_id": 1}
    )
    assert (reserved.status_code, await active(replica)) == (201, [1]), reserved.text


async def test_an_output_block_keeps_a_reservation(store: Store, replica: httpx.AsyncClient) -> None:
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    assert (await replica.post("/dynamo/select_and_reserve", json=PROMPT | {"selection_id": "one"})).status_code == 200
    client: RedisClient = store.client
    (members,) = await client.several([("ZRANGE", keys.reservations(1), 0, -1)])
    (before,) = await client.several([("ZSCORE", keys.reservations(1), members[0])])

    async def is_kept() -> bool:
        assert (await replica.post("/dynamo/reservations/one/output_block", json={})).status_code == 200
        (now,) = await client.several([("ZSCORE", keys.reservations(1), members[0])])
        return float(now) > float(before)

    await wait_until(is_kept, "it is over later")


async def test_a_worker_is_whole_bit_by_bit_and_its_ranks_come_and_go(replica: httpx.AsyncClient) -> None:
    async def ranks() -> list[str]:
        found = (await replica.get("/workers")).json()["publishers"]
        return sorted(f"{each['instance_id']}/{each['dp_rank']} {each['endpoint']}" for each in found)

    sockets = {"0": "tcp://10.0.0.1:5557", "1": "tcp://10.0.0.1:5558"}
    part = {"worker_id": 1, "model_name": "m", "block_size": 4, "data_parallel_size": 2, "endpoint": "http://a"}
    answer = await replica.post("/dynamo/workers", json=part)
    assert answer.json()["not_schedulable_reasons"] == [
        f"kv_events endpoint is required for dp_rank {rank}" for rank in (0, 1)
    ]
    assert await ranks() == []
    answer = await replica.patch("/dynamo/workers/1", json={"kv_events_endpoints": sockets})
    assert answer.json()["lifecycle"] == "schedulable"
    assert await ranks() == ["1/0 tcp://10.0.0.1:5557", "1/1 tcp://10.0.0.1:5558"]
    answer = await replica.patch("/dynamo/workers/1", json={"data_parallel_size": 1})
    assert await ranks() == ["1/0 tcp://10.0.0.1:5557"]
    answer = await replica.patch("/dynamo/workers/1", json={"kv_events_endpoints": {"0": "nonsense"}})
    assert "nonsense" in answer.json()["not_schedulable_reasons"][0]
    assert await ranks() == []


async def test_a_worker_whose_removal_arrives_twice_is_removed(
    replica: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Selections.describe

    async def twice(self: Selections, worker: str, earlier: bytes | None, value: bytes) -> Verdict:
        """As if the first reply had been lost."""
        await describe(self, worker, earlier, value)
        return await describe(self, worker, earlier, value)

    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    monkeypatch.setattr(Selections, "describe", twice)
    assert (await replica.delete("/dynamo/workers/1")).status_code == 200
    assert (await replica.get("/workers")).json()["publishers"] == []
    assert (await replica.delete("/dynamo/workers/1")).status_code == 404


async def test_places_of_a_worker_must_be_allowed(store: Store, make_client: MakeClient) -> None:
    replica = await make_client(store, allowed_endpoints=("10.0.0.0/8",))
    for fields in ({"endpoint": "http://evil"}, {"kv_events_endpoint": "tcp://evil:1"}):
        answer = await replica.post("/dynamo/workers", json=WORKER | fields)
        assert "WAYMARK_ALLOWED_ENDPOINTS" in answer.json()["not_schedulable_reasons"][0], fields
    assert (await replica.get("/workers")).json()["publishers"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "http://u:5ecret@10.0.0.1:8000"},
        {"endpoint": "u:5ecret@10.0.0.1"},
        {"endpoint": "http://10.0.0.1:8000/?key=5ecret"},
        {"endpoint": "http://10.0.0.1:8000#5ecret"},
        {"kv_events_endpoint": "tcp://u:5ecret@10.0.0.1:5557"},
        {"kv_events_endpoints": {"0": SOCKETS[0], "1": "tcp://u:5ecret@10.0.0.1:5557"}},
        {"replay_endpoint": "tcp://5ecret@10.0.0.1:5558"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_password_in_a_description_is_neither_stored_nor_shown(
    store: Store, make_client: MakeClient, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    caplog.set_level(logging.DEBUG)
    replica = await make_client(store, access_log=True)
    (field,) = fields
    refused = [await replica.post("/dynamo/workers", json=WORKER | fields)]
    assert (await replica.post("/dynamo/workers", json=WORKER)).status_code == 201
    refused.append(await replica.patch("/dynamo/workers/1", json=fields))
    for answer in refused:
        assert (answer.status_code, f"{field} is " in answer.text, "5ecr" in answer.text) == (422, True, False)
    shown = await replica.patch("/dynamo/workers/1", json={"block_size": BLOCK_SIZE})
    assert shown.json()["lifecycle"] == "schedulable"
    assert "5ecr" not in shown.text + caplog.text


@pytest.mark.parametrize("path", ["/dynamo/workers/x", "/dynamo/workers/-1", f"/dynamo/workers/{2**64}"])
async def test_an_id_in_a_path_that_is_none_is_refused(replica: httpx.AsyncClient, path: str) -> None:
    answer = await replica.delete(path)
    assert (answer.status_code, "u64" in answer.json()["error"]) == (400, True)


async def test_a_path_names_the_methods_that_it_has(replica: httpx.AsyncClient) -> None:
    answer = await replica.put("/dynamo/workers", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
    assert answer.json()["error"] == "/dynamo/workers does not know PUT; send GET or POST"


async def test_loads_are_listed_by_worker_whatever_their_scores(replica: httpx.AsyncClient) -> None:
    for number in (10, 9, 3, 1, 7):
        worker = WORKER | {"worker_id": number, "kv_events_endpoint": f"tcp://10.0.0.{number}:5557"}
        assert (await replica.post("/dynamo/workers", json=worker)).status_code == 201
    for _ in range(5):
        (group,) = (await replica.get("/dynamo/loads", params={"model_name": "m"})).json()
        assert [each["worker_id"] for each in group["loads"]] == [1, 3, 7, 9, 10]

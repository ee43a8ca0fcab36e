"""A session with the released ``dynamo.indexer`` 1.6.1, replayed: same requests, same statuses, same answers.

The recording feeds engines over ZMQ; here the same blocks are put into the store. Sentences that the release words
in its own way (bodies that do not fit, endpoints) are compared by status and form only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold

pytestmark = pytest.mark.peer

SESSION = json.loads((Path(__file__).parents[2] / "fixtures" / "dynamo" / "session.json").read_text())
TOKENS = [101, 15, 100, 55, 89, 63, 7, 8, 9, 10]


def is_told_alike(step: dict[str, Any]) -> bool:
    """Whether the answer's very words count: what a client reads, and the errors it may match on."""
    return step["status"] < 300 or (step["status"] in (404, 409) and isinstance(step["answer"], dict))


#: The index refuses it with 405; here the selector's clients register their workers by it.
OF_THE_SELECTOR = ("POST", "/workers")


async def test_recorded_session(client: httpx.AsyncClient, hold: Hold) -> None:
    tenants: dict[tuple[str, int], str] = {}
    for step in SESSION["steps"]:
        if "hold" in step:
            held = step["hold"]
            tenant_id = tenants[held["instance_id"], held["rank"]]
            await hold(tokens=TOKENS, tenant_id=tenant_id, **held)
            continue
        if (step["method"], step["path"]) == OF_THE_SELECTOR:
            continue
        request = step["request"]
        body = {} if request is None else {"json": request}
        answer = await client.request(step["method"], "/dynamo" + step["path"], **body)
        assert answer.status_code == step["status"], (step, answer.text)
        if not is_told_alike(step):
            assert isinstance(answer.json()["error"], str), step
        else:
            assert (answer.json() if answer.content else "") == step["answer"], step
        if step["path"] == "/register" and step["status"] == 201:
            name = (str(request["instance_id"]), request.get("dp_rank", 0))
            tenants[name] = request.get("routing_group", "default")


async def test_workers_are_listed_in_the_recorded_form(client: httpx.AsyncClient) -> None:
    for step in SESSION["steps"]:
        if step.get("path") == "/register" and step["status"] == 201:
            assert (await client.post("/dynamo/register", json=step["request"])).status_code == 201
    workers = (await client.get("/dynamo/workers")).json()
    # The recorded engines are up, and nobody listens to ours.
    text = json.dumps(sorted(workers, key=lambda worker: int(worker["instance_id"])))
    assert json.loads(text.replace('"pending"', '"active"')) == SESSION["workers"]

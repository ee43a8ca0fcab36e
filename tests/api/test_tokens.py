"""Tokens of a file: who may do what, and that a token of some tenants sees and changes nothing of others, on any path.

The table at the end of this file has a body for every path of the application; a path without one fails.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.api.conftest import Hold, MakeClient
from tests.patience import patient
from waymark.api import probes
from waymark.api.application import _admin_rows, _ApiParts, _application, _operations
from waymark.api.first import FirstQuestions
from waymark.api.http.tokens_file import Caller, TokensFile
from waymark.api.operations import Operation, Resource
from waymark.api.options import ApiOptions
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.decide.options import SelectionOptions
from waymark.store.store import Store

PROMPT = [1, 2, 3, 4]
SECRET = "zebra"
"""In every name of the other tenant."""


def entry(token: str, **fields: Any) -> dict[str, Any]:
    digest = sha256(token.encode()).hexdigest()
    return {"name": f"name of {token}", "sha256": digest, "tenants": ["a"], "access": "write"} | fields


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(
        json.dumps(
            [
                entry("writes-a"),
                entry("reads-a", access="read"),
                entry("writes-all", tenants=["*"]),
                entry("writes-default", tenants=["default"]),
            ]
        )
    )
    return path


def headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
async def api(store: Store, make_client: MakeClient, file: Path) -> httpx.AsyncClient:
    return await make_client(store, api_token="root", api_tokens_file=str(file))


async def send(
    api: httpx.AsyncClient, token: str, path: str, body: Any = None, *, method: str | None = None
) -> httpx.Response:
    method = method or ("GET" if body is None else "POST")
    return await api.request(method, path, json=body, headers=headers(token))


def publisher(tenant: str, instance: str, **fields: Any) -> dict[str, Any]:
    named = {"tenant_id": tenant, "instance_id": instance, "modelname": fields.pop("modelname", "m")}
    return {"type": "standard", "block_size": 2} | named | fields


@pytest.fixture
async def tenants(api: httpx.AsyncClient, hold: Hold) -> None:
    """One instance of tenant a, and others of a tenant whose names are all secret."""
    for body in (
        publisher("a", "1"),
        publisher(SECRET, f"{SECRET}-1", modelname="m"),
        publisher(SECRET, "77", modelname=f"{SECRET}-model"),
    ):
        assert (await send(api, "root", "/register", body)).status_code == 200
    await hold("1", PROMPT, tenant_id="a")
    await hold(f"{SECRET}-1", PROMPT * 5, tenant_id=SECRET)


# ---- who may do what ---------------------------------------------------------------------------------


QUERY = {"model": "m", "tenant_id": "a", "token_ids": PROMPT, "block_size": 2}


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize(
    ("token", "reads", "writes"),
    [("root", 200, 200), ("writes-all", 200, 200), ("writes-a", 200, 200), ("reads-a", 200, 403), ("", 401, 401)]
    + [("writes-default", 403, 403), ("nobody", 401, 401)],
)
async def test_a_token_reads_and_writes_what_it_may(
    api: httpx.AsyncClient, token: str, reads: int, writes: int
) -> None:
    assert (await send(api, token, "/query", QUERY)).status_code == reads
    refused = await send(api, token, "/register", publisher("a", "pod-2"))
    assert refused.status_code == writes
    if writes in (401, 403):
        assert refused.json()["reason"] == "unauthorized"
        assert token not in refused.text.replace(f"name of {token}", "") or not token


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("tenant", [None, "", SECRET, "default"])
async def test_another_tenant_is_refused_whatever_it_is_called(api: httpx.AsyncClient, tenant: str | None) -> None:
    body = QUERY | {"tenant_id": tenant}
    assert (await send(api, "writes-a", "/query", body)).status_code == 403
    # On a root path a routing group is no name of a tenant, so it hides none.
    assert (await send(api, "writes-a", "/query", body | {"routing_group": "a"})).status_code == 403
    dynamo = {"model_name": "m", "token_ids": PROMPT, "tenant_id": "a", "routing_group": tenant}
    expected = 200 if not tenant else 403
    assert (await send(api, "writes-a", "/dynamo/query", dynamo)).status_code == expected


async def test_open_paths_need_no_token(api: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/dynamo/health"):
        assert (await api.get(path)).status_code == 200


@pytest.mark.usefixtures("tenants")
async def test_answers_and_counts_are_of_the_tokens_tenants(api: httpx.AsyncClient) -> None:
    services = (await send(api, "reads-a", "/services")).json()
    assert (services["count"], [each["TenantID"] for each in services["services"]]) == (1, ["a"])
    assert (await send(api, "root", "/services")).json()["count"] == 3
    assert (await send(api, "reads-a", "/global_view")).json()["count"] == 1
    workers = (await send(api, "reads-a", "/workers")).json()
    assert [each["tenant_id"] for each in workers["publishers"]] == ["a"]
    assert len((await send(api, "reads-a", "/dynamo/workers")).json()) == 1
    assert list((await send(api, "reads-a", "/dynamo/dump")).json()) == ["m:a"]
    for tenant in ("a", SECRET):
        taken = await send(api, "root", "/select", {"model": "m", "tenant_id": tenant, "token_ids": PROMPT})
        await send(api, "root", "/release", {"reservation": taken.json()["reservation"], "cached_tokens": 0})
    assert (await send(api, "root", "/books")).json()["total"]["requests"] == 2
    books = (await send(api, "reads-a", "/books")).json()
    assert (books["total"]["requests"], [each["tenant_id"] for each in books["targets"]]) == (1, ["a"])
    placement = (await send(api, "reads-a", "/placement")).json()
    assert {each["tenant_id"] for part in placement.values() for each in part} == {"a"}
    assert (await send(api, "reads-a", f"/placement/warm?instance={SECRET}-1")).status_code == 404


@pytest.mark.usefixtures("tenants")
async def test_a_reservation_of_another_tenant_is_gone_and_stays(api: httpx.AsyncClient, store: Store) -> None:
    body = {"model": "m", "tenant_id": SECRET, "token_ids": PROMPT}
    reservation = (await send(api, "root", "/select", body)).json()["reservation"]
    answer = await send(api, "writes-a", "/release", {"reservation": reservation})
    assert (answer.status_code, answer.json()) == (200, {"released": 0, "gone": 1})
    assert (await send(api, "root", "/release", {"reservation": reservation})).json() == {"released": 1, "gone": 0}


@pytest.mark.usefixtures("tenants")
async def test_events_of_another_tenant_are_refused_and_its_instances_not_known(api: httpx.AsyncClient) -> None:
    event = {"event_id": 1, "event_type": "stored", "seq_hashes": [1], "base_block_idx": 0, "backend_id": f"{SECRET}-1"}
    foreign = await send(api, "writes-a", "/events", event | {"tenant_id": SECRET})
    assert foreign.status_code == 403
    both = [event | {"tenant_id": "a", "backend_id": "1"}, event | {"tenant_id": SECRET}]
    assert (await send(api, "writes-a", "/events", both)).status_code == 403
    unknown = await send(api, "writes-a", "/events", event | {"tenant_id": "a"})
    missing = await send(api, "writes-a", "/events", event | {"tenant_id": "a", "backend_id": "never"})
    assert unknown.status_code == missing.status_code == 404
    assert unknown.json()["error"].replace(f"{SECRET}-1", "never") == missing.json()["error"]


# ---- the file ----------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_file_is_read_again_when_it_has_changed(file: Path) -> None:
    clock = Clock()
    tokens = TokensFile(file, clock)
    assert tokens.caller(b"reads-a") == Caller("name of reads-a", frozenset({"a"}), may_write=False)
    file.write_text(json.dumps([entry("new", tenants=["b", "c"])]))
    assert tokens.caller(b"new") is None, "it is looked at once a second"
    clock.now += 2
    assert tokens.caller(b"new") == Caller("name of new", frozenset({"b", "c"}), may_write=True)
    assert tokens.caller(b"reads-a") is None
    for broken in ("[", "{}", json.dumps([entry("x", tenants=[])])):
        file.write_text(broken)
        clock.now += 2
        assert tokens.caller(b"new") is not None, "what cannot be read changes nothing"
    file.unlink()
    clock.now += 2
    assert tokens.caller(b"new") is not None
    file.write_text("[]")
    clock.now += 2
    assert tokens.caller(b"new") is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": "name of other"}, "name"),
        ({"sha256": "abc"}, "sha256"),
        ({"sha256": sha256(b"other").hexdigest()}, "sha256"),
        ({"sha256": sha256(b"x").hexdigest().upper()}, "sha256"),
        ({"tenants": None}, "tenants"),
        ({"tenants": []}, "tenants"),
        ({"tenants": "a"}, "tenants"),
        ({"tenants": ["a", "*"]}, "tenants"),
        ({"tenants": [7]}, "tenants"),
        ({"access": "admin"}, "access"),
        ({"access": None}, "access"),
        ({"tenant": "a"}, '"tenant" is no field'),
    ],
)
def test_an_entry_that_does_not_fit_stops_the_process(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([entry("other"), entry("x") | fields]))
    with pytest.raises(SettingsError, match=f"entry 2: {says}") as refused:
        TokensFile(path)
    assert sha256(b"x").hexdigest() not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{}", "7", "[7]", json.dumps([{}] * 1001)])
def test_a_file_that_is_no_list_of_tokens_stops_the_process(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="WAYMARK_API_TOKENS_FILE"):
        TokensFile(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        TokensFile(tmp_path / "none.json")


# ---- every path --------------------------------------------------------------------------------------

MINE, THEIRS = "a", SECRET
_WORKER = {"worker_id": 77, "model_name": f"{SECRET}-model", "endpoint": "http://a:1", "routing_group": THEIRS}
_DYNAMO = {"model_name": f"{SECRET}-model", "routing_group": THEIRS}
_OF_MODEL = {"model": "m", "tenant_id": THEIRS}

#: A body that asks for the other tenant's things, for every path; None where the path has no body.
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/query"): QUERY | {"tenant_id": THEIRS},
    ("POST", "/query_by_hash"): _OF_MODEL | {"seq_hashes": [1], "block_size": 2},
    ("POST", "/select"): _OF_MODEL | {"token_ids": PROMPT},
    ("POST", "/score"): _OF_MODEL | {"token_ids": PROMPT},
    ("POST", "/inspect/prompt"): _OF_MODEL | {"token_ids": PROMPT},
    ("POST", "/release"): {"reservation": "2.2.4.4.0123456789abcdef"},
    ("POST", "/tokenize"): {"model": f"{SECRET}-model", "prompt": "Hi"},
    ("POST", "/detokenize"): {"model": f"{SECRET}-model", "tokens": [1]},
    ("POST", "/register"): publisher(THEIRS, f"{SECRET}-2"),
    ("POST", "/unregister"): {"tenant_id": THEIRS, "instance_id": f"{SECRET}-1"},
    ("POST", "/repair"): {"tenant_id": THEIRS, "instance_id": f"{SECRET}-1"},
    ("POST", "/weight"): {"tenant_id": THEIRS, "instance_id": f"{SECRET}-1", "weight": 0},
    ("POST", "/events"): {
        "event_id": 1,
        "event_type": "stored",
        "seq_hashes": [1],
        "base_block_idx": 0,
        "backend_id": f"{SECRET}-1",
        "tenant_id": THEIRS,
    },
    ("GET", "/inspect/status"): None,
    ("POST", "/inspect/block"): {"key": "0" * 16, "tenant_id": THEIRS},
    ("POST", "/inspect/holder"): {"holder": 1, "tenant_id": THEIRS},
    ("POST", "/inspect/keys"): {"tenant_id": THEIRS},
    ("GET", "/services"): None,
    ("GET", "/workers"): None,
    ("GET", "/books"): None,
    ("GET", "/policies/compare"): None,
    ("POST", "/policies/replay"): {"tenant_id": THEIRS, "policy": "lmetric"},
    ("GET", "/placement"): None,
    ("GET", "/placement/warm"): None,
    ("GET", "/global_view"): None,
    ("GET", "/health"): None,
    ("GET", "/ready"): None,
    ("GET", "/"): None,
    ("GET", "/ui"): None,
    ("GET", "/ui/{name}"): None,
    ("GET", "/metrics"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/docs"): None,
    ("POST", "/dynamo/query"): _DYNAMO | {"token_ids": PROMPT},
    ("POST", "/dynamo/query_by_hash"): _DYNAMO | {"block_hashes": [1]},
    ("POST", "/dynamo/query_tiered_by_hash"): _DYNAMO | {"block_hashes": [1]},
    ("POST", "/dynamo/register"): _DYNAMO | {"instance_id": 78, "block_size": 2, "endpoint": "tcp://a:1"},
    ("POST", "/dynamo/unregister"): {"instance_id": 77, "model_name": f"{SECRET}-model"},
    ("GET", "/dynamo/workers"): None,
    ("POST", "/dynamo/workers"): _WORKER,
    ("PATCH", "/dynamo/workers/{worker_id}"): _WORKER,
    ("DELETE", "/dynamo/workers/{worker_id}"): None,
    ("GET", "/dynamo/dump"): None,
    ("GET", "/dynamo/health"): None,
    ("GET", "/dynamo/metrics"): None,
    ("POST", "/dynamo/register_peer"): {"url": f"http://{SECRET}:1"},
    ("POST", "/dynamo/deregister_peer"): {"url": f"http://{SECRET}:1"},
    ("GET", "/dynamo/peers"): None,
    ("POST", "/dynamo/select"): _DYNAMO | {"token_ids": PROMPT},
    ("POST", "/dynamo/select_and_reserve"): _DYNAMO | {"token_ids": PROMPT, "reservation_id": "r"},
    ("POST", "/dynamo/reservations"): _DYNAMO | {"reservation_id": "r", "worker_id": 77, "token_ids": PROMPT},
    ("POST", "/dynamo/reservations/{reservation_id}/prefill_complete"): {},
    ("POST", "/dynamo/reservations/{reservation_id}/output_block"): {},
    ("DELETE", "/dynamo/reservations/{reservation_id}"): None,
    ("POST", "/dynamo/overlap_scores"): _DYNAMO | {"token_ids": PROMPT},
    ("POST", "/dynamo/potential_loads"): _DYNAMO | {"token_ids": PROMPT},
    ("GET", "/dynamo/loads"): None,
    ("GET", "/admin/prefix-routing/stats"): None,
    ("GET", "/admin/kv-index/stats"): None,
    ("GET", "/admin/kv-index/backends"): None,
    ("POST", "/admin/kv-index/clear"): {"scope": "all"},
}


def paths() -> list[tuple[str, str]]:
    """Every operation of the application."""
    options, metrics = ApiOptions(), Metrics()
    store = Store.open("memory://")
    first = FirstQuestions(store, options, metrics)
    rows = _ApiParts(first, SelectionOptions()).rows() + _admin_rows(store, options)
    operations = _operations(rows, first.dependencies)
    routes = _application(operations, metrics, str).routes
    assert all(isinstance(each, Route) and isinstance(each.endpoint, Operation | Resource) for each in routes)
    # Its answer has no end; test_activity.py asks it.
    return [(operation.method, operation.path) for operation in operations if operation.path != "/activity"]


PATHS = paths()


def test_every_path_has_its_body_here() -> None:
    assert sorted(PATHS) == sorted(BODIES), "a new path: say what a token of another tenant would ask of it"


async def everything(store: Store) -> list[Any]:
    """What the other tenant has."""
    claims = [each for each in await store.directory.claims() if each.registration.tenant_id == SECRET]
    states = await store.publisher_states.of(claims)
    return [claims, [state.blocks for state in states], [state.status for state in states]]


#: One that changes something comes alone; all that read come after each other.
READS = [each for each in PATHS if each[0] == "GET"]
ALONE = [[each] for each in PATHS if each[0] != "GET"]


@pytest.mark.usefixtures("tenants")
@pytest.mark.slow
@pytest.mark.parametrize("paths", [READS, *ALONE], ids=lambda paths: " ".join(paths[0]))
async def test_no_path_tells_or_changes_what_is_another_tenants(
    api: httpx.AsyncClient, store: Store, paths: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_READY_SECONDS", patient(10.0))  # a Redis that stalls for a second is another answer
    before = await everything(store)
    for method, path in paths:
        url = path.replace("{worker_id}", "77").replace("{reservation_id}", "r")
        answer = await send(api, "writes-a", url, BODIES[method, path], method=method)
        assert answer.status_code < 500, path
        # A refusal comes before the handler, and repeats what was sent; so do the errors of models without a tokenizer.
        if answer.status_code != 403 and path not in ("/tokenize", "/detokenize"):
            assert SECRET not in answer.text, path
        assert await everything(store) == before, path

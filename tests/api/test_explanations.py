"""Why a query finds no more: ``/inspect/prompt``, ``explain``, and the note of a query that can find nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.patience import within
from waymark.api import explanations, inspections
from waymark.base.shape import parse, plain
from waymark.contract.inspections import InspectAnswer
from waymark.domain.hashing import extend, token_bytes
from waymark.inspection import holding
from waymark.inspection.inspector import Inspector
from waymark.store.store import Store

TOKENS = [101, 15, 100, 55, 89, 63]
"""Three blocks of two."""

Register = Callable[..., Awaitable[None]]


async def inspect(client: httpx.AsyncClient, status: int = 200, **fields: Any) -> Any:
    body = {"model": "m"} | ({} if fields.keys() & {"seq_hashes", "prompt"} else {"token_ids": TOKENS}) | fields
    answer = await client.post("/inspect/prompt", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
async def held(register: Register, hold: Hold) -> None:
    """a has all blocks but the second of them; b has the first two, one of them on its CPU; c has nothing."""
    for name in ("a", "b", "c"):
        await register(name)
    await hold("a", TOKENS, blocks=[0, 2])
    await hold("b", TOKENS, blocks=[0])
    await hold("b", TOKENS, medium="CPU", blocks=[1])


async def test_each_instance_tells_its_runs_and_where_its_match_ends(
    client: httpx.AsyncClient, held: None, store: Store
) -> None:
    row = f"wm:{{1}}:{extend(None, token_bytes(TOKENS), 2)[0]:016x}"
    assert await inspect(client) == {
        "tenant_id": "default",
        "model": "m",
        "block_size": 2,
        "total_tokens": 6,
        "total_blocks": 3,
        "longest_matched": 4,
        "blocks_held": 3,
        "reasons": [],
        "instances": [
            {
                "instance_id": "b",
                "is_pool": False,
                "longest_matched": 4,
                "note": 'block 2 is next, and "a" has it',
                "holders": [
                    {"dp_rank": 0, "medium": "GPU", "not_counted": None, "runs": [[0, 1]]},
                    {"dp_rank": 0, "medium": "CPU", "not_counted": None, "runs": [[1, 1]]},
                ],
            },
            {
                "instance_id": "a",
                "is_pool": False,
                "longest_matched": 2,
                "note": 'block 1 is next, and "b" has it; 1 of its blocks is behind the missing one and does not count',
                "holders": [{"dp_rank": 0, "medium": "GPU", "not_counted": None, "runs": [[0, 1], [2, 1]]}],
            },
            {
                "instance_id": "c",
                "is_pool": False,
                "longest_matched": 0,
                "note": "it has sent no event, status starting (no connection to tcp://10.0.0.1:5557)",
                "holders": [],
            },
        ],
        "instances_left_out": 0,
        "keys": [f"{key:016x}" for key in extend(None, token_bytes(TOKENS), 2)],
        "rows": [] if store.client.url == "memory://" else [row],  # no redis-cli reaches an emulated Redis
    }


async def test_an_engine_with_other_prompts_is_told_in_a_few_words_and_only_beside_one_with_a_match(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    for name, blocks in (("a", [0]), ("b", [0, 1, 2]), ("c", [0])):
        await register(name)
        await hold(name, [each + (name != "a") for each in TOKENS], blocks=blocks)
    notes = {each["instance_id"]: each["note"] for each in (await inspect(client))["instances"]}
    assert notes["b"] == "none of its 3 blocks is of this prompt"
    assert notes["c"] == "its 1 block is not of this prompt"
    # Of a prompt that nobody has, a sentence says it for all.
    answer = await inspect(client, token_ids=[1, 2, 3, 4])
    assert [each["note"] for each in answer["instances"]] == [None] * 3
    assert answer["reasons"][0].startswith("5 blocks of this model are held, and none begins this prompt")


async def test_an_answer_is_read_back_as_it_was(client: httpx.AsyncClient, held: None) -> None:
    answer = await inspect(client)
    assert plain(parse(InspectAnswer, answer)) == answer


async def test_hashes_tokens_and_msgpack_ask_the_same(client: httpx.AsyncClient, held: None) -> None:
    by_tokens = await inspect(client)
    by_hash = await inspect(client, seq_hashes=extend(None, token_bytes(TOKENS), 2))
    assert by_hash == by_tokens | {"total_tokens": 0}
    packed: bytes = msgpack.packb({"model": "m", "token_ids": token_bytes(TOKENS)})
    answer = await client.post("/inspect/prompt", content=packed, headers={"content-type": "application/msgpack"})
    assert msgpack.unpackb(answer.content) == by_tokens


async def test_a_long_list_of_tokens_is_read_as_a_short_one(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    tokens = list(range(1000, 3400))
    await register("a")
    await hold("a", tokens)
    answer = await inspect(client, token_ids=tokens)
    assert (answer["longest_matched"], answer["instances"][0]["holders"][0]["runs"]) == (2400, [[0, 1200]])
    hashes = extend(None, token_bytes(tokens), 2)
    assert (await inspect(client, seq_hashes=hashes))["longest_matched"] == 2400


async def test_one_instance_and_few_of_them(client: httpx.AsyncClient, held: None) -> None:
    answer = await inspect(client, instance_id="c")
    assert [row["instance_id"] for row in answer["instances"]] == ["c"]
    answer = await inspect(client, top=1)
    assert ([row["instance_id"] for row in answer["instances"]], answer["instances_left_out"]) == (["b"], 2)


async def test_reasons_are_those_of_the_shell(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a", modelname="llama-70b", additionalsalt="sesame")
    await hold("a", TOKENS, salts=("sesame",))
    answer = await inspect(client, model="llama-70b")
    assert answer["reasons"] == ['With the additional salt that "a" is registered with it is held by "a"']
    assert "sesame" not in orjson.dumps(answer).decode()
    answer = await inspect(client, model="llama-70b", lora_name="sql", additional_salt="sesame")
    assert answer["reasons"] == ['With its salts and without an adapter it is held by "a"']
    answer = await inspect(client, model="llama-70b", block_size=4)
    assert answer["instances"][0]["note"] == "it is registered with block size 2, and the query is for 4"
    answer = await inspect(client, model="lama-70b")
    assert answer["reasons"] == ['model "lama-70b" is not registered; did you mean "llama-70b"?']
    assert (answer["instances"], answer["block_size"], answer["keys"]) == ([], None, [])
    answer = await inspect(client, model="llama-70b", token_ids=[1])
    assert answer["reasons"] == ["The prompt has 1 token, less than one block of 2: there is nothing to find"]


async def test_another_tenant_is_never_spoken_of(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a", tenant_id="secret")
    await hold("a", TOKENS, tenant_id="secret")
    alone = await inspect(client)
    assert alone["reasons"] == ['model "m" is not registered; this tenant has no registered model']
    await register("b")
    assert "secret" not in orjson.dumps(await inspect(client)).decode()
    # And the tenant itself is answered as one that is not there.
    assert (await inspect(client, tenant_id="other")) == alone | {"tenant_id": "other"}


async def test_an_unreadable_prompt_is_refused(client: httpx.AsyncClient, register: Register) -> None:
    await register("a")
    for fields, field in (
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [1], "seq_hashes": [1]}, "seq_hashes"),
        ({"top": 0}, "top"),
        ({"block_size": 0}, "block_size"),
    ):
        assert (await inspect(client, 400, **fields))["field"] == field
    await register("b", block_size=4)
    assert (await inspect(client, 400))["field"] == "block_size"


async def test_a_prompt_of_too_many_blocks_is_refused(
    store: Store, make_client: MakeClient, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "BLOCKS_MAX", 8)
    client = await make_client(store)
    await register("a", block_size=1)
    answer = await inspect(client, 413, token_ids=[1] * 9)
    assert answer["error"].startswith("the prompt has 9 blocks, and at most 8 are explained")
    assert (await inspect(client, token_ids=[1] * 8))["total_blocks"] == 8


async def test_an_explanation_has_its_time_and_waits_for_others(
    store: Store, make_client: MakeClient, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "AT_ONCE", 1)
    client = await make_client(store, redis_timeout_seconds=0.05)
    await register("a")
    under_way, most = 0, 0

    async def endless(inspector: Inspector) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.Event().wait()
        finally:
            under_way -= 1

    monkeypatch.setattr(Inspector, "groups", endless)
    async with within(30):
        # A block is looked for in the same places, for no longer.
        block, *answers = await asyncio.gather(
            client.post("/inspect/block", json={"key": "0" * 16}), *(inspect(client, 503) for _ in range(2))
        )
    assert {answer["error"].partition(",")[0] for answer in answers} == {
        "the explanation was not done within 0.125 s; try again"
    }
    assert block.status_code == 503
    assert block.json()["error"].startswith("the inspection was not done within 0.125 s; try again")
    assert most == 1


@pytest.mark.parametrize("step", [32, 512])
async def test_steps_do_not_change_what_is_found(
    step: int, client: httpx.AsyncClient, register: Register, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_STEP_BLOCKS", step)
    tokens = list(range(2400))
    await register("a")
    await hold("a", tokens, blocks=[*range(0, 500), *range(501, 1200)])
    row = (await inspect(client, token_ids=tokens))["instances"][0]
    assert (row["longest_matched"], row["holders"][0]["runs"]) == (1000, [[0, 500], [501, 699]])


# ---- beside other answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/score", "/select"])
async def test_an_answer_with_an_explanation_is_otherwise_the_same(
    path: str, client: httpx.AsyncClient, held: None
) -> None:
    asked: dict[str, Any] = {"model": "m", "block_size": 2}
    asked["seq_hashes" if "hash" in path else "token_ids"] = (
        extend(None, token_bytes(TOKENS), 2) if "hash" in path else TOKENS
    )
    asked |= {"reserve": False} if path == "/select" else {}
    plain = (await client.post(path, json=asked)).json()
    assert "explanation" not in plain
    answer = (await client.post(path, json=asked | {"explain": True})).json()
    explanation = answer.pop("explanation")
    for row in [*answer.get("scores", ()), *([answer["target"]] if "target" in answer else ())]:
        del row["parts"], row["gauges"]
    assert answer == plain
    inspected = await inspect(client, **{name: asked[name] for name in asked if name != "reserve"})
    assert explanation == {name: value for name, value in inspected.items() if name not in ("keys", "rows")}


async def test_a_decision_over_a_prefix_hash_has_nothing_to_explain(client: httpx.AsyncClient, held: None) -> None:
    asked = {"model": "m", "prefix_hash": "00" * 8, "policy": "sticky", "explain": True}
    answer = (await client.post("/score", json=asked)).json()
    assert answer["explanation"]["reasons"] == ["prefix_hash names no blocks, so there is nothing to look up"]


async def test_a_body_that_does_not_fit_gets_the_error_of_its_path(client: httpx.AsyncClient, held: None) -> None:
    asked = {"model": "m", "block_size": 2, "token_ids": [1, "x"], "explain": True}
    with_it = await client.post("/query", json=asked)
    assert with_it.status_code == 400
    assert with_it.json() == (await client.post("/query", json=asked | {"explain": False})).json()
    assert (await client.post("/query", json=asked | {"explain": 1})).json()["field"] == "explain"


async def test_an_explanation_is_refused_while_redis_is_unavailable(away: Store, make_client: MakeClient) -> None:
    client = await make_client(away)
    answer = await client.post("/inspect/prompt", json={"model": "m", "token_ids": TOKENS})
    assert (answer.status_code, answer.json()["reason"]) == (503, "unavailable")


# ---- the note of a query -------------------------------------------------------------------------------


async def test_a_query_that_can_match_nobody_says_so(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    async def note(**fields: Any) -> str | None:
        body = {"model": "m", "block_size": 2, "token_ids": TOKENS} | fields
        answer = await client.post("/query", json=body)
        assert answer.status_code == 200
        said: str | None = answer.headers.get("X-Waymark-Note")
        about = None if said is None else "block_size" if "block_size" in said else "model"
        assert answer.headers.get("X-Waymark-Unknown") == about
        return said

    unknown = "no engine is registered for this model and tenant; POST /inspect/prompt names the models that are"
    assert await note() == unknown
    await register("a")
    await register("b", block_size=16)
    assert await note() is None  # it is registered, and has sent nothing yet
    await hold("a", TOKENS)
    assert await note() is None
    assert await note(token_ids=[1, 2]) is None
    assert await note(block_size=4) == "no engine of this model has block_size 4; they have 2, 16"
    assert await note(block_size=4, instance_id="a") is not None
    assert await note(model="x\r\nSet-Cookie: a") == unknown
    assert await note(tenant_id="t") == unknown
    # A name that is near to a known one is probably a slip.
    await register("c", modelname="llama-3-8b")
    await register("d", modelname="m\N{LATIN SMALL LETTER U WITH DIAERESIS}nchen\n-7b")
    near = "no engine is registered for this model and tenant; did you mean "
    assert await note(model="lama-3-8b") == near + '"llama-3-8b"?'
    assert await note(model="muenchen\n-7b") == near + r'"m\u00fcnchen\n-7b"?'
    await register("e", modelname="base", type="none", endpoint=None, lora_name="another-name")
    assert await note(model="another-name") == near + '"base"?', "which queries do not resolve"
    assert await note(model="lama-3-8b", tenant_id="t") == unknown, "another tenant's names are not told"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/inspect/status", None),
        ("POST", "/inspect/block", {"key": "0" * 16}),
        ("POST", "/inspect/holder", {"holder": 1}),
        ("POST", "/inspect/keys", {}),
    ],
)
async def test_what_shows_the_whole_installation_needs_the_token_even_where_reads_do_not(
    store: Store, make_client: MakeClient, method: str, path: str, body: Any
) -> None:
    client = await make_client(store, api_token="sesame")
    assert (await client.get("/workers")).status_code == 200
    assert (await client.request(method, path, json=body)).status_code == 401
    told = await client.request(method, path, json=body, headers={"Authorization": "Bearer sesame"})
    assert told.status_code in (200, 404)

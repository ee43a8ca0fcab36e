"""Text in: a chat request of OpenAI's form in /query, /tokenize and /detokenize, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from aiohttp import web

from tests.api.conftest import Hold, MakeClient
from tests.conftest import wait_until
from tests.tokenization import small
from waymark.api import first as first_questions
from waymark.api.application import create_app
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.selector import Selector
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.multimodal import PromptItem, seq_hashes_with
from waymark.domain.packing import pack_tokens
from waymark.runtime import parts
from waymark.store.store import Store
from waymark.tokenization import tokenizers as face
from waymark.tokenization.prompt import Prompt, TokenizedPrompt
from waymark.tokenization.tokenizers import Tokenizers

# Chat templates are rendered in a process of their own.
pytestmark = pytest.mark.outside

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather in Paris?"}]
TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHAT = {"model": "m", "messages": MESSAGES, "temperature": 0.2, "stream": True, "max_tokens": 100}


def ids(text: str, *, adds: bool = True) -> list[int]:
    found: list[int] = small.tokenizer().encode(text, add_special_tokens=adds).ids
    return found


@pytest.fixture
def models(tmp_path: Path) -> Path:
    small.directory(tmp_path / "m", template=small.CHATML)
    return tmp_path


@pytest.fixture
async def client(store: Store, make_client: MakeClient, models: Path) -> httpx.AsyncClient:
    return await make_client(store, tokenizers_dir=models)


@pytest.fixture
async def api(memory_store: Store, make_client: MakeClient, models: Path) -> httpx.AsyncClient:
    return await make_client(memory_store, tokenizers_dir=models)


async def test_a_chat_request_gets_the_rows_of_its_tokens(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]], hold: Hold
) -> None:
    await register("one")
    await hold("one", ids(TEXT, adds=False))
    await register("two")
    await hold("two", ids(TEXT))
    for body, best in ((CHAT, "one"), ({"model": "m", "prompt": TEXT}, "two")):
        tokens = ids(TEXT, adds=best == "two")
        by_text = await client.post("/query", json=body | {"block_size": 2})
        by_tokens = await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": tokens})
        packed = await client.post(
            "/query",
            content=msgpack.packb(body | {"block_size": 2}),
            headers={"Content-Type": "application/msgpack"},
        )
        assert by_text.status_code == 200, by_text.text
        in_msgpack = msgpack.unpackb(packed.content)
        assert in_msgpack.pop("instances").keys() == {"one", "two"}
        assert by_text.json() == by_tokens.json() == in_msgpack
        assert by_text.json()["default"][best]["GPU"] == len(tokens) // 2 * 2


async def test_tokens_are_answered_in_the_shape_of_vllm(api: httpx.AsyncClient) -> None:
    answer = await api.post("/tokenize", json={"model": "m", "prompt": "Hello"})
    expected = {"count": len(ids("Hello")), "max_model_len": None, "tokens": ids("Hello"), "source": "local"}
    assert answer.json() == expected
    assert (await api.post("/tokenize", json=CHAT)).json()["tokens"] == ids(TEXT, adds=False)
    bare = await api.post("/tokenize", json={"model": "m", "prompt": "Hello", "add_special_tokens": False})
    assert bare.json()["tokens"] == ids("Hello", adds=False)
    for tokens in (ids("Hello"), ids("Hello") * 200):
        text = await api.post("/detokenize", json={"model": "m", "tokens": tokens})
        assert text.json() == {"prompt": (small.BOS + "Hello") * (len(tokens) // len(ids("Hello")))}
    body = msgpack.packb({"model": "m", "tokens": pack_tokens(ids("Hello"))})
    text = await api.post("/detokenize", content=body, headers={"Content-Type": "application/msgpack"})
    assert msgpack.unpackb(text.content) == {"prompt": small.BOS + "Hello"}


#: Fields, and the status, the reason and the field of their refusal.
UNFIT: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "m", "prompt": 1}, 400, "invalid_type", "prompt"),
    ({"model": "m", "messages": "Hi"}, 400, "invalid_type", "messages"),
    ({"model": "m", "messages": [], "system": 1}, 400, "invalid_type", "system"),
    ({"model": "m", "messages": [], "system": [{"type": "image"}]}, 400, "invalid_value", "system"),
    ({"model": "m", "messages": [{}]}, 400, "invalid_value", "messages"),
    ({"model": "m", "messages": [], "chat_template_kwargs": {"tools": 1}}, 400, "invalid_value", None),
    ({"model": "m", "prompt": "Hi", "messages": []}, 400, "invalid_value", "messages"),
    ({"model": "m", "prompt": "x" * 2000}, 413, "too_large", "prompt"),
    ({"model": "m", "prompt": None}, 400, "missing", None),
]


@pytest.mark.parametrize("path", ["/query", "/tokenize", "/score", "/select"])
async def test_a_prompt_that_does_not_fit_is_refused(
    memory_store: Store, make_client: MakeClient, models: Path, path: str
) -> None:
    api = await make_client(memory_store, tokenizers_dir=models, max_tokens=1024)
    for fields, status, reason, field in UNFIT:
        answer = await api.post(path, json=fields | {"block_size": 2})
        assert (answer.status_code, answer.json()["reason"]) == (status, reason), answer.text
        if field is not None:
            assert answer.json()["field"] == field, fields


PROMPTS: dict[str, Any] = {
    "token_ids": [1] * 5000,
    "seq_hashes": [1] * 10,
    "prompt": "Hi",
    "messages": MESSAGES,
    "prefix_hash": "ab" * 32,
}
TAKEN = {
    "/query": ("token_ids", "seq_hashes", "prompt", "messages"),
    "/query_by_hash": ("seq_hashes", "token_ids", "prompt", "messages"),
    "/score": tuple(PROMPTS),
    "/select": tuple(PROMPTS),
    "/tokenize": ("prompt", "messages"),
}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (path, pair)
        for path, names in TAKEN.items()
        for pair in combinations(names, 2)
        if path != "/query_by_hash" or "seq_hashes" in pair
    ],
)
async def test_a_body_has_one_prompt(api: httpx.AsyncClient, path: str, names: tuple[str, str]) -> None:
    body = {"model": "m", "block_size": 2} | {name: PROMPTS[name] for name in names}
    answer = await api.post(path, json=body)
    assert (answer.status_code, answer.json()["reason"]) == (400, "invalid_value"), answer.text
    assert answer.json()["field"] in names
    assert all(word in answer.json()["error"] for word in ("one prompt", *names))


@pytest.mark.parametrize("path", TAKEN)
async def test_a_body_without_a_prompt_is_told_what_it_may_send(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.post(path, json={"model": "m", "block_size": 2})
    assert (answer.status_code, answer.json()["reason"]) == (400, "missing")
    assert TAKEN[path][0] in answer.json()["error"]


async def test_decisions_take_a_text_as_they_take_its_tokens(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]], hold: Hold
) -> None:
    for name in ("one", "two"):
        await register(name)
    await hold("one", ids(TEXT, adds=False))
    await hold("two", ids(TEXT))
    for body, best, tokens in (
        (CHAT, "one", ids(TEXT, adds=False)),
        ({"model": "m", "prompt": TEXT}, "two", ids(TEXT)),
    ):
        by_text = (await client.post("/score", json=body)).json()
        assert by_text == (await client.post("/score", json={"model": "m", "token_ids": tokens})).json()
        assert by_text["total_tokens"] == len(tokens)
        assert by_text["scores"][0]["instance_id"] == best
        selected = (await client.post("/select", json=body)).json()
        assert selected["target"]["instance_id"] == best
        assert selected["target"]["device_tokens"] == len(tokens) // 2 * 2
        await client.post("/release", json={"reservation": selected["reservation"]})


async def test_messages_give_a_sticky_decision_its_prefix_key_and_need_no_tokenizer(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]]
) -> None:
    await register("one")
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    keys = set()
    for fields in (
        {"messages": [{"role": "user", "content": "hello"}], "system": "be brief"},
        {"messages": parts, "system": [{"type": "text", "text": "be brief"}]},
        {"messages": [{"role": "system", "content": "be brief"}, *parts]},
    ):
        body = {"model": "m", "policy": "sticky", "reserve": False} | fields
        for each in (body, body | {"policy": "least-work"}):
            answer = await client.post("/select", json=each)
            assert answer.status_code == 200, answer.text
            keys.add(answer.json()["prefix_key"])
        refused = await client.post("/select", json=body | {"model": "unknown"})
        assert refused.json()["reason"] == "not_found", "not for a tokenizer"
    assert keys == {sha256(b"m\0Sbe brief").hexdigest()}


async def test_a_system_is_the_first_message(api: httpx.AsyncClient) -> None:
    user = MESSAGES[1:]
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        answer = await api.post("/tokenize", json={"model": "m", "messages": user, "system": system})
        assert answer.json()["tokens"] == ids(TEXT, adds=False)
    nothings: list[Any] = ["", [], None]
    for nothing in nothings:
        answer = await api.post("/tokenize", json={"model": "m", "messages": MESSAGES, "system": nothing})
        assert answer.json()["tokens"] == ids(TEXT, adds=False)


async def test_without_redis_messages_select_by_their_prefix(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"type": "none", "model": "m", "block_size": 2, "instance_id": "one"}
    assert (await api.post("/register", json=fields)).status_code == 200
    assert (await api.post("/select", json={"model": "m", "token_ids": [1, 2]})).status_code == 200

    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("Redis is away")

    monkeypatch.setattr(Selector, "_select", away)
    for body in (CHAT, {"model": "m", "prompt": TEXT}):
        answer = await api.post("/select", json=body)
        assert (answer.status_code, answer.json()["degraded"]) == (200, True), answer.text
        assert answer.json()["prefix_key"] is not None


async def test_a_query_without_a_block_size_takes_that_of_the_engines(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]], hold: Hold
) -> None:
    body = {"model": "m", "token_ids": [1, 2, 3, 4, 5]}
    hashes = {"model": "m", "seq_hashes": extend(None, token_bytes([1, 2, 3, 4, 5]), 2)}
    assert (await client.post("/query", json=body)).json() == {}
    await register("other", modelname="other")
    assert (await client.post("/query", json=body)).json() == {"default": {}}
    await register("one")
    await hold("one", [1, 2, 3, 4])
    await register("pool", type="Mooncake", block_size=3)
    for path, asked in (("/query", body), ("/query", hashes), ("/query_by_hash", hashes)):
        answer = (await client.post(path, json=asked)).json()
        assert answer == (await client.post(path, json=asked | {"block_size": 2})).json()
        assert answer["default"]["one"]["GPU"] == 4
    await register("two", block_size=4)
    for path, asked in (("/query", body), ("/query_by_hash", hashes)):
        await refused_for_two_sizes(client, path, asked)
    rows = (await client.post("/query", json=body | {"block_size": 4})).json()["default"]
    assert (rows["one"]["GPU"], rows["two"]["GPU"]) == (0, 0)


async def refused_for_two_sizes(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["reason"], answer.json()["field"]) == (400, "missing", "block_size")
    assert "2, 4" in answer.json()["error"]


async def test_without_a_tokenizer_the_refusal_names_model_and_setting(
    memory_store: Store, make_client: MakeClient
) -> None:
    api = await make_client(memory_store)
    for path in ("/query", "/tokenize"):
        answer = await api.post(path, json=CHAT)
        assert (answer.status_code, answer.json()["reason"]) == (400, "no_tokenizer")
        named = ('"m"', "WAYMARK_TOKENIZERS", "waymark register URL")
        assert all(word in answer.json()["error"] for word in named)


@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"prompt": "Be brief. " * 40}])
async def test_without_a_tokenizer_the_prefix_decides(
    memory_store: Store, make_client: MakeClient, fields: dict[str, Any]
) -> None:
    """Equal beginnings go to one target, of which the others are told apart by their load."""
    metrics = Metrics()
    api = await make_client(memory_store, metrics=metrics)
    for path in ("/score", "/select"):
        nobody = await api.post(path, json=fields | {"model": "m"})
        assert nobody.status_code == (200 if path == "/score" else 404), nobody.text
    for name in ("one", "two", "three", "four"):
        body = {"type": "none", "model": "m", "instance_id": name, "block_size": 2}
        assert (await api.post("/register", json=body)).status_code == 200
    ranked = (await api.post("/score", json=fields | {"model": "m"})).json()
    assert (ranked["decision"], len(ranked["scores"])) == ("prefix", 4)
    assert ranked["total_tokens"] > 0, "its length is estimated"
    seen = set()
    for _ in range(4):
        selected = (await api.post("/select", json=fields | {"model": "m"})).json()
        assert (selected["decision"], len(selected["prefix_key"])) == ("prefix", 64)
        await api.post("/release", json={"reservation": selected["reservation"]})
        seen.add(selected["target"]["instance_id"])
    assert seen == {ranked["scores"][0]["instance_id"]}
    assert metrics.decisions_without_tokens.labels(reason="no_tokenizer").value == 7


async def test_texts_under_way_hold_up_no_query_of_tokens(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests work at a time; more texts than that wait here for a tokenizer that does not answer."""
    may_answer = asyncio.Event()
    asked = 0

    class Slow:
        kind = "local"
        name = "slow"

        def key(self, _: Prompt) -> bytes | None:
            return None

        async def tokens(self, _: Prompt, key: bytes | None = None) -> TokenizedPrompt:
            nonlocal asked
            asked += 1
            await may_answer.wait()
            return TokenizedPrompt(b"")

        async def close(self) -> None:
            may_answer.set()

    monkeypatch.setattr(Tokenizers, "_opened", lambda *_: Slow())
    monkeypatch.setattr(face, "SECONDS", 600.0)
    monkeypatch.setattr(first_questions, "AT_ONCE", 2)
    api = await make_client(memory_store, tokenizers={"m": "file:///m"})
    body = {"model": "m", "block_size": 2}
    # A model has at most three times as many places as are free.
    of_a_model = face.UNDER_WAY_MAX * 3 // 4
    texts = [
        asyncio.create_task(api.post("/query", json=body | {"prompt": str(number)})) for number in range(of_a_model)
    ]
    await wait_until(lambda: asked == of_a_model, "as many texts as may be are under way")
    assert (await api.post("/query", json=body | {"token_ids": [1, 2]})).status_code == 200
    refused = await api.post("/query", json=body | {"prompt": "one more"})
    assert (refused.status_code, refused.json()["reason"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "1"
    may_answer.set()
    assert {answer.status_code for answer in await asyncio.gather(*texts)} == {200}


# ---- images ----------------------------------------------------------------------------------------


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


FEATURES = {"mm_hashes": {"image": ["cat"]}, "mm_placeholders": {"image": [{"offset": 5, "length": 3}]}}


async def test_features_find_the_blocks_of_their_images_and_no_others(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]], store: Store
) -> None:
    """Events of a prompt with an image, as an engine publishes them, and queries of it."""
    tokens = [1, 2, 3, 4, 5, 9, 9, 9, 6, 7]
    await register("one", type="standard", endpoint=None)
    found = seq_hashes_with((PromptItem(5, 3, "cat"),), None, token_bytes(tokens), 2)
    event = {"event_id": 1, "event_type": "stored", "backend_id": "one", "base_block_idx": 0, "seq_hashes": found}
    assert (await client.post("/events", json=event)).status_code == 200

    async def matched(path: str = "/query", **fields: Any) -> int:
        answer = await client.post(path, json={"model": "m", "token_ids": tokens, **fields})
        assert answer.status_code == 200, answer.text
        if path == "/query":
            return int(answer.json()["default"]["one"]["longest_matched"])
        row = answer.json()["scores"][0] if path == "/score" else answer.json()["target"]
        return int(row["device_tokens"])

    other = {"mm_hashes": {"image": ["dog"]}, "mm_placeholders": FEATURES["mm_placeholders"]}
    moved = {"mm_hashes": FEATURES["mm_hashes"], "mm_placeholders": {"image": [{"offset": 4, "length": 3}]}}
    for path in ("/query", "/score", "/select"):
        assert await matched(path, features=FEATURES) == 10
        for wrong in (None, other, moved):
            assert await matched(path, features=wrong) == 4
        for fields in ({"features": {"mm_hashes": 1}}, {"features": FEATURES, "token_ids": None, "seq_hashes": [1]}):
            refused = await client.post(path, json={"model": "m", "token_ids": tokens} | fields)
            assert (refused.status_code, refused.json()["field"]) == (400, "features")
    assert await matched(token_ids=tokens * 600, features=FEATURES) == 10, "a long list is read without the parser"


async def test_messages_with_an_image_match_up_to_it(
    client: httpx.AsyncClient, register: Callable[..., Awaitable[None]], hold: Hold
) -> None:
    """And never further, whatever an engine may hold of the text that follows."""
    await register("one")
    before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>"
    texts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    without = [MESSAGES[0], {"role": "user", "content": texts}]
    for part in ("a.png", "b.png"):
        messages = [MESSAGES[0], {"role": "user", "content": [texts[0], image(part), texts[1]]}]
        answer = await client.post("/tokenize", json={"model": "m", "messages": messages})
        assert answer.json()["tokens"] == ids(before, adds=False)
        whole = (await client.post("/tokenize", json={"model": "m", "messages": without})).json()["tokens"]
        await hold("one", whole)
        row = (await client.post("/query", json={"model": "m", "messages": messages})).json()["default"]["one"]
        assert row["GPU"] == len(ids(before, adds=False)) // 2 * 2


# ---- engines as a source ---------------------------------------------------------------------------


@pytest.mark.outside
@pytest.mark.parametrize("is_named", [True, False], ids=["by-setting", "by-default"])
async def test_a_text_goes_to_an_engine_of_its_own_tenant_and_model(memory_store: Store, *, is_named: bool) -> None:
    asked: list[tuple[str, str]] = []

    async def tokenize(request: web.Request) -> web.StreamResponse:
        asked.append((request.match_info["name"], (await request.json())["model"]))
        return web.json_response({"tokens": [1, 2, 3, 4]})

    application = web.Application()
    application.router.add_post("/{name}/tokenize", tokenize)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    options, metrics = Settings(tokenizers={"m": "engine:"} if is_named else {}), Metrics()
    tokenizers = parts.tokenizers(options, metrics, memory_store)
    app = create_app(memory_store, parts.api_options(options), parts.selection_options(options), metrics, tokenizers)
    api = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark")
    nobody = await api.post("/query", json=CHAT)
    expected = (503, "unavailable") if is_named else (400, "no_tokenizer")
    assert (nobody.status_code, nobody.json()["reason"]) == expected
    assert "registered with an address" in nobody.json()["error"]
    for tenant in ("a", "b"):
        address = f"http://{host}:{port}/{tenant}"
        fields = {"type": "none", "model": "m", "instance_id": tenant, "block_size": 2, "address": address}
        assert (await api.post("/register", json=fields | {"tenant_id": tenant})).status_code == 200

    # Nobody had an address a moment ago: what was acknowledged is known at once.
    assert (await api.post("/tokenize", json=CHAT | {"tenant_id": "b"})).status_code == 200
    assert (await api.post("/query", json=CHAT | {"tenant_id": "a"})).json() == {
        "a": {"a": {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}}
    }
    assert asked == [("b", "m"), ("a", "m")]
    await runner.cleanup()
    # What could not answer is not asked again at once: a decision that waited for it would be slow each time.
    for _ in range(3):
        refused = await api.post("/query", json=CHAT | {"tenant_id": "a"})
        assert (refused.status_code, refused.json()["reason"]) == (503, "unavailable")
    assert "a moment ago" in refused.json()["error"]
    selected = await api.post("/select", json=CHAT | {"tenant_id": "a", "policy": "least-work"})
    assert (selected.status_code, selected.json()["decision"]) == (200, "prefix"), selected.text
    await tokenizers.close()
    await api.aclose()


async def test_ready_and_a_metric_name_a_tokenizer_whose_texts_are_not_split(
    memory_store: Store, make_client: MakeClient, models: Path
) -> None:
    small.directory(models / "whole", "metaspace-first", template=small.CHATML)
    client = await make_client(memory_store, tokenizers_dir=models)
    for model, number in (("m", "0.0"), ("whole", "1.0")):
        answer = await client.post("/tokenize", json={"model": model, "messages": MESSAGES})
        assert answer.status_code == 200, answer.text
        warnings = (await client.get("/ready")).json().get("warnings", [])
        named = [
            each for each in warnings if each.startswith("the tokenizer file:") and "encodes each text whole" in each
        ]
        assert len(named) == int(float(number))
        assert all('of the model "whole"' in each and str(models / "whole") in each for each in named)
        assert f"waymark_tokenizers_whole {number}" in (await client.get("/metrics")).text

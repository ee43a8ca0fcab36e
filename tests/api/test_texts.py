"""Text in: a chat request of OpenAI's form in /query, /tokenize and /detokenize, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.conftest import wait_until
from tests.tokenization import small
from waymark.domain.hashing import pack_tokens
from waymark.store.store import Store
from waymark.tokenization import tokenizers as face
from waymark.tokenization.prompt import Prompt
from waymark.tokenization.tokenizers import Tokenizers

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
        assert by_text.json() == by_tokens.json() == msgpack.unpackb(packed.content)
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


@pytest.mark.parametrize("path", ["/query", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "status", "reason", "field"),
    [
        ({"model": "x", "prompt": "Hi"}, 400, "no_tokenizer", "model"),
        ({"model": "m", "prompt": 1}, 400, "invalid_type", "prompt"),
        ({"model": "m", "messages": "Hi"}, 400, "invalid_type", "messages"),
        ({"model": "m", "messages": [{}]}, 400, "invalid_value", "messages"),
        ({"model": "m", "messages": [], "chat_template_kwargs": {"tools": 1}}, 400, "invalid_value", None),
        ({"model": "m", "prompt": "Hi", "messages": []}, 400, "invalid_value", "messages"),
        ({"model": "m", "prompt": "x" * 2000}, 413, "too_large", "prompt"),
        ({"model": "m", "prompt": None}, 400, "missing", None),
    ],
)
async def test_a_prompt_that_does_not_fit_is_refused(
    memory_store: Store,
    make_client: MakeClient,
    models: Path,
    path: str,
    fields: dict[str, Any],
    status: int,
    reason: str,
    field: str | None,
) -> None:
    api = await make_client(memory_store, tokenizers_dir=models, text_bytes_max=1024)
    answer = await api.post(path, json=fields | {"block_size": 2})
    assert (answer.status_code, answer.json()["reason"]) == (status, reason), answer.text
    if field is not None:
        assert answer.json()["field"] == field


@pytest.mark.parametrize("count", [1, 5000])
@pytest.mark.parametrize("name", ["prompt", "messages"])
async def test_token_ids_beside_a_text_are_refused(api: httpx.AsyncClient, count: int, name: str) -> None:
    prompt: Any = "Hi" if name == "prompt" else MESSAGES
    body = {"model": "m", "block_size": 2, "token_ids": [1] * count, name: prompt}
    answer = await api.post("/query", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, name)
    assert "one prompt" in answer.json()["error"]


async def test_without_a_tokenizer_the_refusal_names_model_and_setting(
    memory_store: Store, make_client: MakeClient
) -> None:
    api = await make_client(memory_store)
    answer = await api.post("/query", json=CHAT | {"block_size": 2})
    assert answer.status_code == 400
    assert all(word in answer.json()["error"] for word in ('"m"', "WAYMARK_TOKENIZERS"))


async def test_texts_under_way_hold_up_no_query_of_tokens(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen requests work at a time; more texts than that wait here for a tokenizer that does not answer."""
    may_answer = asyncio.Event()
    asked = 0

    class Slow:
        kind = "local"
        name = "slow"

        def known(self, _: Prompt) -> bytes | None:
            return None

        async def tokens(self, _: Prompt) -> bytes:
            nonlocal asked
            asked += 1
            await may_answer.wait()
            return b""

    monkeypatch.setattr(Tokenizers, "_opened", lambda *_: Slow())
    monkeypatch.setattr(face, "SECONDS", 600.0)
    api = await make_client(memory_store, tokenizers={"m": "file:///m"}, requests_at_once=2)
    body = {"model": "m", "block_size": 2}
    texts = [
        asyncio.create_task(api.post("/query", json=body | {"prompt": str(number)}))
        for number in range(face.UNDER_WAY_MAX)
    ]
    await wait_until(lambda: asked == face.UNDER_WAY_MAX, "as many texts as may be are under way")
    assert (await api.post("/query", json=body | {"token_ids": [1, 2]})).status_code == 200
    refused = await api.post("/query", json=body | {"prompt": "one more"})
    assert (refused.status_code, refused.json()["reason"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "1"
    may_answer.set()
    assert {answer.status_code for answer in await asyncio.gather(*texts)} == {200}

"""Hostile texts at every door that accepts text: each costs its sender a refusal, and nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from tests.api.conftest import MakeClient
from tests.tokenization import small
from waymark.store.store import Store

pytestmark = pytest.mark.slow

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% for a in range(9999) %}{{ messages[0].content * 99 }}{% endfor %}"
DOORS = ("/query", "/score", "/select", "/tokenize")
TEXT_BYTES_MAX = 2**18
SOUND = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
JSON, MSGPACK = "application/json", "application/msgpack"


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def said(content: Any, model: str = "m") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}]}


#: The body, and the status and the reason of its refusal.
REFUSED: Mapping[str, tuple[bytes, str, int, str]] = {
    "one character, a prompt": (orjson.dumps({"model": "m", "prompt": "a" * 2**20}), JSON, 413, "too_large"),
    "one character, a message": (orjson.dumps(said("a" * 2**20)), JSON, 413, "too_large"),
    "one character of four bytes": (orjson.dumps(said("🙂" * (TEXT_BYTES_MAX // 4))), JSON, 413, "too_large"),
    "one character, many messages": (
        orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * 2**14}),
        JSON,
        413,
        "too_large",
    ),
    "parts in parts": (orjson.dumps(said(nested(200, "a"))), JSON, 400, "invalid_value"),
    "parts in parts, too deep for a parser": (
        b'{"model": "m", "messages": [{"role": "user", "content": %b%b}]}' % (b"[" * 9999, b"]" * 9999),
        JSON,
        400,
        "invalid_json",
    ),
    "arguments in arguments": (
        orjson.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99_999}}]}
                ],
            }
        ),
        JSON,
        400,
        "invalid_value",
    ),
    "half a surrogate pair": (b'{"model": "m", "prompt": "a\\ud800"}', JSON, 400, "invalid_json"),
    "half a surrogate pair in a message": (
        b'{"model": "m", "messages": [{"role": "user", "content": "\\udc00"}]}',
        JSON,
        400,
        "invalid_json",
    ),
    "half a surrogate pair in msgpack": (
        msgpack.packb({"model": "m", "prompt": "a\ud800"}, unicode_errors="surrogatepass"),
        MSGPACK,
        400,
        "invalid_msgpack",
    ),
    "bytes in a message": (msgpack.packb(said([{"type": "text", "text": b"a"}])), MSGPACK, 400, "invalid_value"),
    "a template that loops": (orjson.dumps(said("a", "loops")), JSON, 400, "invalid_value"),
    "a template that grows": (orjson.dumps(said("a" * 9999, "grows")), JSON, 413, "too_large"),
}


@pytest.fixture
async def api(memory_store: Store, make_client: MakeClient, tmp_path: Path) -> httpx.AsyncClient:
    for model, template in (("m", small.CHATML), ("loops", LOOPS), ("grows", GROWS)):
        small.directory(tmp_path / model, template=template)
    return await make_client(memory_store, tokenizers_dir=tmp_path, max_tokens=TEXT_BYTES_MAX)


@pytest.mark.parametrize("door", DOORS)
async def test_its_sender_is_refused_and_nobody_else(api: httpx.AsyncClient, door: str) -> None:
    for name, (body, media_type, status, reason) in REFUSED.items():
        hostile = [api.post(door, content=body, headers={"Content-Type": media_type}) for _ in range(2)]
        sound = [api.post("/tokenize", json=SOUND) for _ in range(2)]
        *refused, one, two = await asyncio.gather(*hostile, *sound)
        for answer in refused:
            told = msgpack.unpackb(answer.content) if media_type == MSGPACK else answer.json()
            assert (answer.status_code, told["reason"]) == (status, reason), (name, told)
            assert len(told["error"]) < 500, name
        assert one.status_code == two.status_code == 200, name
        assert one.json() == two.json(), name


@pytest.mark.parametrize("door", DOORS)
async def test_a_long_text_of_one_character_that_may_be_sent_is_answered(
    memory_store: Store, make_client: MakeClient, tmp_path: Path, door: str
) -> None:
    small.directory(tmp_path / "m", template=small.CHATML)
    api = await make_client(memory_store, tokenizers_dir=tmp_path)
    # Without an engine there is nobody to select, which is said after the tokens were made.
    answer = await api.post(door, json={"model": "m", "prompt": "a" * 2**17})
    assert answer.status_code == (404 if door == "/select" else 200), answer.text
    assert answer.json().get("reason") == ("not_found" if door == "/select" else None)

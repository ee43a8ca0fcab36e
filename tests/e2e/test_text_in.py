"""A chat request of OpenAI's form, pasted into /query of a running service."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import wait_until
from tests.live import start
from tests.tokenization import small
from waymark.domain.hashing import extend, token_bytes

CHAT = {
    "model": "llama",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]},
    ],
    "temperature": 0.2,
    "max_tokens": 100,
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


async def test_a_chat_request_gets_rows(redis_url: str, tmp_path: Path) -> None:
    small.directory(tmp_path / "models" / "llama", template=small.CHATML)
    tokens = small.tokenizer().encode(TEXT, add_special_tokens=False).ids
    publisher = {"type": "standard", "model": "llama", "instance_id": "pod", "block_size": 4}
    async with (
        start("serve", redis_url, tmp_path / "log", tokenizers_dir=str(tmp_path / "models")) as live,
        live.client() as client,
    ):
        assert (await client.post("/register", json=publisher)).status_code == 200
        event = {"event_id": 1, "event_type": "stored", "backend_id": "pod", "base_block_idx": 0}
        event |= {"seq_hashes": extend(None, token_bytes(tokens), 4)}

        async def is_applied() -> bool:
            return (await client.post("/events", json=event)).status_code == 200

        await wait_until(is_applied, "the event is applied")
        answer = await client.post("/query", json=CHAT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["default"]["pod"]["longest_matched"] == len(tokens) // 4 * 4


async def test_without_a_tokenizer_the_error_names_model_and_setting(redis_url: str, tmp_path: Path) -> None:
    async with start("query", redis_url, tmp_path / "log") as live, live.client() as client:
        answer = await client.post("/query", json=CHAT)
    assert (answer.status_code, answer.json()["reason"], answer.json()["field"]) == (400, "no_tokenizer", "model")
    assert all(word in answer.json()["error"] for word in ('"llama"', "WAYMARK_TOKENIZERS", "WAYMARK_TOKENIZERS_DIR"))

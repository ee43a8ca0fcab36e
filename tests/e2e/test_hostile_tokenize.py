"""An engine that answers a text with millions of ids, or with other millions, holds up no client of the replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import orjson

from tests.conftest import wait_until
from tests.e2e.test_hostile_metrics import held_up_nobody
from tests.e2e.test_hostile_template import MEMORY_KIB, peak_kib
from tests.hostile.raw_server import Pieces, RawServer, http
from tests.listening import listening, port_of
from tests.live import Live, start

#: The longest text that is taken by default, and as many ids as it can have.
TEXT = "a" * 2**21
_MB = 1_000_000


def tokens(content: bytes, more: bytes = b"null") -> bytes:
    return b'{"count": 1, "tokens": [%b], "more": %b}' % (content, more)


#: An answer, made when it is asked for, and the status for the client.
ANSWERS: dict[str, tuple[Callable[[], bytes], int]] = {
    "as many ids as the text can have": (lambda: tokens(b", ".join([b"4294967295"] * len(TEXT))), 200),
    "30 MB of ids": (lambda: tokens(b",".join([b"1234567"] * (30 * _MB // 8))), 503),
    "24 MB of short ids": (lambda: tokens(b",".join([b"1"] * (12 * _MB))), 503),
    "24 MB of lists": (lambda: tokens(b"1", b"[%b[]]" % (b"[]," * (8 * _MB))), 503),
    "24 MB of numbers elsewhere": (lambda: tokens(b"1", b"[%b1]" % (b"1," * (12 * _MB))), 503),
    "24 MB of a text": (lambda: tokens(b"1", b'"%b"' % (b"x" * 24 * _MB)), 200),
}


async def test_a_long_answer_of_a_tokenizer_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    answer = b""

    def answered(path: str, body: bytes) -> Pieces:
        assert path == "/tokenize"
        return [answer[start : start + 2**16] for start in range(0, len(answer), 2**16)]

    async with listening(RawServer(answered).handler) as server:
        tokenizers = {"text": f"http://127.0.0.1:{port_of(server)}"}
        async with start("query", redis_url, tmp_path / "log", tokenizers=orjson.dumps(tokenizers).decode()) as live:
            for name, (content, status) in ANSWERS.items():
                answer = http(content())
                received = await held_up_nobody(ask(live, name), redis_url, live)
                assert received.status_code == status, f"{name}: {received.text}"
            assert 0 < peak_kib(live.pid) <= MEMORY_KIB


async def ask(live: Live, name: str) -> httpx.Response:
    """Return the answer. It is asked for again if a busy machine did not give the time for it."""
    answers: list[httpx.Response] = []

    async def is_in_time() -> bool:
        answers.append(await client.post("/query", json={"model": "text", "block_size": 16, "prompt": TEXT}))
        return " within " not in answers[-1].text

    async with live.client() as client:
        await wait_until(is_in_time, lambda: answers[-1].text)
    return answers[-1]

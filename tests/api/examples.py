"""The examples of the contract: one session that asks each path once, with its answers.

``python -m tests.api.examples`` writes them into ``app/waymark/api/examples.json``, which ``/openapi.json`` and
``/docs`` show. A test asks again and compares.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.tokenization import small
from waymark import __version__
from waymark.api.application import create_app
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.domain.hashing import extend, token_bytes
from waymark.runtime import parts
from waymark.store.store import Store

FILE = Path(__file__).parents[2] / "app" / "waymark" / "api" / "examples.json"
MODEL = "llama"
TOKENS = [101, 15, 100, 55, 89, 63, 7, 12]
PROMPT = {"model": MODEL, "token_ids": TOKENS}
ENGINE = {
    "type": "vLLM",
    "endpoint": "tcp://10.0.0.7:5557",
    "replay_endpoint": "tcp://10.0.0.7:5657",
    "snapshot_endpoint": "tcp://10.0.0.7:5757",
    "modelname": MODEL,
    "instance_id": "vllm-0",
    "block_size": 4,
}
STANDARD = {"type": "standard", "modelname": MODEL, "instance_id": "engine-1", "block_size": 4}
HASHES = [str(each) for each in extend(None, token_bytes(TOKENS), 4)]
LOCAL = [extend(None, token_bytes(part), 4)[0] for part in (TOKENS[:4], TOKENS[4:])]
STORED = {
    "event_id": 1,
    "event_type": "stored",
    "backend_id": "engine-1",
    "model_name": MODEL,
    "block_size": 4,
    "token_ids": TOKENS[:4],
    "seq_hashes": HASHES[:1],
    "base_block_idx": 0,
    "medium": "gpu",
    "dp_rank": 0,
    "timestamp": 1760000000.5,
}
WORKER = {
    "worker_id": 7,
    "endpoint": "http://10.0.0.9:8000",
    "model_name": MODEL,
    "block_size": 4,
    "kv_events_endpoint": "tcp://10.0.0.9:5557",
}
OF_DYNAMO = {"model_name": MODEL, "token_ids": TOKENS}
BY_HASH = {"model_name": MODEL, "block_hashes": LOCAL}
PEER = {"url": "http://10.0.0.3:13333"}

#: Method, path and body, in an order in which each request finds what it needs. ``{...}`` names what came before.
STEPS: list[tuple[str, str, Any]] = [
    ("POST", "/register", ENGINE),
    ("POST", "/register", STANDARD),
    ("POST", "/events", STORED),
    ("GET", "/admin/prefix-routing/stats", None),
    ("GET", "/admin/kv-index/stats", None),
    ("GET", "/admin/kv-index/backends", None),
    ("POST", "/query", PROMPT | {"block_size": 4}),
    ("POST", "/query_by_hash", {"model": MODEL, "block_size": 4, "seq_hashes": HASHES}),
    ("POST", "/inspect/prompt", PROMPT),
    ("POST", "/score", PROMPT),
    ("POST", "/select", PROMPT),
    ("POST", "/release", {"reservation": "{reservation}", "cached_tokens": 4, "prompt_tokens": 8}),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "What is the weather in Paris?"}),
    ("POST", "/detokenize", {"model": MODEL, "tokens": "{tokens}"}),
    ("GET", "/inspect/status", None),
    ("POST", "/inspect/block", {"key": f"{int(HASHES[0]) % 2**64:016x}"}),
    ("POST", "/inspect/holder", {"holder": "{holder}"}),
    ("POST", "/inspect/keys", {"group": 1}),
    ("POST", "/repair", {"instance_id": "vllm-0"}),
    ("POST", "/weight", {"instance_id": "vllm-0", "weight": 0}),
    ("GET", "/services", None),
    ("GET", "/workers", None),
    ("GET", "/books", None),
    ("GET", "/policies/compare", None),
    ("POST", "/policies/replay", {"policy": "lmetric"}),
    ("GET", "/placement", None),
    ("GET", "/placement/warm?instance=engine-1", None),
    ("GET", "/global_view", None),
    ("GET", "/activity", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/", None),
    ("GET", "/ui", None),
    ("GET", "/ui/{name}", None),
    ("GET", "/docs", None),
    ("POST", "/admin/kv-index/clear", {"backend_id": "engine-1"}),
    ("POST", "/unregister", {"instance_id": "engine-1"}),
    ("POST", "/dynamo/register", {"instance_id": 1, "model_name": MODEL, "block_size": 4, "endpoint": "tcp://10.0.0.8:5557"}),
    ("POST", "/register", STANDARD | {"instance_id": "2"}),
    ("POST", "/events", STORED | {"backend_id": "2"}),
    ("POST", "/dynamo/query", OF_DYNAMO),
    ("POST", "/dynamo/query_by_hash", BY_HASH),
    ("POST", "/dynamo/query_tiered_by_hash", BY_HASH),
    ("POST", "/dynamo/workers", WORKER),
    ("GET", "/dynamo/workers", None),
    ("PATCH", "/dynamo/workers/{worker_id}", {"endpoint": "http://10.0.0.9:8001"}),
    ("POST", "/dynamo/select", OF_DYNAMO),
    ("POST", "/dynamo/select_and_reserve", OF_DYNAMO | {"selection_id": "chat-1"}),
    ("POST", "/dynamo/reservations", OF_DYNAMO | {"selection_id": "chat-2", "worker_id": 7}),
    ("POST", "/dynamo/reservations/{reservation_id}/prefill_complete", None),
    ("POST", "/dynamo/reservations/{reservation_id}/output_block", {}),
    ("GET", "/dynamo/loads", None),
    ("POST", "/dynamo/overlap_scores", OF_DYNAMO),
    ("POST", "/dynamo/potential_loads", OF_DYNAMO),
    ("DELETE", "/dynamo/reservations/{reservation_id}", None),
    ("DELETE", "/dynamo/workers/{worker_id}", None),
    ("GET", "/dynamo/dump", None),
    ("GET", "/dynamo/health", None),
    ("GET", "/dynamo/metrics", None),
    ("POST", "/dynamo/register_peer", PEER),
    ("GET", "/dynamo/peers", None),
    ("POST", "/dynamo/deregister_peer", PEER),
    ("POST", "/dynamo/unregister", {"instance_id": 1, "model_name": MODEL}),
]  # fmt: skip
NAMES = {"name": "main.js", "worker_id": "7", "reservation_id": "chat-1"}
_LINES = 6
#: What differs from one session to the next, and what stands in its place.
_FLEETING = {
    r'"at":[\d.]+': '"at":1760000000.5',
    r'"time": \d+': '"time": 1760000040',
    r"\b\d{13}-\d+\b": "1760000000500-0",
    r"\b\d+\.\d+\.\d+\.\d+\.[0-9a-f]{16}\b": "2.2.4.4.0123456789abcdef",
    r"\b\d{14,16}\b": "28114406051234",  # the id of a holder
    re.escape(__version__): "<version>",
}


async def ask_all() -> dict[str, Any]:
    """Ask every path; the examples by method and path."""
    found: dict[str, Any] = {}
    stopping = asyncio.Event()
    stopping.set()  # so that /activity ends
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        small.directory(Path(directory) / MODEL, template=small.CHATML)
        store = Store.open("memory://")
        store.client.url = "redis://redis:6379/0"  # of an emulated Redis, no rows are named
        settings, metrics = Settings(tokenizers_dir=Path(directory), loads_ms=0), Metrics()
        options, selection = parts.api_options(settings), parts.selection_options(settings)
        tokenizers = parts.tokenizers(settings, metrics, store)
        app = create_app(store, options, selection, metrics, tokenizers, stopping=stopping)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://waymark") as client:
            names = dict(NAMES)
            for method, path, body in STEPS:
                content = json.loads(_named(json.dumps(body), names))
                sent = {} if content is None else {"json": content}
                answer = await client.request(method, _named(path, names), **sent)
                assert answer.is_success or answer.is_redirect, (method, path, answer.text)
                shown = _shown(answer)
                if path in ("/select", "/tokenize"):
                    names["reservation"] = answer.json().get("reservation", "")
                    names["tokens"] = json.dumps(answer.json().get("tokens"))
                if path == "/inspect/block":
                    names["holder"] = str(answer.json()["rows"][0]["holders"][0]["id"])
                found.setdefault(
                    f"{method} {path.partition('?')[0]}",
                    _example(_named(path, NAMES), content, answer.status_code, shown),
                )
        await tokenizers.close()
        await store.close()
    return found


def _named(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        is_whole = name in ("tokens", "holder")  # no text, so without the quotes
        text = text.replace(f'"{{{name}}}"' if is_whole else f"{{{name}}}", value)
    return text


def _example(path: str, body: Any, status: int, answer: Any) -> dict[str, Any]:
    sent = {} if body is None else {"body": json.loads(_lasting(json.dumps(body)))}
    return {"path": path} | sent | {"status": status, "answer": answer}


def _lasting(text: str) -> str:
    for pattern, instead in _FLEETING.items():
        text = re.sub(pattern, instead, text)
    return text


def _shown(answer: httpx.Response) -> Any:
    """The answer; of what is no JSON, and of the contract itself, its beginning."""
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "application/json" and not answer.url.path.endswith("/openapi.json"):
        return json.loads(_lasting(json.dumps(answer.json())))
    lines, most = _lasting(answer.text).splitlines(), 1 if kind == "text/html" else _LINES
    return "\n".join(line[:160] for line in lines[:most]) + ("\n..." if len(lines) > most else "")


if __name__ == "__main__":
    FILE.write_text(json.dumps(asyncio.run(ask_all()), indent=1) + "\n", encoding="utf-8")

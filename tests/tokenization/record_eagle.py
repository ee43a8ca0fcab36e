"""Records what SGLang publishes of prompts with EAGLE: ``PYTHON -m tests.tokenization.record_eagle`` writes a file.

PYTHON is that of an environment with sglang, as for ``record_sglang``. SGLang's own radix keys and its own recorder
of events are run over the token ids that its handler of ``/tokenize`` gave for the same bodies; the payloads are
kept as they would go to the socket. Hashes alone are made up: its own need a compiler, and mean nothing here.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
import types
from array import array
from typing import Any

from tests.tokenization import record_sglang

RECORDED = record_sglang.RECORDED.with_name("sglang_0.5.23_eagle.json")
PAGE = 4
#: Numbers of the cases of ``record_sglang`` whose prompts are stored.
CASES = (0, 7, 10, 30)


def record() -> None:
    for name in ("msgspec", "pydantic", "numpy"):
        importlib.import_module(name)
    kept = ("sglang.srt.mem_cache",)
    sys.meta_path.insert(0, record_sglang.LeftOut(tuple(set(record_sglang.LEFT_OUT) - set(kept))))
    new_key = importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixKey
    new_recorder = importlib.import_module("sglang.srt.mem_cache.events").KVCacheEventRecorder
    wire: Any = importlib.import_module("sglang.srt.disaggregation.kv_events")
    listed = json.loads(record_sglang.RECORDED.read_text(encoding="utf-8"))["cases"]
    cases = []
    for number in CASES:
        key = new_key(array("q", listed[number]["tokenize"]["tokens"]))
        key, _ = key.maybe_to_bigram_view(is_eagle=True)
        root = types.SimpleNamespace(parent=None, hash_value=[], key=new_key(array("q")))
        recorder = new_recorder(enabled=True, page_size=PAGE)
        key = key.page_aligned(PAGE)
        hashes = [f"{page + 1:016x}{0:048x}" for page in range(len(key) // PAGE)]
        recorder.record_store(types.SimpleNamespace(parent=root, hash_value=hashes, key=key))
        batch = wire.KVEventBatch(ts=0.0, events=recorder.take())
        payload = base64.b64encode(importlib.import_module("msgspec").msgpack.encode(batch)).decode()
        cases.append({"number": number, "payload": payload})
    about = {"engine": "SGLang 0.5.23", "how": __doc__, "page": PAGE}
    RECORDED.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()

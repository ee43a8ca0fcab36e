"""P12 for an engine's own path to token ids: ``PYTHON -m tools.benchmarks.engine_texts FOLDER``.

``python -m tools.benchmarks.texts FOLDER`` writes FOLDER. PYTHON is the interpreter of an environment with sglang and
transformers, without torch. The program measures the calls of transformers that vLLM's renderer makes for a chat, and
SGLang's own handler of ``/tokenize``, which gets the bytes of a body. Neither includes HTTP, and vLLM's own handler
cannot run without torch, so each figure is lower than the cost of a request to the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from tests.tokenization import record_sglang

_ROUNDS = 5


def measure(folder: Path) -> None:
    tokenizer = record_sglang.loader().from_pretrained(str(folder / "model"))
    bodies = {path.stem: path.read_bytes().splitlines() for path in sorted(folder.glob("*.jsonl"))}
    _print("transformers, as vLLM calls it", bodies, lambda body: _by_transformers(tokenizer, body))
    new_request, handler = record_sglang.handler_of(tokenizer)
    with asyncio.Runner() as runner:

        def by_sglang(body: bytes) -> int:
            request = new_request(**json.loads(body))
            return int(runner.run(handler._handle_non_streaming_request(request, request, None)).count)

        _print("SGLang's handler of /tokenize", bodies, by_sglang)


def _print(what: str, bodies: dict[str, list[bytes]], tokenized: Callable[[bytes], int]) -> None:
    for kind, listed in bodies.items():
        cost = _cost(tokenized, listed)
        print(f"{what}, {kind}: {cost:.2f} ms of CPU, {1e3 / cost:.0f} a second and core")


def _by_transformers(tokenizer: Any, body: bytes) -> int:
    messages = json.loads(body)["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _cost(tokenized: Callable[[bytes], int], bodies: list[bytes]) -> float:
    """Return the CPU per body in ms. The first round only warms up."""
    found = []
    for _ in range(_ROUNDS + 1):
        before = process_time()
        counts = [tokenized(body) for body in bodies]
        found.append((process_time() - before) / len(bodies) * 1e3)
        assert min(counts) > 5000, "not the conversations of P12"
    return median(found[1:])


if __name__ == "__main__":
    measure(Path(sys.argv[1]))

"""A replica with more models in files than it may have tokenizers open: each text is right, and memory has a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.test_hostile_metrics import held_up_nobody
from tests.e2e.test_hostile_template import children, peak_kib
from tests.live import start
from tests.patience import within
from tests.tokenization import small
from waymark.tokenization.places import OPEN_MAX

#: An open tokenizer of those here takes 27 MiB.
TOKENIZER_KIB = 64 * 1024


async def test_more_models_than_may_be_open(redis_url: str, tmp_path: Path) -> None:
    kinds = [small.KINDS[number % len(small.KINDS)] for number in range(OPEN_MAX + 2)]
    for number, kind in enumerate(kinds):
        small.directory(tmp_path / "models" / f"m{number}", kind)
    log, models = tmp_path / "log", tmp_path / "models"
    async with start("serve", redis_url, log, tokenizers_dir=models) as live, live.client() as client, within(60):

        async def is_right(number: int, text: str) -> None:
            body = {"model": f"m{number}", "prompt": text, "add_special_tokens": False}
            answer = await client.post("/tokenize", json=body)
            while answer.status_code == 503:  # a busy machine
                answer = await client.post("/tokenize", json=body)
            expected = small.tokenizer(kinds[number]).encode(text, add_special_tokens=False).ids
            assert answer.raise_for_status().json()["tokens"] == expected

        async def closed() -> float:
            return await live.metric("waymark_tokenizers_closed_total")

        async def in_turn() -> None:
            await is_right(OPEN_MAX, "one")
            assert await closed() == 1
            await is_right(0, "two")  # the one that was closed
            assert await closed() == 2

        async def at_once() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(kinds)):
                    tasks.create_task(is_right(number, "several"))

        for number in range(OPEN_MAX):
            await is_right(number, "one")
        assert await closed() == 0
        assert len(children(live.pid)) == OPEN_MAX
        for use in (in_turn, at_once):
            await held_up_nobody(use(), redis_url, live)
            open_now = children(live.pid)
            assert len(open_now) == await live.metric("waymark_tokenizers_open") == OPEN_MAX
            assert sum(map(peak_kib, open_now)) <= OPEN_MAX * TOKENIZER_KIB

"""A model whose files take all memory or time is refused, and holds up no other model and no other client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.e2e.test_hostile_metrics import others
from tests.hostile.beside import Times, watched
from tests.live import Live, start
from tests.patience import patient, within
from tests.tokenization import small
from tests.tokenization.test_encoders import GROWS, changed, nested
from tests.tokenization.test_renderers import HOSTILE
from waymark.tokenization.templates import SOURCE_MAX

_Result = TypeVar("_Result")
#: Until an honest text is tokenized, which waits for the process of its tokenizer, too.
OTHERS_SECONDS = 0.25
#: Until a message of the hostile model is refused, and what its process may take meanwhile.
REFUSED_SECONDS, MEMORY_KIB = 2.0, 256 * 1024


def chat(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "block_size": 16, "messages": [{"role": "user", "content": text}]}


async def test_a_hostile_template_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    """One takes the memory, one the time, one is not even read: ``tokenization/test_renderers.py`` has all of them."""
    names = ("a list is doubled", "a trim", "parentheses")
    for name in names:
        small.directory(tmp_path / "models" / name, template=HOSTILE[name])
    async with opened(redis_url, tmp_path / "models") as live, live.client() as stranger:
        loop = asyncio.get_running_loop()
        for name in names:
            attacks = [refused(loop, stranger, chat(name, f"Hi {n}")) for n in range(4)]
            seconds = await held_up_nobody(redis_url, live, *attacks, are_children_small=True)
            assert max(seconds) <= patient(REFUSED_SECONDS)


def _sparse(path: Path) -> None:
    os.truncate(path, 4 * 2**30)


def _lists(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * (4 * SOURCE_MAX // 3 - 2) + b"[]]")


def _nested(path: Path) -> None:
    """Each takes half a second to open, and the library holds the GIL."""
    path.write_text(nested(2**20))


FILES = [("tokenizer.json", _sparse), ("tokenizer_config.json", _lists), ("tokenizer.json", _nested)]


async def test_a_file_of_a_model_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    """Above the bound it is not read, and at the bound it is read off the loop."""
    models = tmp_path / "models"
    for name, write in FILES:
        for number in range(4):
            path = small.directory(models / f"{write.__name__}-{number}", template=small.CHATML) / name
            path.touch()
            write(path)
    async with opened(redis_url, models) as live, live.client() as stranger:
        for _, write in FILES:
            attacks = [answered(stranger, chat(f"{write.__name__}-{number}", "Hi")) for number in range(4)]
            answers = await held_up_nobody(redis_url, live, *attacks)
            assert {answer.status_code for answer in answers} == {400}


async def test_a_text_that_takes_all_memory_holds_up_nobody(redis_url: str, tmp_path: Path) -> None:
    """Its tokenizer makes 2 GB of it, which ends a process."""
    path = small.directory(tmp_path / "models" / "hostile", template=small.CHATML) / "tokenizer.json"
    path.write_text(changed(normalizer=GROWS | {"content": "y" * 2**20}))
    async with opened(redis_url, tmp_path / "models", max_tokens=2**16) as live, live.client() as stranger:
        (answer,) = await held_up_nobody(redis_url, live, answered(stranger, chat("hostile", "x" * 2000)))
        assert (answer.status_code, "bytes of memory" in answer.text) == (400, True)


@asynccontextmanager
async def opened(redis_url: str, models: Path, **settings: Any) -> AsyncIterator[Live]:
    """A process that knows an honest model, too."""
    small.directory(models / "honest", template=small.CHATML)
    log = models.parent / "log"
    async with start("serve", redis_url, log, tokenizers_dir=str(models), **settings) as live, live.client() as client:
        await ask(client, chat("honest", "Hi"), 200)
        yield live


async def held_up_nobody(
    redis_url: str, live: Live, *attacks: Coroutine[Any, Any, _Result], are_children_small: bool = False
) -> list[_Result]:
    """Return the results of the attacks; until then ``/health``, queries and honest texts are asked for."""
    loop, slowest, memory, turn = asyncio.get_running_loop(), 0.0, 0, 0
    async with live.client() as client, within(60), watched(redis_url, live.pid) as processes:
        attack = asyncio.gather(*attacks)
        while not attack.done():
            turn += 1
            for check in others(client).values():
                cost = await processes.cost_of(check)
                assert not cost.is_late(Times()), cost
            slowest = max(slowest, await duration(loop, ask(client, chat("honest", f"turn {turn}"), 200)))
            several = (live.pid, *(children(live.pid) if are_children_small else ()))
            memory = max(memory, *map(peak_kib, several), 0)
            await asyncio.sleep(0.02)
    assert slowest <= patient(OTHERS_SECONDS)
    assert 0 < memory <= MEMORY_KIB
    return await attack


async def answered(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    answer = await ask(client, body, 400, 503)
    while answer.status_code == 503 and "was not tokenized within" in answer.json()["error"]:  # a busy machine
        answer = await ask(client, body, 400, 503)
    return answer


async def refused(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """Return the seconds until a message is refused with a sentence."""
    began = loop.time()
    answer = await answered(client, body)
    assert "template" in answer.json()["error"]
    return loop.time() - began


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def peak_kib(pid: int) -> int:
    """Return the most that a process has ever had resident; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], *statuses: int) -> httpx.Response:
    answer = await client.post("/tokenize", json=body)
    assert answer.status_code in statuses, answer.text
    return answer


async def duration(loop: asyncio.AbstractEventLoop, answer: Awaitable[httpx.Response]) -> float:
    began = loop.time()
    assert (await answer).status_code == 200
    return loop.time() - began

"""A real master of Mooncake and a real store: the keys that engines put there are found over HTTP.

Needs ``pip install mooncake-transfer-engine-non-cuda`` and the library libibverbs; skipped without them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO, NamedTuple

import httpx
import pytest

from tests.decide.conftest import metrics
from tests.patience import patient, wait_until
from tests.ports import unused_port
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools, QueriedPool
from waymark.domain.hashing import namespace
from waymark.domain.pool_keys import AskedPrompt, PromptIds, key_forms, sglang_forms

__all__ = ["metrics"]

pytestmark = [pytest.mark.outside, pytest.mark.slow]

SIZE = 16
BLOCKS = 600
#: Puts the keys that it reads, one list a line, and says so.
CLIENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
failed = store.setup("127.0.0.1", sys.argv[1], 64 << 20, 16 << 20, "tcp", "", sys.argv[2])
assert not failed, failed
for line in sys.stdin:
    results = {store.put(key, b"kv") for key in json.loads(line)}
    print("put", results, flush=True)
"""


class RealMaster(NamedTuple):
    url: str
    store: asyncio.subprocess.Process

    async def put(self, keys: list[str]) -> None:
        """Put objects as an engine does."""
        assert self.store.stdin is not None
        assert self.store.stdout is not None
        self.store.stdin.write(json.dumps(keys).encode() + b"\n")
        while not (line := await self.store.stdout.readline()).startswith(b"put"):
            assert line, "the store has ended"
        assert line == b"put {0}\n"


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[RealMaster]:
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    binary = Path(found.submodule_search_locations[0]) / "mooncake_master"
    rpc, http, metadata = (unused_port() for _ in range(3))
    ports = [f"-rpc_port={rpc}", f"-metrics_port={http}", f"-http_metadata_server_port={metadata}"]
    async with AsyncExitStack() as stack:
        log = stack.enter_context((tmp_path / "mooncake.log").open("w"))
        process = await started(stack, str(binary), *ports, "-enable_http_metadata_server=true", log=log)
        client = await stack.enter_async_context(httpx.AsyncClient())
        url = f"http://127.0.0.1:{http}"

        async def is_up() -> bool:
            return process.returncode is not None or await answers(client, f"{url}/batch_query_keys?keys=a")

        await wait_until(is_up, "the master answers")
        if process.returncode is not None:
            pytest.skip("mooncake_master does not run here; it needs libibverbs")
        places = f"http://127.0.0.1:{metadata}/metadata", f"127.0.0.1:{rpc}"
        yield RealMaster(url, await started(stack, sys.executable, "-c", CLIENT, *places, log=log))


async def started(stack: AsyncExitStack, *command: str, log: IO[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=log)

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.communicate()

    stack.push_async_callback(end)
    return process


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False


async def test_what_engines_have_put_is_found(master: RealMaster, metrics: Metrics) -> None:
    tokens = array("I", range(SIZE * BLOCKS)).tobytes()
    plain = AskedPrompt(PromptIds(tokens, 0), SIZE, "org/model")
    salted = AskedPrompt(PromptIds(tokens, namespace(None, ["s"])), SIZE, "org/model", "s")
    vllm = ",".join(f"team-a@model@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{{sha256_cbor}}" for rank in range(2))
    asker = Asker()
    pools = AskedPools(asker, metrics, seconds=patient(5.0))
    for prompt, forms in ((plain, sglang_forms("org/model", 2)), (plain, (vllm,)), (salted, (vllm,))):
        read = key_forms(forms)
        assert read is not None
        there = [*range(550), 590]
        hashes = list(read.hashes(prompt))
        await master.put([key for n in there for key in read.keys(hashes[n])[0]])
        await master.put(read.keys(hashes[595])[0][:1])  # one part of a block
        pool = QueriedPool(master.url, 2, () if forms[0].startswith("org") else forms)
        assert await pools.blocks([pool], prompt) == (1 << 550) - 1 | 1 << 590
    await asker.close()

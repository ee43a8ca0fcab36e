"""Runs Waymark as a process of its own, over real sockets, for tests of hostile clients, of logs, and of a client."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests import forked
from tests.conftest import wait_until
from tests.patience import patient
from tests.ports import unused_port

START_SECONDS = 20.0
#: The time limit for the answer to a well-behaved client.
ANSWER_SECONDS = 10.0

#: Matches the name of the family or the sample in a line of metrics.
_NAME = re.compile(r"(?:# \w+ )?(\w*)")

Start = Callable[..., AbstractAsyncContextManager["Live"]]


def lines_of(text: str, name: str) -> str:
    """Return the lines about one metric, because tests read metrics often, and to parse all lines takes a hundred times
    as long."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if (found := _NAME.match(line)) and name.startswith(found[1]))


@dataclass(frozen=True, slots=True)
class Live:
    """A running process."""

    port: int
    log: Path
    token: str | None = None
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.AsyncClient:
        """Return a well-behaved client."""
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=patient(ANSWER_SECONDS), trust_env=False)

    async def metric(self, name: str, **labels: str) -> float:
        """Return one sample of ``/metrics``; 0 if the series does not exist yet."""
        async with self.client() as client:
            text = (await client.get("/metrics")).raise_for_status().text
        families = list(text_string_to_metric_families(lines_of(text, name)))
        assert any(name.startswith(family.name) for family in families), f"there is no metric {name}"
        samples = (sample for family in families for sample in family.samples)
        return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), 0.0)

    def said(self) -> str:
        """Return the log of the process."""
        return self.log.read_text(errors="replace")

    async def memory(self) -> float:
        """Return the resident bytes of the process."""
        return await self.metric("process_resident_memory_bytes")


@asynccontextmanager
async def start(role: str, redis_url: str, log: Path, **settings: Any) -> AsyncIterator[Live]:
    """Start ``waymark <role>`` on a free port, and wait until it is ready. ``settings`` are by field name. It must exit
    with 0."""
    port = unused_port()
    values: dict[str, Any] = {"redis_url": redis_url, "host": "127.0.0.1", "port": port} | settings
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {f"WAYMARK_{name.upper()}": str(value) for name, value in values.items()}
    with log.open("wb") as output:
        process = forked.start([role], environ, output, Path.cwd())
    try:
        live = Live(values["port"], log, settings.get("api_token"), process.pid)
        async with live.client() as client:

            async def is_ready() -> bool:
                assert process.poll() is None, live.said()
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_ready, f"waymark {role} is ready", START_SECONDS)
        yield live
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: process.poll() is not None, f"waymark {role} has ended", START_SECONDS)
        assert process.returncode == 0, live.said()
    finally:
        process.kill()
        process.wait()

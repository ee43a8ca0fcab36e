"""Lists and watches pods of Kubernetes over plain HTTP.

A list is read in pages; then a watch goes on from its resource version, with bookmarks, until the API server ends it.
A version that the server has forgotten (410) begins again with a list. The token is read for each request, for the
kubelet replaces it. Whatever goes wrong, what was known stays known: only a list, or an event, makes a pod gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from waymark.asker import Asker
from waymark.discovery.pods import Pod, pod_of
from waymark.errors import InvalidValue, Unanswered
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.shown import shown

log = logging.getLogger(__name__)

_PAGE_PODS = 100
#: Pods of all pages; a list that is longer is a failure, not a shorter list.
PODS_MAX = 20_000
_PAGE_BYTES_MAX = 32 * 2**20
_LINE_BYTES_MAX = 4 * 2**20
_LIST_SECONDS = 30.0
#: How long a watch is asked to last, and how long it is waited for.
_WATCH_SECONDS, _WATCH_SECONDS_MAX = 300, 330.0
_BACKOFF_SECONDS, _BACKOFF_SECONDS_MAX = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The URL and the credentials of the API."""

    url: str
    token_file: str | None
    ca_file: str | None
    namespace: str
    """The namespace whose pods are listed; empty: all."""
    selector: str


class _Expired(Exception):
    """The resource version is too old: list again."""


class PodWatch:
    """The pods that match, kept up to date by ``keep``."""

    def __init__(self, server: ApiServer, metrics: Metrics) -> None:
        self._server = server
        self._metrics = metrics
        self._asker = Asker(ca_file=server.ca_file)
        self.pods: dict[str, Pod] = {}
        """The pods that match, by name."""
        self.lists = 0
        """The number of complete lists of pods. Before the first, no pod is known to be absent."""
        self.gone: set[str] = set()
        """Pods that the server itself has called gone, or not ready, since ``gone`` was last cleared."""
        self.changed = asyncio.Event()
        self.problem = ""

    async def keep(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    version = await self._list()
                    while True:
                        version = await self._watch(version)
                        failures = 0
                except _Expired:
                    failures = 0
                    self._metrics.discovery_requests.labels(outcome="gone").inc()
                except (Unanswered, InvalidValue) as error:
                    await self._failed(error.sentence, failures)
                    failures += 1
        finally:
            await self._asker.close()

    async def list_again(self) -> None:
        """List once more, beside the watch, which goes on from its own version."""
        try:
            await self._list()
        except _Expired:
            self._metrics.discovery_requests.labels(outcome="gone").inc()
        except (Unanswered, InvalidValue) as error:
            await self._failed(error.sentence, 0)

    async def _failed(self, sentence: str, failures: int) -> None:
        self._metrics.discovery_requests.labels(outcome="failed").inc()
        problem = f"the API server {self._server.url}: {sentence}"
        if problem != self.problem:
            log.warning("pods cannot be read", extra=fields(error=problem))
        self.problem = problem
        await self._asker.close()  # the next connection reads the CA again
        wait = min(_BACKOFF_SECONDS * 2 ** min(failures, 10), _BACKOFF_SECONDS_MAX)
        await asyncio.sleep(wait * random.uniform(0.5, 1.0))

    def _answered(self) -> None:
        self._metrics.discovery_requests.labels(outcome="ok").inc()
        if self.problem:
            log.info("pods can be read again")
        self.problem = ""

    # ---- list --------------------------------------------------------------------------------------

    async def _list(self) -> str:
        """Read all pods; the resource version that a watch goes on from."""
        found: dict[str, Pod] = {}
        query: dict[str, str] = {"limit": str(_PAGE_PODS)}
        while True:
            page = await self._page(query)
            metadata, items = page["metadata"], page["items"]
            for item in items:
                pod = pod_of(item)
                if pod is not None:
                    found[pod.name] = pod
            if len(found) > PODS_MAX:
                raise Unanswered(f"more than {PODS_MAX} pods match {shown(self._server.selector)}; narrow the selector")
            following = metadata.get("continue")
            if not following:
                break
            query = {"limit": str(_PAGE_PODS), "continue": str(following)}
            await asyncio.sleep(0)
        self.gone |= {name for name, pod in found.items() if not pod.is_ready}
        self.pods = found
        self.lists += 1
        self.changed.set()
        self._answered()
        return str(metadata.get("resourceVersion") or "")

    async def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        reply = await self._asker.ask(
            self._url(query), seconds=_LIST_SECONDS, bytes_max=_PAGE_BYTES_MAX, headers=await self._headers()
        )
        if reply.status == 410:
            raise _Expired
        if reply.status != 200:
            raise Unanswered(_refused(reply.status))
        try:
            page = orjson.loads(reply.body)
        except ValueError:
            page = None
        if not isinstance(page, dict) or not isinstance(page.get("items"), list):
            raise Unanswered("its answer is no list of pods")
        if not isinstance(page.get("metadata"), dict):
            raise Unanswered("its list of pods has no metadata")
        return page

    # ---- watch -------------------------------------------------------------------------------------

    async def _watch(self, version: str) -> str:
        """Follow the changes until the server ends the answer; the version to go on from."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        has_changed = False
        async with self._asker.stream(
            self._url(query), seconds=_WATCH_SECONDS_MAX, headers=await self._headers()
        ) as response:
            if response.status == 410:
                raise _Expired
            if response.status != 200:
                raise Unanswered(_refused(response.status))
            async for line in _lines(response.content.iter_any()):
                version = self._event(line) or version
                has_changed = True
        self._answered()
        if not has_changed:
            await asyncio.sleep(_BACKOFF_SECONDS)  # a server that ends each watch at once is not asked in a loop
        return version

    def _event(self, line: bytes) -> str:
        """Apply one event; its resource version, or an empty text."""
        try:
            event = orjson.loads(line)
            kind, item = event["type"], event["object"]
            version = str((item.get("metadata") or {}).get("resourceVersion") or "")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unanswered(f"an event of {len(line)} bytes is none") from None
        if kind == "ERROR":
            if item.get("code") == 410:
                raise _Expired
            raise Unanswered(f"it ended the watch: {shown(str(item.get('message')))}")
        pod = pod_of(item) if kind in ("ADDED", "MODIFIED", "DELETED") else None
        if pod is not None:
            if kind == "DELETED":
                self.pods.pop(pod.name, None)
            else:
                self.pods[pod.name] = pod
            if kind == "DELETED" or not pod.is_ready:
                self.gone.add(pod.name)
            else:
                self.gone.discard(pod.name)
            if len(self.pods) > PODS_MAX:
                raise Unanswered(f"more than {PODS_MAX} pods match {shown(self._server.selector)}; narrow the selector")
            self.changed.set()
        return version

    # ---- requests ----------------------------------------------------------------------------------

    def _url(self, query: Mapping[str, str]) -> str:
        of = f"/namespaces/{quote(self._server.namespace, safe='')}" if self._server.namespace else ""
        text = urlencode({"labelSelector": self._server.selector} | dict(query))
        return f"{self._server.url.rstrip('/')}/api/v1{of}/pods?{text}"

    async def _headers(self) -> dict[str, str]:
        file = self._server.token_file
        if file is None:
            return {}
        try:
            token = (await asyncio.to_thread(Path(file).read_text)).strip()
        except (OSError, ValueError) as error:
            raise Unanswered(f"its token cannot be read: {error}") from None
        return {"Authorization": f"Bearer {token}"}


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            raise Unanswered(f"an event is longer than {_LINE_BYTES_MAX} bytes")
        for line in whole:
            if line.strip():
                yield line
                await asyncio.sleep(0)


def _refused(status: int) -> str:
    if status in (401, 403):
        return f"it answered with status {status}; the ServiceAccount needs the verbs list and watch of pods"
    return f"it answered with status {status}"

"""Lists and watches pods of Kubernetes over plain HTTP.

A list is read in pages; then a watch goes on from its resource version, with bookmarks, until the API server ends it. A
watch that breaks off is followed by another from the last version that was seen. If the server has forgotten the
version (410), or an event cannot be read, pods are listed again. The token is read for each request, as the kubelet
replaces it. Known pods stay known after any failure: a pod leaves only by a list or an event; and whatever the server
answers, requests are paced.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import orjson

from waymark.base.asker import Asker
from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.errors import InvalidValue, SettingsError, Unanswered
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.shown import hide_password, shown
from waymark.discovery.pods import DELETION_COST, Pod, in_turns, pod_of
from waymark.domain.targets import URL, is_url

log = logging.getLogger(__name__)

#: A pod may have 5,000 members of objects before the JSON of a full page is above its bound.
_PAGE_PODS = 50
#: An answer with more items is not accepted as a page, although a server may ignore the limit.
PAGE_ITEMS_MAX = 40 * _PAGE_PODS
#: The bound on pods of all pages; a longer list is a failure, not a shorter list.
PODS_MAX = 20_000
#: Pages of one list: twice as many as full ones need, because a server may leave non-matching items out of a page.
PAGES_MAX = 2 * PODS_MAX // _PAGE_PODS
#: The pause after a page with hardly a pod that was not in an earlier page.
_THIN_PODS, _THIN_SECONDS = _PAGE_PODS // 10, 0.1
PAGE_BYTES_MAX = 32 * 2**20
LINE_BYTES_MAX = 4 * 2**20
#: The most values of a page or an event, and the most lists, objects and members of objects; fifty pods have some ten
#: thousand.
_VALUES_MAX, _PARTS_MAX = 2**20, 2**17
#: A resource version, or a token of the next page: it becomes a part of a URL.
TOKEN_CHARACTERS_MAX = 8192
_LIST_SECONDS, _PATCH_SECONDS = 30.0, 10.0
#: How long a watch is asked to last, and how long it is waited for.
_WATCH_SECONDS, _WATCH_SECONDS_MAX = 300, 330.0
#: Watches from one version that fail in a row; then pods are listed again.
_WATCHES_MAX = 3
#: The pauses between attempts. The longest one is short, because engines that start meanwhile are not known.
_BACKOFF_SECONDS, _BACKOFF_SECONDS_MAX = 1.0, 4.0
#: A list is read again after this time if it lacks pods although the server has reported no error, or has items other
#: than pods.
_DOUBT_SECONDS = 2.0


_EXPIRED = "the resource version is too old"


@record(frozen=True, slots=True)
class ApiServer:
    """The URL and the credentials of the API."""

    url: str
    token_file: str | None
    ca_file: str | None
    namespace: str
    """The namespace whose pods are listed; empty: all."""
    selector: str

    @classmethod
    def at(cls, url: str, namespace: str, selector: str) -> ApiServer:
        """Return the server at an operator's URL, whose query may name the file of the token. Raise ``SettingsError``
        if it is not such a URL.
        """
        place, _, query = url.partition("?")
        names = dict(parse_qsl(query, keep_blank_values=True))
        token_file = names.pop("token_file", None)
        if not is_url(place) or names:
            raise SettingsError(
                f"WAYMARK_DISCOVERY_URL is {shown(hide_password(url))}: it must be {URL}, and may end in "
                "?token_file=/path"
            )
        return cls(place, token_file, None, namespace, selector)


class _ListAgain(Unanswered):
    """An unusable event of a watch: no watch continues from its version."""


class _Expired(_ListAgain):
    """The server has forgotten the resource version."""


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
        self.patch_problem = ""
        """Why pods cannot be annotated."""
        self._version = ""
        """The resource version to watch from; empty: list first."""
        self._doubted: float | None = None
        """The time of the last list, if it is doubted."""
        self._not_before = 0.0
        """The earliest time of the next list beside the watch."""
        self._list_number = 0
        self._event_names: set[str] | None = None
        """The pods with an event of the watch since the current list began; None if no list is being read."""

    async def keep(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        try:
            while True:
                began = monotonic()
                try:
                    if not self._version:
                        self._version = await self._list()
                    await self._watch()
                    failures = 0
                except Unanswered as error:
                    failures = 1 if monotonic() - began > _BACKOFF_SECONDS_MAX else failures + 1
                    if isinstance(error, _ListAgain) or failures > _WATCHES_MAX:
                        self._version = ""
                    await self._failed(error)
                except InvalidValue as error:  # the certificates cannot be read
                    failures += 1
                    await self._failed(error)
                pause = min(_BACKOFF_SECONDS * 2 ** min(max(0, failures - 1), 10), _BACKOFF_SECONDS_MAX)
                # A long watch is followed by the next one at once.
                passed = 0.0 if failures else monotonic() - began
                await asyncio.sleep(max(0.0, pause * random.uniform(0.5, 1.0) - passed))
        finally:
            await self._asker.close()

    @property
    def is_doubted(self) -> bool:
        """Whether the last list is to be read again."""
        return self._doubted is not None

    @property
    def wants_another_list(self) -> bool:
        """Whether it is time to read a doubtful list again."""
        return self._doubted is not None and monotonic() - self._doubted >= _DOUBT_SECONDS

    async def list_again(self) -> None:
        """List once more, beside the watch, which goes on from its own version; not more often than ``keep`` does."""
        if monotonic() < self._not_before:
            return
        self._not_before, self._event_names = monotonic() + _BACKOFF_SECONDS, set()
        try:
            await self._list(is_beside_watch=True)
        except (Unanswered, InvalidValue) as error:
            self._note(error)
        finally:
            self._event_names = None

    async def _failed(self, error: Unanswered | InvalidValue) -> None:
        self._note(error)
        await self._asker.close()  # the next connection reads the CA again

    def _note(self, error: Unanswered | InvalidValue) -> None:
        outcome = "gone" if isinstance(error, _Expired) else "failed"
        self._metrics.discovery_requests.labels(outcome=outcome).inc()
        if outcome == "gone":
            return
        problem = f"the API server {self._server.url}: {error.sentence}"
        if problem != self.problem:
            log.warning("pods cannot be read", extra=fields(error=problem))
        self.problem = problem

    def _answered(self) -> None:
        self._metrics.discovery_requests.labels(outcome="ok").inc()
        if self.problem:
            log.info("pods can be read again")
        self.problem = ""

    # ---- list --------------------------------------------------------------------------------------

    async def _list(self, *, is_beside_watch: bool = False) -> str:
        """Read all pods. Return the resource version that a watch goes on from."""
        self._list_number += 1
        number = self._list_number
        pods: dict[str, Pod] = {}
        query: dict[str, str] = {"limit": str(_PAGE_PODS)}
        odd_items = 0
        for _ in range(PAGES_MAX):
            page = await self._page(query)
            metadata, items = page["metadata"], page["items"]
            count = len(pods)
            async for item in in_turns(items):
                pod = pod_of(item)
                if pod is None:
                    odd_items += 1
                else:
                    pods[pod.name] = pod
            if len(pods) > PODS_MAX:
                raise self._too_many()
            following = _token(metadata, "continue")
            if not following:
                break
            query = {"limit": str(_PAGE_PODS), "continue": following}
            await asyncio.sleep(_THIN_SECONDS if len(pods) - count < _THIN_PODS else 0)
        else:
            raise Unanswered(f"its list of pods has more than {PAGES_MAX} pages")
        if odd_items:
            log.warning("a list of pods has items that are not pods", extra=fields(items=odd_items, pods=len(pods)))
        if is_beside_watch:
            if number != self._list_number:
                return ""  # the watch goes on from a list that began later
            # The list may be older than these events, and the watch does not repeat them.
            for name in self._event_names or ():
                pods.pop(name, None)
                if name in self.pods:
                    pods[name] = self.pods[name]
        are_missing = any(name not in pods for name in self.pods)
        self._doubted = monotonic() if odd_items or are_missing else None
        self.gone |= {name for name, pod in pods.items() if not pod.is_ready}
        self.pods = pods
        self.lists += 1
        self.changed.set()
        self._answered()
        return _token(metadata, "resourceVersion") or "0"

    async def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        reply = await self._asker.ask(
            self._url(query), seconds=_LIST_SECONDS, bytes_max=PAGE_BYTES_MAX, headers=await self._headers()
        )
        if reply.status == 410:
            raise _Expired(_EXPIRED)
        if reply.status != 200:
            raise Unanswered(_refused(reply.status))
        try:
            page = bounded_loads(reply.body, values_max=_VALUES_MAX, parts_max=_PARTS_MAX)
        except TooMuchJson as error:
            raise Unanswered(f"its list of pods is refused: {error}") from None
        except ValueError:
            page = None
        if not isinstance(page, dict) or not isinstance(page.get("items"), list):
            raise Unanswered("its answer is no list of pods")
        if not isinstance(page.get("metadata"), dict):
            raise Unanswered("its list of pods has no metadata")
        if len(page["items"]) > PAGE_ITEMS_MAX:
            raise Unanswered(f"its page has {len(page['items'])} items, and {_PAGE_PODS} were requested")
        return page

    # ---- watch -------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow the changes from the last version until the server ends the answer."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with self._asker.stream(
            self._url(query), seconds=_WATCH_SECONDS_MAX, headers=await self._headers()
        ) as response:
            if response.status == 410:
                raise _Expired(_EXPIRED)
            if response.status != 200:
                raise Unanswered(_refused(response.status))
            async for line in _lines(response.content.iter_any()):
                self._version = self._event(line) or self._version
        self._answered()

    def _event(self, line: bytes) -> str:
        """Apply one event. Return its resource version, or an empty text."""
        try:
            event = bounded_loads(line, values_max=_VALUES_MAX, parts_max=_PARTS_MAX)
            kind, item = event["type"], event["object"]
            version = _token(item.get("metadata") or {}, "resourceVersion")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _ListAgain(f"{len(line)} bytes of its watch are not an event") from None
        if kind == "ERROR":
            if item.get("code") == 410:
                raise _Expired(_EXPIRED)
            raise _ListAgain(f"it ended the watch: {shown(_token(item, 'message'))}")
        pod = pod_of(item) if kind in ("ADDED", "MODIFIED", "DELETED") else None
        if pod is not None:
            if self._event_names is not None:
                self._event_names.add(pod.name)
            if kind == "DELETED":
                self.pods.pop(pod.name, None)
            else:
                self.pods[pod.name] = pod
            if kind == "DELETED" or not pod.is_ready:
                self.gone.add(pod.name)
            else:
                self.gone.discard(pod.name)
            if len(self.pods) > PODS_MAX:
                raise self._too_many()
            self.changed.set()
        return version

    def _too_many(self) -> Unanswered:
        return _ListAgain(f"more than {PODS_MAX} pods match {shown(self._server.selector)}; narrow the selector")

    # ---- patch -------------------------------------------------------------------------------------

    async def set_deletion_cost(self, pod: Pod, cost: int) -> bool:
        """Annotate a pod; return False if the server has refused it or does not answer."""
        namespace, _, name = pod.name.partition("/")
        body = orjson.dumps({"metadata": {"annotations": {DELETION_COST: str(cost)}}})
        url = (
            f"{self._server.url.rstrip('/')}/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        )
        try:
            reply = await self._asker.ask(
                url,
                seconds=_PATCH_SECONDS,
                bytes_max=LINE_BYTES_MAX,
                json=body,
                method="PATCH",
                headers=await self._headers() | {"Content-Type": "application/merge-patch+json"},
            )
            if reply.status not in (200, 404):  # 404: the pod is gone
                raise Unanswered(_refused(reply.status, "patch"))
        except (Unanswered, InvalidValue) as error:
            self._metrics.discovery_requests.labels(outcome="failed").inc()
            problem = f"the pod {pod.name} cannot be annotated: {error.sentence}"
            if problem != self.patch_problem:
                log.warning("a pod cannot be annotated", extra=fields(error=problem))
            self.patch_problem = problem
            return False
        self._metrics.discovery_requests.labels(outcome="ok").inc()
        self.patch_problem = ""
        if self.pods.get(pod.name) is pod:  # the watch has not reported the change yet
            self.pods[pod.name] = replace(pod, deletion_cost=str(cost))
        return True

    # ---- requests ----------------------------------------------------------------------------------

    def _url(self, query: Mapping[str, str]) -> str:
        namespace = f"/namespaces/{quote(self._server.namespace, safe='')}" if self._server.namespace else ""
        text = urlencode({"labelSelector": self._server.selector} | dict(query))
        return f"{self._server.url.rstrip('/')}/api/v1{namespace}/pods?{text}"

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
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *whole, rest = rest.split(b"\n")
            for line in whole:
                _check_length(line)
                if line.strip():
                    yield bytes(line)
                    await asyncio.sleep(0)
        _check_length(rest)
    if rest.strip():
        raise Unanswered(f"its watch ended within an event, after {len(rest)} bytes of it")


def _check_length(line: bytearray) -> None:
    if len(line) > LINE_BYTES_MAX:
        raise _ListAgain(f"an event is longer than {LINE_BYTES_MAX} bytes")


def _token(fields: Mapping[str, Any], name: str) -> str:
    """Return a text of the server; empty if it is something else, or too long."""
    text = fields.get(name)
    return text if isinstance(text, str) and len(text) <= TOKEN_CHARACTERS_MAX else ""


def _refused(status: int, verbs: str = "list and watch") -> str:
    if status in (401, 403):
        return f"it answered with status {status}; the ServiceAccount needs for pods: {verbs}"
    return f"it answered with status {status}"

"""An API server of Kubernetes that a test scripts: pages, resource versions, watches, bookmarks, errors."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

from aiohttp import web

SELECTOR = "llm-d.ai/inference-serving=true"


def pod(name: str, address: str = "10.0.0.1", *, ready: bool = True, **more: Any) -> dict[str, Any]:
    """A pod as the API has it. ``more``: labels, annotations, started, deleted, version."""
    metadata: dict[str, Any] = {
        "namespace": "serving",
        "name": name,
        "labels": {"llm-d.ai/inference-serving": "true"} | more.get("labels", {}),
        "annotations": {f"waymark.dev/{key}": text for key, text in more.get("annotations", {}).items()},
        "resourceVersion": str(more.get("version", 1)),
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    if more.get("deleted"):
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {},
        "status": {
            "phase": "Running",
            "podIP": address,
            "startTime": more.get("started", "2026-01-01T00:00:01Z"),
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


_CUT = b"cut"


class ApiServerStub:
    """``pods`` is what a list answers; ``send`` adds an event to every watch."""

    def __init__(self) -> None:
        self.url = ""
        self.pods: dict[str, dict[str, Any]] = {}
        self.patches: list[tuple[str, str, Any]] = []
        """The name, the type of the content and the body of each PATCH of a pod."""
        self.patch_status = 200
        self.refused: set[str] = set()
        """Pods that may not be patched."""
        self.version = 100
        self.page = 500
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self.paths: set[str] = set()
        self.status = 200
        """Of every answer."""
        self.watch_status = 200
        self.delay = 0.0
        """Seconds before every answer."""
        self.body: bytes | None = None
        """Instead of a list."""
        self.is_endless = False
        """Every page names a following one."""
        self.greeting: bytes | None = None
        """The only line of every watch, which then ends."""
        self.asked_at: list[float] = []
        """The time of each request."""
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._runner: web.AppRunner | None = None

    def put(self, *pods: dict[str, Any]) -> None:
        for each in pods:
            self.pods[each["metadata"]["name"]] = each

    def send(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        self.send_line(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def send_line(self, line: bytes | None) -> None:
        """``None`` ends the watches."""
        for queue in self._queues:
            queue.put_nowait(line)

    def break_off(self) -> None:
        """Cut the connections of the watches, in the middle of the answer."""
        self.send_line(_CUT)

    @property
    def watched(self) -> int:
        return len(self._queues)

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._handle)
        application.router.add_patch("/api/v1/namespaces/serving/pods/{name}", self._patch)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        self.send_line(None)
        await self._runner.cleanup()

    async def _patch(self, request: web.Request) -> web.Response:
        """Annotate a pod; every watch gets the change, as Kubernetes sends it."""
        name, body = request.match_info["name"], await request.json()
        self.patches.append((name, request.content_type, body))
        if self.patch_status != 200:
            return web.Response(status=self.patch_status)
        if name in self.refused:
            return web.Response(status=422)
        if name not in self.pods:
            return web.Response(status=404)
        self.pods[name]["metadata"]["annotations"] |= body["metadata"]["annotations"]
        self.send("MODIFIED", self.pods[name])
        return web.json_response(self.pods[name])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked_at.append(monotonic())
        self.tokens.append(request.headers.get("Authorization"))
        self.paths.add(request.path)
        query = dict(request.query)
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return web.Response(status=self.status)
        if query.get("watch"):
            return await self._watch(request, query)
        self.lists.append(query)
        if self.body is not None:
            return web.Response(body=self.body)
        names = sorted(self.pods)
        first = int(query.get("continue", "0"))
        size = min(self.page, int(query["limit"]))
        items = [self.pods[name] for name in names[first : first + size]]
        metadata = {"resourceVersion": str(self.version)}
        if first + size < len(names) or self.is_endless:
            metadata["continue"] = str(first + size)
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        self.watches.append(query)
        if self.watch_status != 200:
            return web.Response(status=self.watch_status)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.greeting is not None:
            await response.write(self.greeting)
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            while (line := await queue.get()) is not None:
                if line == _CUT:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                await response.write(line)
        except ConnectionError:
            pass
        finally:
            self._queues.discard(queue)
        return response

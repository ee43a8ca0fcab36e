"""Liveness, readiness, metrics, and the page: the paths for operators and their tools.

A process is alive while its event loop runs, and ready while Redis answers and has the scripts. Neither probe contacts
an engine. They do not wait long for a Redis that hangs, because their caller has a time limit, usually a second.

``GET /ui`` is the page of a replica, which is served unchanged. Its files are independent of the installation, so every
client may load them. Their contents come from the other paths, which check the token. The content security policy
forbids the page to load anything from elsewhere, to run inline scripts, and to be in a frame.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.texts import PromptTokenizer
from waymark.base.errors import NotFound
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.contract.publishers import HealthAnswer, ReadyAnswer
from waymark.decide.fail_open import StartupGate
from waymark.store.health import HealthReason, RedisHealth
from waymark.store.store import Store

_READY_SECONDS = 0.9
_ANSWERS_SECONDS = 0.5

_PAGE_FOLDER: Final = Path(__file__).parent / "ui"
_MEDIA_TYPES: Final = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8"}
_HTML: Final = b"text/html; charset=utf-8"

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Probes:
    """Handlers of ``/health``, ``/ready`` and ``/metrics``."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        gate: StartupGate | None = None,
        tokenizer: PromptTokenizer | None = None,
        *,
        warning: str | None = None,
    ) -> None:
        """Create the handlers. ``gate`` is that of a process that decides, ``tokenizer`` that of one that accepts text.
        ``warning`` is always shown.
        """
        self._constant_warnings = [] if warning is None else [warning]
        self._store = store
        self._tokenizer = tokenizer
        self._gate = gate
        self._metrics = metrics

    async def health(self, _: Body) -> Answer:
        return Answer(HealthAnswer(status="ok"))

    async def ready(self, _: Body) -> Answer:
        try:
            async with asyncio.timeout(_READY_SECONDS):
                reasons, no_answers = await asyncio.gather(
                    self._store.check(), self._store.why_no_answers(_ANSWERS_SECONDS)
                )
        except TimeoutError:
            no_answers = None
            reasons = [f"Redis did not answer within {_READY_SECONDS:g} s"]
        if reasons:
            self._metrics.redis_up.set(0)
            error = {"error": "not ready: " + "; ".join(reasons), "reason": "unavailable"}
            return Answer(error, 503, {"Retry-After": "1"})
        waiting = None if self._gate is None else await self._gate.waiting()
        if waiting is not None:
            return Answer({"error": f"not ready: {waiting}", "reason": "starting"}, 503, {"Retry-After": "1"})
        warnings = self._constant_warnings + ([] if no_answers is None else [no_answers])
        warnings += (await self._health()).warnings.values()
        warnings += self._tokenizer.warnings() if self._tokenizer else ()
        warnings += self._gate.watch.warnings() if self._gate is not None and self._gate.watch is not None else ()
        return Answer(ReadyAnswer(status="ready", answers_redis=self._store.answers_url, warnings=warnings))

    async def metrics(self, _: Body) -> Answer:
        await self._health()
        text, media_type = self._metrics.render()
        return Answer(text, media_type=media_type.encode())

    async def _health(self) -> RedisHealth:
        """Return the health of Redis, and set its metrics. An embedded Redis reports only that it is up."""
        health, metrics = await self._store.health.poll(), self._metrics
        metrics.redis_up.set(health.is_up)
        if health.primaries:
            for reason in HealthReason:
                metrics.redis_misconfigured.labels(reason=reason).set(reason in health.warnings)
            for gauge in (metrics.redis_memory_bytes, metrics.redis_memory_max_bytes, metrics.redis_evicted_keys):
                gauge.clear()  # a Cluster may now have fewer primaries
            for number, primary in enumerate(health.primaries):
                metrics.redis_memory_bytes.labels(primary=number).set(primary.memory_bytes)
                metrics.redis_memory_max_bytes.labels(primary=number).set(primary.memory_max_bytes)
                metrics.redis_evicted_keys.labels(primary=number).set(primary.evicted_keys)
        return health


class Page:
    """Handlers of ``/``, ``/ui`` and the files of the page, which are read only once."""

    def __init__(self, *, is_shown: bool) -> None:
        """With ``is_shown=False`` there is no page."""
        self._index = (_PAGE_FOLDER / "index.html").read_bytes() if is_shown else b""
        self._files = {
            path.name: (path.read_bytes(), _MEDIA_TYPES[path.suffix])
            for path in (sorted(_PAGE_FOLDER.iterdir()) if is_shown else ())
            if path.suffix in _MEDIA_TYPES
        }

    async def index(self, _: Body) -> Answer:
        if not self._index:
            raise NotFound("this Waymark shows no page; set WAYMARK_UI to true")
        return Answer(self._index, media_type=_HTML, headers=dict(HEADERS))

    async def file(self, body: Body) -> Answer:
        name = body.path["name"]
        page_file = self._files.get(name)
        if page_file is None:
            raise NotFound(f"the page has no file {shown(name)}")
        return Answer(page_file[0], media_type=page_file[1], headers=dict(HEADERS))

    async def root(self, _: Body) -> Answer:
        """Redirect to the page."""
        return Answer(b"", 307, {"Location": "ui"})

"""The entry point: text or messages of a model to token ids, within bounds, or a refusal that names the way out.

A text that many clients send at the same time is tokenized once. At most ``UNDER_WAY_MAX`` texts are under way; a
further one is refused at once. A model may take at most three times as many places as are free, so a model with slow
files leaves places to all others. A request waits ``SECONDS`` at most, and the work that it waited for keeps its place
until it ends.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.domain.names import DEFAULT_TENANT, GroupName
from waymark.tokenization.encoders import TokenizerChanged
from waymark.tokenization.places import EncoderPlaces, NoPlace
from waymark.tokenization.prompt import Prompt, Source, SourcedTokens
from waymark.tokenization.remote import RemoteTokenizer
from waymark.tokenization.renderers import Renderers
from waymark.tokenization.segments import SegmentMemo
from waymark.tokenization.sources import (
    Addresses,
    EngineTokenizer,
    directory_of,
    found_in,
    is_for_sglang,
    missing,
    no_tokenizer,
)

T = TypeVar("T")

CACHE_BYTES = 64 * 2**20
"""The token ids of known text: of 500 conversations of 32,000 tokens. A text that is forgotten is tokenized again."""
THREADS = 4
"""The threads that split long texts, and search directories."""
OPENINGS_MAX = 8
"""Sources that are opened at the same time. A large tokenizer takes a second or two, and a hostile one ten."""
UNDER_WAY_MAX = 32
_SHARE = 3
"""The most places of a model for each free one: 24 of 32 if no other model has any."""
_REFUSALS_MAX = 1024
SECONDS = 5.0
#: The pause before a directory is searched again, before a source that could not be opened is tried again, and before a
#: prompt that the files of its model refused is tried again.
_AGAIN_SECONDS = 5.0


#: The source that stands for any registered engine of the model.
ENGINE = "engine:"


class Engines(NamedTuple):
    """The objects that a source ``engine:`` needs."""

    addresses: Addresses
    asker: Asker
    failed: dict[str, float]
    """Until when an address is not asked, because it could not tokenize."""


class Tokenizers:
    """The sources of all models; opened when they are first needed, and kept."""

    def __init__(
        self,
        sources: Mapping[str, str],
        directory: Path | None,
        metrics: Metrics,
        *,
        text_bytes_max: int = 2 * 2**20,
        seconds: float | None = None,
        new_asker: Callable[[], Asker] = Asker,
        engines: Engines | None = None,
    ) -> None:
        """Create the entry point. ``engines`` are asked for the tokens of a source ``engine:``, and of models without a
        source.
        """
        self._configured = dict(sources)
        self._directory = directory
        self._metrics = metrics
        self._text_bytes_max = text_bytes_max
        self._seconds = SECONDS if seconds is None else seconds
        self._new_asker = new_asker
        self._engines = engines
        # Each turn of a conversation is a prompt with all earlier tokens, so pieces get most of the memory.
        self._prompts = SegmentMemo(CACHE_BYTES // 4)
        self._memo = SegmentMemo(CACHE_BYTES - CACHE_BYTES // 4)
        metrics.tokens_cache_bytes.set_function(lambda: self._memo.bytes + self._prompts.bytes)
        metrics.tokenizers_whole.set_function(lambda: len(self._whole()))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._places_to_open = asyncio.Semaphore(OPENINGS_MAX)
        self._openings: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held while the source of a model is opened."""
        self._renderers = Renderers(metrics)
        self._places = EncoderPlaces(metrics)
        self._discovered: dict[str, str] = {}
        self._search_again = 0.0
        self._search = asyncio.Lock()
        self._open: dict[str, Source] = {}
        self._failed: dict[str, tuple[float, InvalidValue | TokenizerUnavailable]] = {}
        self._under_way: dict[bytes, asyncio.Task[Any]] = {}
        self._of_models: Counter[str] = Counter()
        """The number of places of each model."""
        self._refusals: dict[bytes, tuple[float, InvalidValue]] = {}
        """Prompts that files of a model refused, and until when; the oldest first."""

    async def tokens(self, model: str, prompt: Prompt, tenant_id: str = DEFAULT_TENANT) -> SourcedTokens:
        """Return the ids of a prompt, in agreement with the engines of the model. ``tenant_id`` says whose engines may
        be asked.

        Raise ``InvalidValue``: ``no_tokenizer`` if the model has no source, ``too_large`` for a long text, or another
        reason if the prompt does not fit. Raise ``TokenizerUnavailable`` if the source does not answer, or too many
        texts are under way.
        """
        began = monotonic()
        source = self._open.get(model)
        key = None if source is None else source.key(prompt)
        remembered = None if source is None or key is None else source.known(key)
        if source is None or remembered is None:
            work = _digest(model, prompt, tenant_id) if key is None else key
            refused_until, refusal = self._refusals.get(work, (0.0, None))
            if refusal is not None and monotonic() < refused_until:
                raise copy(refusal)
            try:
                tokens = await self._once(model, work, lambda: self._made(GroupName(tenant_id, model), prompt, key))
            except InvalidValue as error:
                # Another engine may answer by now, while files stay as they were opened.
                if source is not None and source.kind == "local":
                    self._refuse(work, error)
                raise
        else:
            tokens = SourcedTokens(remembered.ids, source.kind, remembered.items)
        self._metrics.tokenize_duration_seconds.labels(source=tokens.source).observe(monotonic() - began)
        return tokens

    async def text(self, model: str, ids: Sequence[int], tenant_id: str = DEFAULT_TENANT) -> str:
        """Return the text of token ids. Raise the errors of ``tokens``."""
        key = blake2b(repr((model, tenant_id, ids)).encode("utf-8", "replace"), digest_size=32).digest()
        return await self._once(model, b"text" + key, lambda: self._text(GroupName(tenant_id, model), ids))

    def warnings(self) -> list[str]:
        """Return a sentence for each open source that costs more than necessary."""
        return [
            f"the tokenizer {source.name} of the model {shown(model)} encodes each text whole, because the pieces "
            "between its special tokens depend on each other"
            for model, source in self._whole()
        ]

    async def file_warnings(self) -> list[str]:
        """Return ``warnings`` for each tokenizer in files that ``WAYMARK_TOKENIZERS`` names, and the failures to open
        one.
        """
        failed = []
        for model, url in self._configured.items():
            if not url.startswith("file:"):
                continue
            try:
                await self._source(GroupName(DEFAULT_TENANT, model))
            except (InvalidValue, TokenizerUnavailable) as failure:
                failed.append(f"the tokenizer of the model {shown(model)} cannot be used: {failure.sentence}")
        return self.warnings() + failed

    def _whole(self) -> list[tuple[str, Source]]:
        # A copy: a scrape may come from another thread.
        return [(model, source) for model, source in list(self._open.items()) if source.encodes_whole]

    async def close(self) -> None:
        """End the work under way, and release threads and connections."""
        for task in self._under_way.values():
            task.cancel()
        for source in list(self._open.values()):
            await source.close()
        if self._engines is not None:
            await self._engines.asker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._renderers.close()
        self._places.close()

    # ---- one piece of work -------------------------------------------------------------------------

    async def _once(self, model: str, key: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``work``, or of the same work already under way."""
        task = self._under_way.get(key)
        if task is None:
            free, own = UNDER_WAY_MAX - len(self._under_way), self._of_models[model]
            if not free:
                raise TokenizerUnavailable(
                    f"{UNDER_WAY_MAX} texts are being tokenized, which is the maximum; try again in a moment"
                )
            if own >= _SHARE * free:
                raise TokenizerUnavailable(
                    f"{own} texts of the model {shown(model)} are being tokenized, and the other {free} places are for "
                    "other models; try again in a moment"
                )
            self._of_models[model] = own + 1
            task = self._under_way[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._ended, model, key))
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            raise TokenizerUnavailable(
                f"the text was not tokenized within {self._seconds:g} s; try again in a moment"
            ) from None
        finally:
            del task  # the task's error refers to this frame, and so to the prompt

    def _refuse(self, key: bytes, refusal: InvalidValue) -> None:
        """Remember for a while that the files of a model refuse a prompt: its template may have taken a second.

        A copy of the error has no traceback, which would keep the prompt.
        """
        self._refusals.pop(key, None)
        self._refusals[key] = (monotonic() + _AGAIN_SECONDS, copy(refusal))
        if len(self._refusals) > _REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]

    def _ended(self, model: str, key: bytes, task: asyncio.Task[Any]) -> None:
        del self._under_way[key]
        self._of_models[model] -= 1
        if not self._of_models[model]:
            del self._of_models[model]
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, even if no caller waits for it

    async def _made(self, group: GroupName, prompt: Prompt, key: bytes | None) -> SourcedTokens:
        source = await self._source(group)
        try:
            prompt_tokens = await source.tokens(prompt, key)
        except TokenizerChanged:
            source = await self._opened_anew(group, source)
            prompt_tokens = await source.tokens(prompt)
        return SourcedTokens(prompt_tokens.ids, source.kind, prompt_tokens.items)

    async def _text(self, group: GroupName, ids: Sequence[int]) -> str:
        source = await self._source(group)
        try:
            return await source.text(ids)
        except TokenizerChanged:
            return await (await self._opened_anew(group, source)).text(ids)

    # ---- sources -----------------------------------------------------------------------------------

    async def _source(self, group: GroupName) -> Source:
        model = group.model_name
        source = self._open.get(model)
        if source is not None:
            return source
        url = self._configured.get(model) or await self._discover(model)
        if url is None and self._engines is None:
            raise no_tokenizer(model)
        if url is None or url == ENGINE:
            # Two tenants may have different engines for a model of the same name.
            if self._engines is None:
                raise TokenizerUnavailable("the tokenizer engine: cannot be used: this process knows no registrations")
            return EngineTokenizer(
                group,
                self._engines.addresses,
                self._engines.asker,
                seconds=self._seconds,
                bytes_max=self._text_bytes_max,
                failed=self._engines.failed,
                is_default=url is None,
            )
        async with self._openings[model]:  # texts that come meanwhile wait for the result
            if model not in self._open:
                failed_until, failure = self._failed.get(model, (0.0, None))
                if failure is not None and monotonic() < failed_until:
                    raise copy(failure)
                self._open[model] = await self._try_to_open(model, url)
            return self._open[model]

    async def _opened_anew(self, group: GroupName, source: Source) -> Source:
        """Return the source of a model whose file has changed."""
        if self._open.get(group.model_name) is source:
            del self._open[group.model_name]
            await source.close()
        return await self._source(group)

    async def _discover(self, model: str) -> str | None:
        if self._directory is None:
            return None
        if model not in self._discovered:
            async with self._search:  # callers that ask meanwhile wait for the result
                if monotonic() >= self._search_again:
                    self._discovered = await self._in_thread(partial(found_in, self._directory))
                    self._search_again = monotonic() + _AGAIN_SECONDS
        return self._discovered.get(model)

    async def _try_to_open(self, model: str, url: str) -> Source:
        began = monotonic()
        try:
            async with self._places_to_open:
                return await _in_daemon(partial(self._opened, model, url))
        except NoPlace:
            raise  # a place becomes free when another text has its answer
        except (InvalidValue, TokenizerUnavailable) as failure:
            # A file that takes long must not keep a processor busy.
            pause = _AGAIN_SECONDS * max(1.0, monotonic() - began)
            self._failed[model] = (monotonic() + pause, copy(failure))
            raise

    def _opened(self, model: str, url: str) -> Source:
        """Open a source in a thread: it imports, reads files, and may ask the hub."""
        if url.startswith("http"):
            return RemoteTokenizer(url, model, self._new_asker(), seconds=self._seconds, bytes_max=self._text_bytes_max)
        if url.startswith("unix:"):
            try:
                from waymark.tokenization.uds import UdsTokenizer
            except ModuleNotFoundError as error:
                raise missing(str(error.name), url, "epp") from None
            return UdsTokenizer(url, model, seconds=self._seconds, bytes_max=self._text_bytes_max)
        try:
            from waymark.tokenization.local import LocalTokenizer
        except ModuleNotFoundError as error:
            raise missing(str(error.name), url) from None
        return LocalTokenizer(
            url,
            directory_of(url),
            self._memo,
            self._pool,
            self._metrics,
            prompts=self._prompts,
            bytes_max=self._text_bytes_max,
            is_for_sglang=is_for_sglang(url),
            renderers=self._renderers,
            places=self._places,
        )

    def _in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)


def _digest(model: str, prompt: Prompt, tenant_id: str) -> bytes:
    """Return a digest of a prompt, its model and its tenant: the same digest means the same work."""
    try:
        text = json.dumps([model, tenant_id, type(prompt).__name__, prompt.said])
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(
            f"messages have a value that is not JSON: {str(error)[:100]}; send JSON", field="messages"
        ) from None
    return blake2b(text.encode(), digest_size=32).digest()


def _in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in a thread that the end of the process does not wait for: the hub may take minutes."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    Thread(target=_run, args=(work, result), name="open", daemon=True).start()
    return asyncio.wrap_future(result)


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
        del work, result  # the error refers to this frame, as above

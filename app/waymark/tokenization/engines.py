"""Tokens from any registered engine of a model; if one cannot answer, the next one is asked.

After a failure an engine is skipped for a moment, so that prompts do not wait one after the other for an engine that is
gone, or that has no tokenizer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TypeVar

from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.shown import shown
from waymark.domain.names import GroupName
from waymark.tokenization.prompt import Prompt, TokenizedPrompt
from waymark.tokenization.remote import RemoteTokenizer
from waymark.tokenization.sources import no_tokenizer

T = TypeVar("T")

Addresses = Callable[[GroupName], Awaitable[Sequence[str]]]
"""Finds the addresses of a group's engines."""

#: The time of one engine: it must not take the whole time of the request, so the next one is asked after so many
#: seconds.
_ONE_SECONDS = 2.0
#: How long an engine that could not answer is not asked.
_FAILED_SECONDS = 5.0
_FAILED_MAX = 4096


class EngineTokenizer:
    """The tokenizers of the engines of one group. It holds no open resource."""

    kind = "remote"
    encodes_whole = False

    def __init__(
        self,
        group: GroupName,
        addresses: Addresses,
        asker: Asker,
        *,
        seconds: float,
        bytes_max: int,
        failed: dict[str, float],
        is_default: bool,
    ) -> None:
        """``failed`` is shared by all sources of a process; ``is_default``: no setting names a source of the model."""
        self.name = "engine:"
        self._group = group
        self._addresses = addresses
        self._asker = asker
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._failed = failed
        self._is_default = is_default

    def key(self, prompt: Prompt) -> bytes | None:
        """Return None: engines come and go."""

    def known(self, key: bytes) -> TokenizedPrompt | None:
        """Return None: answers are not remembered."""

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the tokens from the first engine that answers."""
        return await self._first(lambda engine: engine.tokens(prompt))

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text from the first engine that answers."""
        return await self._first(lambda engine: engine.text(ids))

    async def close(self) -> None:
        """Close nothing: the connections belong to their creator."""

    async def _first(self, work: Callable[[RemoteTokenizer], Awaitable[T]]) -> T:
        model = self._group.model_name
        addresses = list(dict.fromkeys(await self._addresses(self._group)))
        if not addresses and self._is_default:
            raise no_tokenizer(model)
        if not addresses:
            raise TokenizerUnavailable(
                f"the tokenizer engine: cannot be used now: no engine of the model {shown(model)} is registered with "
                "an address; register one with an address"
            )
        now = monotonic()
        addresses = [address for address in addresses if self._failed.get(address, 0.0) <= now]
        if not addresses:
            raise TokenizerUnavailable(
                f"no engine of the model {shown(model)} could tokenize a text a moment ago; try again in "
                f"{_FAILED_SECONDS:g} s, send token_ids, or name a tokenizer in WAYMARK_TOKENIZERS",
                retry_after_seconds=int(_FAILED_SECONDS),
            )
        random.shuffle(addresses)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        last = f"none of {len(addresses)} engines was asked within {self._seconds:g} s"
        for tried, address in enumerate(addresses):
            seconds_left = deadline - loop.time()
            if seconds_left <= 0:
                break
            seconds = seconds_left if tried == len(addresses) - 1 else min(seconds_left, _ONE_SECONDS)
            engine = RemoteTokenizer(address, model, self._asker, seconds=seconds, bytes_max=self._bytes_max)
            try:
                return await work(engine)
            except TokenizerUnavailable as error:
                last = error.sentence
                self._remember(address)
            except InvalidValue as error:
                if error.field != "url":
                    raise
                last = error.sentence  # its address is not allowed
        raise TokenizerUnavailable(
            f"no engine of the model {shown(model)} could tokenize the text: {last}; send token_ids, or name a "
            "tokenizer in WAYMARK_TOKENIZERS"
        )

    def _remember(self, address: str) -> None:
        self._failed.pop(address, None)
        self._failed[address] = monotonic() + _FAILED_SECONDS
        if len(self._failed) > _FAILED_MAX:
            del self._failed[next(iter(self._failed))]

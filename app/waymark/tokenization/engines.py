"""Tokens from any registered engine of a model; where one cannot answer, the next one is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.shown import shown
from waymark.domain.names import GroupName
from waymark.tokenization.prompt import Prompt, TokenizedPrompt
from waymark.tokenization.remote import RemoteTokenizer

T = TypeVar("T")

Addresses = Callable[[GroupName], Awaitable[Sequence[str]]]
"""Finds where the engines of a group take requests."""

#: One of them may not take all of the time: the next one is asked after so long, in seconds.
_ONE_SECONDS = 2.0


class EngineTokenizer:
    """The tokenizers of the engines of one group. It holds nothing open."""

    kind = "remote"
    encodes_whole = False

    def __init__(self, group: GroupName, addresses: Addresses, asker: Asker, *, seconds: float, bytes_max: int) -> None:
        self.name = "engine:"
        self._group = group
        self._addresses = addresses
        self._asker = asker
        self._seconds = seconds
        self._bytes_max = bytes_max

    def key(self, prompt: Prompt) -> bytes | None:
        """None: engines come and go."""

    def known(self, key: bytes) -> TokenizedPrompt | None:
        """Nothing is."""

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """The tokens of a prompt, as the first engine makes them that answers."""
        return await self._first(lambda engine: engine.tokens(prompt))

    async def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, as the first engine makes it that answers."""
        return await self._first(lambda engine: engine.text(ids))

    async def close(self) -> None:
        """The connections are its maker's."""

    async def _first(self, work: Callable[[RemoteTokenizer], Awaitable[T]]) -> T:
        model = self._group.model_name
        addresses = list(dict.fromkeys(await self._addresses(self._group)))
        if not addresses:
            raise TokenizerUnavailable(
                f"the tokenizer engine: cannot be used now: no engine of the model {shown(model)} is registered with "
                "an address; register one with an address"
            )
        random.shuffle(addresses)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        last = f"none of {len(addresses)} engines was asked within {self._seconds:g} s"
        for tried, address in enumerate(addresses):
            left = until - loop.time()
            if left <= 0:
                break
            seconds = left if tried == len(addresses) - 1 else min(left, _ONE_SECONDS)
            engine = RemoteTokenizer(address, model, self._asker, seconds=seconds, bytes_max=self._bytes_max)
            try:
                return await work(engine)
            except TokenizerUnavailable as error:
                last = error.sentence
            except InvalidValue as error:
                if error.field != "url":
                    raise
                last = error.sentence  # its address is not allowed
        raise TokenizerUnavailable(
            f"no engine of the model {shown(model)} could tokenize the text; the last error: {last}"
        )

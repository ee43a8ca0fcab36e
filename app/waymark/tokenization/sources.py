"""The source of a model's tokens, and its opening. Optional packages are imported only when they are needed.

Any registered engine of a model can be a source; if one cannot answer, the next one is asked. After a failure an engine
is skipped for a moment, so that prompts do not wait one after the other for an engine that is gone, or that has no
tokenizer.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.shown import shown
from waymark.domain.names import GroupName
from waymark.tokenization.prompt import Forgetful, Prompt, TokenizedPrompt
from waymark.tokenization.remote import RemoteTokenizer

#: The bound on directories below WAYMARK_TOKENIZERS_DIR to look at; a volume may hold anything.
_DIRECTORIES_MAX = 10_000
#: The files of a tokenizer; the weights next to them are not fetched.
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def no_tokenizer(model: str) -> InvalidValue:
    """Return the refusal of text for a model without a source."""
    return InvalidValue(
        f"there is no tokenizer for the model {shown(model)}, and no engine of it that is registered with an address; "
        "register one with 'waymark register URL', name a tokenizer in WAYMARK_TOKENIZERS, put its directory into "
        "WAYMARK_TOKENIZERS_DIR, or send token_ids",
        reason="no_tokenizer",
        field="model",
    )


def found_in(directory: Path) -> dict[str, str]:
    """Return URLs by model: each ``tokenizer.json`` one or two levels down, with its directory's path as the model."""
    names: dict[str, str] = {}
    looked_at = 0
    for path in _directories(directory):
        for candidate in [path, *_directories(path)]:
            looked_at += 1
            if looked_at > _DIRECTORIES_MAX:
                return names
            if (candidate / "tokenizer.json").is_file():
                names[candidate.relative_to(directory).as_posix()] = candidate.absolute().as_uri()
    return names


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []  # unreadable, so without a tokenizer


def directory_of(url: str, *, hub_cache: Path | None = None) -> Path:
    """Return the directory of a ``file`` or ``hf`` URL, after fetching it from the hub if necessary. Blocks.

    ``hub_cache`` is the directory for the hub's files, by default that of ``huggingface_hub``.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        return path.parent if path.name == "tokenizer.json" else path
    name, _, revision = (parts.netloc + parts.path).partition("@")
    return _from_hub(url, name.rstrip("/"), revision or None, hub_cache)


def is_for_sglang(url: str) -> bool:
    """Return whether SGLang serves the model of a ``file`` or ``hf`` URL; else messages are read in vLLM's way."""
    return urlsplit(url).query == "engine=sglang"


def _from_hub(url: str, name: str, revision: str | None, cache: Path | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        raise missing("huggingface_hub", url) from None

    def fetch(*, is_local: bool) -> Path:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=cache, allow_patterns=list(_FILES), local_files_only=is_local
            )
        )

    try:
        try:
            return fetch(is_local=True)
        except LocalEntryNotFoundError:
            return fetch(is_local=False)
    except Exception as error:  # the hub's client lets errors of several libraries through
        first = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise TokenizerUnavailable(f"the tokenizer {url} cannot be fetched: {first}", retry_after_seconds=10) from None


def missing(package: str, url: str, extra: str = "tokens") -> InvalidValue:
    """Return the refusal without an optional package."""
    return InvalidValue(
        f"the tokenizer {url} needs the package {package}, which is not installed; install waymark[{extra}]",
        reason="no_tokenizer",
        field="model",
    )


T = TypeVar("T")

Addresses = Callable[[GroupName], Awaitable[Sequence[str]]]
"""Finds the addresses of a group's engines."""

#: The time of one engine: it must not take the whole time of the request, so the next one is asked after so many
#: seconds.
_ONE_SECONDS = 2.0
#: How long an engine that could not answer is not asked.
_FAILED_SECONDS = 5.0
_FAILED_MAX = 4096


class EngineTokenizer(Forgetful):
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

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the tokens from the first engine that answers."""
        return await self._first(lambda engine: engine.tokens(prompt))

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text from the first engine that answers."""
        return await self._first(lambda engine: engine.text(ids))

    async def close(self) -> None:
        """Do no work: the connections belong to their creator."""

    async def _first(self, work: Callable[[RemoteTokenizer], Awaitable[T]]) -> T:
        model = self._group.model_name
        addresses = list(dict.fromkeys(await self._addresses(self._group)))
        if not addresses and self._is_default:
            raise no_tokenizer(model)
        if not addresses:
            raise TokenizerUnavailable(
                f"the tokenizer engine: cannot be used now: no engine of the model {shown(model)} is registered with "
                "an address; register one with 'waymark register URL'"
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

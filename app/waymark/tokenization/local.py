"""A tokenizer from files: ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a model.

Another process encodes texts (``encoders``), and others render templates. Looking up a result, and all other work on a
short text, are done on the event loop: they cost less than a switch to a thread and back.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.chat.requests import has_media
from waymark.domain.packing import pack_tokens
from waymark.tokenization.encoders import TokenizerProcess
from waymark.tokenization.places import EncoderPlaces
from waymark.tokenization.prompt import ChatPrompt, Prompt, TextPrompt, TokenizedPrompt
from waymark.tokenization.renderers import Renderers
from waymark.tokenization.segments import Pieces, SegmentMemo, Splitter
from waymark.tokenization.templates import SOURCE_MAX, ChatTemplate

if find_spec("tokenizers") is None:  # another process imports it
    raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

log = logging.getLogger(__name__)

#: Characters of a text to split on the loop; beyond it a thread does it.
_SHORT = 2**16
#: How long messages wait until their model's template may be rendered.
_TURN_SECONDS = 0.5
_SAMPLES = 20
#: Files of a model come from a hub. Of the tokenizers in use, the largest have 33 MB, and a configuration 1 MB.
TOKENIZER_BYTES_MAX, TEXT_BYTES_MAX = 40 * 2**20, 4 * SOURCE_MAX
#: Pieces of the samples: texts that a tokenizer may treat differently at a border.
_PIECES = (
    *("", "a", " a", "a ", "  two  blanks  ", "\n", "\n\nnew line", "line\n", "Hello, world!", "don't", "12345", " 7"),
    *("user\n", "été e\u0301te\u0301", "中文字", "🙂🙃", "\t", "▁", "x" * 40, "ﬁ ①", "İI", "."),
)

#: Characters at the end of a text whose ids are compared with those that it has before other texts.
_WINDOW = 512
#: The most characters of a word. Some languages write no blanks.
_WORD = 32
#: Texts that change the last ids of a text before them, if anything does. An engine may write such texts for an image.
_FOLLOWING = (
    *("a", "A", "é", "1", " ", " a", "\n", "\n\n", "<", "["),
    *("'", "'s", ".", ",", "_", "▁", "\u0301", "中", "🙂"),
)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def encoder_of(directory: Path, bytes_max: int, places: EncoderPlaces | None = None) -> TokenizerProcess:
    """Open the tokenizer of a directory for texts up to ``bytes_max``."""
    path = directory / "tokenizer.json"
    size = path.stat().st_size if path.is_file() else 0
    if size > TOKENIZER_BYTES_MAX:
        raise _too_large(path, size, TOKENIZER_BYTES_MAX)
    return TokenizerProcess(path, TOKENIZER_BYTES_MAX, bytes_max, places)


class Templates:
    """The chat templates of a model: one, or one more for requests with tools."""

    def __init__(self, default: ChatTemplate, with_tools: ChatTemplate | None) -> None:
        self._default = default
        self._with_tools = with_tools

    def of(self, prompt: ChatPrompt) -> ChatTemplate:
        return self._with_tools if prompt.tools and self._with_tools is not None else self._default


def read_templates(
    directory: Path, bytes_max: int, *, is_for_sglang: bool = False, renderers: Renderers | None = None
) -> Templates | None:
    config = _json(directory / "tokenizer_config.json")
    special: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    file = directory / "chat_template.jinja"
    content = _content(file, TEXT_BYTES_MAX)
    try:
        template: Any = config.get("chat_template") if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{file} is not UTF-8: {error}; mend it", reason="no_tokenizer", field="model") from None
    if template is None:
        template = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    else:
        named = {"default": template}
    templates = {
        name: ChatTemplate(source, special, bytes_max=bytes_max, is_for_sglang=is_for_sglang, renderers=renderers)
        for name, source in named.items()
        if name in ("default", "tool_use") and isinstance(source, str)
    }
    return Templates(templates["default"], templates.get("tool_use")) if "default" in templates else None


def _content(path: Path, bytes_max: int) -> bytes | None:
    """Return the bytes of a file, or None if there is no such file."""
    if not path.is_file():
        return None  # opening a pipe would block
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(bytes_max + 1) if size <= bytes_max else b""
    size = max(size, len(content))
    if size > bytes_max:
        raise _too_large(path, size, bytes_max)
    return content


def _too_large(path: Path, size: int, bytes_max: int) -> InvalidValue:
    return InvalidValue(
        f"{path} has {size} bytes, and at most {bytes_max} are read; put a smaller file there, or give the model "
        "another source in WAYMARK_TOKENIZERS",
        reason="no_tokenizer",
        field="model",
    )


def _json(path: Path) -> dict[str, Any]:
    content = _content(path, TEXT_BYTES_MAX)
    if content is None:
        return {}
    try:
        document = bounded_loads(content)
    except ValueError as error:
        raise InvalidValue(f"{path} is not JSON: {error}; mend it", reason="no_tokenizer", field="model") from None
    return document if isinstance(document, dict) else {}


class LocalTokenizer:
    """The tokenizer of one model, from a directory. It must be made in a thread: it reads files, and tries samples.

    Raise ``InvalidValue`` (no_tokenizer) if the directory does not have a usable one.
    """

    kind = "local"

    def __init__(
        self,
        name: str,
        directory: Path,
        memo: SegmentMemo,
        pool: Executor,
        metrics: Metrics,
        *,
        prompts: SegmentMemo,
        bytes_max: int,
        is_for_sglang: bool = False,
        renderers: Renderers | None = None,
        places: EncoderPlaces | None = None,
    ) -> None:
        """``memo`` remembers pieces, ``prompts`` whole prompts. Messages are read as vLLM reads them, or as SGLang."""
        self.name = name
        self._is_for_sglang = is_for_sglang
        self._memo = memo
        self._prompts = prompts
        self._seed = SegmentMemo.seed()
        self._pool = pool
        self._segments_known = metrics.tokenize_segments.labels(known="true")
        self._segments_new = metrics.tokenize_segments.labels(known="false")
        self._bytes_max = bytes_max
        self._renderers = renderers or Renderers(metrics)
        self._turn = asyncio.Lock()
        """Held while a text is rendered: one model takes one of the threads that wait for renderings."""
        self._encoder = encoder_of(directory, bytes_max, places)
        try:
            self._template = read_templates(
                directory, bytes_max, is_for_sglang=is_for_sglang, renderers=self._renderers
            )
            self._splitter = Splitter(self._encoder.tokens, self._encoder.peculiar, SegmentMemo.seed())
            self._around = self._added_around()
            self.splits = self._are_samples_equal()
        except BaseException:
            self._encoder.close()
            raise
        self.encodes_whole = not self.splits
        if not self.splits:
            log.warning(
                "texts of this tokenizer are encoded whole: split at special tokens, their ids would differ",
                extra=fields(source=name),
            )

    def key(self, prompt: Prompt) -> bytes | None:
        """Return a digest of everything that determines the ids of a prompt; None if it cannot be computed cheaply."""
        if not _is_within(prompt, self._bytes_max):
            return None
        facts = prompt.said
        if isinstance(prompt, ChatPrompt):
            dates = None if self._template is None else self._template.of(prompt).dates()
            if dates is None:
                return None
            facts = (*facts, dates)
        try:
            # Exact, and fast. From version 3 on, one value may be written in two ways.
            return xxh3_128_digest(marshal.dumps(facts, 2), self._seed)
        except ValueError:
            return None  # too deep, or not JSON

    def known(self, key: bytes) -> TokenizedPrompt | None:
        """Return the remembered ids of a prompt."""
        ids = self._prompts.find(key)
        if ids is None:
            return None
        self._segments_known.inc()
        return TokenizedPrompt(ids)

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the ids of a prompt. Raise ``InvalidValue`` if it is too long or the template refuses it."""
        if key is None:
            # Before the template is rendered: the day may end meanwhile.
            key = self.key(prompt)
        if self._is_for_sglang and isinstance(prompt, ChatPrompt):
            prompt = replace(prompt, add_special_tokens=False)  # whatever a request says
        if self._is_for_sglang and prompt.truncation is not None:
            prompt = replace(prompt, truncation=None)  # it knows no such field
        if isinstance(prompt, ChatPrompt):
            pieces = await self._rendered(prompt)
        elif len(prompt.text) <= _SHORT:
            pieces = self._pieces(prompt)
        else:
            pieces = await asyncio.get_running_loop().run_in_executor(self._pool, self._pieces, prompt)
        remembered = [self._memo.find(piece_key) if piece_key else b"" for piece_key in pieces.keys]
        new = {
            piece_key: text
            for piece_key, text, piece_ids in zip(pieces.keys, pieces.texts, remembered, strict=True)
            if piece_ids is None
        }
        self._segments_known.inc(len(set(filter(None, pieces.keys))) - len(new))
        encoded = await self._encoded_anew(new, adds=not self.splits and prompt.add_special_tokens) if new else {}
        ids = [
            encoded[piece_key] if piece_ids is None else piece_ids
            for piece_key, piece_ids in zip(pieces.keys, remembered, strict=True)
        ]
        joined = pieces.joined(ids)
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            uncertain = await self._uncertain(pieces.texts[-1])
            joined = joined[: max(0, len(joined) - 4 * uncertain)]
        joined = self._surrounded(prompt, joined)
        if key is not None:
            self._prompts.keep(key, joined)
        return TokenizedPrompt(joined)

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens; unknown ids are left out."""
        return await self._encoder.decode(pack_tokens(list(ids)))

    async def close(self) -> None:
        """End the process of the tokenizer."""
        self._encoder.close()

    async def _rendered(self, prompt: ChatPrompt) -> Pieces:
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise TokenizerUnavailable(
                f"the chat template of this model has been busy with other messages for {_TURN_SECONDS:g} s; try again "
                "in a moment"
            ) from None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._renderers.threads, self._pieces, prompt)
        finally:
            self._turn.release()

    # ---- a prompt in pieces ------------------------------------------------------------------------

    def _pieces(self, prompt: Prompt) -> Pieces:
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            return self._pieces_before_media(prompt)
        pieces = self._pieces_of(self._text(prompt), prompt)
        if not isinstance(prompt, ChatPrompt) or self._template is None:
            return pieces
        ending = self._template.of(prompt).behind(prompt)
        return pieces.followed_by(self._pieces_of(ending, prompt)) if ending else pieces

    def _pieces_of(self, text: str, prompt: Prompt) -> Pieces:
        if self.splits:
            return self._splitter.split(text)
        return self._splitter.whole(text, b"\1" if prompt.add_special_tokens else b"\0")

    def _pieces_before_media(self, prompt: ChatPrompt) -> Pieces:
        """Return the pieces before the first image; empty if texts are not split."""
        return self._splitter.split(self._text(prompt, is_cut=True)) if self.splits else Pieces([""], [b""], [])

    async def _uncertain(self, text: str) -> int:
        """Return how many ids at the end of a piece depend on the following text, which only the engine knows."""
        window = text[-_WINDOW:]
        if not window:
            return 0
        # The following text may change the last word, whatever its first characters are.
        word = len(window) - len(window.rstrip().rpartition(" ")[0])
        beginning = window[: len(window) - min(word, _WORD)]
        whole, *continued = await self._encoder.encode([window, beginning, *(window + ids for ids in _FOLLOWING)])
        same = min(len(commonprefix([whole, ids])) for ids in continued) // 4  # noqa: RUF071  # of ids
        return len(whole) // 4 - same

    def _text(self, prompt: Prompt, *, is_cut: bool = False) -> str:
        if isinstance(prompt, ChatPrompt):
            if self._template is None:
                raise InvalidValue(
                    f"{self.name} has no chat template, and messages need one; add chat_template.jinja to it, or send "
                    "prompt or token_ids",
                    reason="no_tokenizer",
                    field="model",
                )
            template = self._template.of(prompt)
            text, field = template.render_before_media(prompt) if is_cut else template.render(prompt), "messages"
        else:
            text, field = prompt.text, "prompt"
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            raise InvalidValue(
                f"{field} has half of a surrogate pair, which no tokenizer can read; send whole characters", field=field
            ) from None
        if size > self._bytes_max:
            raise InvalidValue(
                f"{field} makes a text of {size} bytes and at most {self._bytes_max} are read; send less, or raise "
                "WAYMARK_MAX_TOKENS",
                reason="too_large",
                field=field,
            )
        return text

    def _surrounded(self, prompt: Prompt, ids: bytes) -> bytes:
        """Return the ids with the tokenizer's additions, cut if the request says so."""
        beginning, ending = self._around if prompt.add_special_tokens else (b"", b"")
        is_cut = isinstance(prompt, ChatPrompt) and has_media(prompt.messages)
        if is_cut:
            # How much would be removed of an unknown rest is unknown, too.
            return beginning + ids if self.splits and prompt.truncation is None else b""
        if self.splits:
            ids = beginning + ids + ending
        return ids if prompt.truncation is None else prompt.truncation.cut(ids, beginning, ending)

    # ---- the tokenizer -----------------------------------------------------------------------------

    async def _encoded_anew(self, new: Mapping[bytes, str], *, adds: bool) -> dict[bytes, bytes]:
        """Encode texts by their keys, and remember the ids in the memo."""
        self._segments_new.inc(len(new))
        encoded = await self._encoder.encode(list(new.values()), adds=adds)
        result = dict(zip(new, encoded, strict=True))
        for key, ids in result.items():
            self._memo.keep(key, ids)
        return result

    def _added_around(self) -> tuple[bytes, bytes]:
        """Return the tokenizer's additions before and after a text with special tokens."""
        (bare,), (full,) = self._encoder.encoded_first(["a"]), self._encoder.encoded_first(["a"], adds=True)
        start = full.find(bare)
        while start % 4 and start >= 0:
            start = full.find(bare, start + 1)
        return (b"", b"") if start < 0 else (full[:start], full[start + len(bare) :])

    def _are_samples_equal(self) -> bool:
        beginning, ending = self._around
        for sample in _samples(self._splitter.words):
            pieces = self._splitter.split(sample)
            whole, *parts = self._encoder.encoded_first([sample, *pieces.texts])
            glued = pieces.joined([ids if text else b"" for text, ids in zip(pieces.texts, parts, strict=True)])
            if whole != glued or self._encoder.encoded_first([sample], adds=True) != [beginning + glued + ending]:
                return False
        return True


def _is_within(prompt: Prompt, characters_max: int) -> bool:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) <= characters_max
    characters_left = characters_max - (
        0 if prompt.system is None else len(prompt.system) * (1 if isinstance(prompt.system, str) else 1024)
    )
    for message in prompt.messages:
        content = message.get("content") if isinstance(message, dict) else None
        characters_left -= len(content) + 100 if isinstance(content, str) else 1024
        if characters_left < 0:
            return False
    return True


def _samples(words: Sequence[str]) -> Iterator[str]:
    chance = random.Random(0)
    marks = list(words[:8]) + chance.sample(list(words[8:]), min(24, len(words[8:])))
    for number in range(_SAMPLES):
        pieces: list[str] = [_PIECES[number % len(_PIECES)]]
        for _ in range(12):
            pieces += [chance.choice(marks) if marks else "", chance.choice(_PIECES), chance.choice(_PIECES)]
        yield "".join(pieces)

"""Tokenizers in processes of their own (``encoding``), one for each model; ``places`` bounds how many run.

A tokenizer that exceeds a bound costs its process, and the next text starts another.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import struct
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.logs import fields
from waymark.tokenization import encoding
from waymark.tokenization.encoding import ADDED_CHARACTERS_MAX, ADDED_MAX, Bounds
from waymark.tokenization.places import EncoderPlace, EncoderPlaces
from waymark.tokenization.processes import ChildProcess, is_out_of_cpu, named
from waymark.tokenization.rendering import ANSWER, REQUEST, TEXT, TOO_LARGE

log = logging.getLogger(__name__)

#: CPU to open a tokenizer. The largest in use take one to two seconds.
OPEN_SECONDS_MAX = 10.0
#: How long an opening may take on a busy machine.
_OPEN_WALL_SECONDS = 60.0
#: CPU for a text of the default maximum length, which takes some two seconds; a longer text has more.
TEXT_SECONDS_MAX = 10.0
_TEXT_BYTES = 2 * 2**20
#: How long such a text may take on a busy machine.
_TEXT_WALL_SECONDS = 120.0
#: The address space of a process: a tokenizer takes up to 500 MB, and a text some 300 bytes for each of its bytes;
#: two of the texts may have the maximum length.
MEMORY_BYTES_MAX, _TEXT_MEMORY = 2**30, 1024
#: The bytes of an answer for each byte that a text may have: an id has four, and some normalizers make a text longer.
_ANSWER_BYTES = 16
#: The samples with which a tokenizer is tried are shorter.
_SAMPLE_BYTES = 2**16
#: The most bytes of the answer to an opening, which has the added tokens in JSON.
_OPENED_BYTES_MAX = 8 * 2**20


def memory_bytes_max(bytes_max: int) -> int:
    """Return the bound on the memory of a process for texts of up to this many bytes."""
    return MEMORY_BYTES_MAX + _TEXT_MEMORY * bytes_max


class TokenizerChanged(TokenizerUnavailable):
    """The file of a tokenizer has changed, so the added tokens and all remembered ids are out of date."""


class _OpenedFile(NamedTuple):
    """The answer of a process that has opened its tokenizer."""

    tokens: dict[str, int]
    peculiar: list[str]
    digest: str

    @classmethod
    def of(cls, answer: bytes) -> _OpenedFile:
        """Read the answer. Raise ValueError if the program cannot have sent it: the file may have taken over."""
        most = ADDED_MAX + ADDED_CHARACTERS_MAX
        content = bounded_loads(answer, values_max=most, parts_max=most)
        match content:
            case {"tokens": dict(tokens), "peculiar": list(peculiar), "digest": str(digest)}:
                has_ids = all(type(number) is int and 0 <= number < 2**32 for number in tokens.values())
                has_texts = all(isinstance(token, str) for token in peculiar)
                if has_ids and has_texts and len(tokens) + len(peculiar) <= ADDED_MAX:
                    return cls(tokens, peculiar, digest)
        raise ValueError("its process does not answer with added tokens")


class TokenizerProcess:
    """The process of one model's tokenizer. It must be made in a thread, which waits until the tokenizer is open.

    Raise ``InvalidValue`` (no_tokenizer) if the file is not a usable tokenizer.
    """

    def __init__(self, path: Path, file_bytes_max: int, bytes_max: int, places: EncoderPlaces | None = None) -> None:
        """``bytes_max`` are the most bytes of a text."""
        self._path = path
        if not path.is_file():  # opening a pipe would block
            raise self._unusable("there is no such file")
        self._file_bytes_max = file_bytes_max
        self._bytes_max = bytes_max
        self._lengths = max(1.0, bytes_max / _TEXT_BYTES)
        self._bounds = Bounds(
            memory_bytes_max(bytes_max),
            OPEN_SECONDS_MAX,
            TEXT_SECONDS_MAX * self._lengths,
            _ANSWER_BYTES * max(bytes_max, _SAMPLE_BYTES),
        )
        self._digest = ""
        """A digest of the file."""
        self._deadline = 0.0
        self._numbers = count()
        self._answers: _Answers | None = None
        self._starting = asyncio.Lock()
        self._places = places or EncoderPlaces()
        self._place = EncoderPlace()
        with self._places.taken(self._place):
            _, content = self._open()
        self.tokens, self.peculiar = content.tokens, content.peculiar
        """The added tokens at which texts are split, with their ids, and those that match in ways of their own."""

    def encoded_first(self, texts: Sequence[str], *, adds: bool = False) -> list[bytes]:
        """Return the ids of texts, as ``encode`` does. It blocks, and must not be called after ``encode``."""
        request = marshal.dumps((list(texts), adds), 2)
        with self._places.taken(self._place):
            process = self._place.process or self._opened_again()
            kind, answer = self._asked_in_thread(process, request, 0, 4 + self._bounds.answer_bytes)
        if kind != TEXT:
            raise self._unusable(answer[4:].decode("utf-8", "replace"))
        try:
            return _split(answer[4:], len(texts))
        except ValueError as error:
            raise self._unusable(str(error)) from None

    async def encode(self, texts: Sequence[str], *, adds: bool = False) -> list[bytes]:
        """Return the ids of texts as little-endian u32; ``adds``: with the tokenizer's special tokens."""
        answer = await self._asked(marshal.dumps((list(texts), adds), 2))
        try:
            return _split(answer, len(texts))
        except ValueError as error:
            raise _unreadable(str(error)) from None

    async def decode(self, ids: bytes) -> str:
        """Return the text of ids, including special tokens; unknown ids are left out."""
        return (await self._asked(marshal.dumps((ids, False), 2))).decode("utf-8", "replace")

    def close(self) -> None:
        """End the process."""
        if self._answers is not None:
            self._answers.close()
        process = self._places.drop(self._place)
        if process is not None:
            process.kill()  # it may be in the middle of a text
            process.end()

    async def _asked(self, request: bytes) -> bytes:
        if len(request) <= encoding.LONG:
            return await self._asked_in_place(request)
        async with self._places.long_texts.taken(self._place, len(request), self._bytes_max):
            return await self._asked_in_place(request)

    async def _asked_in_place(self, request: bytes) -> bytes:
        await self._places.take(self._place)
        try:
            return await self._answered(request)
        finally:
            self._places.leave(self._place)

    async def _answered(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        why = ""
        for _ in range(2):  # another text may have ended the process
            answers = await self._connected()
            try:
                async with asyncio.timeout(_TEXT_WALL_SECONDS * self._lengths):
                    kind, answer = await answers.ask(next(self._numbers) % 2**32, request)
            except TimeoutError:
                answers.process.kill()  # it may hang; other texts under way go to the next one
                raise TokenizerUnavailable(
                    f"the tokenizer {self._path} has not answered in time; try again in a moment"
                ) from None
            except EOFError:
                why = self._reason(await loop.run_in_executor(self._places.threads, answers.process.end))
                continue
            if kind == TEXT:
                return answer
            why = answer.decode("utf-8", "replace")
            if kind == TOO_LARGE:
                why = f"it makes more than {self._bounds.answer_bytes} bytes of it"
            break
        raise _unreadable(why)

    async def _connected(self) -> _Answers:
        """Return the connection to the process. One that has ended is started again, and opens the tokenizer again."""
        async with self._starting:
            loop = asyncio.get_running_loop()
            answers, process = self._answers, self._place.process
            is_usable = process is not None and process.is_usable()
            if answers is not None and not answers.is_closed and answers.process is process and is_usable:
                return answers
            if answers is not None and answers.process.is_own():
                # This comes before another thread closes its socket: the loop would take the next socket with the same
                # descriptor for this one.
                answers.close()
            if process is None or answers is not None or not is_usable:
                process = await loop.run_in_executor(self._places.threads, self._opened_again)
            self._answers = answers = _Answers(process, self._bounds.answer_bytes)
            await loop.create_unix_connection(lambda: answers, sock=process.socket)
            return answers

    def _opened_again(self) -> ChildProcess:
        """Return another process; the tokenizer was closed, or its process has ended."""
        process, self._place.process = self._place.process, None
        if process is not None:
            why = self._reason(process.end())
            log.warning("a tokenizer ended its process", extra=fields(source=str(self._path), reason=why))
        return self._open()[0]

    def _open(self) -> tuple[ChildProcess, _OpenedFile]:
        """Start the process of the place. Return it, and the contents of the file."""
        self._deadline = monotonic() + _OPEN_WALL_SECONDS
        self._places.end_surplus()
        process = ChildProcess(encoding.__file__, *map(str, self._bounds))
        request = str(self._path).encode("utf-8", "surrogateescape")
        with self._places.opening(process):
            kind, answer = self._asked_in_thread(process, request, self._file_bytes_max, _OPENED_BYTES_MAX)
        if kind != TEXT:
            process.end()
            raise self._unusable(answer.decode("utf-8", "replace"))
        try:
            content = _OpenedFile.of(answer)
        except ValueError as error:
            process.end()
            raise self._unusable(str(error)) from None
        if self._digest not in ("", content.digest):
            process.end()
            raise TokenizerChanged(f"{self._path} has changed since it was opened; try again in a moment")
        self._digest = content.digest
        self._place.process = process
        return process, content

    def _asked_in_thread(
        self, process: ChildProcess, request: bytes, number: int, answer_max: int
    ) -> tuple[bytes, bytes]:
        seconds = max(0.1, self._deadline - monotonic())
        try:
            return process.ask(request, number, answer_max=answer_max, seconds=seconds)
        except TimeoutError:
            process.kill()
            process.end()
            raise TokenizerUnavailable(
                f"the tokenizer {self._path} was not opened within {_OPEN_WALL_SECONDS:g} s; try again in a moment"
            ) from None
        except (OSError, EOFError):
            raise self._unusable(self._reason(process.end())) from None

    def _reason(self, status: int) -> str:
        bounds = self._bounds
        if is_out_of_cpu(status):
            return (
                f"it takes more than {bounds.open_seconds:g} s of CPU to open, or {bounds.text_seconds:g} s for a text"
            )
        return f"it takes more than {bounds.memory_bytes} bytes of memory, or ends its process ({named(status)})"

    def _unusable(self, why: str) -> InvalidValue:
        return InvalidValue(
            f"{self._path} cannot be read as a tokenizer: {why[:200]}; put a tokenizer there, or give the model "
            "another source in WAYMARK_TOKENIZERS",
            reason="no_tokenizer",
            field="model",
        )


class _Answers(asyncio.Protocol):
    """The requests to a process that have no answer yet."""

    def __init__(self, process: ChildProcess, answer_max: int) -> None:
        self.process = process
        self._answer_max = answer_max
        self.is_closed = False
        self._transport: Any = None
        self._waiting: dict[int, asyncio.Future[tuple[bytes, bytes]]] = {}
        self._received = bytearray()

    async def ask(self, number: int, request: bytes) -> tuple[bytes, bytes]:
        """Return the kind of an answer, and the answer. Raise EOFError if the process ends."""
        if self.is_closed or self._transport is None:
            raise EOFError
        answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(REQUEST.pack(len(request), number) + request)
        try:
            return await answer
        finally:
            del self._waiting[number]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= ANSWER.size:
            kind, size = ANSWER.unpack_from(received)
            # A model's file may have taken over the process: its answers are not trusted.
            if not 4 <= size <= 4 + self._answer_max:
                self.close()
                return
            end = ANSWER.size + size
            if len(received) < end:
                return
            number = int.from_bytes(received[ANSWER.size : ANSWER.size + 4], "little")
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result((kind, bytes(received[ANSWER.size + 4 : end])))
            del received[:end]

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EOFError())


def _unreadable(why: str) -> InvalidValue:
    return InvalidValue(f"the tokenizer of this model cannot read this text: {why}; send less, or send token_ids")


def _split(answer: bytes, texts: int) -> list[bytes]:
    """Return the ids of each text. Raise ValueError if the answer has another length than its first numbers say."""
    offset, ids = 4 * texts, []
    for size in struct.unpack_from(f"<{texts}I", answer.ljust(offset, b"\0")):
        ids.append(answer[offset : offset + 4 * size])
        offset += 4 * size
    if offset != len(answer):
        raise ValueError("its process answers with ids of another length than it announces")
    return ids

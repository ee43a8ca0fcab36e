"""The program of a process that holds one model's tokenizer; ``encoders`` starts it, and talks to it over a socket.

A tokenizer comes with a model's files, often from a hub. The library holds the GIL while it opens one, and some files
take all memory or end the process. So each tokenizer is opened and used in a process of its own, with bounds on memory
and CPU. The process ends at the end of its socket, and so with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import marshal
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_128_hexdigest

from waymark.domain.packing import pack_tokens, unpack_tokens
from waymark.tokenization.rendering import ANSWER, REQUEST, TEXT, TOO_LARGE, UNFIT, first_line

#: The most added tokens of a model, and their characters; with more, texts are not split. Models have some thousand.
ADDED_MAX, ADDED_CHARACTERS_MAX = 2**16, 2**18

#: The most characters of a text to encode at once, in less than a millisecond: a new turn of a conversation.
_FEW = 2**11
#: Threads for texts up to ``LONG`` characters, and for longer ones, which take most memory.
THREADS, LONG, _LONG_THREADS = 4, 2**16, 2
_WATCH_SECONDS = 0.5


class Bounds(NamedTuple):
    """The resources that the process may take; the arguments of the program behind the socket."""

    memory_bytes: int
    """Its address space."""
    open_seconds: float
    """CPU to open the tokenizer."""
    text_seconds: float
    """CPU for one text."""
    answer_bytes: int
    """The ids of one request, or their text."""


class OpenTokenizer:
    """The tokenizer of a file. Only ``encode_batch_fast`` is called: ``encode`` holds the GIL as long as it takes."""

    def __init__(self, content: bytes) -> None:
        # The process that starts this program reads its constants, and need not load the library.
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(content)
        # Engines cut and fill prompts themselves, if at all.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def added(self) -> dict[str, Any]:
        """Return the ids of the added tokens at which a text is split, and the tokens that match in ways of their
        own.
        """
        tokens, peculiar = {}, []
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            if not token.content or token.normalized:
                continue  # the tokenizer looks for these in each piece, after it has normalized it
            if token.lstrip or token.rstrip or token.single_word:
                peculiar.append(token.content)
            else:
                tokens[token.content] = number
        if len(tokens) + len(peculiar) > ADDED_MAX or sum(map(len, (*tokens, *peculiar))) > ADDED_CHARACTERS_MAX:
            return {"tokens": {}, "peculiar": []}
        return {"tokens": tokens, "peculiar": peculiar}

    def answer(self, request: Any) -> bytes:
        """Return the number of ids of each text and all ids, as u32; or the text of ids."""
        texts, adds = request
        if isinstance(texts, bytes):
            (text,) = self._tokenizer.decode_batch([unpack_tokens(texts)], skip_special_tokens=False)
            return str(text).encode("utf-8", "replace")
        # One at a time: several would be spread over all cores.
        ids = [pack_tokens(self._tokenizer.encode_batch_fast([text], add_special_tokens=adds)[0].ids) for text in texts]
        return b"".join([struct.pack(f"<{len(ids)}I", *(len(each) // 4 for each in ids)), *ids])


class Server:
    """The requests of one process, which are answered in the order in which they are done."""

    def __init__(self, tokenizer: OpenTokenizer, stream: BinaryIO, bounds: Bounds) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._bounds = bounds
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        """The CPU that a thread had used when it began with a text. Only a live thread has a clock, so no thread ends
        while the clocks are read."""
        self._looking = threading.Lock()
        self._has_garbage = False

    def serve(self) -> None:
        """Answer requests until the socket ends."""
        threading.Thread(target=self._watch, daemon=True).start()
        short, long = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(_LONG_THREADS)
        while len(head := self._stream.read(REQUEST.size)) == REQUEST.size:
            size, number = REQUEST.unpack(head)
            request = self._stream.read(size)
            if size <= _FEW:
                self._work(number, request)
            elif size <= LONG:
                short.submit(self._work, number, request)
            else:
                long.submit(self._long, number, request)

    def _long(self, number: int, request: bytes) -> None:
        """Run in a thread that ends: the library keeps memory for each thread, 30 MB after a text of 1 MB."""
        thread = threading.Thread(target=self._work, args=(number, request))
        thread.start()
        thread.join()
        self._has_garbage = True

    def _work(self, number: int, request: bytes) -> None:
        thread = threading.get_ident()
        with self._looking:
            self._begun[thread] = time.thread_time()
        try:
            kind, content = TEXT, self._tokenizer.answer(marshal.loads(request))
        except BaseException as error:  # a panic of the library is not an Exception
            kind, content = UNFIT, first_line(error).encode("utf-8", "replace")
        with self._looking:
            del self._begun[thread]
        if len(content) > self._bounds.answer_bytes:
            kind, content = TOO_LARGE, b""
        with self._lock:
            self._stream.write(ANSWER.pack(kind, 4 + len(content)) + number.to_bytes(4, "little") + content)
            self._stream.flush()

    def _watch(self) -> None:
        """End the process when a text has taken all its CPU; return the memory of long ones."""
        while True:
            time.sleep(_WATCH_SECONDS)
            with self._looking:
                for thread, before in self._begun.items():
                    if time.clock_gettime(time.pthread_getcpuclockid(thread)) - before > self._bounds.text_seconds:
                        os.kill(os.getpid(), signal.SIGXCPU)
            if self._has_garbage:
                self._has_garbage = False
                release_memory()


def release_memory() -> None:
    """Return free memory to the system: after a text of 1 MB, glibc keeps up to 200 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries return it by themselves
    if trim is not None:
        trim(0)


def opened(stream: BinaryIO, seconds_max: float) -> OpenTokenizer | None:
    """Open the file that the first request names, of at most the given number of bytes, and answer with its added
    tokens."""
    size, bytes_max = REQUEST.unpack(stream.read(REQUEST.size))
    tokenizer: OpenTokenizer | None = None
    kind = TEXT
    # The kernel ends the process at the end of this time, whatever it is in the middle of.
    signal.setitimer(signal.ITIMER_PROF, seconds_max)
    try:
        with open(stream.read(size), "rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise ValueError(f"it has more than {bytes_max} bytes")  # it has grown
        tokenizer = OpenTokenizer(content)
        answer = json.dumps(tokenizer.added() | {"digest": xxh3_128_hexdigest(content)})
    except BaseException as error:  # a panic of the library is not an Exception
        tokenizer, kind, answer = None, UNFIT, first_line(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    encoded = answer.encode("utf-8", "replace")
    stream.write(ANSWER.pack(kind, len(encoded)) + encoded)
    stream.flush()
    return tokenizer


def main() -> None:
    memory_bytes, open_seconds, text_seconds, answer_bytes = sys.argv[2:]
    bounds = Bounds(int(memory_bytes), float(open_seconds), float(text_seconds), int(answer_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (bounds.memory_bytes, bounds.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A terminal sends these to all of its processes; this one must end at the end of its socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as stream:
        files: Any = stream  # it reads and writes
        tokenizer = opened(files, bounds.open_seconds)
        if tokenizer is not None:
            Server(tokenizer, files, bounds).serve()
            # A thread may be in the middle of a text whose result is not needed any more.
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

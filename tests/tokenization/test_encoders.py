"""encoders: a tokenizer that takes too much costs its own process, and each text gets its ids whatever others cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.patience import patient, wait_for, wait_until, within
from tests.tokenization import small
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.domain.packing import pack_tokens
from waymark.tokenization import encoders, encoding
from waymark.tokenization.encoders import TokenizerProcess
from waymark.tokenization.processes import ChildProcess
from waymark.tokenization.rendering import ANSWER, REQUEST, TEXT, UNFIT

# A tokenizer is in a process of its own.
pytestmark = pytest.mark.outside

MIB = 2**20
HI = "Hello, world! "
Open = Callable[..., TokenizerProcess]


def changed(**fields: Any) -> str:
    """The text of a ``tokenizer.json`` with other fields."""
    return json.dumps(json.loads(small.trained("byte-level")) | fields)


def nested(number: int) -> str:
    """Lists that are read as one kind of normalizer after the other; each takes many times its bytes."""
    return changed(normalizer="lists of lists").replace('"lists of lists"', f"[{'[],' * number}[]]")


#: Each character becomes the content.
GROWS = {"type": "Replace", "pattern": {"String": "x"}}
#: Ends in a panic of the library.
PANICS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.fixture
async def opened(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Open]:
    made = []

    def opened(
        content: str | None = None, *, bytes_max: int = 2 * MIB, file_bytes_max: int = 40 * MIB
    ) -> TokenizerProcess:
        path = tmp_path / "tokenizer.json"
        path.write_text(small.trained("byte-level") if content is None else content)
        made.append(TokenizerProcess(path, file_bytes_max, bytes_max))
        return made[-1]

    yield opened
    for encoder in made:
        encoder.close()


def children() -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def ids(text: str, *, adds: bool = False) -> bytes:
    return pack_tokens(small.tokenizer().encode(text, add_special_tokens=adds).ids)


async def test_texts_have_their_ids_and_ids_their_text(opened: Open) -> None:
    encoder = opened()
    assert encoder.encoded_first([HI], adds=True) == [ids(HI, adds=True)]
    texts = [HI, "", HI * 200, HI * 5000]
    assert await encoder.encode(texts) == [ids(text) for text in texts]
    assert await encoder.encode([HI], adds=True) == [ids(HI, adds=True)]
    assert await encoder.decode(ids(HI)) == HI
    assert encoder.tokens == {token: small.tokenizer().token_to_id(token) for token in small.SPECIAL}


@pytest.mark.parametrize(
    ("content", "bound", "why"),
    [
        ("{", {}, "EOF"),
        (nested(100), {}, "did not match"),
        (nested(2 * MIB), {"MEMORY_BYTES_MAX": 128 * MIB}, "bytes of memory"),
        (nested(2 * MIB), {"OPEN_SECONDS_MAX": 0.05}, "0.05 s of CPU"),
    ],
    ids=["no JSON", "lists", "takes all memory", "takes long"],
)
async def test_a_file_that_cannot_be_opened_is_refused_with_a_sentence(
    opened: Open, monkeypatch: pytest.MonkeyPatch, content: str, bound: dict[str, Any], why: str
) -> None:
    before = children()
    for name, value in bound.items():
        monkeypatch.setattr(encoders, name, value)
    with pytest.raises(InvalidValue, match=r"cannot be read as a tokenizer.*WAYMARK_TOKENIZERS") as caught:
        opened(content, bytes_max=1)
    assert why in caught.value.sentence
    assert (caught.value.reason, caught.value.field) == ("no_tokenizer", "model")
    assert children() <= before


async def test_a_file_that_has_grown_is_not_read_to_its_end(opened: Open) -> None:
    with pytest.raises(InvalidValue, match="it has more than 1000 bytes"):
        opened(file_bytes_max=1000)


async def test_an_opening_that_takes_too_long_is_unavailable(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_OPEN_WALL_SECONDS", 0.0)
    with pytest.raises(TokenizerUnavailable, match="was not opened within"):
        opened(nested(2 * MIB))


@pytest.mark.parametrize(
    ("content", "bound", "text", "why"),
    [
        ("y" * MIB, {"MEMORY_BYTES_MAX": 192 * MIB}, "x" * 2000, "bytes of memory"),
        ("y", {"TEXT_SECONDS_MAX": 0.01}, HI * 100_000, "0.01 s for a text"),
        ("y" * 1024, {}, "x" * 400, "makes more than 1048576 bytes"),
    ],
    ids=["takes all memory", "takes long", "makes much"],
)
async def test_a_text_that_costs_too_much_is_refused_and_the_next_one_is_encoded(
    opened: Open, monkeypatch: pytest.MonkeyPatch, content: str, bound: dict[str, Any], text: str, why: str
) -> None:
    for name, value in bound.items():
        monkeypatch.setattr(encoders, name, value)
    encoder = opened(changed(normalizer=GROWS | {"content": content}), bytes_max=2**16)
    with pytest.raises(InvalidValue, match="cannot read this text") as caught:
        await encoder.encode([text])
    assert why in caught.value.sentence
    assert await encoder.encode([HI]) == [ids(HI)]


async def test_a_text_at_which_the_library_panics_is_refused(opened: Open) -> None:
    encoder = opened(changed(pre_tokenizer=PANICS))
    before = children()
    for text in ("x" * 100, "x" * 5000):
        with pytest.raises(InvalidValue, match="cannot read this text"):
            await encoder.encode([text])
    assert children() == before


async def test_a_short_text_does_not_wait_for_long_ones(opened: Open) -> None:
    encoder = opened()
    long = [asyncio.ensure_future(encoder.encode([HI * 30_000])) for _ in range(6)]
    for text in (HI, HI * 1000):
        assert await encoder.encode([text]) == [ids(text)]
    assert not all(each.done() for each in long)
    for each in long:
        assert len((await each)[0]) > 4 * 30_000


async def test_a_long_text_leaves_no_memory_in_use(opened: Open) -> None:
    others = children()
    tokenizer = opened()

    def own_mib() -> float:
        (pid,) = children() - others
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / MIB

    await tokenizer.encode([HI])
    before = own_mib()
    for _ in range(2):
        await tokenizer.encode(["a" * MIB])
    await wait_until(lambda: own_mib() < before + 12, lambda: f"it has {own_mib():.0f} MiB, and {before:.0f} before")


async def test_a_process_that_was_killed_is_replaced(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    encoder = opened()
    for text in (HI, HI * 1000):
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)
        assert await encoder.encode([text]) == [ids(text)]
    assert "a tokenizer ended its process" in caplog.text


async def test_the_next_socket_of_the_same_number_is_read(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket of a process that has ended is closed before the loop hears of it, and the next one has its number."""
    before = children()
    encoder = opened()
    assert await encoder.encode([HI]) == [ids(HI)]
    (process,) = children() - before
    os.kill(process, signal.SIGKILL)
    stat = Path(f"/proc/{process}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it has ended")
    loop, has_ended = asyncio.get_running_loop(), threading.Event()
    end, in_a_thread = ChildProcess.end, loop.run_in_executor

    def ended(child: ChildProcess) -> int:
        status = end(child)
        has_ended.set()
        return status

    def at_once(pool: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        future = in_a_thread(pool, call, *arguments)
        assert has_ended.wait(patient(20))
        return future

    monkeypatch.setattr(ChildProcess, "end", ended)
    monkeypatch.setattr(loop, "run_in_executor", at_once)
    async with within(20):
        assert await encoder.encode([HI]) == [ids(HI)]


async def test_a_process_that_hangs_is_replaced(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    encoder = opened()
    assert await encoder.encode([HI]) == [ids(HI)]
    (process,) = children() - before
    os.kill(process, signal.SIGSTOP)
    monkeypatch.setattr(encoders, "_TEXT_WALL_SECONDS", 0.1)
    with pytest.raises(TokenizerUnavailable, match="has not answered in time"):
        await encoder.encode([HI])
    monkeypatch.undo()
    assert await encoder.encode([HI]) == [ids(HI)]
    assert process not in children()


async def test_texts_of_others_are_encoded_again_when_one_ends_the_process(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    encoder = opened()
    asked = asyncio.gather(*(encoder.encode([HI * 20_000]) for _ in range(4)))
    (process,) = children() - before
    await encoder.encode([HI])
    os.kill(process, signal.SIGKILL)
    assert await asked == [[ids(HI * 20_000)]] * 4


async def test_too_many_added_tokens_are_not_split_at(opened: Open) -> None:
    def added(number: int) -> list[dict[str, Any]]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        return [{"id": 1000 + n, "content": f"<{n:05}>"} | flags for n in range(number)]

    assert len(opened(changed(added_tokens=added(1000))).tokens) == 1000
    encoder = opened(many := changed(added_tokens=added(40_000)))
    assert (encoder.tokens, encoder.peculiar) == ({}, [])
    assert await encoder.encode(["<00007>"]) == [
        pack_tokens(Tokenizer.from_str(many).encode("<00007>", add_special_tokens=False).ids)
    ]


@pytest.mark.parametrize("is_encoding", [False, True])
def test_no_process_outlives_the_one_that_has_started_it(tmp_path: Path, is_encoding: bool) -> None:
    path = small.directory(tmp_path) / "tokenizer.json"
    program = (
        "import os, time\nfrom pathlib import Path\nfrom waymark.tokenization.encoders import TokenizerProcess\n"
        f"encoder = TokenizerProcess(Path({str(path)!r}), 2**20, 2**21)\n"
        "print(Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text(), flush=True)\n"
        + ("encoder.encoded_first(['x y ' * 500_000])\n" if is_encoding else "time.sleep(60)\n")
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{parent.stdout.readline().strip()}")
        assert child.exists()
        parent.kill()
    wait_for(lambda: not child.exists(), "the child has ended, too")


def test_the_program_answers_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that its coverage is seen."""
    monkeypatch.setattr(encoding.Server, "_watch", lambda _: None)
    path = small.directory(tmp_path) / "tokenizer.json"
    ours, theirs = socket.socketpair()
    name = str(path).encode()
    ours.sendall(REQUEST.pack(len(name), MIB) + name)
    questions: list[Any] = [([HI], False), (ids(HI), False), (1, 2)]
    for number, asked in enumerate(questions):
        request = marshal.dumps(asked, 2)
        ours.sendall(REQUEST.pack(len(request), number) + request)
    ours.shutdown(socket.SHUT_WR)
    with theirs, theirs.makefile("rwb") as stream:
        files: Any = stream
        encoder = encoding.opened(files, 60.0)
        assert encoder is not None
        encoding.Server(encoder, files, encoding.Bounds(0, 0.0, 0.0, MIB)).serve()
    with ours, ours.makefile("rb") as answers:
        kinds = []
        for _ in range(4):
            kind, size = ANSWER.unpack(answers.read(ANSWER.size))
            kinds.append((kind, answers.read(size)))
    assert [kind for kind, _ in kinds] == [TEXT, TEXT, TEXT, UNFIT]
    assert json.loads(kinds[0][1])["peculiar"] == []
    assert kinds[1][1] == bytes(4) + (len(ids(HI)) // 4).to_bytes(4, "little") + ids(HI)
    assert kinds[2][1] == b"\1\0\0\0" + HI.encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b"{",
        b"[" * MIB,
        b'{"tokens": {"<a>": 1}, "peculiar": []}',
        b'{"tokens": {"<a>": "1"}, "peculiar": [], "digest": ""}',
        b'{"tokens": {"<a>": 4294967296}, "peculiar": [], "digest": ""}',
        b'{"tokens": {}, "peculiar": [1], "digest": ""}',
        json.dumps({"tokens": dict.fromkeys(map(str, range(70_000)), 1), "peculiar": [], "digest": ""}).encode(),
    ],
    ids=["list", "no JSON", "deep", "no digest", "text for an id", "large id", "number for a token", "many"],
)
async def test_a_process_that_opens_with_anything_else_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """A file may have taken over the process."""
    before = children()
    monkeypatch.setattr(ChildProcess, "ask", lambda *_, **__: (TEXT, answer))
    with pytest.raises(InvalidValue, match="cannot be read as a tokenizer") as caught:
        opened()
    assert caught.value.reason == "no_tokenizer"
    assert children() <= before


@pytest.mark.parametrize("answer", [b"", b"\5\0\0\0abcde", b"\1\0\0\0abc", b"\1\0\0\0abcdefgh"])
async def test_ids_of_another_length_than_announced_are_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    encoder = opened()

    async def ask(*_: object) -> tuple[bytes, bytes]:
        return TEXT, answer

    monkeypatch.setattr(encoders._Answers, "ask", ask)
    with pytest.raises(InvalidValue, match="cannot read this text"):
        await encoder.encode([HI])

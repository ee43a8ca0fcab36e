"""places: however many models are asked for, few tokenizers are open, and each text gets the ids of its own model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient, wait_for, wait_until, within
from tests.tokenization import small
from tests.tokenization.bounds import be_patient
from tests.tokenization.test_encoders import children
from waymark.base.errors import TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.packing import pack_tokens
from waymark.tokenization import encoding
from waymark.tokenization import places as places_module
from waymark.tokenization.encoders import TokenizerProcess
from waymark.tokenization.places import EncoderPlaces, NoPlace
from waymark.tokenization.processes import ChildProcess
from waymark.tokenization.prompt import TextPrompt
from waymark.tokenization.tokenizers import Tokenizers

# A tokenizer is in a process of its own.
pytestmark = pytest.mark.outside

HI = "Hello, world! "
OPEN_MAX = 2
MODELS = [*small.KINDS]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(places_module, "OPEN_MAX", OPEN_MAX)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes there are when another one has started."""
    before, start = children(), ChildProcess.__init__
    counts: list[int] = []

    def counted(process: ChildProcess, program: str, *arguments: str) -> None:
        start(process, program, *arguments)
        counts.append(len(children() - before))

    monkeypatch.setattr(ChildProcess, "__init__", counted)
    return counts


@pytest.fixture
async def tokenizers(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Tokenizers]:
    for kind in MODELS:
        small.directory(tmp_path / kind, kind)
    made = Tokenizers({}, tmp_path, Metrics())
    yield made
    await made.close()


@pytest.fixture
async def two(anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Two tokenizers that share one place; the first one's process."""
    monkeypatch.setattr(places_module, "OPEN_MAX", 1)
    places, before = EncoderPlaces(Metrics()), children()
    path = small.directory(tmp_path) / "tokenizer.json"
    second, first = (TokenizerProcess(path, 2**20, 2**20, places) for _ in range(2))
    (process,) = children() - before
    yield first, second, process
    first.close()
    second.close()
    places.close()


def ids(text: str, kind: small.Kind = "byte-level") -> bytes:
    return pack_tokens(small.tokenizer(kind).encode(text, add_special_tokens=False).ids)


async def test_models_beyond_the_bound_have_their_ids_in_turn_and_at_once(
    tokenizers: Tokenizers, started: list[int]
) -> None:
    async def is_right(kind: small.Kind, text: str) -> None:
        prompt = TextPrompt(text, add_special_tokens=False)
        assert (await tokenizers.tokens(kind, prompt)).ids == ids(text, kind)

    for turn in range(2):
        for kind in MODELS:
            await is_right(kind, f"turn {turn}")
    in_turn = len(started)
    for turn in range(2, 4):
        async with asyncio.TaskGroup() as tasks:
            for kind in MODELS:
                for text in (f"turn {turn}", HI * turn * 100):
                    tasks.create_task(is_right(kind, text))
    assert (in_turn, max(started)) == (2 * len(MODELS), OPEN_MAX)
    said = tokenizers._metrics.render()[0].decode()
    assert f"waymark_tokenizers_open {float(OPEN_MAX)}" in said
    assert f"waymark_tokenizers_closed_total {float(len(started) - OPEN_MAX)}" in said


async def test_one_that_is_used_again_stays_open(tokenizers: Tokenizers, started: list[int]) -> None:
    often, *others = MODELS
    for number, kind in enumerate(others):
        for model in (often, kind):
            await tokenizers.tokens(model, TextPrompt(f"{number}"))
    assert len(started) == len(MODELS)


async def test_one_that_is_answering_is_not_closed(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, process = two
    os.kill(process, signal.SIGSTOP)
    text = asyncio.create_task(first.encode([HI]))
    await wait_until(lambda: first._answers is not None, "the first one is asked")
    with monkeypatch.context() as patch:
        patch.setattr(places_module, "_WAIT_SECONDS", 0.05)
        with pytest.raises(NoPlace, match=r"1 tokenizers are open, .* none was idle within"):
            await second.encode([HI])
    os.kill(process, signal.SIGCONT)
    async with within(20):
        assert await text == [ids(HI)]
        assert await second.encode([HI]) == [ids(HI)]


async def test_a_text_waits_until_one_is_idle(two: Any) -> None:
    first, second, process = two
    os.kill(process, signal.SIGSTOP)
    text = asyncio.create_task(first.encode([HI]))
    await wait_until(lambda: first._answers is not None, "the first one is asked")
    left, waiting = (asyncio.create_task(second.encode([HI])) for _ in range(2))
    await wait_until(lambda: len(second._places._waiting) == 2, "the second one waits")
    left.cancel()
    os.kill(process, signal.SIGCONT)
    async with within(20):
        assert await text == [ids(HI)]
        assert await waiting == [ids(HI)]
        assert left.cancelled()
        assert await first.encode([HI]) == [ids(HI)]


async def test_a_long_text_waits_for_room_and_short_ones_and_other_models_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "OPEN_MAX", 3)
    longest = 2**16
    metrics, before = Metrics(), children()
    places, path = EncoderPlaces(metrics), small.directory(tmp_path) / "tokenizer.json"
    made: list[TokenizerProcess] = []
    stopped: list[int] = []
    for _ in range(3):
        made.append(TokenizerProcess(path, 2**20, longest, places))
        stopped.append(*(children() - before - set(stopped)))
    first, second, third = made
    all_of_one = "a b " * (longest // 2)
    room = places_module.TEXTS_OF_ONE_MAX * longest

    def taken() -> bytes:
        return metrics.render()[0]

    for process in stopped[:2]:
        os.kill(process, signal.SIGSTOP)
    texts = [asyncio.create_task(first.encode([all_of_one]))]
    await wait_until(lambda: len(places.long_texts) == room, "the first one has a long text")
    with monkeypatch.context() as patch:
        patch.setattr(places_module, "_WAIT_SECONDS", 0.05)
        with pytest.raises(NoPlace, match=rf"{room} bytes of long texts are being encoded, .* try again"):
            await first.encode([all_of_one])
    async with within(60):
        assert await third.encode([all_of_one]) == [ids(all_of_one)], "there is room for another model"
        texts.append(asyncio.create_task(second.encode([all_of_one])))
        await wait_until(lambda: len(places.long_texts) == 2 * room, "the second one has a long text")
        assert f"waymark_tokenizers_long_bytes {float(2 * room)}".encode() in taken()
        with monkeypatch.context() as patch:
            patch.setattr(places_module, "_WAIT_SECONDS", 0.05)
            with pytest.raises(NoPlace, match="bytes of long texts are being encoded"):
                await third.encode([all_of_one])
        assert await third.encode([HI]) == [ids(HI)]
        texts += [asyncio.create_task(each.encode([all_of_one])) for each in (first, third)]
        for process in stopped[:2]:
            os.kill(process, signal.SIGCONT)
        assert await asyncio.gather(*texts) == [[ids(all_of_one)]] * 4
    assert b"waymark_tokenizers_long_bytes 0.0" in taken()
    for each in made:
        each.close()
    places.close()


async def test_a_model_that_found_no_place_is_opened_as_soon_as_there_is_one(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(places_module, "OPEN_MAX", 0)
        patch.setattr(places_module, "_WAIT_SECONDS", 0.05)
        with pytest.raises(TokenizerUnavailable, match="which is the maximum"):
            await tokenizers.tokens("unigram", TextPrompt(HI))
    assert (await tokenizers.tokens("unigram", TextPrompt(HI))).source == "local"


async def test_a_service_that_ends_waits_for_no_opening(
    tokenizers: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hangs.py"
    program.write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(encoding, "__file__", str(program))
    before = children()
    asked = asyncio.create_task(tokenizers.tokens("unigram", TextPrompt(HI)))
    await wait_until(lambda: bool(tokenizers._places._openings), "a process opens the tokenizer")
    await tokenizers.close()
    await wait_until(lambda: not tokenizers._places._openings, "the thread does not wait any more")
    await wait_until(lambda: children() <= before, "the process has ended")
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_a_file_that_has_changed_while_it_was_closed_is_opened_anew(
    tokenizers: Tokenizers, tmp_path: Path
) -> None:
    first, second, third, *_ = MODELS

    async def is_of(kind: small.Kind, text: str) -> None:
        assert (await tokenizers.tokens(first, TextPrompt(text, add_special_tokens=False))).ids == ids(text, kind)

    await is_of(first, HI)
    small.directory(tmp_path / first, "wordpiece")
    await is_of(first, HI)
    for model in (second, third):
        await tokenizers.tokens(model, TextPrompt(HI))
    for text in (HI + HI, HI):
        await is_of("wordpiece", text)
    for model in (second, third):
        await tokenizers.tokens(model, TextPrompt(HI + HI))
    small.directory(tmp_path / first, "unigram")
    assert await tokenizers.text(first, list(memoryview(ids("a", "unigram")).cast("I"))) == "a"


def test_a_forked_process_opens_its_own(tmp_path: Path) -> None:
    before = children()
    encoder = TokenizerProcess(small.directory(tmp_path) / "tokenizer.json", 2**20, 2**20)

    async def is_right(text: str) -> bool:
        async with within(20):
            return await encoder.encode([text]) == [ids(text)]

    with asyncio.Runner() as runner:
        assert runner.run(is_right(HI))
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)
        assert runner.run(is_right(HI)), "a thread has opened it again"
        (process,) = children() - before
        forked = os.fork()
        if not forked:
            status = 1
            try:
                status = 0 if asyncio.run(is_right(HI)) else 1
                encoder.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
        assert runner.run(is_right(HI + HI))
        assert children() - before == {process}
        encoder.close()


def test_a_program_that_is_started_later_keeps_no_tokenizer_alive(tmp_path: Path) -> None:
    path = small.directory(tmp_path) / "tokenizer.json"
    program = (
        "import asyncio, subprocess\nfrom pathlib import Path\n"
        "from waymark.tokenization.encoders import TokenizerProcess\n"
        f"encoder = TokenizerProcess(Path({str(path)!r}), 2**20, 2**21)\n"
        "async def main():\n"
        "    await encoder.encode(['x'])\n"
        "    later = await asyncio.create_subprocess_exec('sleep', '1000')\n"
        "    print(encoder._place.process._process.pid, later.pid, flush=True)\n"
        "    await later.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, later = (Path(f"/proc/{pid}") for pid in parent.stdout.readline().split())
        assert child.exists()
        parent.kill()
    wait_for(lambda: not child.exists(), "the tokenizer has ended, too", patient(10))
    assert later.exists()
    os.kill(int(later.name), signal.SIGKILL)

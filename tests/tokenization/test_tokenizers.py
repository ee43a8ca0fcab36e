"""The one face: which source a model has, one work for one text, bounds, and what is said when it cannot be done."""

from __future__ import annotations

import asyncio
import errno
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.tokenization import small
from tests.tokenization.bounds import be_patient
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.tokenization import tokenizers as face
from waymark.tokenization.prompt import ChatPrompt, Prompt, SourcedTokens, TextPrompt, TokenizedPrompt
from waymark.tokenization.sources import directory_of, found_in
from waymark.tokenization.tokenizers import Tokenizers

# Chat templates are rendered in a process of their own.
pytestmark = pytest.mark.outside

HI = TextPrompt("Hello, world!")
Make = Callable[..., Tokenizers]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        def make(sources: dict[str, str] | None = None, directory: Path | None = None, **options: Any) -> Tokenizers:
            made = Tokenizers(sources or {}, directory, options.pop("metrics", Metrics()), **options)
            stack.push_async_callback(made.close)
            return made

        yield make


def expected(text: str = HI.text) -> list[int]:
    ids: list[int] = small.tokenizer().encode(text).ids
    return ids


async def ids(tokenizers: Tokenizers, model: str, prompt: Prompt = HI) -> list[int]:
    found = (await tokenizers.tokens(model, prompt)).ids
    return [int.from_bytes(found[at : at + 4], "little") for at in range(0, len(found), 4)]


async def test_a_source_of_a_file_a_hub_and_a_directory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.directory(tmp_path / "models" / "org" / "b")
    small.directory(tmp_path / "with blank")
    tokenizers = make({"a": (tmp_path / "with blank").as_uri()}, tmp_path / "models")
    assert await ids(tokenizers, "a") == await ids(tokenizers, "org/b") == expected()
    assert (await tokenizers.tokens("a", HI)).source == "local"


@pytest.mark.parametrize("source", [None, "file:///not/there", "without a template"])
async def test_a_refused_prompt_is_kept_by_nobody(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    be_patient(monkeypatch)
    url = small.directory(tmp_path / "m").as_uri() if source == "without a template" else source
    tokenizers = make({} if url is None else {"m": url})
    prompt = ChatPrompt([{"role": "user", "content": "hello"}])

    async def refused() -> bool:
        try:
            await tokenizers.tokens("m", prompt)
        except InvalidValue:
            return True
        return False

    gc.disable()
    try:
        before = sys.getrefcount(prompt)
        assert [await refused() for _ in range(3)] == [True] * 3
        await wait_until(lambda: sys.getrefcount(prompt) == before, "nobody else has the prompt")
    finally:
        gc.enable()


async def test_a_model_that_sglang_serves_has_messages_as_sglang_shows_them(make: Make, tmp_path: Path) -> None:
    url = small.directory(tmp_path / "m", template=small.CHATML).as_uri()
    tokenizers = make({"plain": url, "vllm": f"{url}?engine=vllm", "sglang": f"{url}?engine=sglang"})
    parts = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}])
    joined = {end: ChatPrompt([{"role": "user", "content": f"a{end}b"}]) for end in "\n "}
    assert await ids(tokenizers, "plain", parts) == await ids(tokenizers, "plain", joined["\n"])
    assert await ids(tokenizers, "vllm", parts) == await ids(tokenizers, "plain", joined["\n"])
    assert await ids(tokenizers, "sglang", parts) == await ids(tokenizers, "plain", joined[" "])


def test_a_tokenizer_of_the_hub_is_found_in_its_cache(tmp_path: Path) -> None:
    of_repository = tmp_path / "models--org--name"
    snapshot = of_repository / "snapshots" / ("0123456789" * 4)
    small.directory(snapshot)
    (of_repository / "refs").mkdir()
    (of_repository / "refs" / "main").write_text(snapshot.name)
    assert directory_of("hf://org/name", hub_cache=tmp_path) == snapshot
    assert directory_of(f"hf://org/name@{snapshot.name}", hub_cache=tmp_path) == snapshot
    assert directory_of("hf://org/name?engine=sglang", hub_cache=tmp_path) == snapshot


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def away(*_: Any, **options: Any) -> str:
        if options["local_files_only"]:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", away)
    with pytest.raises(TokenizerUnavailable, match=r"hf://org/name cannot be fetched: no route"):
        directory_of("hf://org/name", hub_cache=tmp_path)


def test_directories_are_searched_two_levels_down(tmp_path: Path) -> None:
    for name in ("a", "org/b", "org/x/too-deep"):
        small.directory(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert found_in(tmp_path) == {name: (tmp_path / name).as_uri() for name in ("a", "org/b")}
    assert found_in(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("model", ["unknown", "../a", "/etc", "a/../a", ""])
async def test_a_model_without_a_source_is_refused_by_name(make: Make, tmp_path: Path, model: str) -> None:
    small.directory(tmp_path / "models" / "a")
    tokenizers = make({}, tmp_path / "models")
    with pytest.raises(InvalidValue, match="WAYMARK_TOKENIZERS") as caught:
        await tokenizers.tokens(model, HI)
    assert (caught.value.reason, caught.value.field) == ("no_tokenizer", "model")
    assert "registered with an address" in caught.value.sentence
    assert "'waymark register URL'" in caught.value.sentence


async def test_a_directory_that_comes_later_is_found(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = make({}, tmp_path)
    with pytest.raises(InvalidValue):
        await tokenizers.tokens("late", HI)
    small.directory(tmp_path / "late")
    with pytest.raises(InvalidValue):
        await tokenizers.tokens("late", HI)  # not searched again so soon
    monkeypatch.setattr(face, "_AGAIN_SECONDS", 0.0)
    tokenizers = make({}, tmp_path)
    assert await ids(tokenizers, "late") == expected()


async def test_a_source_that_cannot_be_opened_is_tried_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face, "_AGAIN_SECONDS", 0.0)
    tokenizers = make({"a": (tmp_path / "a").as_uri()})
    with pytest.raises(InvalidValue, match=r"tokenizer\.json cannot be read as a tokenizer"):
        await tokenizers.tokens("a", HI)
    small.directory(tmp_path / "a")
    assert await ids(tokenizers, "a") == expected()


async def test_no_process_waits_at_its_end_for_a_source_that_does_not_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub may take minutes, and Python waits for the threads of its pools."""
    is_over = threading.Event()
    monkeypatch.setattr(face, "directory_of", lambda _: is_over.wait(600))
    tokenizers = make({"m": "hf://org/m"}, seconds=0.1)
    try:
        with pytest.raises(TokenizerUnavailable, match="was not tokenized within"):
            await tokenizers.tokens("m", TextPrompt("a"))
        opening = [each for each in threading.enumerate() if each.name.startswith("open")]
        assert [each.daemon for each in opening] == [True]
    finally:
        is_over.set()


async def test_a_process_that_cannot_be_started_is_tried_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(face, "_AGAIN_SECONDS", 0.0)
    tokenizers = make({"a": small.directory(tmp_path / "a").as_uri()})
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", full)
        with pytest.raises(TokenizerUnavailable, match=r"cannot be started: .*no process is left"):
            await tokenizers.tokens("a", HI)
    assert await ids(tokenizers, "a") == expected()


async def test_without_the_packages_the_refusal_names_the_extra(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("local", "templates"):
        monkeypatch.delitem(sys.modules, f"waymark.tokenization.{module}", raising=False)
    for package in ("tokenizers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    tokenizers = make({"a": tmp_path.as_uri(), "b": "hf://org/name"})
    for model in ("a", "b"):
        with pytest.raises(InvalidValue, match=r"install waymark\[tokens\]") as caught:
            await tokenizers.tokens(model, HI)
        assert caught.value.reason == "no_tokenizer"


class Slow:
    """A source that answers when it is told to."""

    kind = "local"
    name = "slow"

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.calls = 0

    def key(self, prompt: Prompt) -> bytes | None:
        return None

    def known(self, key: bytes) -> TokenizedPrompt | None:
        return None

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        self.calls += 1
        await self.may_answer.wait()
        return TokenizedPrompt(b"\1\0\0\0")

    async def text(self, ids: Any) -> str:
        return ""

    async def close(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    source = Slow()
    monkeypatch.setattr(Tokenizers, "_opened", lambda *_: source)
    return source


async def test_a_text_that_many_ask_for_is_worked_on_once(make: Make, slow: Slow) -> None:
    tokenizers = make({"a": "file:///a"}, seconds=600)
    prompts: list[Prompt] = [HI] * 50 + [ChatPrompt([{"role": "user", "content": "Hi"}])] * 50
    tasks = [asyncio.create_task(tokenizers.tokens("a", prompt)) for prompt in prompts]
    await wait_until(lambda: slow.calls == 2, "two texts are worked on")
    tasks[0].cancel()  # whoever goes away takes nothing from the others
    slow.may_answer.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert set(answers[1:]) == {SourcedTokens(b"\1\0\0\0", "local")}
    assert slow.calls == 2
    assert tokenizers._under_way == {}


async def test_one_text_more_than_may_be_is_refused_at_once(make: Make, slow: Slow) -> None:
    tokenizers = make({f"m{number}": f"file:///{number}" for number in range(99)}, seconds=600)
    most = face.UNDER_WAY_MAX
    tasks = [asyncio.create_task(tokenizers.tokens(f"m{number}", HI)) for number in range(most)]
    await wait_until(lambda: slow.calls == most, "as many as may be are under way")
    with pytest.raises(TokenizerUnavailable, match="32 texts") as caught:
        await tokenizers.tokens("m98", HI)
    assert caught.value.retry_after_seconds >= 1
    slow.may_answer.set()
    await asyncio.gather(*tasks)
    assert (await tokenizers.tokens("m98", HI)).ids == b"\1\0\0\0"
    assert not tokenizers._of_models


async def test_one_model_leaves_places_to_others(make: Make, slow: Slow) -> None:
    tokenizers = make({"greedy": "file:///a", "other": "file:///b"}, seconds=600)
    most = face.UNDER_WAY_MAX * 3 // 4
    tasks = [asyncio.create_task(tokenizers.tokens("greedy", TextPrompt(str(number)))) for number in range(most)]
    await wait_until(lambda: slow.calls == most, "as many as may be are under way")
    with pytest.raises(
        TokenizerUnavailable, match='24 texts of the model "greedy" are being tokenized, and the other 8'
    ):
        await tokenizers.tokens("greedy", TextPrompt("one more"))
    tasks += [asyncio.create_task(tokenizers.tokens("other", TextPrompt(str(number)))) for number in range(6)]
    await wait_until(lambda: slow.calls == most + 6, "the other model has places")
    slow.may_answer.set()
    await asyncio.gather(*tasks)


async def test_a_refusal_of_files_is_remembered_for_a_while(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small.directory(tmp_path / "m", template="{{ raise_exception('no') }}").as_uri()
    metrics = Metrics()
    tokenizers = make({"m": source}, metrics=metrics)
    asked: list[bytes] = []
    once = tokenizers._once

    async def counted(model: str, key: bytes, work: Any) -> Any:
        asked.append(key)
        return await once(model, key, work)

    monkeypatch.setattr(tokenizers, "_once", counted)

    async def refused(text: str) -> None:
        with pytest.raises(InvalidValue, match="no"):
            await tokenizers.tokens("m", ChatPrompt([{"role": "user", "content": text}]))

    await refused("opens the source")
    for _ in range(3):
        await refused("a")
    assert len(asked) == 2
    monkeypatch.setattr(face, "_REFUSALS_MAX", 1)
    await refused("b")
    await refused("a")
    assert len(asked) == 4, "only the newest is remembered"
    monkeypatch.setattr(face, "monotonic", lambda: monotonic() + 6)
    await refused("a")
    assert len(asked) == 5, "and not for long"


class Text(str):
    """A text that a weak reference can name."""


@pytest.mark.parametrize("error", [InvalidValue, TokenizerUnavailable])
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_prompt_that_gets_no_tokens_is_freed_at_once(
    make: Make,
    slow: Slow,
    monkeypatch: pytest.MonkeyPatch,
    error: type[InvalidValue] | type[TokenizerUnavailable],
    is_open: bool,
) -> None:
    """An error holds the frames that it has passed, and some errors are remembered."""
    tokenizers = make({"a": "file:///a"}, seconds=600)

    async def fail(*_: Any) -> Any:
        raise error("no")

    def fail_to_open(*_: Any) -> Any:
        raise error("no")

    slow.may_answer.set()
    if is_open:
        await tokenizers.tokens("a", HI)
        monkeypatch.setattr(slow, "tokens", fail)
    else:
        monkeypatch.setattr(Tokenizers, "_opened", fail_to_open)
    texts: list[weakref.ref[Text]] = []
    failures = 0
    gc.collect()
    gc.disable()
    try:
        for number in (*range(20), *range(20)):
            text = Text(number)
            texts.append(weakref.ref(text))
            try:
                await tokenizers.tokens("a", TextPrompt(text))
            except (InvalidValue, TokenizerUnavailable):
                failures += 1
            del text
        await asyncio.sleep(0)
        left = sum(text() is not None for text in texts)
    finally:
        gc.enable()
    assert (failures, left) == (40, 0)


async def test_work_that_nobody_waits_for_any_more_keeps_its_place(make: Make, slow: Slow) -> None:
    tokenizers = make({"a": "file:///a"}, seconds=0.01)
    with pytest.raises(TokenizerUnavailable, match=r"within 0\.01 s"):
        await tokenizers.tokens("a", HI)
    assert len(tokenizers._under_way) == 1
    slow.may_answer.set()
    await wait_until(lambda: not tokenizers._under_way, "the place is free again")


async def test_what_was_made_is_counted(make: Make, tmp_path: Path) -> None:
    metrics = Metrics()
    small.directory(tmp_path / "a")
    tokenizers = make({}, tmp_path, metrics=metrics)
    for _ in range(2):
        await tokenizers.tokens("a", HI)
    text, _ = metrics.render()
    assert b'waymark_tokenize_duration_seconds_count{source="local"} 2.0' in text
    assert b'waymark_tokenize_segments_total{known="true"} 1.0' in text
    assert b'waymark_tokenize_segments_total{known="false"} 1.0' in text
    assert metrics.tokens_cache_bytes.value > 0


async def test_tokens_become_text_again(make: Make, tmp_path: Path) -> None:
    small.directory(tmp_path / "a")
    tokenizers = make({}, tmp_path)
    assert await tokenizers.text("a", expected()) == small.BOS + HI.text
    with pytest.raises(InvalidValue, match="no tokenizer"):
        await tokenizers.text("b", [1])


async def test_whoever_asks_while_a_directory_is_searched_is_not_refused(make: Make, tmp_path: Path) -> None:
    small.directory(tmp_path / "a")
    tokenizers = make({}, tmp_path)
    prompts = [TextPrompt(str(number)) for number in range(8)]
    found = await asyncio.gather(*(tokenizers.tokens("a", prompt) for prompt in prompts))
    assert [each.source for each in found] == ["local"] * 8

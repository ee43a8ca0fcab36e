"""local and segments: the same ids with pieces and without, from every kind of tokenizer, and bounds that hold."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tests.tokenization import small
from tests.unit import examples
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics
from waymark.chat.requests import Truncation
from waymark.domain.packing import pack_tokens, unpack_tokens
from waymark.tokenization import local as local_module
from waymark.tokenization import templates
from waymark.tokenization.local import TEXT_BYTES_MAX, TOKENIZER_BYTES_MAX, LocalTokenizer
from waymark.tokenization.prompt import ChatPrompt, Prompt, TextPrompt, TokenizedPrompt
from waymark.tokenization.segments import SegmentMemo, Splitter
from waymark.tokenization.templates import ChatTemplate

# Chat templates are rendered in a process of their own.
pytestmark = pytest.mark.outside

MAX = 2**20
PECULIAR = (
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("<|tool|>", special=False, normalized=False),
    AddedToken("weather", special=False, normalized=True),
)
Open = Callable[..., LocalTokenizer]


def known(local: LocalTokenizer, prompt: Prompt) -> TokenizedPrompt | None:
    """What is had at once."""
    key = local.key(prompt)
    return None if key is None else local.known(key)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
async def at(anyio_backend: str, pool: ThreadPoolExecutor) -> AsyncIterator[Open]:
    """Opens the tokenizer of a directory."""
    made = []

    def at(directory: Path, **options: Any) -> LocalTokenizer:
        options = {"prompts": SegmentMemo(MAX), "bytes_max": MAX, **options}
        memo, metrics = options.pop("memo", None), options.pop("metrics", None)
        memo = SegmentMemo(MAX) if memo is None else memo
        made.append(LocalTokenizer("file:///m", directory, memo, pool, metrics or Metrics(), **options))
        return made[-1]

    yield at
    for local in made:
        await local.close()


@pytest.fixture
def opened(tmp_path: Path, at: Open) -> Open:
    """Opens a small tokenizer of a kind."""

    def opened(
        kind: small.Kind = "byte-level",
        *,
        memo: SegmentMemo | None = None,
        metrics: Metrics | None = None,
        bytes_max: int = MAX,
        **files: Any,
    ) -> LocalTokenizer:
        directory = small.directory(tmp_path / kind, kind, **files)
        return at(directory, memo=memo, metrics=metrics, bytes_max=bytes_max)

    return opened


def whole(tokenizer: Tokenizer, prompt: TextPrompt) -> bytes:
    return pack_tokens(tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens).ids)


ordinary = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["user\n", "Hello, world!", " weather", "  two  ", "\n\n", "don't", "İ", "e\u0301", "▁", ""]),
)
marks = st.sampled_from([*small.SPECIAL, "<mask>", "<|tool|>", "<|im_star", "<|", "weather"])
texts = st.lists(st.one_of(ordinary, ordinary, marks), max_size=14).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_ids_are_those_of_the_whole_text_with_the_memo_and_without(kind: small.Kind, opened: Open) -> None:
    memo = SegmentMemo(20_000)  # small: much is forgotten
    local = opened(kind, memo=memo, added=PECULIAR)
    reference = Tokenizer.from_str((small.tokenizer(kind)).to_str())
    reference.add_tokens(list(PECULIAR))
    remembered = 0

    async def check(prompt: TextPrompt) -> None:
        nonlocal remembered
        expected = whole(reference, prompt)
        assert await local.tokens(prompt) == TokenizedPrompt(expected)
        at_once = known(local, prompt)
        remembered += at_once is not None
        assert at_once in (None, TokenizedPrompt(expected))

    with asyncio.Runner() as runner:

        @settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
        @example("<|im_start|>user\nHello<|im_end|>", True)
        @example("a <mask> b<|im_end|> c", False)
        @example("<|im<|im_start|><|im_end", True)
        @given(texts, st.booleans())
        def each(text: str, adds: bool) -> None:
            runner.run(check(TextPrompt(text, adds)))

        each()
        runner.run(local.close())
    assert remembered


@pytest.mark.parametrize("kind", small.KINDS)
def test_a_tokenizer_whose_pieces_depend_on_each_other_is_used_whole(
    kind: small.Kind, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    local = opened(kind)
    assert local.splits is (kind != "metaspace-first")
    assert ("encoded whole" in caplog.text) is not local.splits


async def test_a_new_turn_is_all_that_is_encoded(opened: Open) -> None:
    metrics = Metrics()
    local = opened(metrics=metrics, template=small.CHATML)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    first = await local.tokens(ChatPrompt(turns))
    counts = [metrics.tokenize_segments.labels(known=known) for known in ("true", "false")]
    before = [count.value for count in counts]
    more = ChatPrompt([*turns, {"role": "user", "content": "What is new?"}])
    assert known(local, more) is None
    second = await local.tokens(more)
    assert [count.value - was for count, was in zip(counts, before, strict=True)] == [4, 1]
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    assert second.ids.startswith(whole(small.tokenizer(), TextPrompt(text, False)))
    assert known(local, more) == second != first


def test_the_memo_stays_below_its_bound_and_forgets_the_least_used() -> None:
    memo = SegmentMemo(1200)
    for number in range(3):
        memo.keep(bytes([number]) * 16, bytes(40))
    assert memo.find(bytes(16)) == bytes(40)
    memo.keep(bytes([3]) * 16, bytes(40))
    assert memo.bytes <= 1200
    assert memo.find(bytes(16)) is not None
    assert memo.find(bytes([1]) * 16) is None
    memo.keep(b"large", bytes(1200))
    assert memo.find(b"large") is None
    nothing = SegmentMemo(0)
    nothing.keep(b"any", b"1234")
    assert (nothing.find(b"any"), nothing.bytes) == (None, 0)


@pytest.mark.parametrize("ids_bytes", [60, 600])
def test_the_memo_takes_no_more_memory_than_its_bound(ids_bytes: int) -> None:
    bound = 2**20
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    memo = SegmentMemo(bound)
    for number in range(bound // ids_bytes):
        memo.keep(number.to_bytes(16, "little"), number.to_bytes(ids_bytes, "little"))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * bound < taken <= bound


def test_keys_of_two_tokenizers_differ() -> None:
    one, other = (Splitter({}, (), SegmentMemo.seed()) for _ in range(2))
    assert one.split("text").keys != other.split("text").keys
    assert one.whole("text", b"\0").keys != one.whole("text", b"\1").keys


@given(
    st.dictionaries(st.text("ab<|", min_size=1, max_size=4), st.integers(0, 9), max_size=8),
    st.text("ab<|", max_size=30),
    st.integers(1, 8),
)
def test_a_text_is_split_at_the_longest_token_wherever_it_is_searched(
    tokens: dict[str, int], text: str, window: int
) -> None:
    import waymark.tokenization.segments as segments

    before, segments._WINDOW = segments._WINDOW, window
    try:
        pieces = Splitter(tokens, (), 0).split(text)
    finally:
        segments._WINDOW = before
    expected = [""]
    at = 0
    while at < len(text):
        found = max((token for token in tokens if text.startswith(token, at)), key=len, default=None)
        if found is not None:
            expected += [found, ""]
            at += len(found)
            continue
        expected[-1] += text[at]
        at += 1
    assert pieces.texts == expected[::2]
    assert pieces.tokens == [pack_tokens([tokens[token]]) for token in expected[1::2]]
    assert [bool(key) for key in pieces.keys] == [bool(each) for each in pieces.texts]
    assert pieces.joined([each.encode() for each in pieces.texts]) == b"".join(
        pack_tokens([tokens[each]]) if number % 2 else each.encode() for number, each in enumerate(expected)
    )


def test_a_text_is_not_split_at_tokens_that_cost_much_to_find() -> None:
    several, many = ({chr(0x4E00 + n): n for n in range(number)} for number in (500, 600))
    assert Splitter(several, (), 0).split("a丁b").texts == ["a", "b"]
    assert Splitter(many, (), 0).split("a丁b").texts == ["a丁b"]
    assert Splitter({"丁": 1}, list(many), 0).split("a丁b").texts == ["a丁b"]


def test_a_text_is_not_split_into_too_many_pieces() -> None:
    splitter = Splitter({"<>": 1}, ["<mask>"], 0)
    assert len(splitter.split("<>" * 60_000).texts) == 60_001
    assert len(splitter.split("<>" * 70_000).texts) == 1
    text = "a" * 100_000 + "<mask>" + "<>" * 1000
    assert splitter.split(text).texts == [text]


async def test_the_loop_turns_while_a_long_text_is_encoded(opened: Open) -> None:
    local = opened("byte-level", bytes_max=MAX)
    text = "The quick brown fox jumps over 12345 lazy dogs. " * 13_000
    assert len(text) > 600_000
    turns = 0
    encoding = asyncio.create_task(local.tokens(TextPrompt(text)))
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await encoding).ids) > 100_000
    assert turns > 20, "the thread held the interpreter all the time"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["x" * MAX, "<" * MAX, "<|im_star" * (MAX // 9), "\n" * MAX], ids=lambda text: text[:9]
)
async def test_a_hostile_text_as_long_as_may_be_does_not_stop_the_loop(opened: Open, text: str) -> None:
    local = opened("byte-level", bytes_max=MAX)
    turns = 0
    encoding = asyncio.create_task(local.tokens(TextPrompt(text)))
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await encoding).ids) > 4
    assert turns > 10


@pytest.mark.parametrize(
    ("prompt", "reason", "named"),
    [
        (TextPrompt("x" * 1001), "too_large", "prompt makes a text of 1001 bytes"),
        (TextPrompt("é" * 501), "too_large", "1002 bytes"),
        (TextPrompt("a\ud800"), "invalid_value", "surrogate"),
        (ChatPrompt([{"role": "user", "content": "x" * 1001}]), "too_large", "WAYMARK_MAX_TOKENS"),
    ],
)
async def test_a_text_that_cannot_be_read_is_refused_by_its_field(
    opened: Open, prompt: Prompt, reason: str, named: str
) -> None:
    local = opened(template=small.CHATML, bytes_max=1000)
    with pytest.raises(InvalidValue, match=named) as caught:
        await local.tokens(prompt)
    assert caught.value.reason == reason
    assert (await local.tokens(TextPrompt("x" * 1000))).ids


async def test_messages_without_a_template_are_refused(opened: Open) -> None:
    with pytest.raises(InvalidValue, match="no chat template") as caught:
        await opened().tokens(ChatPrompt([{"role": "user", "content": "Hi"}]))
    assert caught.value.reason == "no_tokenizer"


async def test_templates_are_read_where_models_have_them(opened: Open, at: Open, tmp_path: Path) -> None:
    user = ChatPrompt([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    with_tools = ChatPrompt(user.messages, tools=[{"type": "function", "function": {"name": "f"}}])

    async def said(local: LocalTokenizer, prompt: ChatPrompt) -> str:
        ids = (await local.tokens(prompt)).ids
        return await local.text([int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)])

    named = [
        {"name": "default", "template": "{{ bos_token }}plain{{ eos_token }}{{ pad_token }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}!"},
    ]
    local = opened(template=named)
    assert await said(local, user) == f"{small.BOS}plain{small.EOS}"
    assert await said(local, with_tools) == "f!"
    directory = tmp_path / "byte-level"
    (directory / "chat_template.jinja").write_text("from the file\n")
    assert await said(at(directory), user) == "from the file"
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert await said(at(directory), user) == "of a processor"


def make(directory: Path, pool: ThreadPoolExecutor) -> LocalTokenizer:
    memo = SegmentMemo(0)
    return LocalTokenizer("file:///m", directory, memo, pool, Metrics(), prompts=SegmentMemo(MAX), bytes_max=MAX)


def test_files_that_cannot_be_read_are_named(opened: Open, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    opened()
    directory = tmp_path / "byte-level"
    for text in ("{", "[" * 100_000):
        (directory / "tokenizer_config.json").write_text(text)
        with pytest.raises(InvalidValue, match=r"tokenizer_config\.json is not JSON") as caught:
            make(directory, pool)
        assert caught.value.reason == "no_tokenizer"
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"tokenizer\.json cannot be read as a tokenizer"):
        make(directory, pool)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"]
)
def test_a_file_above_its_bound_is_not_read(tmp_path: Path, pool: ThreadPoolExecutor, name: str) -> None:
    directory = small.directory(tmp_path / "m")
    bytes_max = TOKENIZER_BYTES_MAX if name == "tokenizer.json" else TEXT_BYTES_MAX
    (directory / name).write_bytes(b"")
    os.truncate(directory / name, bytes_max + 1)
    with pytest.raises(
        InvalidValue, match=rf"{name} has {bytes_max + 1} bytes, and at most {bytes_max}.*WAYMARK_TOKENIZERS"
    ) as caught:
        make(directory, pool)
    assert (caught.value.reason, caught.value.field) == ("no_tokenizer", "model")
    os.truncate(directory / name, bytes_max)
    with pytest.raises(InvalidValue, match=r"is not JSON|cannot be read as a tokenizer|characters"):
        make(directory, pool)


def test_a_file_that_grows_while_it_is_read_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="at most 100 are read"):
        local_module._content(Path("/proc/self/status"), 100)  # its size is said to be 0


def test_a_pipe_is_no_tokenizer(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    directory = small.directory(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    os.mkfifo(directory / "tokenizer.json")
    with pytest.raises(InvalidValue, match="there is no such file"):
        make(directory, pool)


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    directory = small.directory(tmp_path / "m")
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidValue, match=r"chat_template\.jinja is not UTF-8"):
        make(directory, pool)


async def test_a_tokenizer_that_cuts_and_fills_texts_by_itself_does_not(opened: Open, at: Open, tmp_path: Path) -> None:
    opened()
    path = tmp_path / "byte-level" / "tokenizer.json"
    cutting = Tokenizer.from_file(str(path))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=64)
    cutting.save(str(path))
    prompt = TextPrompt("The quick brown fox jumps over the lazy dog")
    assert await at(path.parent).tokens(prompt) == TokenizedPrompt(whole(small.tokenizer(), prompt))


@pytest.mark.parametrize("kind", ["byte-level", "metaspace-first"])
async def test_ids_are_cut_as_the_tokenizer_itself_cuts_them(kind: small.Kind, opened: Open) -> None:
    local, text = opened(kind, template=small.CHATML), "Hello, world! The quick brown fox<|im_end|>"
    reference = small.tokenizer(kind)
    for adds in (True, False):
        for keep in range(1, 20):
            reference.enable_truncation(keep, direction="left")
            prompt = TextPrompt(text, adds, Truncation(keep))
            assert await local.tokens(prompt) == TokenizedPrompt(whole(reference, TextPrompt(text, adds)))
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    chat = ChatPrompt([{"role": "user", "content": "Hi"}, picture])
    assert bool((await local.tokens(chat)).ids) is local.splits
    assert await local.tokens(replace(chat, truncation=Truncation(3))) == TokenizedPrompt(b""), (
        "what is cut off is not known"
    )


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("kind", small.KINDS)
async def test_all_certain_ids_before_an_image_are_known(kind: small.Kind, opened: Open) -> None:
    local, reference = opened(kind, template=PARTS), small.tokenizer(kind)
    assert local.splits == (kind != "metaspace-first")
    for end in ("dog", "dog.", "dog ", "dog\n", "12", "été"):
        text = "The quick brown fox jumps over the lazy " * 10 + end
        picture = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "x"}}]
        ids = unpack_tokens((await local.tokens(ChatPrompt([{"role": "user", "content": picture}]))).ids)
        if not local.splits:
            assert ids == [], end
            continue
        before = f"<|im_start|>user\n{text}"
        for behind in ("", "<image>", "<|im_end|>", "quick", " over", "s", "3", "\n\n", "'t", "{", "é"):
            all_ids = reference.encode(before + behind, add_special_tokens=False).ids
            assert all_ids[: len(ids)] == ids, (end, behind)
        assert len(ids) >= len(reference.encode(before, add_special_tokens=False).ids) - 12, end


def test_fewer_ids_than_are_added_are_refused() -> None:
    with pytest.raises(InvalidValue, match="fewer than the special tokens") as caught:
        Truncation(1).cut(bytes(40), bytes(4), bytes(4))
    assert caught.value.field == "truncate_prompt_tokens"


@pytest.mark.parametrize("words", [1, 2**14], ids=["short", "long"])
async def test_a_known_prompt_is_not_rendered_again(opened: Open, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local = opened(template=small.CHATML)
    content = "Hello " * words
    first = await local.tokens(ChatPrompt([{"role": "user", "content": content}]))

    def render(*_: object) -> str:
        raise AssertionError("rendered again")

    monkeypatch.setattr(ChatTemplate, "render", render)
    assert known(local, ChatPrompt([{"role": "user", "content": content}])) == first


_HELLO = {"role": "user", "content": "Hello"}


OTHERS: list[Prompt] = [
    ChatPrompt([{"role": "user", "content": "Hello "}]),
    ChatPrompt([{"role": "user", "content": "Hello", "name": "a"}]),
    ChatPrompt([_HELLO, _HELLO]),
    ChatPrompt([_HELLO], tools=[{"function": {"name": "f"}}]),
    ChatPrompt([_HELLO], system="Be brief."),
    ChatPrompt([_HELLO], template_kwargs={"a": True}),
    ChatPrompt([_HELLO], template_kwargs={"a": 1}),
    ChatPrompt([_HELLO], add_generation_prompt=False),
    ChatPrompt([_HELLO], add_generation_prompt=False, continue_final_message=True),
    ChatPrompt([_HELLO], add_special_tokens=True),
    ChatPrompt([_HELLO], truncation=Truncation(2)),
    TextPrompt("Hello"),
]


async def test_a_prompt_that_differs_in_anything_is_another_one(opened: Open) -> None:
    local = opened(template=small.CHATML)
    await local.tokens(ChatPrompt([_HELLO]))
    assert known(local, ChatPrompt([_HELLO])) is not None
    assert [other for other in OTHERS if known(local, other) is not None] == []


async def test_tokenizers_that_share_a_memo_do_not_share_its_prompts(tmp_path: Path, at: Open) -> None:
    memo, prompts = SegmentMemo(MAX), SegmentMemo(MAX)
    one, other = (
        at(small.directory(tmp_path / kind, kind), memo=memo, prompts=prompts) for kind in ("byte-level", "wordpiece")
    )
    await one.tokens(TextPrompt("Hello"))
    assert known(one, TextPrompt("Hello")) is not None
    assert known(other, TextPrompt("Hello")) is None


async def test_a_prompt_with_another_date_is_another_one(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    local = opened(template="{{ strftime_now('%d %b %Y') if strftime_now is defined }}" + small.CHATML)
    for day in (21, 22):

        class Then(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Self:
                return cls(2026, 11, day, tzinfo=tz)  # noqa: B023  # used before the next

        monkeypatch.setattr(templates, "datetime", Then)
        assert known(local, ChatPrompt([_HELLO])) is None
        made = await local.tokens(ChatPrompt([_HELLO]))
        assert known(local, ChatPrompt([_HELLO])) == made
        assert (await local.text(unpack_tokens(made.ids))).startswith(f"{day} Nov 2026")


async def test_a_prompt_whose_template_asks_the_clock_in_its_own_way_is_not_remembered(opened: Open) -> None:
    local = opened(template="{% set form = '%d' %}{{ strftime_now(form) }}" + small.CHATML)
    await local.tokens(ChatPrompt([_HELLO]))
    assert known(local, ChatPrompt([_HELLO])) is None

"""remote: what is asked of an engine, and what becomes of every answer that it may give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.chat.requests import Truncation
from waymark.domain.multimodal import PromptItem
from waymark.domain.names import GroupName
from waymark.domain.packing import unpack_tokens
from waymark.tokenization import remote as remote_module
from waymark.tokenization.prompt import ChatPrompt, Prompt, TextPrompt, TokenizedPrompt
from waymark.tokenization.remote import RemoteTokenizer
from waymark.tokenization.sources import EngineTokenizer
from waymark.tokenization.tokenizers import Tokenizers

pytestmark = pytest.mark.outside

HI = TextPrompt("Hello")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: Answer | None = None
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        if self.answer is not None:
            return await self.answer(request)
        if request.path == "/detokenize":
            return web.json_response({"prompt": "Hello"})
        return web.json_response({"count": 3, "max_model_len": 4096, "tokens": [1, 2, 2**32 - 1]})

    def says(self, status: int, body: str | bytes) -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            return web.Response(status=status, body=body.encode() if isinstance(body, str) else body)

        self.answer = answer


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    application = web.Application(client_max_size=2**26)
    application.router.add_post("/{path:.*}", engine.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    engine.url = f"http://{host}:{port}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def remote(engine: Engine) -> AsyncIterator[RemoteTokenizer]:
    remote = RemoteTokenizer(engine.url + "/", "m", Asker(), seconds=60, bytes_max=2**20)
    yield remote
    await remote.close()


async def test_an_engine_is_asked_in_its_own_form(engine: Engine, remote: RemoteTokenizer) -> None:
    assert await remote.tokens(HI) == TokenizedPrompt(b"\1\0\0\0\2\0\0\0\xff\xff\xff\xff")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    await remote.tokens(ChatPrompt(messages, tools, {"enable_thinking": False}, False, True))
    assert await remote.text([1, 2]) == "Hello"
    assert engine.asked == [
        ("/tokenize", {"model": "m", "prompt": "Hello", "add_special_tokens": True}),
        (
            "/tokenize",
            {
                "model": "m",
                "messages": messages,
                "tools": tools,
                "chat_template_kwargs": {"enable_thinking": False},
                "add_generation_prompt": False,
                "continue_final_message": True,
                "add_special_tokens": False,
            },
        ),
        ("/detokenize", {"model": "m", "tokens": [1, 2]}),
    ]


async def test_a_text_of_sglang_is_read(engine: Engine, remote: RemoteTokenizer) -> None:
    engine.says(200, json.dumps({"text": "Hello"}))
    assert await remote.text([1]) == "Hello"


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refusal_is_told_on(engine: Engine, remote: RemoteTokenizer, status: int) -> None:
    engine.says(status, json.dumps({"error": {"message": "no such role"}}))
    with pytest.raises(InvalidValue, match="no such role") as caught:
        await remote.tokens(ChatPrompt([]))
    assert caught.value.field == "messages"
    assert engine.url in caught.value.sentence


@pytest.mark.parametrize(
    ("status", "body", "named"),
    [
        (500, "", "status 500"),
        (404, "{}", "neither /tokenize nor render"),
        (302, "", "no redirect is followed"),
        (200, "no JSON", "no JSON object"),
        (200, "1", "no JSON object"),
        (200, "[1]", "no list of tokens"),
        (200, "{}", "no list of tokens"),
        (200, '{"tokens": [-1]}', "no list of tokens"),
        (200, '{"tokens": [1.5]}', "no list of tokens"),
        (200, '{"tokens": "abc"}', "no list of tokens"),
        (200, b'{"tokens": [' + b"1," * 2**24 + b"1]}", "longer than"),
    ],
    ids=lambda value: str(value[:20] if isinstance(value, bytes) else value)[:20],
)
async def test_an_engine_that_answers_otherwise_is_unavailable(
    engine: Engine, remote: RemoteTokenizer, status: int, body: str | bytes, named: str
) -> None:
    engine.says(status, body)
    with pytest.raises(TokenizerUnavailable, match=named) as caught:
        await remote.tokens(HI)
    assert engine.url in caught.value.sentence


async def test_an_engine_that_is_silent_or_not_there_is_unavailable(engine: Engine, free_port: int) -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    engine.answer = never
    for url, named in ((engine.url, r"within 0\.2 s"), (f"http://127.0.0.1:{free_port}", "cannot be used now")):
        remote = RemoteTokenizer(url, "m", Asker(), seconds=0.2, bytes_max=2**20)
        with pytest.raises(TokenizerUnavailable, match=named):
            await remote.tokens(HI)
        await remote.close()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (TextPrompt("x" * 2**22), "too_large"),
        (TextPrompt("\ud800"), "invalid_value"),
        (ChatPrompt([{"role": "user", "content": b"x"}]), "invalid_value"),
    ],
)
async def test_what_cannot_be_sent_is_refused(
    engine: Engine, remote: RemoteTokenizer, prompt: Prompt, reason: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        await remote.tokens(prompt)
    assert (caught.value.reason, engine.asked) == (reason, [])


async def test_nothing_is_remembered_of_an_engine(engine: Engine) -> None:
    tokenizers = Tokenizers({"m": engine.url}, None, Metrics())
    for _ in range(2):
        assert (await tokenizers.tokens("m", HI)).source == "remote"
    assert len(engine.asked) == 2
    await tokenizers.close()


# ---- render endpoints ------------------------------------------------------------------------------

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
FEATURES = {"mm_hashes": {"image": ["abc"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}


async def test_images_are_named_by_the_render_endpoint(engine: Engine, remote: RemoteTokenizer) -> None:
    engine.says(200, json.dumps({"token_ids": [5, 9, 9, 6], "features": FEATURES, "sampling_params": {}}))
    made = await remote.tokens(ChatPrompt(IMAGE))
    assert made == TokenizedPrompt(b"\5\0\0\0\t\0\0\0\t\0\0\0\6\0\0\0", (PromptItem(1, 2, "abc"),))
    ((path, body),) = engine.asked
    assert (path, body["messages"]) == ("/v1/chat/completions/render", IMAGE)


async def test_a_server_with_render_endpoints_alone_is_asked_there(engine: Engine, remote: RemoteTokenizer) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/completions/render":
            return web.json_response([{"token_ids": [1], "features": None}])
        if request.path == "/v1/chat/completions/render":
            return web.json_response({"token_ids": [2]})
        return web.json_response({"detail": "Not Found"}, status=404)

    engine.answer = answer
    assert await remote.tokens(HI) == TokenizedPrompt(b"\1\0\0\0")
    assert await remote.tokens(ChatPrompt([])) == TokenizedPrompt(b"\2\0\0\0")


async def test_a_prompt_that_is_cut_is_asked_of_the_render_endpoints(engine: Engine, remote: RemoteTokenizer) -> None:
    engine.says(200, json.dumps({"token_ids": [5]}))
    for each in (
        TextPrompt("Hello", truncation=Truncation(1, "left")),
        ChatPrompt([], truncation=Truncation(1, "left")),
    ):
        assert await remote.tokens(each) == TokenizedPrompt(b"\5\0\0\0")
    assert [path for path, _ in engine.asked] == ["/v1/completions/render", "/v1/chat/completions/render"]
    assert all((body["truncate_prompt_tokens"], body["truncation_side"]) == (1, "left") for _, body in engine.asked)
    engine.says(404, "{}")
    with pytest.raises(InvalidValue, match="needs /v1/completions/render") as caught:
        await remote.tokens(TextPrompt("Hello", truncation=Truncation(1)))
    assert caught.value.field == "truncate_prompt_tokens"


async def test_images_without_a_render_endpoint_are_refused(engine: Engine, remote: RemoteTokenizer) -> None:
    engine.says(404, "{}")
    with pytest.raises(InvalidValue, match="/v1/chat/completions/render") as caught:
        await remote.tokens(ChatPrompt(IMAGE))
    assert caught.value.field == "messages"


async def test_features_that_do_not_fit_are_no_answer(engine: Engine, remote: RemoteTokenizer) -> None:
    engine.says(200, json.dumps({"token_ids": [5], "features": {"mm_hashes": {"image": ["a"]}}}))
    with pytest.raises(TokenizerUnavailable, match="features"):
        await remote.tokens(ChatPrompt(IMAGE))


# ---- any registered engine -------------------------------------------------------------------------


def options(**changed: Any) -> dict[str, Any]:
    return {"seconds": 60, "bytes_max": 2**20, "failed": {}, "is_default": True} | changed


def of_any(addresses: list[str], **changed: Any) -> EngineTokenizer:
    async def found(group: GroupName) -> list[str]:
        assert group == GroupName("t", "m")
        return addresses

    return EngineTokenizer(GroupName("t", "m"), found, Asker(), **options(**changed))


async def test_the_next_engine_is_asked_where_one_fails(engine: Engine, free_port: int) -> None:
    gone = f"http://127.0.0.1:{free_port}"
    for _ in range(8):  # whichever is asked first
        tokenizer = of_any([gone, engine.url])
        assert await tokenizer.tokens(HI) == TokenizedPrompt(b"\1\0\0\0\2\0\0\0\xff\xff\xff\xff")
        assert await tokenizer.text([1]) == "Hello"
        await tokenizer._asker.close()


async def test_without_an_engine_that_answers_the_last_is_named(engine: Engine, free_port: int) -> None:
    engine.says(500, "")
    tokenizer = of_any([engine.url])
    with pytest.raises(TokenizerUnavailable, match=f'"m".*{engine.url}.*status 500'):
        await tokenizer.tokens(HI)
    with pytest.raises(TokenizerUnavailable, match="registered with an address"):
        await of_any([], is_default=False).tokens(HI)
    with pytest.raises(InvalidValue, match="registered with an address"):
        await of_any([]).tokens(HI)
    await tokenizer._asker.close()


async def test_a_refusal_of_one_engine_is_not_asked_of_the_next(engine: Engine) -> None:
    engine.says(400, json.dumps({"error": "no such role"}))
    tokenizer = of_any([engine.url, engine.url + "/"])
    with pytest.raises(InvalidValue, match="no such role"):
        await tokenizer.tokens(ChatPrompt([]))
    assert len(engine.asked) == 1
    await tokenizer._asker.close()


async def test_an_address_that_is_not_allowed_is_not_asked(engine: Engine) -> None:
    async def found(_: GroupName) -> list[str]:
        return [engine.url]

    asker = Asker(AllowedEndpoints(["10.0.0.0/8"]))
    tokenizer = EngineTokenizer(GroupName("t", "m"), found, asker, **options())
    with pytest.raises(TokenizerUnavailable, match="WAYMARK_ALLOWED_ENDPOINTS"):
        await tokenizer.tokens(HI)
    assert engine.asked == []


async def test_an_answer_is_as_long_as_its_prompt_can_need(engine: Engine, remote: RemoteTokenizer) -> None:
    """A longer one is not read to its end, and one of millions of values is not parsed."""
    ids = [4_294_967_295] * 2**18
    engine.says(200, json.dumps({"tokens": ids}))
    found = await remote.tokens(TextPrompt("a" * len(ids)))
    assert found.ids == b"\xff" * 4 * len(ids), "each byte may be a token"
    with pytest.raises(TokenizerUnavailable, match="longer than"):
        await remote.tokens(HI)
    engine.says(200, json.dumps({"token_ids": ids}))
    for prompt in (ChatPrompt([], truncation=Truncation(9, "left")), TextPrompt("a", truncation=Truncation(9, "left"))):
        with pytest.raises(TokenizerUnavailable, match="longer than"):
            await remote.tokens(prompt)
    assert len((await remote.tokens(ChatPrompt(IMAGE))).ids) == 4 * len(ids), "images have no such bound"
    engine.says(200, b'{"tokens": [1], "more": [' + b"[]," * (2**18 + 1) + b"1]}")
    with pytest.raises(TokenizerUnavailable, match="no JSON object"):
        await remote.tokens(HI)
    engine.says(200, b"[" * 2000)
    with pytest.raises(TokenizerUnavailable, match="no JSON object"):
        await remote.tokens(HI)
    engine.says(400, b"[" * 2000)
    with pytest.raises(InvalidValue, match="refuses the prompt with status 400"):
        await remote.tokens(HI)


@pytest.mark.parametrize("tokens", ["[true]", "[1, false, 2]", "[1.0]", '["1"]', "[4294967296]", "[-1]", "{}", "null"])
async def test_what_is_not_a_list_of_ids_is_an_error_of_the_tokenizer(
    engine: Engine, remote: RemoteTokenizer, tokens: str
) -> None:
    engine.says(200, f'{{"tokens": {tokens}}}')
    with pytest.raises(TokenizerUnavailable, match="has no list of tokens"):
        await remote.tokens(HI)


LONG = ",".join(map(str, range(100)))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f'{{"tokens": [{LONG}]}}', list(range(100))),
        (f'{{"count": 100, "tokens" :\n [ {LONG} ], "token_strs": null}}', list(range(100))),
        (f'{{"x": {{"tokens": [{LONG}]}}, "tokens": [1]}}', [1]),
        (f'{{"x": "tokens", "tokens": [1], "y": [{LONG}]}}', [1]),
        (f'{{"token_ids": [{LONG}], "tokens": [2]}}', [2]),
        (f'{{"x": "\\"tokens\\": [{LONG}]", "tokens": [3]}}', [3]),
        (f'{{"tokens": [{LONG},]}}', None),
        (f'{{"tokens": [{LONG},,1]}}', None),
        (f'{{"tokens": [{LONG},true]}}', None),
        (f'{{"tokens": [{LONG},-1]}}', None),
        (f'{{"tokens": [{LONG},4294967296]}}', None),
        (f'{{"tokens": [{LONG},[1]]}}', None),
        (f'{{"tokens": [{LONG},"]"]}}', None),
        (f'{{"tokens": [{LONG}', None),
        (f'{{"tokens": [{LONG}]]}}', None),
    ],
)
async def test_a_long_list_of_ids_is_read_in_pieces(
    engine: Engine, remote: RemoteTokenizer, monkeypatch: pytest.MonkeyPatch, answer: str, expected: list[int] | None
) -> None:
    engine.says(200, answer)
    read: list[list[int] | None] = []
    for piece_bytes in (2**16, 7):
        monkeypatch.setattr(remote_module, "_PIECE_BYTES", piece_bytes)
        try:
            read.append(unpack_tokens((await remote.tokens(HI)).ids))
        except TokenizerUnavailable:
            read.append(None)
    assert read == [expected] * 2


async def test_more_ids_than_a_prompt_can_have_are_not_kept(
    engine: Engine, remote: RemoteTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "_MEDIA_IDS_MAX", 0)
    for count, is_kept in ((80_000, True), (100_000, False)):
        engine.says(200, b'{"tokens": [%b]}' % b",".join([b"1"] * count))
        if is_kept:
            assert len((await remote.tokens(HI)).ids) == 4 * count
            continue
        with pytest.raises(TokenizerUnavailable, match="no list of ids"):
            await remote.tokens(HI)

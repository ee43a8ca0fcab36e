"""uds: llm-d's tokenizer service, played by a real gRPC server on a Unix socket."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.grpc_loops import events_of_this_loop as events_of_this_loop
from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.chat.requests import Truncation
from waymark.domain.multimodal import PromptItem
from waymark.tokenization.prompt import ChatPrompt, TextPrompt, TokenizedPrompt
from waymark.tokenization.tokenizers import Tokenizers
from waymark.tokenization.uds import CLASSES, METHODS, SERVICE, UdsTokenizer

pytestmark = pytest.mark.outside

HI = TextPrompt("Hello")
PARTS = [{"type": "text", "text": "What is"}, {"type": "image_url", "image_url": {"url": "data:x"}}]


class Service:
    """Answers as the published interface does, and keeps what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Any] = []
        self.known: set[str] = set()
        self.error = ""
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, name),
                request_deserializer=CLASSES[asked].FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (asked, _) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._server.add_insecure_port(self.url.replace("unix://", "unix:"))
        await self._server.start()

    async def stop(self) -> None:
        self.known.clear()
        await self._server.stop(None)

    async def InitializeTokenizer(self, request: Any, _: Any) -> Any:
        self.asked.append(request)
        self.known.add(request.model_name)
        return CLASSES["InitializeTokenizerResponse"](success=True)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if request.model_name not in self.known:
            await context.abort(grpc.StatusCode.INTERNAL, "no such tokenizer")
        if self.error:
            return CLASSES["TokenizeResponse"](success=False, error_message=self.error)
        return CLASSES["TokenizeResponse"](success=True, input_ids=[1, 2**32 - 1])

    async def RenderChatCompletion(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if self.error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.error)
        answer = CLASSES["RenderChatCompletionResponse"](success=True, token_ids=[7] * 4)
        if any(message.content_parts for message in request.messages):
            answer.features.mm_hashes.add(key="image", value={"values": ["abc"]})
            answer.features.mm_placeholders.add(key="image", value={"ranges": [{"offset": 1, "length": 2}]})
        return answer


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(f"unix://{tmp_path}/s")
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def remote(service: Service) -> AsyncIterator[UdsTokenizer]:
    remote = UdsTokenizer(service.url, "m", seconds=60, bytes_max=2**20)
    yield remote
    await remote.close()


async def test_a_text_is_made_into_tokens(service: Service, remote: UdsTokenizer) -> None:
    for adds in (True, False):
        assert await remote.tokens(TextPrompt("Hello", adds)) == TokenizedPrompt(b"\1\0\0\0\xff\xff\xff\xff")
    first, *texts = service.asked
    assert first.model_name == "m"
    assert [(each.input, each.model_name, each.add_special_tokens) for each in texts] == [
        ("Hello", "m", True),
        ("Hello", "m", False),
    ]


async def test_messages_go_with_all_that_the_interface_has_fields_for(service: Service, remote: UdsTokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    user = [{"role": "user", "content": "Hi"}, {"role": "user", "content": PARTS}]
    made = await remote.tokens(ChatPrompt(user, tools, {"enable_thinking": False}, system="Be brief."))
    assert made == TokenizedPrompt(b"\7\0\0\0" * 4, (PromptItem(1, 2, "abc"),))
    _, request = service.asked
    assert [message.role for message in request.messages] == ["system", "user", "user"]
    assert [message.content for message in request.messages] == ["Be brief.", "Hi", ""]
    text, image = request.messages[2].content_parts
    assert (text.type, text.text, image.type, image.image_url.url) == ("text", "What is", "image_url", "data:x")
    assert (request.tools[0].function.name, json.loads(request.tools[0].function.parameters_json)) == (
        "f",
        {"type": "object"},
    )
    assert json.loads(request.chat_template_kwargs) == {"enable_thinking": False}
    assert (request.add_generation_prompt, request.continue_final_message, request.model_name) == (True, False, "m")


def test_the_fields_have_the_numbers_that_are_published() -> None:
    """Bytes as another implementation of the interface writes them."""
    request = CLASSES["RenderChatCompletionRequest"](
        model_name="m",
        messages=[{"role": "u", "content": "t"}],
        tools=[{"type": "f", "function": {"name": "n", "parameters_json": "{}"}}],
        add_generation_prompt=True,
        continue_final_message=True,
        chat_template_kwargs="{}",
    )
    expected = b"\x0a\x01m" + b"\x12\x06\x0a\x01u\x12\x01t" + b"\x1a\x0c\x0a\x01f\x12\x07\x0a\x01n\x1a\x02{}"
    assert request.SerializeToString() == expected + b"\x28\x01" + b"\x30\x01" + b"\x3a\x02{}"
    features = b"\x0a\x0c\x0a\x05image\x12\x03\x0a\x01h" + b"\x12\x0f\x0a\x05image\x12\x06\x0a\x04\x08\x04\x10\x02"
    found = CLASSES["MultiModalFeatures"].FromString(features)
    assert (found.mm_hashes[0].key, list(found.mm_hashes[0].value.values)) == ("image", ["h"])
    assert [(each.offset, each.length) for each in found.mm_placeholders[0].value.ranges] == [(4, 2)]


async def test_a_refusal_is_told_on(service: Service, remote: UdsTokenizer) -> None:
    service.error = "no such role"
    for prompt, field in ((HI, "prompt"), (ChatPrompt([]), "messages")):
        with pytest.raises(InvalidValue, match="no such role") as caught:
            await remote.tokens(prompt)
        assert caught.value.field == field
        assert service.url in caught.value.sentence


async def test_a_service_that_was_started_again_is_told_the_model_again(service: Service, remote: UdsTokenizer) -> None:
    await remote.tokens(HI)
    service.known.clear()
    with pytest.raises(TokenizerUnavailable, match="no such tokenizer"):
        await remote.tokens(HI)
    assert await remote.tokens(HI) == TokenizedPrompt(b"\1\0\0\0\xff\xff\xff\xff")


async def test_a_service_that_is_not_there_is_named(tmp_path: Path) -> None:
    remote = UdsTokenizer(f"unix://{tmp_path}/none", "m", seconds=60, bytes_max=2**20)
    with pytest.raises(TokenizerUnavailable, match=f"unix://{tmp_path}/none"):
        await remote.tokens(HI)
    await remote.close()


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (ChatPrompt([{"role": "assistant", "tool_calls": [{}]}]), "tool_calls"),
        (ChatPrompt([{"role": "tool", "content": "1", "tool_call_id": "x"}]), "tool_call_id"),
        (ChatPrompt(["x"]), "no object"),
        (ChatPrompt([{"role": 1, "content": "x"}]), "cannot be sent"),
        (ChatPrompt([{"role": "user", "content": 1}]), "cannot be sent"),
        (ChatPrompt([{"role": "user", "content": [{"type": "video_url"}]}]), "video"),
        (ChatPrompt([{"role": "user", b"x": 1, "name": "a"}]), "has "),
        (ChatPrompt([], tools=["x"]), "without a function"),
        # A msgpack body may have bytes, which are no JSON.
        (ChatPrompt([], tools=[{"function": {"name": "f", "parameters": {"a": b"x"}}}]), "tools cannot be sent"),
        (ChatPrompt([], template_kwargs={"a": b"x"}), "chat_template_kwargs cannot be sent"),
        (ChatPrompt([], add_special_tokens=True), "add_special_tokens"),
        (TextPrompt("a", truncation=Truncation(1)), "truncate_prompt_tokens"),
        (TextPrompt("\ud800"), "cannot be sent"),
        (TextPrompt("x" * 2**22), "at most"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_the_interface_has_no_field_for_is_refused(
    service: Service, remote: UdsTokenizer, prompt: Any, named: str
) -> None:
    with pytest.raises(InvalidValue, match=named):
        await remote.tokens(prompt)
    assert not any(hasattr(request, "messages") for request in service.asked)


async def test_tokens_do_not_become_text(remote: UdsTokenizer) -> None:
    with pytest.raises(InvalidValue, match="cannot turn token ids into text"):
        await remote.text([1])


async def test_without_grpc_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "waymark.tokenization.uds")
    tokenizers = Tokenizers({"m": "unix:///run/tokenizer.socket"}, None, Metrics())
    with pytest.raises(InvalidValue, match=r"grpc, which is not installed; install waymark\[epp\]") as caught:
        await tokenizers.tokens("m", HI)
    assert caught.value.reason == "no_tokenizer"
    await tokenizers.close()

"""Tokens from llm-d's tokenizer service: ``tokenization.TokenizationService``, gRPC over a Unix socket.

Only the used part of its interface is described, with the published names and field numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from waymark.base.errors import InvalidValue, TokenizerUnavailable
from waymark.base.protobuf import message_classes
from waymark.chat.openai import as_message
from waymark.chat.requests import kind_of
from waymark.domain.multimodal import PromptItems, items_of
from waymark.domain.packing import pack_tokens
from waymark.tokenization.prompt import ChatPrompt, Forgetful, Prompt, TokenizedPrompt, is_cut

PACKAGE = "tokenization"
SERVICE = f"{PACKAGE}.TokenizationService"
_ANSWER_BYTES_MAX = 32 * 2**20

_MESSAGES = {
    "TokenizeRequest": "string input, string model_name, bool add_special_tokens",
    "TokenizeResponse": "uint32* input_ids, bool success, string error_message",
    "InitializeTokenizerRequest": "string model_name, bool enable_thinking, bool add_generation_prompt",
    "InitializeTokenizerResponse": "bool success, string error_message",
    "ImageUrl": "string url",
    "ContentPart": "string type, string? text, ImageUrl? image_url",
    "ChatMessage": "string role, string? content, ContentPart* content_parts",
    "FunctionDefinition": "string name, string? description, string? parameters_json, bool? strict",
    "ChatCompletionTool": "string type, FunctionDefinition function",
    "RenderChatCompletionRequest": "string model_name, ChatMessage* messages, ChatCompletionTool* tools, 5, "
    "bool add_generation_prompt, bool continue_final_message, string? chat_template_kwargs",
    "PlaceholderRange": "int32 offset, int32 length",
    "StringList": "string* values",
    "PlaceholderRangeList": "PlaceholderRange* ranges",
    "HashesEntry": "string key, StringList value",
    "PlaceholdersEntry": "string key, PlaceholderRangeList value",
    # On the wire, a map is a list of entries.
    "MultiModalFeatures": "HashesEntry* mm_hashes, PlaceholdersEntry* mm_placeholders",
    "RenderChatCompletionResponse": "string request_id, uint32* token_ids, MultiModalFeatures features, bool success, "
    "string error_message",
}
#: Method -> its request and its answer.
METHODS = {
    "Tokenize": ("TokenizeRequest", "TokenizeResponse"),
    "InitializeTokenizer": ("InitializeTokenizerRequest", "InitializeTokenizerResponse"),
    "RenderChatCompletion": ("RenderChatCompletionRequest", "RenderChatCompletionResponse"),
}

CLASSES = message_classes("waymark/tokenizer.proto", PACKAGE, _MESSAGES)


class UdsTokenizer(Forgetful):
    """The tokenizer service at ``url`` (``unix:///path``), for ``model`` as it calls it."""

    kind = "remote"
    encodes_whole = False

    def __init__(self, url: str, model: str, *, seconds: float, bytes_max: int) -> None:
        self.name = url
        self._model = model
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._channel: Any = None
        self._is_initialized = False

    async def tokens(self, prompt: Prompt, key: bytes | None = None) -> TokenizedPrompt:
        """Return the tokens of a prompt from the service."""
        is_chat = isinstance(prompt, ChatPrompt)
        field = "messages" if is_chat else "prompt"
        if is_cut(prompt):
            raise InvalidValue(
                f"the service of the tokenizer {self.name} has no field truncate_prompt_tokens; send token_ids",
                field="truncate_prompt_tokens",
            )
        if isinstance(prompt, ChatPrompt):
            method, request = "RenderChatCompletion", self._chat(prompt)
        else:
            fields = {"input": prompt.text, "add_special_tokens": prompt.add_special_tokens}
            method, request = "Tokenize", _made("TokenizeRequest", fields | {"model_name": self._model}, field)
        if request.ByteSize() > 2 * self._bytes_max:
            raise InvalidValue(
                f"{field} is {request.ByteSize()} bytes and at most {2 * self._bytes_max} are sent on; send less, or "
                "raise WAYMARK_MAX_TOKENS",
                reason="too_large",
                field=field,
            )
        if not self._is_initialized:
            first = _made(
                "InitializeTokenizerRequest", {"model_name": self._model, "add_generation_prompt": True}, field
            )
            await self._call("InitializeTokenizer", first, "model")
            self._is_initialized = True
        answer = await self._call(method, request, field)
        if is_chat:
            return TokenizedPrompt(pack_tokens(list(answer.token_ids)), self._items(answer.features))
        return TokenizedPrompt(pack_tokens(list(answer.input_ids)))

    async def text(self, ids: Sequence[int]) -> str:
        """Refuse: the service cannot turn tokens into text."""
        raise InvalidValue(
            f"the tokenizer {self.name} cannot turn token ids into text; name another source in WAYMARK_TOKENIZERS",
            reason="no_tokenizer",
            field="model",
        )

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    # ---- requests and answers ----------------------------------------------------------------------

    async def _call(self, method: str, request: Any, field: str) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                self.name.replace("unix://", "unix:", 1),
                options=[("grpc.max_receive_message_length", _ANSWER_BYTES_MAX), ("grpc.enable_retries", 0)],
            )
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=CLASSES[METHODS[method][1]].FromString,
        )
        try:
            answer = await call(request, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            self._is_initialized = False  # the service may have been started again, without this model
            details = str(error.details() or "")[:200]
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise self._refused(field, details) from None
            raise TokenizerUnavailable(
                f"the tokenizer {self.name} cannot be used now: {error.code().name}: {details}"
            ) from None
        if not answer.success:
            self._is_initialized = False
            raise self._refused(field, answer.error_message[:200])
        return answer

    def _refused(self, field: str, details: str) -> InvalidValue:
        text = json.dumps(details, ensure_ascii=False)
        return InvalidValue(f"{self.name} refuses the {field}: {text}; send what that service takes", field=field)

    def _chat(self, prompt: ChatPrompt) -> Any:
        messages = [*as_message(prompt.system), *prompt.messages]
        fields: dict[str, Any] = {
            "model_name": self._model,
            "messages": [_message(message, index) for index, message in enumerate(messages)],
            "tools": [_tool(tool) for tool in prompt.tools or ()],
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
        }
        if prompt.add_special_tokens:
            raise InvalidValue(
                f"add_special_tokens is true, and {self.name} takes no such field with messages; leave it out",
                field="add_special_tokens",
            )
        if prompt.template_kwargs:
            fields["chat_template_kwargs"] = _json(dict(prompt.template_kwargs), "chat_template_kwargs")
        return _made("RenderChatCompletionRequest", fields, "messages")

    def _items(self, features: Any) -> PromptItems:
        named = {
            "mm_hashes": {entry.key: list(entry.value.values) for entry in features.mm_hashes},
            "mm_placeholders": {
                entry.key: [
                    {"offset": item_range.offset, "length": item_range.length} for item_range in entry.value.ranges
                ]
                for entry in features.mm_placeholders
            },
        }
        try:
            return items_of(named)
        except InvalidValue as error:
            raise TokenizerUnavailable(
                f"the tokenizer {self.name} cannot be used now: in its answer, {error.sentence}"
            ) from None


def _made(name: str, fields: Mapping[str, Any], field: str) -> Any:
    try:
        return CLASSES[name](**fields)
    except (TypeError, ValueError) as error:
        raise _unsendable(field, error) from None


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a msgpack body may have bytes
        raise _unsendable(field, error) from None


def _unsendable(field: str, error: Exception) -> InvalidValue:
    sentence = f"{field} cannot be sent to a tokenizer service: {str(error)[:100]}; send texts"
    return InvalidValue(sentence, field=field)


def _message(message: Any, index: int) -> dict[str, Any]:
    """Return a message in the service's form, which has a role, and a text or parts."""
    if not isinstance(message, Mapping):
        raise _unfit(index, "is no object; send role and content")
    dropped_fields = sorted(str(name) for name in message.keys() - {"role", "content"} if message[name])
    if dropped_fields:
        raise _unfit(index, f"has {dropped_fields[0]}, for which the interface of the tokenizer service has no field")
    content = message.get("content")
    if isinstance(content, list):
        return {"role": message.get("role"), "content_parts": list(_parts(content, index))}
    return {"role": message.get("role")} | ({} if content is None else {"content": content})


def _parts(content: Sequence[Any], index: int) -> Iterator[dict[str, Any]]:
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "text":
            yield {"type": "text", "text": part.get("text")}
        elif isinstance(part, Mapping) and part.get("type") == "image_url":
            image = part.get("image_url")
            yield {"type": "image_url", "image_url": {"url": image.get("url") if isinstance(image, Mapping) else image}}
        else:
            kind = kind_of(part) or "one of another type"
            raise _unfit(index, f"has a part ({kind}) for which the interface of the tokenizer service has no field")


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidValue("tools has an element without a function; send type and function", field="tools")
    fields = {name: function[name] for name in ("name", "description", "strict") if function.get(name) is not None}
    if function.get("parameters") is not None:
        fields["parameters_json"] = _json(function["parameters"], "tools")
    return {"type": tool.get("type", "function"), "function": fields}


def _unfit(index: int, problem: str) -> InvalidValue:
    return InvalidValue(
        f"messages[{index}] {problem}; name another source in WAYMARK_TOKENIZERS, or send token_ids",
        field="messages",
        index=index,
    )

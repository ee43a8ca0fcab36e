"""What a body asks for, as far as routing needs it: a model, prompts, how many sequences, a stream or not.

A body that does not have the form of its API is not refused here: the engine says what is wrong with it. It has no
prompt then, and goes to the engine with the least load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from waymark.chat.prefix_key import prefix_key
from waymark.domain.hashing import pack_tokens
from waymark.gateway.shapes import Api, Refusal
from waymark.tokenization.prompt import ChatPrompt, TextPrompt

Ids: TypeAlias = bytes
"""Token ids as little-endian u32."""
Prompt: TypeAlias = TextPrompt | ChatPrompt | Ids

#: Sequences of one request that load is reserved for; an engine may be asked for more.
SEQUENCES_MAX = 64


class Wanted(NamedTuple):
    """What a request asks for."""

    api: Api
    fields: dict[str, Any]
    model: str
    prompts: tuple[Prompt, ...]
    sequences: int
    """Of each prompt."""
    is_stream: bool
    prefix_key: bytes | None
    """None: there is no text to go by."""

    @property
    def salts(self) -> list[str]:
        salt = self.fields.get("cache_salt")
        return [salt] if isinstance(salt, str) and salt else []


def wanted_of(api: Api, body: bytes, *, prefix_bytes: int) -> Wanted:
    """Read a body. Raises Refusal where it is no JSON object with a model."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Refusal(400, "the body is not valid JSON; send a JSON object", "invalid_json") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "the body is no JSON object; send one", "invalid_type")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(400, "model is missing; it must be the name of a model", "missing", field="model")
    messages, system = _messages(api, fields)
    prompts = _prompts(api, fields, messages, system)
    count = fields.get("n")
    key = prefix_key(model, messages or _as_messages(prompts), system, prefix_bytes=prefix_bytes)
    return Wanted(
        api,
        fields,
        model,
        prompts,
        count if isinstance(count, int) and count >= 1 else 1,
        fields.get("stream") is True,
        key,
    )


def with_cache_control(wanted: Wanted, body: bytes) -> bytes:
    """The body with a mark behind its system prompt, up to which Anthropic's API caches; as it is where it has one.

    The mark is on the last text block: all blocks before it are cached with it, and a request may have four marks.
    """
    system = wanted.fields.get("system")
    if wanted.api is not Api.MESSAGES or not system:
        return body
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return body
    texts = [number for number, block in enumerate(blocks) if block.get("type") == "text"]
    if not texts or any("cache_control" in block for block in blocks):
        return body
    last = texts[-1]
    marked = [
        block | {"cache_control": {"type": "ephemeral"}} if number == last else block
        for number, block in enumerate(blocks)
    ]
    return orjson.dumps(wanted.fields | {"system": marked})


def _messages(api: Api, fields: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The messages of a body in OpenAI's form, and what stands before them."""
    if api is Api.RESPONSES:
        given = fields.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return items if isinstance(items, list) else (), fields.get("instructions")
    given = fields.get("messages")
    if api not in (Api.CHAT, Api.MESSAGES) or not isinstance(given, list):
        return (), None
    return given, fields.get("system") if api is Api.MESSAGES else None


def _prompts(api: Api, fields: Mapping[str, Any], messages: Sequence[Any], system: Any) -> tuple[Prompt, ...]:
    if messages:
        tools, more = fields.get("tools"), fields.get("chat_template_kwargs")
        return (
            ChatPrompt(
                messages,
                tools if isinstance(tools, list) else None,
                more if isinstance(more, dict) else {},
                fields.get("add_generation_prompt") is not False,
                fields.get("continue_final_message") is True,
                fields.get("add_special_tokens") is True,
                system,
            ),
        )
    if api is not Api.COMPLETIONS:
        return ()
    given = fields.get("prompt")
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    adds = fields.get("add_special_tokens") is not False
    found = [_prompt(each, adds_special_tokens=adds) for each in several]
    return tuple(each for each in found if each is not None)


def _prompt(given: Any, *, adds_special_tokens: bool) -> Prompt | None:
    if isinstance(given, str):
        return TextPrompt(given, adds_special_tokens)
    if isinstance(given, list) and given:
        try:
            return pack_tokens(given)
        except (TypeError, OverflowError, ValueError):
            return None
    return None


def _as_messages(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The first text as a message, so that completions have a prefix key, too."""
    first = prompts[0] if prompts else None
    return [{"role": "user", "content": first.text}] if isinstance(first, TextPrompt) else []

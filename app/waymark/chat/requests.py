"""The facts in a request to an engine's HTTP API that decide where it goes: its model, its prompt, its salt.

The bodies of OpenAI's and Anthropic's paths are read leniently: an engine checks the rest of a body, and an unexpected
shape only costs the match.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown

# ``truncate_prompt_tokens`` of a request: how vLLM cuts the token ids of a prompt.


_ID_BYTES = 4


class Truncation(NamedTuple):
    """How many ids are kept, and from which side the others are removed; None: the tokenizer removes them itself."""

    keep: int
    """-1: as many as the model takes, so every id of a prompt that it accepts."""
    side: Literal["left", "right"] | None = None

    def cut(self, ids: bytes, beginning: bytes, ending: bytes) -> bytes:
        """Return the kept part of packed ids, which begin and end with those added by the tokenizer.

        Raise ``InvalidValue`` if even these are too many.
        """
        keep = _ID_BYTES * self.keep
        if self.keep < 0 or len(ids) <= keep:
            return ids
        if not keep:
            return b""
        if self.side is not None:
            return ids[:keep] if self.side == "right" else ids[len(ids) - keep :]
        # A tokenizer that cuts keeps its own additions, and cuts the ids between them.
        room = keep - len(beginning) - len(ending)
        if room < 0:
            raise InvalidValue(
                f"truncate_prompt_tokens is {self.keep}, fewer than the special tokens that are added; send more, or "
                "add_special_tokens as false",
                field="truncate_prompt_tokens",
            )
        text = ids[len(beginning) : len(ids) - len(ending)]
        return beginning + text[len(text) - room :] + ending


def truncation_of(fields: Mapping[str, Any]) -> Truncation | None:
    """Return the truncation in a body; None if it is missing, or cannot be read."""
    keep, side = fields.get("truncate_prompt_tokens"), fields.get("truncation_side")
    if type(keep) is not int or keep < -1:
        return None
    return Truncation(keep, side if side in ("left", "right") else None)


#: Names of models are kept in caches; no model has a longer name.
_NAME_CHARACTERS_MAX = 4096


class Form(StrEnum):
    """The kind of a body, by the end of its path."""

    CHAT = "/chat/completions"
    COMPLETIONS = "/completions"
    MESSAGES = "/messages"
    RESPONSES = "/responses"
    EMBEDDINGS = "/embeddings"


@record(frozen=True, slots=True)
class PackedTokens:
    """The token ids of a prompt that was read without the parser, as little-endian u32."""

    ids: bytes

    def __len__(self) -> int:
        return len(self.ids) // 4


@record(frozen=True, slots=True)
class InferenceRequest:
    """A parsed body. It has ``messages`` or ``prompts``, or neither if its path has another form."""

    model: str
    form: Form | None = None
    messages: Sequence[Any] | None = None
    system: Any = None
    """The system prompt of Anthropic's form: a text or a list of blocks."""
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    prompts: Sequence[str | Sequence[int] | PackedTokens] = ()
    """Texts or token ids; the first one decides the target."""
    truncation: Truncation | None = None
    cache_salt: str | None = None
    is_stream: bool = False
    copies: int = 1
    """The field ``n``: answers to each prompt."""

    @property
    def prompts_to_answer(self) -> int:
        """How many prompts an engine computes sequences for; the inputs of embeddings count as one."""
        return 1 if self.form is Form.EMBEDDINGS else max(1, len(self.prompts))


def form_of(path: str) -> Form | None:
    """Return the form of the bodies of a path, whatever prefix a proxy has put before it; None for another path."""
    bare = path.partition("?")[0].rstrip("/")
    return next((form for form in Form if bare.endswith(form)), None)


#: Fields by which engines are told where to copy blocks from. A client that sets one could choose where an engine
#: connects to, and whose blocks it takes.
_PLACE_FIELDS = (
    "kv_transfer_params", "kv_hints", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
)  # fmt: skip


def check_places(fields: Any) -> None:
    """Raise ``InvalidValue`` if a body tells the engine where to copy from, as only a proxy behind Waymark may.

    The body is forwarded byte for byte, so the field cannot be removed.
    """
    if isinstance(fields, Mapping):
        for name in _PLACE_FIELDS:
            if fields.get(name) is not None:
                raise InvalidValue(
                    f"{name} tells an engine where to copy blocks from, which no client decides; leave it out",
                    field=name,
                )


def read_request(path: str, fields: Any) -> InferenceRequest:
    """Read a body.

    Raise ``InvalidValue`` on ``model`` if the body names none, on a field that names another engine, and for a body
    that is not an object.
    """
    if not isinstance(fields, Mapping):
        raise InvalidValue("the body is no JSON object; send one with the field model", reason="invalid_type")
    check_places(fields)
    model = fields.get("model")
    if model is None or model == "":
        raise InvalidValue("the body names no model; send the field model", reason="missing", field="model")
    if not isinstance(model, str) or len(model) > _NAME_CHARACTERS_MAX:
        raise InvalidValue(
            f"model is {shown(model)}; it must be a text of at most {_NAME_CHARACTERS_MAX} characters", field="model"
        )
    form = form_of(path)
    salt = fields.get("cache_salt")
    copies = fields.get("n")
    values: dict[str, Any] = {
        "model": model,
        "form": form,
        "cache_salt": salt if isinstance(salt, str) and salt else None,
        "is_stream": fields.get("stream") is True,
        "truncation": None if form in (Form.MESSAGES, Form.RESPONSES) else truncation_of(fields),
        "copies": copies if type(copies) is int and copies > 0 else 1,
    }
    if form in (Form.CHAT, Form.MESSAGES, Form.RESPONSES):
        values |= _chat(form, fields)
    elif form is not None:
        values["prompts"] = _prompts(fields.get("prompt" if form is Form.COMPLETIONS else "input"))
        values["add_special_tokens"] = _flag(fields, "add_special_tokens", None)
    return InferenceRequest(**values)


def _chat(form: Form, fields: Mapping[str, Any]) -> dict[str, Any]:
    messages, system = fields.get("messages"), fields.get("system")
    if form is Form.RESPONSES:
        messages, system = fields.get("input"), fields.get("instructions")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
    tools = fields.get("tools")
    kwargs = fields.get("chat_template_kwargs")
    return {
        "messages": messages if isinstance(messages, list) else [],
        "system": system,
        "tools": [_tool(tool, form) for tool in tools] if isinstance(tools, list) and tools else None,
        "template_kwargs": kwargs if isinstance(kwargs, Mapping) else {},
        "add_generation_prompt": _flag(fields, "add_generation_prompt", True),
        "continue_final_message": _flag(fields, "continue_final_message", False),
        "add_special_tokens": _flag(fields, "add_special_tokens", None),
    }


def _tool(tool: Any, form: Form) -> Any:
    """Return a tool in the form of chat completions, in which templates see it."""
    if form is Form.CHAT or not isinstance(tool, Mapping) or "function" in tool:
        return tool
    schema = tool.get("input_schema") if form is Form.MESSAGES else tool.get("parameters")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _prompts(value: Any) -> Sequence[str | Sequence[int] | PackedTokens]:
    """Return one prompt or a list of prompts, each a text or token ids; anything else is left out."""
    if isinstance(value, str | PackedTokens):
        return (value,)
    if not isinstance(value, list) or not value:
        return ()
    if type(value[0]) is int:
        return (value,)
    return tuple(prompt for prompt in value if isinstance(prompt, str | list))


def _flag(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return value if isinstance(value, bool) else default


# Session tokens: a client that sends one back stays at the instance that answered it.


SESSION = "x-session-token"
"""The header that carries a session token."""
_TOKEN_BYTES_MAX = 2048


def session_of(token: str | bytes | None) -> str | None:
    """Return the instance that a token names, or None without a readable token."""
    if not token or len(token) > _TOKEN_BYTES_MAX:
        return None
    try:
        return base64.b64decode(token, validate=True).decode() or None
    except (binascii.Error, ValueError):
        return None


def session_token(instance_id: str) -> str:
    """Return the token by which a client's further requests go to the same instance."""
    return base64.b64encode(instance_id.encode()).decode()


#: Type of a part -> its kind in a chat template.
MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video": "video",
    "video_url": "video",
}


def kind_of(part: Any) -> str | None:
    """Return ``image``, ``audio`` or ``video``; None for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


def has_media(messages: Sequence[Any]) -> bool:
    """Return whether a part of a message is an image, a video or a sound."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return any(kind_of(part) is not None for content in contents if isinstance(content, list) for part in content)

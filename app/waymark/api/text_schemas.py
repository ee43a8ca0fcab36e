"""Request bodies of prompts in the form of text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from waymark.api.http.fields import NAME, OPTIONAL_NAME, NonEmptyName, OptionalName, RequestBody, TokenIds
from waymark.chat.requests import Truncation
from waymark.domain.names import DEFAULT_TENANT, GroupName


def _text_or_list(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "neither a text nor a list")
    return value


System = Annotated[
    Any, BeforeValidator(_text_or_list), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
]


class TextFields(RequestBody):
    """A text, or the messages of a chat request, in place of token ids."""

    prompt: str | None = Field(
        default=None, description="a text; the model needs a tokenizer, or an engine with an address"
    )
    messages: list[Any] | None = Field(
        default=None,
        description="a list of messages as in a chat request of OpenAI; tokenized as prompt is",
    )
    system: System = Field(
        default=None,
        description="a text or a list of blocks: the system prompt for messages, as in a request of Anthropic's API",
    )
    tools: list[Any] | None = Field(default=None, description="a list of tools, for messages")
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="an object with arguments for the chat template, for messages"
    )
    add_generation_prompt: bool = Field(
        default=True,
        description="true or false: whether the start of the assistant's answer is added after the messages",
    )
    continue_final_message: bool = Field(
        default=False, description="true or false: whether the model continues the last message"
    )
    add_special_tokens: bool | None = Field(
        default=None, description="true or false; the default is true for a prompt and false for messages"
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=2**63 - 1,
        description="how many token ids of the prompt or messages are kept, as by vLLM; -1 keeps all",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None,
        description="left or right: the end at which ids are removed; by default ids are removed "
        "after the special tokens at the left end",
    )

    @property
    def truncation(self) -> Truncation | None:
        keep = self.truncate_prompt_tokens
        return None if keep is None else Truncation(keep, self.truncation_side)


class OfModel(RequestBody):
    """The model whose tokenizer is used."""

    model: NonEmptyName = Field(validation_alias=AliasChoices("model", "model_name", "modelname"), description=NAME)
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'")

    @property
    def group(self) -> GroupName:
        return GroupName(self.tenant_id or DEFAULT_TENANT, self.model)


class TokenizeRequest(OfModel, TextFields):
    """A text or messages, as vLLM accepts them."""


class DetokenizeRequest(OfModel):
    """The token ids to turn into text."""

    tokens: TokenIds = Field(
        validation_alias=AliasChoices("tokens", "token_ids"),
        description="a list of token ids, or in msgpack a bin of little-endian u32",
    )

"""Request bodies with a prompt, in tokens, text or hashes: queries, and the parts that decisions share with them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import BlockSize, HashList, NonEmptyName, OptionalName, RequestBody, TokenIds, optional
from waymark.api.http.prompts import MODEL, SEQ_HASHES
from waymark.chat.requests import Truncation
from waymark.domain.multimodal import PromptItems, items_of
from waymark.domain.names import BLOCK_SIZE, DEFAULT_TENANT, NAME, OPTIONAL_NAME, Adapter, GroupName


def _text_or_list(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "neither a text nor a list")
    return value


System = Annotated[
    Any, BeforeValidator(_text_or_list), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})
]


class TextFields(RequestBody):
    """A text, or the messages of a chat request, instead of token ids."""

    prompt: str | None = optional("a text; the model needs a tokenizer, or an engine with an address")
    messages: list[Any] | None = optional("a list of messages as in a chat request of OpenAI; tokenized as prompt is")
    system: System = optional(
        "a text or a list of blocks: the system prompt for messages, as in a request of Anthropic's API"
    )
    tools: list[Any] | None = optional("a list of tools, for messages")
    chat_template_kwargs: dict[str, Any] = optional("an object with arguments for the chat template, for messages", {})
    add_generation_prompt: bool = optional(
        "true or false: whether the start of the assistant's answer is added after the messages", True
    )
    continue_final_message: bool = optional("true or false: whether the model continues the last message", False)
    add_special_tokens: bool | None = optional("true or false; the default is true for a prompt and false for messages")
    truncate_prompt_tokens: int | None = optional(
        "how many token ids of the prompt or messages are kept, as by vLLM; -1 keeps all", ge=-1, le=2**63 - 1
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "left or right: the end at which ids are removed; by default ids are removed "
        "after the special tokens at the left end"
    )

    @property
    def truncation(self) -> Truncation | None:
        keep = self.truncate_prompt_tokens
        return None if keep is None else Truncation(keep, self.truncation_side)


class ModelRequest(RequestBody):
    """The model whose tokenizer is used."""

    model: NonEmptyName = Field(validation_alias=AliasChoices(*MODEL), description=NAME)
    tenant_id: OptionalName = optional(f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'")

    @property
    def group(self) -> GroupName:
        return GroupName(self.tenant_id or DEFAULT_TENANT, self.model)


class TokenizeRequest(ModelRequest, TextFields):
    """A text or messages, as vLLM accepts them."""


class DetokenizeRequest(ModelRequest):
    """The token ids to turn into text."""

    tokens: TokenIds = Field(
        validation_alias=AliasChoices("tokens", "token_ids"),
        description="a list of token ids, or in msgpack a bin of little-endian u32",
    )


class Named(ModelRequest):
    """The model, tenant, adapter and salts of the blocks that a request concerns."""

    lora_name: OptionalName = optional(f"{OPTIONAL_NAME}; empty means the base model")
    lora_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = optional(
        "an integer of 0..2^63-1, and not together with lora_name; the default is the base model"
    )
    cache_salt: OptionalName = optional(f"{OPTIONAL_NAME}; empty means none")
    additional_salt: OptionalName = optional(
        f"{OPTIONAL_NAME}; empty means none", validation_alias=AliasChoices("additional_salt", "additionalsalt")
    )

    @property
    def adapter(self) -> Adapter:
        """The adapter's name or its id. ``InvalidBody`` is raised if both are set."""
        if self.lora_name is None:
            return self.lora_id
        if self.lora_id is not None:
            raise InvalidBody("lora_id and lora_name are both given; send lora_name alone", field="lora_id")
        return self.lora_name

    @property
    def salts(self) -> list[str]:
        return [salt for salt in (self.additional_salt, self.cache_salt) if salt is not None]


OPTIONAL_BLOCK_SIZE = f"{BLOCK_SIZE}; the default is the block size of the model's engines, if all have the same"


class _QueryBody(Named):
    block_size: BlockSize | None = optional(OPTIONAL_BLOCK_SIZE)
    instance_id: OptionalName = optional(f"{OPTIONAL_NAME}; empty means every instance")
    by: Literal["instance", "address"] = optional("instance or address: the key of each row in the answer", "instance")
    explain: bool = optional(
        "true or false: whether the answer explains why each instance has no more of the prompt", False
    )


class PromptFields(TextFields):
    """A prompt, given as tokens, hashes, a text or messages."""

    may_have_any_list: ClassVar = True

    token_ids: TokenIds = optional(
        "a list of token ids, or in msgpack a bin of little-endian u32; send only one of token_ids, "
        "seq_hashes, prompt and messages"
    )
    seq_hashes: HashList = optional(
        "a list of rolling hashes, u64, or in msgpack a bin of little-endian u64",
        validation_alias=AliasChoices(*SEQ_HASHES.spellings),
    )
    features: dict[str, Any] | None = optional(
        "an object with mm_hashes and mm_placeholders, as vLLM's render endpoints return it: the position "
        "of each image in token_ids"
    )

    @property
    def items(self) -> PromptItems:
        """The images and other items among the tokens; ``InvalidValue`` if ``features`` does not fit."""
        return () if self.features is None else items_of(self.features)


class QueryRequest(_QueryBody, PromptFields):
    """A prompt, given as tokens, hashes, a text or messages."""


class QueryByHashRequest(_QueryBody):
    """A prompt, given as the rolling hashes of its blocks."""

    seq_hashes: HashList = Field(
        validation_alias=AliasChoices(*SEQ_HASHES.spellings),
        description="a list of rolling hashes, u64, or in msgpack a bin of little-endian u64",
    )


class InspectRequest(QueryRequest):
    """A prompt to explain, with the same fields as a query."""

    top: Annotated[int, Field(ge=1, le=1000)] = optional(
        "an integer of 1..1000: how many instances are shown, the longest match first", 20
    )

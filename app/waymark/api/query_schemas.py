"""Request bodies with a prompt or its hashes: queries, and the parts that decisions and inspections share with them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import (
    BLOCK_SIZE,
    NAME,
    OPTIONAL_NAME,
    BlockSize,
    HashList,
    NonEmptyName,
    OptionalName,
    RequestBody,
    TokenIds,
)
from waymark.api.text_schemas import TextFields
from waymark.domain.multimodal import PromptItems, items_of
from waymark.domain.names import DEFAULT_TENANT, Adapter, GroupName


class Named(RequestBody):
    """The model, tenant, adapter and salts of the blocks that a request is about."""

    model: NonEmptyName = Field(validation_alias=AliasChoices("model", "model_name", "modelname"), description=NAME)
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'")
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means the base model")
    lora_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        default=None,
        description="an integer of 0..2^63-1, and not together with lora_name; the default is the base model",
    )
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means none")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty means none",
    )

    @property
    def group(self) -> GroupName:
        return GroupName(self.tenant_id or DEFAULT_TENANT, self.model)

    @property
    def adapter(self) -> Adapter:
        """The adapter's name or its id. Raises ``InvalidBody`` if both are set."""
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
    block_size: BlockSize | None = Field(default=None, description=OPTIONAL_BLOCK_SIZE)
    instance_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means every instance")
    by: Literal["instance", "address"] = Field(
        default="instance", description="instance or address: the key of each row in the answer"
    )
    explain: bool = Field(
        default=False,
        description="true or false: whether the answer explains why each instance has no more of the prompt",
    )


class PromptFields(TextFields):
    """A prompt, given as tokens, hashes, a text or messages."""

    token_ids: TokenIds = Field(
        default=None,
        description="a list of token ids, or in msgpack a bin of little-endian u32; send only one of token_ids, "
        "seq_hashes, prompt and messages",
    )
    seq_hashes: HashList = Field(
        default=None,
        validation_alias=AliasChoices("seq_hashes", "block_hash", "block_hashes"),
        description="a list of rolling hashes, u64, or in msgpack a bin of little-endian u64",
    )
    features: dict[str, Any] | None = Field(
        default=None,
        description="an object with mm_hashes and mm_placeholders, as vLLM's render endpoints return it: the position "
        "of each image in token_ids",
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
        validation_alias=AliasChoices("seq_hashes", "block_hash", "block_hashes"),
        description="a list of rolling hashes, u64, or in msgpack a bin of little-endian u64",
    )


class InspectRequest(QueryRequest):
    """A prompt to explain, with the same fields as a query."""

    top: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=20, description="an integer of 1..1000: how many instances are shown, the longest match first"
    )

"""Request bodies of the Dynamo API's indexer, and the body of its errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from waymark.api.http.fields import HashList, Model, NonEmptyName, OptionalName, RankNumber, RequestBody, TokenIds
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, NAME, OPTIONAL_NAME, U32_MAX, U64_MASK, GroupName

_GROUP = f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'"
_RANK = f"an integer of 0..{U32_MAX}"
_ID = "an integer of 0..2^64-1"

InstanceId = Annotated[int, Field(ge=0, le=U64_MASK)]


class _Grouped(RequestBody):
    model_name: NonEmptyName = Field(description=NAME)
    routing_group: OptionalName = Field(default=None, description=_GROUP)
    tenant_id: OptionalName = Field(default=None, description=f"{_GROUP}; routing_group takes precedence")

    @property
    def partition(self) -> str | None:
        """The one partition key; None if the request does not name one."""
        return self.routing_group or self.tenant_id

    @property
    def group(self) -> GroupName:
        return GroupName(self.partition or DEFAULT_TENANT, self.model_name)


class DynamoRegisterRequest(_Grouped):
    """The publisher of KV events that Waymark subscribes to."""

    instance_id: InstanceId = Field(description=_ID)
    endpoint: str = Field(description=f"a text, {ENDPOINT}")
    block_size: Annotated[int, Field(ge=0, le=U32_MAX)] = Field(description="an integer of 1..65536, tokens per block")
    dp_rank: RankNumber = Field(default=0, description=_RANK)
    replay_endpoint: OptionalName = Field(default=None, description=f"a text, {ENDPOINT}")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty means none",
    )


class DynamoUnregisterRequest(_Grouped):
    """The publishers to remove: of all groups without ``routing_group``, and all ranks without ``dp_rank``."""

    instance_id: InstanceId = Field(description=_ID)
    dp_rank: RankNumber | None = Field(default=None, description=_RANK)


class DynamoQueryRequest(_Grouped):
    """A prompt, by its tokens. The model and group determine the block size."""

    token_ids: TokenIds = Field(description="a list of token ids, or in msgpack a bin of little-endian u32")
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means the base model")
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means none")


class DynamoQueryByHashRequest(_Grouped):
    """A prompt, by the local hashes of its blocks."""

    block_hashes: HashList = Field(
        description="a list of local hashes, signed or unsigned, or in msgpack a bin of little-endian u64"
    )


class PeerRequest(RequestBody):
    """The base URL of a peer."""

    url: Annotated[str, Field(max_length=4096)] = Field(description="a text of at most 4096 characters")


class DynamoErrorBody(Model):
    """The body of every answer in the Dynamo API that is not a 2xx."""

    error: str

"""The KV Events envelope of ``POST /events``, as the contract publishes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from waymark.api.http.fields import BLOCK_SIZE, RANK, BlockSize, Hash, HashList, RankNumber, TokenIds
from waymark.api.http.models import Model, Root
from waymark.domain.media import UNNAMED
from waymark.domain.names import DEFAULT_TENANT, U64_MASK

EventId = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": U64_MASK},
                {"type": "string", "pattern": "^[0-9]{1,20}$"},
            ]
        }
    ),
]


class StandardEvent(Model):
    """One event of the KV Events envelope."""

    event_id: EventId = Field(description="the number of the event in its stream, which rises by one with each event")
    event_type: Literal["stored", "removed", "cleared"]
    backend_id: str = Field(description="the registered instance_id")
    tenant_id: str | None = Field(None, description=f"empty means '{DEFAULT_TENANT}'")
    model_name: str | None = Field(None, description="the default is the registered name")
    block_size: BlockSize | None = Field(None, description=f"{BLOCK_SIZE}; the default is the registered size")
    dp_rank: RankNumber | None = Field(None, description=f"{RANK}; the default is the registered rank")
    medium: Annotated[str, Field(pattern="^[A-Za-z0-9_]{0,32}$")] | None = Field(
        None,
        description=f"in upper or lower case, not DP; the default is {UNNAMED}, or for a cleared event every medium",
    )
    lora_name: str | None = Field(None, description="empty means the base model")
    additional_salt: str | None = Field(None, description="empty means none")
    seq_hashes: HashList | None = Field(
        None,
        description="rolling hashes; or, with token_ids, the engine's own hashes. "
        "Stored and removed events need at least one",
    )
    base_block_idx: RankNumber | None = Field(
        None,
        description=f"{RANK}: the position of the first block in the prompt; a stored event needs this or parent_hash",
    )
    parent_hash: Hash | None = Field(None, description="the hash of the block before the first block of this event")
    token_ids: TokenIds | None = Field(
        None, description="the tokens of the blocks; absent if the hashes are rolling hashes"
    )
    timestamp: Any = Field(None, description="the time of the event, in any unit; Waymark does not use it")


class EventsRequest(Root[StandardEvent | list[StandardEvent]]):
    """One event, or a list of them."""

"""Bodies of ``/inspect/block``, ``/inspect/holder`` and ``/inspect/keys``, and the answer of ``/inspect/status``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from waymark.api.http.fields import OPTIONAL_NAME, OptionalName, RequestBody

BlockKey = Annotated[str, Field(pattern="^[0-9a-fA-F]{16}$")]
CHAIN_MAX = 131_072
"""The most blocks of a prompt whose rows are named: a command for every 32 of them."""


class InspectGroupsRequest(RequestBody):
    """The groups to look into; without a field, all groups."""

    group: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = Field(
        default=None, description="an integer of 1..9007199254740991: only the group with this id"
    )
    model: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only groups of this model")
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only groups of this tenant")


class InspectBlockRequest(InspectGroupsRequest):
    """The block to find."""

    key: BlockKey = Field(description="16 hex digits: the key of the block, which is seq_hash XOR namespace")


class InspectHolderRequest(InspectGroupsRequest):
    """The holder to describe."""

    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] = Field(
        description="an integer of 0..9007199254740991: the id of the holder, as a row contains it"
    )


class InspectKeysRequest(InspectGroupsRequest):
    """What the commands are to show; with groups alone, everything but the blocks."""

    block: BlockKey | None = Field(default=None, description="16 hex digits: the row that begins with this block")
    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = Field(
        default=None, description="an integer of 0..9007199254740991: the record and the entries of this holder"
    )
    chain: Annotated[list[BlockKey], Field(max_length=CHAIN_MAX)] | None = Field(
        default=None,
        description=f"at most {CHAIN_MAX} keys, as keys of /inspect/prompt has them: the rows of a whole prompt",
    )

"""How many blocks the holders of a bounded group have, and which of its holders end because there are too many.

Holder ids ascend, so the oldest generation of a group is the one with the lowest id. Each worker writes the numbers of
its publishers. If a group then has too many blocks, one worker at a time may choose a **cut**, which is a holder id:
every holder up to that id ends. The worker of each publisher ends that publisher's holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from waymark.base.record import record
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.leases import Grant
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

#: For how many milliseconds only one worker may choose a cut.
_CHOICE_MS: Final = 250


@record(frozen=True, slots=True)
class GroupEntries:
    """The numbers of a group that each of its publishers needs."""

    blocks: int
    publishers: int
    """The number of publishers with blocks."""
    cut: int
    """Holders up to this id end."""


class Entries:
    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def note(self, grant: Grant, blocks: Mapping[int, int], max_entries: int) -> GroupEntries | None:
        """Write how many blocks a publisher's holders have. Choose a cut unless another worker is choosing one.

        None if fenced.
        """
        noted = await self._note(grant, blocks, max_entries)
        if noted is None:
            return None
        is_turn = noted[1]
        if is_turn:
            cut = _cut(await self._client.hgetall(keys.entries(grant.group_id)), max_entries)
            if cut is not None:
                noted = await self._note(grant, blocks, max_entries, cut)
        return None if noted is None else noted[0]

    async def _note(
        self, grant: Grant, blocks: Mapping[int, int], max_entries: int, cut: int | None = None
    ) -> tuple[GroupEntries, bool] | None:
        value = " ".join([str(sum(blocks.values())), *(f"{holder}:{n}" for holder, n in blocks.items())])
        outcome = await self._scripts.run(
            "note_entries",
            entries=keys.entries(grant.group_id),
            record=grant.record,
            publisher=grant.publisher,
            token=grant.token,
            max=max_entries,
            milliseconds=_CHOICE_MS,
            cut="" if cut is None else cut,
            value=value,
        )
        if not outcome.is_applied:
            return None
        total, publishers, cut, chooses = outcome.numbers
        return GroupEntries(total, publishers, cut), bool(chooses)

    async def cuts(self, claims: Iterable[Claim]) -> dict[int, int]:
        """Return the cut of each group of the claims, by group id; 0 if no cut was chosen yet."""
        groups = sorted({claim.group_id for claim in claims})
        replies = (
            await self._client.several([("HGET", keys.entries(group), "cut") for group in groups]) if groups else []
        )
        return {group: int(cut) if cut and cut.isdigit() else 0 for group, cut in zip(groups, replies, strict=True)}


def _cut(fields: Mapping[bytes, bytes], max_entries: int) -> int | None:
    """Return the highest id of the holders that must end, so that ``max_entries`` is met; None if the group is within
    it.
    """
    holders: list[tuple[int, int]] = []
    for field, value in fields.items():
        if field.isdigit():
            pairs = (word.partition(b":") for word in value.split()[1:])
            holders += ((int(holder), int(n)) for holder, _, n in pairs if holder.isdigit() and n.isdigit())
    total, cut = sum(n for _, n in holders), None
    for holder, n in sorted(holders):
        if total <= max_entries:
            break
        total, cut = total - n, holder
    return cut

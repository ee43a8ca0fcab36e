"""Puts the publishers and blocks of a file into this Redis, one publisher after the other.

The blocks of a publisher get holders hidden from readers, like those of a snapshot, which become visible in one step
when all blocks are written. So no answer counts only a part. An import that was cut short can be repeated: it replaces
the publishers that the first one registered.

An import acts as a worker with the lease: the stream has the watermark and the digest of the file afterwards, and the
status ``starting``. The ingest worker that takes it over continues as after any other worker. It requests the batches
after the watermark, and ends the life if the engine is not the process in the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from waymark.base.errors import Conflict, InvalidValue, StoreUnavailable
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.domain.held import HeldBlocks
from waymark.domain.life_facts import UNTRUSTED
from waymark.domain.moves import Moves
from waymark.domain.packing import KEY_BYTES
from waymark.domain.parts import STEP, UNCHANGED, Commit, PartList, Parts, blocks_of, has_singles, joined, new_part_list
from waymark.domain.rows import SLOT_CHARS, Place, keys_of
from waymark.domain.status import StreamStatus
from waymark.store import keys
from waymark.store.calls import CALL_BLOCKS
from waymark.store.claims import Claim
from waymark.store.hashes import KEPT
from waymark.store.holder_tables import decode_holder
from waymark.store.index_file import IndexFile, SavedPublisher, SavedRow
from waymark.store.leases import Grant, random_nonce
from waymark.store.parsing import Malformed
from waymark.store.records import Facts, NewHolder
from waymark.store.scripts import Verdict
from waymark.store.store import Store

_LEASE_SECONDS: Final = 15.0
_NAMES_SHOWN: Final = 5


@record(slots=True)
class Imported:
    """The result of an import."""

    publishers: int = 0
    blocks: int = 0
    changed: int = 0
    """The number of streams that had changed while they were exported."""


async def import_index(
    store: Store,
    file: IndexFile,
    *,
    hash_seed: int,
    model: str | None = None,
    tenant: str | None = None,
    replaces: bool = False,
) -> Imported:
    """Import the publishers of the model and the tenant, after a check of the whole file.

    ``replaces`` allows names with a registration here. Raises InvalidValue or Conflict, before any change,
    and StoreUnavailable.
    """
    wanted = [
        saved
        for saved in file.publishers
        if model in (None, saved.group.model_name) and tenant in (None, saved.group.tenant_id)
    ]
    await _check(store, file, wanted, hash_seed=hash_seed, replaces=replaces)
    report = Imported()
    for saved in wanted:
        await _import_publisher(store, file, saved)
        report.publishers += 1
        report.blocks += saved.blocks
        report.changed += not saved.is_exact
    return report


async def _check(
    store: Store, file: IndexFile, wanted: Sequence[SavedPublisher], *, hash_seed: int, replaces: bool
) -> None:
    """Raise InvalidValue or Conflict if the file cannot be imported here."""
    complaint = await store.other_format()
    if complaint is not None:
        raise InvalidValue(complaint)
    if not wanted:
        groups = sorted({f"{saved.group.tenant_id}/{saved.group.model_name}" for saved in file.publishers})
        raise InvalidValue(
            f"{file.path} has no publisher of this model and tenant; it has {', '.join(groups) or 'none'}"
        )
    seed = await store.client.hget(keys.GROUPS, "hash_seed")
    if file.hash_seed != hash_seed or (seed is not None and int(seed) != hash_seed):
        here = f", and this Redis has {seed.decode()}" if seed is not None else ""
        raise InvalidValue(
            f"WAYMARK_HASH_SEED is {hash_seed}, but the blocks of {file.path} are hashed with {file.hash_seed}{here}: "
            "import it with that seed into a Redis with that seed, or an empty one"
        )
    for saved in wanted:
        for holder in saved.holders:
            try:
                decode_holder(b"1", holder.holder)
            except Malformed as exc:
                name = shown(str(saved.claim.registration.name))
                raise InvalidValue(f"{file.path}: a holder of publisher {name} cannot be read: {exc}") from None
    registered = {claim.registration.name for claim in await store.directory.claims()}
    conflicts = [str(saved.claim.registration.name) for saved in wanted if saved.claim.registration.name in registered]
    if conflicts and not replaces:
        more = f" and {len(conflicts) - _NAMES_SHOWN} more" if len(conflicts) > _NAMES_SHOWN else ""
        names = ", ".join(shown(name) for name in conflicts[:_NAMES_SHOWN])
        raise Conflict(
            f"this Redis has a registration of {names}{more} already, perhaps of an import that was cut; with "
            "--replace the registration and the blocks of the file replace those here. Nothing was changed"
        )


async def _import_publisher(store: Store, file: IndexFile, saved: SavedPublisher) -> None:
    claim = await _registered(store, saved)
    # A worker may have taken the stream of a new registration at once; it waits until this lease is released.
    grant = await store.leases.take(claim, "import", _LEASE_SECONDS, force=True)
    if grant is None:
        raise _contended(claim)
    try:
        await _PublisherImport(store, grant, saved).write(file)
    finally:
        await store.leases.drop(grant)


async def _registered(store: Store, saved: SavedPublisher) -> Claim:
    """Register a publisher as in the file. Return its claim in this Redis."""
    registration = saved.claim.registration
    claim = await store.directory.claim(registration.name)
    if claim is not None and (claim.is_leaving or claim.registration != registration):
        await store.registry.unregister([registration.name])
    await store.registry.register(registration)
    claim = await store.directory.claim(registration.name)
    if claim is None or claim.is_leaving:
        raise StoreUnavailable(
            f"publisher {shown(str(registration.name))} was unregistered during the import; import again"
        )
    return claim


def _contended(claim: Claim) -> StoreUnavailable:
    name = shown(str(claim.registration.name))
    return StoreUnavailable(
        f"another process has taken the stream of publisher {name} during the import; import again with --replace"
    )


class _PublisherImport:
    """The import of one publisher, under its lease."""

    def __init__(self, store: Store, grant: Grant, saved: SavedPublisher) -> None:
        self._store = store
        self._grant = grant
        self._saved = saved
        self._renewed = time.monotonic()
        self._has_singles = False

    async def write(self, file: IndexFile) -> None:
        store, grant, saved = self._store, self._grant, self._saved
        publisher, state = grant.claim.publisher, saved.state
        begin = [
            NewHolder(holder.name, replace(decode_holder(b"1", holder.holder), publisher=publisher))
            for holder in saved.holders
        ]
        self._must(await store.records.drop_staged(grant, random_nonce()))
        highest = await store.leases.highest_holder(grant)
        ids = None if highest is None else await store.records.stage(grant, begin, highest, random_nonce())
        if ids is None:
            raise _contended(grant.claim)
        await self._write_rows(file, ids)
        watermark, commit = state["watermark"], None
        if watermark is not None:
            commit = Commit(watermark, state["ts"], state["newest_ts"], state["digest"])
        facts = self._facts()
        self._must(await store.records.take_staged(grant, commit, facts, begin, random_nonce()))
        event_ids = {
            id_: holder.event_id for id_, holder in zip(ids, saved.holders, strict=True) if holder.event_id is not None
        }
        if event_ids:
            verdict = await store.index.apply(grant, [], Moves(HeldBlocks()), None, event_ids)
            self._must(verdict is Verdict.APPLIED)
        status = StreamStatus.LOST if state["is_lost"] else StreamStatus.STARTING
        facts |= {"status": status, "last_event_id": state["last_event_id"]}
        self._must(await store.records.write(grant, facts, state["counters"]))
        self._must(await store.records.set_lost(grant, is_lost=state["is_lost"]))

    async def _write_rows(self, file: IndexFile, ids: Sequence[int]) -> None:
        """Write all rows for the staged holders.

        The script creates a branch row only if the row of its piece is full, and each refusal is a round trip. So the
        branch rows come last.
        """
        saved, last = self._saved, [0] * len(ids)
        parts: Parts = []
        for is_branch in (False, True):
            for rows in file.rows_of(saved):
                more = new_part_list(saved.holders[rows.holder].seq)
                for row in rows.rows:
                    if (row.place.branch is not None) is is_branch:
                        _add(more, row, ids[rows.holder], last[rows.holder] + STEP)
                        last[rows.holder] += STEP * row.blocks
                parts = joined(parts, more.parts)
                if blocks_of(parts) >= CALL_BLOCKS * self._grant.shards:
                    await self._apply(parts)
                    parts = []
            await self._apply(parts)
            parts = []

    def _facts(self) -> Facts:
        """Return the flags of the stream. If it changed while it was read, the counts of copies may be wrong."""
        flags = set(self._saved.state["flags"].split()) - {KEPT}  # the engine hashes of the group are not in the file
        if not self._saved.is_exact:
            flags.add(UNTRUSTED)
        return {"flags": " ".join(sorted(flags)), "main_groups": self._saved.state["main_groups"]}

    async def _apply(self, parts: Parts) -> None:
        await self._renew()
        if not self._has_singles and has_singles(parts):
            self._must(await self._store.records.keep_singles(self._grant))
            self._has_singles = True
        moves = Moves(HeldBlocks())
        verdict = await self._store.index.apply(self._grant, parts, moves, None, hold=self._renew, is_staged=True)
        self._must(verdict is Verdict.APPLIED)

    async def _renew(self) -> None:
        if time.monotonic() - self._renewed > _LEASE_SECONDS / 5:
            self._must(await self._store.leases.renew(self._grant, _LEASE_SECONDS))
            self._renewed = time.monotonic()

    def _must(self, is_ours: bool) -> None:
        if not is_ours:
            raise _contended(self._grant.claim)


def _add(parts: PartList, row: SavedRow, holder: int, position: int) -> None:
    """Add the blocks of a row, the first at ``position``.

    The order does not show which block is the parent of which. With ``is_known`` a block without a slot moves alone, so
    that no other block gets into a branch row that does not begin with an ancestor. A block of a shared branch row gets
    a branch row of its own, because the file does not say what its parent is.
    """
    places = [row.place] * row.blocks
    if row.place.is_shared:
        places = [Place(row.place.head, key) for key in keys_of(row.slots)]
    hashes = row.hashes or bytes(KEY_BYTES * row.blocks)
    start = 0
    # ``PartList`` takes one value of copies for all blocks of a part.
    for (place, copies), group in groupby((places[i], row.copies.get(i, UNCHANGED)) for i in range(row.blocks)):
        end = start + len(list(group))
        parts.add_packed(
            "+",
            holder,
            position + STEP * start,
            place,
            row.namespace,
            row.slots[SLOT_CHARS * start : SLOT_CHARS * end],
            hashes[KEY_BYTES * start : KEY_BYTES * end],
            is_known=True,
            is_identity=not row.hashes,
            copies=copies,
        )
        start = end

"""Where a target copies the beginning of a prompt from, if another engine has more blocks.

Only a registration with ``kv_source`` is a source. Its pulls are booked by the script that makes the reservation, so
that any number of replicas together send at most ``PULLS_MAX`` pulls to one source at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waymark.decide.fleet import FleetMember
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions
from waymark.decide.question import CopySource
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.media import order_of
from waymark.domain.packing import KEY_BYTES, unpack
from waymark.store.hashes import HeldHashes
from waymark.store.reservations import Pulls

TOKENS_MIN = 1_024
"""A source must have this many tokens more than the target, because fewer are computed faster than a transfer
begins."""
PULLS_MAX = 4
"""Copies from one engine at a time, over all replicas: they share its network with each other and its requests."""

#: The most sources that a decision offers to Redis.
_PEERS_MAX = 4


class _Peer(NamedTuple):
    member: FleetMember
    blocks: int


class Peers:
    """The possible sources of one prompt, those with the most blocks first."""

    def __init__(self, snapshot: GroupSnapshot, matches: PromptMatches, options: SelectionOptions) -> None:
        self._snapshot = snapshot
        self._matches = matches
        self._options = options
        rows, size, loads = matches.seen.rows, matches.request.block_size, matches.seen.loads
        left_out, peers = snapshot.left_out, []
        for member in snapshot.fleet.kv_sources:
            row = rows.get(member.name)
            # Every engine reads blocks of a pool from the pool.
            if row is None or row.shared or member.publisher in left_out:
                continue
            if row.blocks * size >= TOKENS_MIN:
                peers.append(_Peer(member, row.blocks))

        def order(peer: _Peer) -> tuple[int, int]:
            load = loads.get(peer.member.publisher)
            return -peer.blocks, 0 if load is None else load.requests

        self._peers = sorted(peers, key=order)[:_PEERS_MAX]

    def pulls(self, publishers: Sequence[int], matched: Sequence[int]) -> Pulls | None:
        """Return the sources of each offered target, which has ``matched`` blocks; None if no target has one."""
        choices = [
            [place for place, peer in enumerate(self._peers) if self._is_worth(peer, publisher, has)]
            for publisher, has in zip(publishers, matched, strict=True)
        ]
        if not any(choices):
            return None
        return Pulls([peer.member.publisher for peer in self._peers], choices, PULLS_MAX)

    def _is_worth(self, peer: _Peer, publisher: int, matched: int) -> bool:
        """Return whether copying is cheaper than computing, or the cost of either is not known."""
        tokens = (peer.blocks - matched) * self._matches.request.block_size
        if publisher == peer.member.publisher or tokens < TOKENS_MIN:
            return False
        source, target = peer.member.target, self._snapshot.fleet.by_publisher[publisher].target
        speeds = [speed for speed in (source.transfer_gbps, target.transfer_gbps) if speed]
        times = self._matches.seen.answer_times.get(publisher)
        slope = None if times is None else times.first_token.slope
        if slope is None and self._options.prefill_tokens_per_second:
            slope = 1000 / self._options.prefill_tokens_per_second
        if not speeds or not source.kv_bytes_per_token or slope is None:
            return True
        return source.kv_bytes_per_token * 8 / (min(speeds) * 1e6) < slope

    async def source(self, hashes: HeldHashes, publisher: int, matched: int) -> CopySource | None:
        """Return the source that was booked for a target with ``matched`` blocks; None if its blocks are gone."""
        snapshot, matches = self._snapshot, self._matches
        peer = next((possible for possible in self._peers if possible.member.publisher == publisher), None)
        if peer is None or matches.walk is None or peer.member.target.kv_source is None:
            return None
        table = snapshot.fleet.table
        holders = sorted(
            (holder for holder in table.holders.values() if holder.publisher == publisher),
            key=lambda holder: order_of(holder.medium),
        )
        blocks = unpack(matches.keys[: peer.blocks * KEY_BYTES])
        copies = await hashes.read(snapshot.entry, blocks, matched, [holder.id for holder in holders])
        if not copies:
            return None
        instance_id, dp_rank = peer.member.name
        tokens: dict[str, int] = {}
        for copy in copies:
            medium = table.holders[copy.holder].medium
            tokens[medium] = tokens.get(medium, 0) + matches.request.block_size
        return CopySource(
            instance_id, dp_rank, peer.member.target.kv_source, tokens, [copy.engine_hash for copy in copies]
        )

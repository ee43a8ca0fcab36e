"""Bounds by generations: blocks of a rank and medium share a holder if they were stored in the same period.

The oldest generation ends as a whole, which is one small write however many blocks it has. The name of a generation's
holder has an epoch: the time at which the generation began, in milliseconds. A new generation begins with the first
store after a tenth of the time to live has passed, or after the last generation has reached its share of the most
blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Final, Literal

from waymark.base.record import record
from waymark.domain.media import normal_medium
from waymark.domain.names import HolderName

GENERATIONS: Final = 10
"""The number of closed generations of a lasting name, if the bound is a time. A group with a single publisher has as
many if the bound is a number of blocks.
"""
GENERATIONS_MAX: Final = 20
"""The most generations of one lasting name. Removals may leave few blocks in each, so their number has a bound."""
SHARES_MAX: Final = 100
"""The most shares into which the most blocks of a group are divided. A generation has at least one share, so that the
holder table seldom changes.
"""

RemovalReason = Literal["ttl", "max_entries"]


@record(frozen=True, slots=True)
class BlockBounds:
    """The most blocks of a group, and the seconds for which a block counts after its last store; 0 means no bound."""

    max_entries: int = 0
    ttl: int = 0
    medium_ttl: Mapping[str, int] = field(default_factory=dict)
    """The seconds for single media, by the medium's normal name, instead of ``ttl``."""

    @classmethod
    def of(cls, max_entries: int, ttl: int, medium_ttl: Mapping[str, int]) -> BlockBounds:
        return cls(max_entries, ttl, {normal_medium(name) or name: n for name, n in medium_ttl.items()})

    def __bool__(self) -> bool:
        return bool(self.max_entries or self.ttl or self.medium_ttl)

    def seconds(self, medium: str) -> int:
        return self.medium_ttl.get(medium, self.ttl)

    def has(self, medium: str) -> bool:
        return bool(self.max_entries or self.seconds(medium))

    def reason_to_end(self, name: HolderName, holder: int, now: int, cut: int) -> RemovalReason | None:
        """Return why a holder ends at ``now`` (in ms), if it does; holders up to id ``cut`` end for lack of room."""
        seconds = self.seconds(name.medium)
        if name.epoch is None:
            # The holder has blocks from before there was a bound, and their age is unknown.
            return ("ttl" if seconds else "max_entries") if self.has(name.medium) else None
        lives = 1000 * seconds + 1000 * seconds // GENERATIONS
        if seconds and not -lives < now - name.epoch < lives:
            return "ttl"
        return "max_entries" if self.max_entries and holder <= cut else None


class Generations:
    """The generations of one stream. The caller sets ``now`` and the facts of the group."""

    def __init__(self, bounds: BlockBounds) -> None:
        self.bounds = bounds
        self.are_bounded = bool(bounds)
        """Whether the group has bounds, so that there are generations."""
        self.now = 0
        """The time at which the fold began, in ms."""
        self.cut = 0
        """The newest holder of the group that ends because the group has too many blocks."""
        self.publishers = 1
        """The number of publishers in the group with blocks."""
        self.epochs: dict[HolderName, int] = {}
        """The generation for the stores of the current batch, by lasting name."""
        self._newest: dict[HolderName, HolderName] = {}
        self._last: dict[HolderName, int] = {}
        """The last epoch of each lasting name."""
        self._count: Counter[HolderName] = Counter()

    # ---- holders -----------------------------------------------------------------------------------

    def begin(self, name: HolderName) -> None:
        newest = self._newest.get(name.lasting)
        if name.epoch is not None and (newest is None or _epoch(newest) < name.epoch):
            self._newest[name.lasting] = name
            self._last[name.lasting] = max(self._last.get(name.lasting, 0), name.epoch)

    def end(self, name: HolderName) -> None:
        if self._newest.get(name.lasting) == name:
            del self._newest[name.lasting]

    def over(
        self, holders: Mapping[HolderName, int], blocks_of: Callable[[int], int]
    ) -> Iterator[tuple[HolderName, RemovalReason | None]]:
        """Yield the holders that end, oldest first, each with the bound that it exceeds, or None if it has no block
        left.
        """
        counts = Counter(name.lasting for name in holders)
        for name, holder in sorted(holders.items(), key=lambda item: item[1]):
            reason = self.bounds.reason_to_end(name, holder, self.now, self.cut)
            if reason is None and counts[name.lasting] > GENERATIONS_MAX and self.bounds.has(name.medium):
                reason = "max_entries"
            is_newest = self._newest.get(name.lasting) == name
            if reason is not None or (name.epoch is not None and not is_newest and not blocks_of(holder)):
                counts[name.lasting] -= 1
                yield name, reason

    # ---- stores ------------------------------------------------------------------------------------

    def takes(self, name: HolderName, blocks: int) -> bool:
        """Return whether stores go to a holder with this number of blocks."""
        if not self.bounds.has(name.medium):
            return name.epoch is None
        return self._newest.get(name.lasting) == name and self._is_open(name) and not self._is_full(blocks)

    def begin_fold(self, blocks_of: Callable[[HolderName], int]) -> None:
        """Direct stores to the newest generations from now on, unless these are closed."""
        self._count.clear()
        self.epochs = {}
        for lasting, name in self._newest.items():
            count = blocks_of(name)
            if self.bounds.has(lasting.medium) and self._is_open(name) and not self._is_full(count):
                self.epochs[lasting] = _epoch(name)
                self._count[lasting] = count

    def store(self, lasting: HolderName, blocks: int) -> None:
        """Count newly stored blocks; a name without an open generation gets one."""
        if lasting not in self.epochs:
            if not self.bounds.has(lasting.medium):
                return
            # Two generations that begin in the same millisecond need two names.
            self.epochs[lasting] = self._last[lasting] = max(self.now, self._last.get(lasting, -1) + 1)
        self._count[lasting] += blocks

    def end_batch(self) -> None:
        """Close the full generations. A batch is never split."""
        full = [lasting for lasting in self.epochs if self._is_full(self._count[lasting])]
        if full:
            self.epochs = {lasting: epoch for lasting, epoch in self.epochs.items() if lasting not in full}
            for lasting in full:
                del self._count[lasting]

    def _is_open(self, name: HolderName) -> bool:
        width = 1000 * self.bounds.seconds(name.medium) // GENERATIONS
        return not width or 0 <= self.now - _epoch(name) < width

    def _is_full(self, blocks: int) -> bool:
        most = self.bounds.max_entries
        parts = min(SHARES_MAX, GENERATIONS * self.publishers * max(1, len(self._newest)))
        return bool(most) and blocks >= max(1, most // parts)


def _epoch(name: HolderName) -> int:
    assert name.epoch is not None
    return name.epoch

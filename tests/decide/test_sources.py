"""Which engines a target may copy a prompt from: those that have enough more, if copying is cheaper than computing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.question import CopySource
from waymark.decide.snapshot import GroupSnapshot
from waymark.decide.sources import Peers
from waymark.domain.answer_times import NO_SUMS, AnswerTimes, TimeSums
from waymark.domain.match import TargetRow, Walk
from waymark.domain.names import GroupName, Holder
from waymark.domain.packing import pack
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import PLAIN, Target
from waymark.store.directory import GroupEntry
from waymark.store.hashes import HeldBlock, HeldHashes
from waymark.store.reservations import Load

SIZE = 16
#: Blocks that are just enough to be worth a copy: 1,024 tokens.
ENOUGH = 64
BLOCKS = list(range(1, 201))
#: A target that others copy from, at 100 kB a token: 0.08 ms at 10 Gbit/s.
SOURCE = Target(kv_source="tcp://10.0.0.9:7777", kv_bytes_per_token=100_000, transfer_gbps=10.0)


def peers(
    rows: Mapping[int, TargetRow],
    targets: Mapping[int, Target],
    *,
    loads: Mapping[int, Load] | None = None,
    left_out: frozenset[int] = frozenset(),
    times: Mapping[int, AnswerTimes] | None = None,
    holders: Mapping[int, Holder] | None = None,
    has_walk: bool = True,
    **options: Any,
) -> Peers:
    """The sources of a prompt of which the targets have ``rows``, by publisher."""
    published = {each: PublisherRow(f"pod-{each}", 0, SIZE, "instance") for each in targets}
    table = HolderTable(b"v", GroupName("t", "m"), published, holders or {}, b"", targets)
    fleet = Fleet(table)
    named = {(f"pod-{publisher}", 0): row for publisher, row in rows.items()}
    seen = PromptState(named, loads or {}, {}, {}, answer_times=times or {})
    request = RoutingRequest(SIZE * len(BLOCKS), SIZE)
    walk = Walk(table.view(SIZE)) if has_walk else None
    snapshot = GroupSnapshot(GroupEntry(7, 1), fleet, left_out=left_out)
    return Peers(snapshot, PromptMatches(request, seen, pack(BLOCKS), walk), SelectionOptions(**options))


def sources_of(found: Peers, publisher: int = 1, matched: int = 0) -> list[int]:
    """The publishers that a target with so many blocks may copy from, the best first."""
    pulls = found.pulls([publisher], [matched])
    return [] if pulls is None else [pulls.sources[at] for at in pulls.choices[0]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (TargetRow(device=ENOUGH), [2]),
        (TargetRow(device=ENOUGH - 1), []),
        (TargetRow(device=30, host=20, disk=14), [2]),
        # Every engine reads blocks of a pool from the pool.
        (TargetRow(device=ENOUGH, shared=1), []),
        (TargetRow(), []),
    ],
)
def test_a_source_has_enough_blocks_of_its_own(row: TargetRow, expected: list[int]) -> None:
    assert sources_of(peers({2: row}, {1: PLAIN, 2: SOURCE})) == expected


@pytest.mark.parametrize(("matched", "expected"), [(0, [2]), (36, [2]), (37, []), (100, []), (150, [])])
def test_a_source_has_enough_more_than_the_target(matched: int, expected: list[int]) -> None:
    assert sources_of(peers({2: TargetRow(device=100)}, {1: PLAIN, 2: SOURCE}), matched=matched) == expected


def test_nobody_copies_from_itself() -> None:
    found = peers({2: TargetRow(device=100), 3: TargetRow(device=90)}, {1: PLAIN, 2: SOURCE, 3: SOURCE})
    assert sources_of(found, publisher=2) == [3]
    assert sources_of(found, publisher=3) == [2]


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        ({1: PLAIN, 2: PLAIN}, frozenset()),
        ({1: PLAIN, 2: SOURCE}, frozenset({2})),
        ({1: PLAIN}, frozenset()),
    ],
    ids=["gives nothing away", "cannot be reached", "not there"],
)
def test_only_an_engine_in_reach_that_names_it_is_a_source(
    targets: Mapping[int, Target], left_out: frozenset[int]
) -> None:
    found = peers({2: TargetRow(device=100)}, targets, left_out=left_out)
    assert found.pulls([1], [0]) is None


def test_a_source_out_of_reach_does_not_hide_the_next() -> None:
    rows = {2: TargetRow(device=100), 3: TargetRow(device=100, shared=1), 4: TargetRow(device=90)}
    targets = {1: PLAIN} | dict.fromkeys((2, 3, 4, 5), SOURCE)
    assert sources_of(peers(rows, targets, left_out=frozenset({2}))) == [4]


def test_the_sources_with_most_come_first_and_of_equal_ones_those_with_fewer_requests() -> None:
    targets = {1: PLAIN} | dict.fromkeys(range(2, 9), SOURCE)
    rows = {2: 70, 3: 90, 4: 90, 5: 90, 6: 80, 7: 64, 8: 71}
    loads = {3: Load(0, 5), 4: Load(9, 1), 2: Load(0, 0)}
    found = peers({each: TargetRow(device=blocks) for each, blocks in rows.items()}, targets, loads=loads)
    # 5 has no load at all. Only four are offered to Redis.
    assert sources_of(found) == [5, 4, 3, 6]


def test_each_offered_target_has_choices_of_its_own() -> None:
    found = peers({2: TargetRow(device=100), 3: TargetRow(device=80)}, {1: PLAIN, 2: SOURCE, 3: SOURCE})
    pulls = found.pulls([1, 2, 3, 1], [0, 100, 80, 30])
    assert pulls is not None
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"at most (\d+) copies from one engine are under way", page)
    assert (pulls.sources, pulls.choices, pulls.pulls_max) == ([2, 3], [[0, 1], [], [], [0]], int(documented))
    assert found.pulls([1, 2], [90, 100]) is None


def with_slope(slope: float) -> AnswerTimes:
    """The times of a target whose first token takes ``slope`` ms for each token of the prompt."""
    idle, busy = TimeSums.of(0.0, 0.0), TimeSums.of(100.0, 100.0 * slope)
    sums = NO_SUMS
    for each in (idle, busy) * 5:
        sums = sums.plus(each)
    return AnswerTimes(sums)


@pytest.mark.parametrize(
    ("source", "target", "slope", "speed", "expected"),
    [
        # 100 kB at 10 Gbit/s take 0.08 ms a token.
        (SOURCE, PLAIN, 0.081, 0, [2]),
        (SOURCE, PLAIN, 0.079, 0, []),
        # What was measured counts for more than the setting.
        (SOURCE, PLAIN, 0.079, 1_000, []),
        (SOURCE, PLAIN, None, 12_490, [2]),
        (SOURCE, PLAIN, None, 12_510, []),
        # The slower of the two ends sets the speed.
        (SOURCE, Target(transfer_gbps=5.0), 0.081, 0, []),
        (SOURCE, Target(transfer_gbps=5.0), 0.161, 0, [2]),
        (SOURCE, Target(transfer_gbps=50.0), 0.081, 0, [2]),
        (Target(kv_source="tcp://a:1", kv_bytes_per_token=1e5), Target(transfer_gbps=10.0), 0.079, 0, []),
        # Nobody says what a copy, or a token, costs.
        (Target(kv_source="tcp://a:1", transfer_gbps=10.0), PLAIN, 0.001, 0, [2]),
        (Target(kv_source="tcp://a:1", kv_bytes_per_token=1e5), PLAIN, 0.001, 0, [2]),
        (SOURCE, PLAIN, None, 0, [2]),
    ],
)
def test_copying_has_to_be_cheaper_than_computing(
    source: Target, target: Target, slope: float | None, speed: float, expected: list[int]
) -> None:
    found = peers(
        {2: TargetRow(device=100)},
        {1: target, 2: source},
        times={} if slope is None else {1: with_slope(slope), 2: with_slope(1e9)},
        prefill_tokens_per_second=speed,
    )
    assert sources_of(found) == expected


# ---- the source that was booked -----------------------------------------------------------------------

HOLDERS = {
    40: Holder(40, 2, "pod-2", 0, "DISK", SIZE, "", "instance"),
    41: Holder(41, 2, "pod-2", 0, "GPU", SIZE, "", "instance"),
    42: Holder(42, 2, "pod-2", 0, "CPU", SIZE, "", "instance"),
    43: Holder(43, 1, "pod-1", 0, "GPU", SIZE, "", "instance"),
}


class Hashes:
    """Takes what is asked of Redis, and answers."""

    def __init__(self, *held: HeldBlock) -> None:
        self.held = list(held)
        self.asked: list[tuple[Sequence[int], int, Sequence[int]]] = []

    async def read(
        self, entry: GroupEntry, blocks: Sequence[int], first: int, holders: Sequence[int]
    ) -> list[HeldBlock]:
        assert entry.group_id == 7
        self.asked.append((list(blocks), first, list(holders)))
        return self.held


async def source(hashes: Hashes, found: Peers, publisher: int = 2, matched: int = 60) -> CopySource | None:
    return await found.source(cast(HeldHashes, hashes), publisher, matched)


async def test_the_source_names_the_blocks_that_it_has_more_by_medium() -> None:
    found = peers({2: TargetRow(device=64, host=2)}, {1: PLAIN, 2: SOURCE}, holders=HOLDERS)
    hashes = Hashes(HeldBlock(41, 901), HeldBlock(42, 902), HeldBlock(41, 903))
    named = await source(hashes, found)
    assert named == CopySource("pod-2", 0, "tcp://10.0.0.9:7777", {"GPU": 2 * SIZE, "CPU": SIZE}, [901, 902, 903])
    assert named.place == "10.0.0.9:7777"
    # Its own holders alone, the fastest first, and no block beyond its match.
    assert hashes.asked == [(BLOCKS[:66], 60, [41, 42, 40])]


async def test_a_source_whose_blocks_are_gone_is_none() -> None:
    found = peers({2: TargetRow(device=100)}, {1: PLAIN, 2: SOURCE}, holders=HOLDERS)
    assert await source(Hashes(), found) is None


async def test_what_was_not_offered_or_not_walked_is_no_source() -> None:
    hashes = Hashes(HeldBlock(41, 901))
    targets = {1: PLAIN, 2: SOURCE}
    found = peers({2: TargetRow(device=100)}, targets, holders=HOLDERS)
    assert await source(hashes, found, publisher=1) is None
    unwalked = peers({2: TargetRow(device=100)}, targets, holders=HOLDERS, has_walk=False)
    assert await source(hashes, unwalked) is None
    assert hashes.asked == []

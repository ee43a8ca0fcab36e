"""Quick reads: what the first rows decide, and what the general way has to go on with."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.store.factories import GROUP, Stream, stored
from tests.store.test_reader import CHAIN, read
from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.rows import PIECE_BLOCKS
from waymark.store.chain import PackedKeys
from waymark.store.hot import HOLDERS_MIN, HotRows, crowd_blocks
from waymark.store.quick import FirstPortions, KnownPlans, KnownRuns, QuickPlan, QuickRead, Start
from waymark.store.reader import Reader
from waymark.store.steps import finished
from waymark.store.store import Store

BLOCKS = 2 * PIECE_BLOCKS


@pytest.fixture
async def plan(store: Store, stream: Stream) -> QuickPlan:
    """That of a group whose one holder has two pieces of the chain, after a query has found it."""
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, CHAIN[:BLOCKS]))
    await read(store.reader, CHAIN[:1])
    plan = store.reader.quick.plan(GROUP, 16)
    assert plan is not None
    return plan


def begun(reader: Reader, plan: QuickPlan, chain: list[int], *, pieces: int = 4) -> asyncio.Future[QuickRead] | None:
    """The result to come; None if the read was not begun."""
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    keys, is_whole = pack(chain[: PIECE_BLOCKS * pieces + 1]), len(chain) <= PIECE_BLOCKS * pieces
    read = reader.quick.read(plan, keys, pieces, is_whole=is_whole, seconds=30.0)
    if read is None:
        return None
    read.begin(result)
    return result


async def result(reader: Reader, plan: QuickPlan, chain: list[int], *, pieces: int = 4) -> QuickRead:
    begun_read = begun(reader, plan, chain, pieces=pieces)
    assert begun_read is not None
    return await begun_read


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        (CHAIN[:10], 10),
        (CHAIN[:BLOCKS], BLOCKS),
        (CHAIN[: BLOCKS + 1], BLOCKS),
        (CHAIN[:BLOCKS] + [9_000_000] * 200, BLOCKS),
        ([9_000_000], 0),
    ],
    ids=["a part", "all", "one more", "many more", "nothing"],
)
async def test_rows_decide_a_chain_up_to_its_first_block_without_a_holder(
    store: Store, plan: QuickPlan, chain: list[int], found: int, implementation: str
) -> None:
    read = await result(store.reader, plan, chain)
    assert read.blocks == min(len(chain), 4 * PIECE_BLOCKS)
    assert read.runs is not None
    assert sum(length for _, length in read.runs) == found
    assert read.is_over


async def test_a_chain_that_goes_on_behind_the_portion_is_not_over(store: Store, plan: QuickPlan) -> None:
    read = await result(store.reader, plan, CHAIN[:BLOCKS], pieces=1)
    assert (read.is_over, read.blocks) == (False, PIECE_BLOCKS)
    assert read.runs is not None


async def asked_by_the_general_way(reader: Reader, start: Start | None) -> list[bytes]:
    """The heads in each request of a query of ``BLOCKS`` and one block more, which finds all but the last."""
    fetch = reader._fetcher.fetch
    asked: list[bytes] = []

    def noted(entry: Any, wanted: Any, **options: Any) -> Any:
        asked.append(wanted.heads)
        return fetch(entry, wanted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader._fetcher, "fetch", noted)
        keys = PackedKeys(pack(CHAIN[: BLOCKS + 1]))
        reading = await finished(reader.reading(GROUP, 16, keys, deadline_seconds=30.0, start=start))
    assert reading is not None
    assert (reading.walk.blocks, reading.round_trips) == (BLOCKS, 1)
    return asked


async def test_the_general_way_goes_on_with_the_values_that_were_read(store: Store, plan: QuickPlan) -> None:
    start = (await result(store.reader, plan, CHAIN[: BLOCKS + 1])).start
    assert start.fetched is not None
    for begin, requests in ((start, 0), (None, 1), (start._replace(fetched=None), 1)):
        assert len(await asked_by_the_general_way(store.reader, begin)) == requests


async def test_values_that_were_asked_for_before_a_write_are_read_again(store: Store, plan: QuickPlan) -> None:
    """The write may have been acknowledged in the meantime, so the next answer has to contain it."""
    asked = begun(store.reader, plan, CHAIN[:BLOCKS])
    assert asked is not None
    store.reader.forget_rows()
    read = await asked
    assert (read.runs, read.start.fetched) == (None, None)


async def test_values_of_another_incarnation_are_read_again(store: Store, plan: QuickPlan) -> None:
    asked = begun(store.reader, plan, CHAIN[:BLOCKS])
    assert asked is not None
    store.incarnation.forget()
    read = await asked
    assert (read.runs, read.start.fetched) == (None, None)
    assert not store.reader.quick.is_current(plan)


async def test_a_table_that_has_changed_is_not_decided_by(store: Store, stream: Stream, plan: QuickPlan) -> None:
    await stream.begin("0 CPU")
    read = await result(store.reader, plan, CHAIN[:BLOCKS])
    assert read.runs is None
    assert read.start.fetched is not None, "the rows themselves are good"


@pytest.fixture
def hot(store: Store) -> HotRows:
    """Rows that stay hot during a test."""
    store.reader._hot = store.reader.quick.hot = hot = HotRows(3600.0, 2**20)
    return hot


async def test_a_row_of_many_holders_is_not_read_again_for_a_moment(
    implementation: str, store: Store, stream: Stream, plan: QuickPlan, hot: HotRows
) -> None:
    holders = await stream.begin(*[f"{rank} GPU" for rank in range(HOLDERS_MIN)])
    await stream.apply(*[stored(holder, CHAIN[:PIECE_BLOCKS], seq=2) for holder in holders[1:]])
    await read(store.reader, CHAIN[:BLOCKS])
    hot.clear()
    plan = store.reader.quick.plan(GROUP, 16) or plan
    reads = [await result(store.reader, plan, CHAIN[: BLOCKS + 1]) for _ in range(2)]
    assert [each.start.asked.heads for each in reads] == [pack(CHAIN[:65:32]), pack(CHAIN[32:65:32])]
    crowd, one = (b" ".join(b"%d" % holder for holder in holders[:count]) for count in (HOLDERS_MIN, 1))
    for each in reads:
        assert each.runs == ((crowd, PIECE_BLOCKS), (one, PIECE_BLOCKS))
        assert (each.blocks, each.is_over) == (BLOCKS + 1, True)
    assert await asked_by_the_general_way(store.reader, reads[1].start) == []
    hot_alone = await result(store.reader, plan, CHAIN[:5])
    assert (hot_alone.start.asked.heads, hot_alone.runs, hot_alone.is_over) == (b"", ((crowd, 5),), True)


async def test_further_rows_of_many_holders_are_kept_beside_those_that_are_hot(
    store: Store, stream: Stream, plan: QuickPlan, hot: HotRows
) -> None:
    holders = await stream.begin(*[f"{rank} GPU" for rank in range(HOLDERS_MIN)])
    await stream.apply(*[stored(holder, CHAIN[:BLOCKS], seq=2) for holder in holders[1:]])
    await read(store.reader, CHAIN[:PIECE_BLOCKS])
    hot.clear()
    plan = store.reader.quick.plan(GROUP, 16) or plan
    await result(store.reader, plan, CHAIN[:PIECE_BLOCKS])
    reads = [await result(store.reader, plan, CHAIN[: BLOCKS + 1]) for _ in range(2)]
    assert [each.start.asked.heads for each in reads] == [pack(CHAIN[32:65:32]), pack(CHAIN[64:65])]
    assert [each.runs for each in reads] == [((b" ".join(b"%d" % holder for holder in holders), BLOCKS),)] * 2


@pytest.mark.parametrize("value", [b"+" + b" 1:1" * HOLDERS_MIN, b"+"], ids=["marked", "a hint"])
async def test_a_hot_row_that_does_not_list_all_is_left_to_the_general_way(
    store: Store, plan: QuickPlan, hot: HotRows, value: bytes
) -> None:
    hot.keep(plan.entry.group_id, pack(CHAIN[:1]), [value], time.monotonic())
    assert len(hot) == 1
    assert begun(store.reader, plan, CHAIN[:BLOCKS]) is None
    assert (await result(store.reader, plan, [9_000_000])).runs == (), "it does not concern another chain"


async def test_what_follows_from_runs_is_made_once(store: Store, plan: QuickPlan) -> None:
    made: list[int] = []

    def make(walk: Walk) -> int:
        made.append(walk.blocks)
        return walk.blocks

    known = KnownRuns(make, lambda _: 1000, 4000)
    whole, part = [await result(store.reader, plan, CHAIN[:BLOCKS], pieces=pieces) for pieces in (4, 1)]
    assert [known.of(whole) for _ in range(2)] == [BLOCKS, BLOCKS]
    assert known.of(part) is None, "the chain goes on behind the portion"
    assert made == [BLOCKS]
    assert 0 < known.bytes <= 4000
    known.clear()
    assert (known.of(whole), known.bytes > 0, len(made)) == (BLOCKS, True, 2)
    full = known.bytes
    whole.runs = ((b"1", 1),) * 17
    known.of(whole)
    assert (known.bytes, made[-1]) == (full, 17), "so many runs are not kept"
    whole.runs = ((b"%d" % (plan.view.newest + 1), BLOCKS),)
    assert known.of(whole) is None, "the table does not have this holder yet"
    for holder in range(9):
        whole.runs = ((b"1", 1 + holder),)
        known.of(whole)
        assert known.bytes <= 4000


async def test_what_follows_from_runs_may_be_larger_than_the_cache(store: Store, plan: QuickPlan) -> None:
    known = KnownRuns(lambda walk: walk.blocks, lambda _: 5000, 4000)
    read = await result(store.reader, plan, CHAIN[:BLOCKS])
    assert (known.of(read), known.bytes) == (BLOCKS, 0)


async def test_a_result_without_room_takes_none_from_others(store: Store, plan: QuickPlan) -> None:
    known = KnownRuns(lambda walk: walk.blocks, lambda blocks: 5000 if blocks < BLOCKS else 0, 4000)
    read = await result(store.reader, plan, CHAIN[:BLOCKS])
    assert known.of(read) == BLOCKS
    kept = known.bytes
    read.runs = ((b"1", 1),)
    known.of(read)
    assert known.bytes == kept > 0


async def test_only_a_group_that_a_query_has_found_has_a_plan(store: Store, plan: QuickPlan) -> None:
    quick = store.reader.quick
    assert quick.plan(GroupName("nobody", "m"), 16) is None
    assert quick.plan(GROUP, 8) is None, "no holder has blocks of this size"
    assert quick.plan(GROUP, None) == plan


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_plan_is_made_once_for_a_table(store: Store, plan: QuickPlan, *, is_plain: bool) -> None:
    made: list[QuickPlan] = []

    def asked(plan: QuickPlan) -> bool:
        made.append(plan)
        return is_plain

    plans = KnownPlans(store.reader.quick, asked)
    for _ in range(2):
        assert plans.of(GROUP) == plans.of(GROUP, 16) == (plan if is_plain else None)
    assert made == [plan, plan], "one for each block size"
    store.incarnation.forget()
    assert plans.of(GROUP) is None


def test_a_large_portion_follows_matches_of_a_whole_small_one() -> None:
    portions = FirstPortions()
    for _ in range(4):
        assert portions.pieces(7) == 4
        portions.remember(7, 200, 200)
    assert (portions.pieces(7), portions.pieces(8)) == (16, 4)
    portions.remember(7, 100, 0)
    assert portions.pieces(7) == 16, "a short prompt does not count"
    portions.remember(7, 200, 127)
    assert portions.pieces(7) == 16
    portions.remember(7, 200, 127)
    assert portions.pieces(7) == 4


def test_the_blocks_of_all_runs_of_a_crowd_count() -> None:
    crowd = b" ".join(b"%d" % holder for holder in range(1, HOLDERS_MIN + 1))
    fewer = crowd.rpartition(b" ")[0]
    assert crowd_blocks([(crowd, 2), (fewer, 5), (crowd, 3)]) == 5

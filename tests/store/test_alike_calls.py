"""The calls for frames that go straight: in which order they are sent, and what is made of each reply."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import hiredis
import pytest

from tests.patience import wait_until, within
from waymark.domain.parts import Commit
from waymark.domain.plain_runs import PackedShare, PackedWave
from waymark.store import keys
from waymark.store.alike_calls import AlikeCalls, SentCall, SentCalls
from waymark.store.hashes import KeptHashes
from waymark.store.index import Index
from waymark.store.leases import Grant
from waymark.store.pacing import Pacer
from waymark.store.redis.client import SCRIPTS
from waymark.store.redis.words import PackedWords

SHARDS = 4
COMMIT = Commit(9, 1.5, 1.5, "0" * 16)
_NAMES = {script.sha.encode(): name for name, script in SCRIPTS.items()}


def share(parts: int = 1) -> PackedShare:
    packed = b"$1\r\nx\r\n" * parts
    return parts, (parts, [5], 1, b"$3\r\nrow\r\n", [7], packed)


class Redis:
    """A client, and the calls that it was given; each is a script, its shard, and its words."""

    def __init__(self, *, shards: int = SHARDS, pacer: Pacer | None = None) -> None:
        self.is_connected = True
        self.sent: list[tuple[str, int, list[bytes]]] = []
        self.under_way: list[SentCall] = []
        self.counted: list[tuple[str, str]] = []
        self.ends: list[bool | Exception] = []
        self.newest = 0
        """The newest Redis hash of the group's engine hashes."""
        claim = SimpleNamespace(group_id=1, publisher=3, shards=shards)
        self.grant = Grant(cast("Any", claim), "1.token", 0, {shard: 100 + shard for shard in range(shards)})
        self._index = Index(cast("Any", self), cast("Any", self), pacer)
        self.calls: AlikeCalls = self._index.alike_calls(self.grant, KeptHashes(cast("Any", self), self.grant, 1000))

    def connection(self, key: bytes, *, is_script: bool = False) -> Any:
        return self if self.is_connected and is_script else None

    def server_of(self, key: bytes) -> None:
        return None

    def silent_at(self) -> float:
        return 0.0

    def send(self, packed: bytes, _reader: Any, call: SentCall, _deadline: float, *, is_urgent: bool) -> None:
        reader = hiredis.Reader()
        reader.feed(packed)
        _, sha, _, *words = cast("list[bytes]", reader.gets())
        assert not reader.has_data()
        self.sent.append((_NAMES[sha], call.shard, words))
        self.under_way.append(call)

    def _count(self, name: str, verdict: str, _began: float) -> None:
        self.counted.append((name, verdict))

    def begin(self, *waves: PackedWave, entries: Sequence[PackedWords] = ()) -> SentCalls:
        return self.calls.send(waves or [{1: share(2), 2: share()}], COMMIT, self.ends.append, entries)

    def answer(self, number: int = 0, verdict: bytes = b"applied", parts: int | None = None) -> None:
        """Answer one of the calls under way."""
        call = self.under_way.pop(number)
        calls = self.grant.calls[call.shard] + 1
        applied = [9] if call.share is None else [call.share[0] if parts is None else parts, 0]
        applied = [self.newest] if call.entries is not None else applied
        call.set_result([[verdict, *applied, calls]])

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(name, shard) for name, shard, _ in self.sent]


APPLY, MOVE, KEEP = "apply_rows", "commit_batch", "keep_hashes"
ENTRIES = PackedWords(2, b"$1\r\nh\r\n$1\r\nb\r\n")


def test_shard_0_comes_first_and_the_watermark_last() -> None:
    redis = Redis()
    redis.begin({2: share(), 1: share()}, {0: share(), 3: share()})
    steps: list[list[tuple[str, int]]] = []
    while redis.under_way:
        steps.append([(APPLY if call.share else MOVE, call.shard) for call in redis.under_way])
        while len(redis.sent) == sum(map(len, steps)) and redis.under_way:
            assert not redis.ends
            redis.answer(-1)
    assert steps == [[(APPLY, 0)], [(APPLY, 2), (APPLY, 1)], [(APPLY, 0)], [(APPLY, 3)], [(MOVE, 0)]]
    assert redis.ends == [True]
    assert redis.grant.calls == {0: 103, 1: 102, 2: 103, 3: 104}


def test_a_call_says_what_shard_0_has_acknowledged_and_the_last_one_what_all_others_have() -> None:
    redis = Redis()
    redis.begin()
    for _ in range(4):
        redis.answer()
    words = [each[2] for each in redis.sent]
    calls_and_first = [each[each.index(b"1.token") + 5 :][:2] for each in words[:3]]
    assert calls_and_first == [[b"100", b""], [b"101", b"101"], [b"102", b"101"]]
    assert words[3][words[3].index(b"1.token") :] == [
        b"1.token", b"101", b"9", b"1.5", b"1.5", b"0" * 16, b"2", b"1", b"102", b"2", b"103"
    ]  # fmt: skip
    assert not redis.grant.moved_shards
    assert redis.counted == [(APPLY, "applied")] * 3 + [(MOVE, "applied")]


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_hashes_are_kept_before_their_blocks_are_applied(shards: int) -> None:
    redis = Redis(shards=shards)
    redis.begin({0: share()}, entries=[ENTRIES, ENTRIES])
    for number, name in enumerate([KEEP, KEEP, APPLY, *[MOVE] * (shards > 1)]):
        assert redis.order[number:] == [(name, 0)]
        words = redis.sent[-1][2]
        assert words[words.index(b"1.token") + (5 if name == APPLY else 1)] == b"%d" % (100 + number)
        redis.answer()
    assert redis.sent[1][2][-2:] == [b"h", b"b"]
    assert redis.ends == [True]
    assert redis.counted[:2] == [(KEEP, "applied")] * 2


def test_after_a_refusal_of_hashes_their_blocks_are_not_applied() -> None:
    redis = Redis(shards=1)
    for verdict in (b"fenced", b"other"):
        redis.newest = 7
        redis.begin({0: share()}, entries=[ENTRIES])
        redis.answer(verdict=verdict)
    assert (redis.ends, redis.order) == ([False, False], [(KEEP, 0)] * 2)
    redis.begin({0: share()}, entries=[ENTRIES])
    assert [name for name in redis.sent[-1][2] if name.endswith(b":7")], "the reply has told which is the newest"


def test_a_call_names_the_holders_of_its_parts() -> None:
    redis = Redis(shards=1)
    parts, (blocks, _, rows, row_words, seqs, part_words) = share()
    for holders in ([5], [5], [6, 5], []):
        redis.begin({0: (parts, (blocks, holders, rows, row_words, seqs, part_words))})
        words = redis.sent[-1][2]
        engines = [word for word in words if b":e:" in word or b"engine" in word]
        assert engines == [keys.engine(1, 0, holder).encode() for holder in holders]
        at = words.index(b"x") - 3 - len(holders)
        assert words[at - 1 : at + len(holders)] == [b"%d" % each for each in (len(holders), *holders)]
        redis.answer()


def test_one_shard_moves_the_watermark_with_its_parts() -> None:
    redis = Redis(shards=1)
    redis.begin({0: share()})
    assert b"9" in redis.sent[0][2]
    redis.answer()
    assert (redis.order, redis.ends) == ([(APPLY, 0)], [True])


@pytest.mark.parametrize(
    ("verdict", "parts"), [(b"fenced", 0), (b"lost", 0), (b"branch", 1), (b"row", 1), (b"apart", 1), (b"applied", 1)]
)
@pytest.mark.parametrize("number", [0, 1])
def test_after_a_refusal_nothing_is_sent_and_the_end_is_that_of_the_last_call(
    verdict: bytes, parts: int, number: int
) -> None:
    redis = Redis()
    redis.begin({1: share(2), 2: share(2)})
    redis.answer()
    redis.answer(number, verdict, parts)
    assert not redis.ends, "another call is under way, and may not meet a second attempt"
    redis.answer()
    assert redis.ends == [False]
    assert len(redis.sent) == 3
    refused = 1 + number
    is_acknowledged = verdict not in (b"fenced", b"lost")
    assert (redis.grant.calls[refused] == 101 + refused) == is_acknowledged
    assert redis.grant.moved_shards == {1, 2} - (set() if is_acknowledged else {refused})


def test_an_error_of_a_call_is_a_reply_that_is_lost() -> None:
    redis = Redis()
    redis.begin()
    redis.answer()
    redis.under_way.pop().set_exception(TimeoutError())
    assert not redis.ends
    redis.answer()
    assert (redis.ends, len(redis.sent)) == ([False], 3)
    assert redis.counted[1:] == [(APPLY, "none"), (APPLY, "applied")]


@pytest.mark.parametrize("answered", [0, 1, 3])
def test_a_connection_that_is_not_open_ends_all(answered: int) -> None:
    redis = Redis()
    redis.is_connected = answered > 0
    sent = redis.begin()
    for number in range(answered):
        redis.is_connected = number + 1 < answered
        redis.answer()
    assert redis.ends == [False]
    assert sent.done()
    assert len(redis.sent) == answered


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_calls_that_are_dropped_go_on_no_more(answered: int) -> None:
    redis = Redis()
    sent = redis.begin()
    for _ in range(answered):
        redis.answer()
    under_way = list(redis.under_way)
    before = len(redis.sent)
    sent.drop()
    assert sent.done()
    assert all(call.done() for call in under_way)
    assert redis.counted[answered:] == [(MOVE if answered == 3 else APPLY, "none")] * len(under_way)
    assert (redis.ends, len(redis.sent)) == ([], before)


def fail(*_: object) -> bytes:
    raise ArithmeticError("a defect")


def test_an_error_of_sending_is_told_instead_of_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the connection, with the calls of other streams."""
    redis = Redis()
    sent = redis.begin()
    monkeypatch.setattr(AlikeCalls, "_packed", fail)
    redis.answer()
    assert [type(end) for end in redis.ends] == [ArithmeticError]
    assert sent.done()


async def test_an_error_of_a_call_that_has_waited_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pacer = Pacer(90)
    redis = Redis(pacer=pacer)
    sent = redis.begin()
    redis.answer()
    monkeypatch.setattr(AlikeCalls, "_packed", fail)
    redis.answer()
    await wait_until(lambda: sent.done(), "the calls are over")
    assert [type(end) for end in redis.ends] == [ArithmeticError]
    async with within(20), pacer.admit(None, 90):
        assert pacer.waiting == 0


async def test_a_call_between_others_waits_for_the_pacer() -> None:
    pacer = Pacer(90)
    redis = Redis(pacer=pacer)
    redis.begin()
    redis.answer()
    assert redis.order == [(APPLY, 0), (APPLY, 1)], "both together are more than the server may have at once"
    redis.answer()
    await wait_until(lambda: len(redis.sent) == 3, "the other is sent")
    redis.answer()
    redis.answer()
    assert redis.ends == [True]
    assert pacer.waiting == 0


async def test_dropped_calls_leave_the_pacer_to_others() -> None:
    pacer = Pacer(90)
    redis = Redis(pacer=pacer)
    sent = redis.begin()
    redis.answer()
    assert pacer.waiting == 1
    sent.drop()
    async with within(20), pacer.admit(None, 100):
        assert len(redis.sent) == 2
    assert not redis.ends


@pytest.mark.parametrize("sent", range(4))
def test_after_an_error_of_sending_nothing_else_is_sent(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watermark would say that the blocks of the call which was not sent are there."""
    redis, error = Redis(), ValueError("a defect")
    send, count = redis.send, 0

    def fails(*args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == sent + 1:
            raise error
        send(*args, **options)

    monkeypatch.setattr(redis, "send", fails)
    redis.begin()
    while redis.under_way:
        redis.answer()
    assert redis.ends == [error]
    assert count == sent + 1

"""The sockets of a simulated engine, seen from plain ones."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from tests.conftest import wait_until
from tests.simulator.peers import subscribed
from waymark.base.errors import InvalidValue
from waymark.simulator.encode import BlockRemoved, Encoder, ReplayFraming, WireEvent
from waymark.simulator.options import Faults
from waymark.simulator.publisher import END_SEQ, SimulatedPublisher

pytestmark = pytest.mark.outside

ANY_PORT = "tcp://127.0.0.1:0"
NEVER_SECONDS = 0.2
"""How long no answer counts as none at all."""


def removal(engine_hash: int) -> list[WireEvent]:
    return [BlockRemoved((engine_hash,))]


def simulated(
    *,
    endpoint: str = ANY_PORT,
    replay_endpoint: str | None = ANY_PORT,
    topic: str = "",
    framing: ReplayFraming = "topic",
    buffer_batches: int = 100,
    first_seq: int = 0,
    faults: Faults | None = None,
) -> SimulatedPublisher:
    return SimulatedPublisher(
        endpoint,
        replay_endpoint,
        encoder=Encoder("vllm-map"),
        topic=topic,
        buffer_batches=buffer_batches,
        replay_framing=framing,
        first_seq=first_seq,
        faults=faults,
    )


def publish(publisher: SimulatedPublisher, count: int) -> list[int]:
    return [publisher.publish(removal(n), ts=1.0) for n in range(count)]


def seqs(replies: list[list[bytes]]) -> list[int]:
    """Of replay answers, read from the end; the end marker is -1."""
    return [-1 if reply[-2] == END_SEQ else int.from_bytes(reply[-2], "big") for reply in replies]


async def test_a_frame_is_topic_seq_and_payload() -> None:
    async with simulated(topic="kv@pod-0@demo", first_seq=258) as publisher, subscribed(publisher) as peer:
        assert publisher.publish(removal(7), ts=2.5, rank=3) == 258
        [[topic, seq, payload]] = await peer.frames(1)
    assert (topic, seq) == (b"kv@pod-0@demo", bytes([0, 0, 0, 0, 0, 0, 1, 2]))
    assert msgpack.unpackb(payload) == [
        2.5,
        [{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}],
        3,
    ]


@pytest.mark.parametrize(("framing", "length"), [("seq", 3), ("topic", 4)])
async def test_a_replay_has_what_was_sent_and_an_end_marker(framing: ReplayFraming, length: int) -> None:
    async with simulated(topic="t", framing=framing) as publisher, subscribed(publisher) as peer:
        publish(publisher, 5)
        live = await peer.frames(5)
        replies = await peer.replay(publisher.replay_endpoint, 2, 4)
    assert {len(reply) for reply in replies} == {length}
    assert [reply[0] for reply in replies] == [b""] * 4
    assert [reply[-2:] for reply in replies[:3]] == [frame[1:] for frame in live[2:]]
    assert replies[3][-2:] == [END_SEQ, b""]
    if framing == "topic":
        assert [reply[1] for reply in replies] == [b"t", b"t", b"t", b""]


async def test_ipc_endpoints_work_as_well(tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    async with simulated(endpoint=endpoint, replay_endpoint=replay_endpoint) as publisher:
        assert (publisher.endpoint, publisher.replay_endpoint) == (endpoint, replay_endpoint)
        async with subscribed(publisher) as peer:
            publish(publisher, 1)
            assert await peer.seqs(1) == [0]
            assert seqs(await peer.replay(replay_endpoint, 0, 2)) == [0, -1]


async def test_the_bound_port_is_told() -> None:
    async with simulated() as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        assert publisher.endpoint != publisher.replay_endpoint
        assert not publisher.endpoint.endswith(":0")


async def test_an_address_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.simulator.publisher.BIND_SECONDS", 0.0)
    async with simulated() as publisher:
        with pytest.raises(InvalidValue, match="cannot bind") as caught:
            async with simulated(endpoint=publisher.endpoint):
                pass
    assert caught.value.field == "endpoint"
    sentence = f"cannot bind {publisher.endpoint}: Address already in use"
    assert str(caught.value) == f"{sentence}; end what has this port, or choose another --base-port"


async def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"^cannot bind tcp://192\.0\.2\.1:0: [^;]*$"):
        async with simulated(endpoint="tcp://192.0.2.1:0"):
            pass


async def test_the_buffer_keeps_the_last_batches_only() -> None:
    async with simulated(buffer_batches=3) as publisher, subscribed(publisher) as peer:
        publish(publisher, 10)
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 4)) == [7, 8, 9, -1]


async def test_a_replay_of_nothing_is_the_end_marker_alone() -> None:
    async with simulated() as publisher, subscribed(publisher) as peer:
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 1)) == [-1]


async def test_a_request_of_another_form_is_counted_and_not_answered() -> None:
    async with simulated() as publisher, subscribed(publisher) as peer:
        endpoint = publisher.replay_endpoint
        for request in ([b"", b"short"], [b"no delimiter"], [b"x", bytes(8)]):
            assert await peer.answers_within(endpoint, request, NEVER_SECONDS) == 0
        assert publisher.counts["bad_requests"] == 3
        assert seqs(await peer.replay(endpoint, 0, 1)) == [-1]


@pytest.mark.parametrize("rebind", [False, True])
async def test_a_restart_begins_again_with_an_empty_buffer(rebind: bool) -> None:
    async with simulated(first_seq=1) as publisher, subscribed(publisher) as peer:
        publish(publisher, 3)
        assert await peer.seqs(3) == [1, 2, 3]
        where = (publisher.endpoint, publisher.replay_endpoint)
        await publisher.restart(rebind=rebind)
        assert (publisher.endpoint, publisher.replay_endpoint) == where
        await peer.wait_subscribed(publisher)
        publish(publisher, 2)
        assert await peer.seqs(2) == [1, 2]
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 3)) == [1, 2, -1]
        assert publisher.counts["restarts"] == 1


async def test_what_was_published_while_down_is_in_the_replay() -> None:
    async with simulated() as publisher, subscribed(publisher) as peer:
        publish(publisher, 1)
        assert await peer.seqs(1) == [0]
        await publisher.down()
        publish(publisher, 2)
        await publisher.up()
        await peer.wait_subscribed(publisher)
        publish(publisher, 1)
        assert await peer.seqs(1) == [3]
        assert seqs(await peer.replay(publisher.replay_endpoint, 1, 4)) == [1, 2, 3, -1]


async def test_subscribers_that_leave_are_not_counted() -> None:
    async with simulated() as publisher:
        async with subscribed(publisher), subscribed(publisher):
            assert publisher.subscribers == 2
        await wait_until(lambda: publisher.subscribers == 0, "both have left")


# ---- faults ----------------------------------------------------------------------------------------


async def test_dropped_batches_are_missing_live_and_found_by_replay() -> None:
    async with simulated(faults=Faults(drop_every=3)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 7)
        assert await peer.seqs(5) == [0, 1, 3, 4, 6]
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 8)) == [0, 1, 2, 3, 4, 5, 6, -1]
        assert publisher.counts["dropped"] == 2


async def test_a_silent_engine_sends_nothing_and_answers_nothing_until_it_wakes() -> None:
    async with simulated(faults=Faults(silent_after=2)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 4)
        assert await peer.seqs(2) == [0, 1]
        request = [b"", bytes(8)]
        assert await peer.answers_within(publisher.replay_endpoint, request, NEVER_SECONDS) == 0
        publisher.faults = publisher.faults.model_copy(update={"silent_after": 0})
        publish(publisher, 1)
        assert await peer.seqs(1) == [4]


async def test_a_silent_replay_endpoint_leaves_live_frames_alone() -> None:
    async with simulated(faults=Faults(replay_silent=True)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 2)
        assert await peer.answers_within(publisher.replay_endpoint, [b"", bytes(8)], NEVER_SECONDS) == 0
        assert await peer.seqs(2) == [0, 1]


async def test_a_truncated_replay_has_no_end_marker() -> None:
    async with simulated(faults=Faults(truncate_replay=2)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 5)
        assert seqs(await peer.replay(publisher.replay_endpoint, 1, 2)) == [1, 2]
        assert await peer.answers_within(publisher.replay_endpoint, [b"", bytes(8)], NEVER_SECONDS) == 2


async def test_a_late_replay_begins_after_what_was_asked_for() -> None:
    async with simulated(faults=Faults(late_replay=2)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 5)
        assert seqs(await peer.replay(publisher.replay_endpoint, 1, 3)) == [3, 4, -1]


async def test_a_hole_in_a_replay_is_always_the_same() -> None:
    async with simulated(faults=Faults(replay_hole_every=3)) as publisher, subscribed(publisher) as peer:
        publish(publisher, 7)
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 6)) == [0, 1, 3, 4, 6, -1]
        assert seqs(await peer.replay(publisher.replay_endpoint, 1, 5)) == [1, 3, 4, 6, -1]


async def test_garbage_takes_a_seq_and_is_replayed_and_a_malformed_frame_does_not() -> None:
    async with simulated() as publisher, subscribed(publisher) as peer:
        assert publisher.publish_garbage() == 0
        publisher.send_malformed()
        publish(publisher, 1)
        garbage, malformed, good = await peer.frames(3)
        assert len(malformed[1]) != 8
        assert [int.from_bytes(frame[1], "big") for frame in (garbage, good)] == [0, 1]
        with pytest.raises((ValueError, msgpack.ExtraData)):
            msgpack.unpackb(garbage[2])
        assert seqs(await peer.replay(publisher.replay_endpoint, 0, 3)) == [0, 1, -1]


async def test_an_error_of_the_caller_passes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with simulated():
            raise ZeroDivisionError


def test_a_negative_fault_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue) as caught:
        Faults(drop_every=-1)
    assert caught.value.field == "drop_every"

"""Room for streams: counted against what sockets really take, and against a limit in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.conftest import wait_until
from tests.patience import patient
from waymark.ingest.replay import Replay
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.subscriber import Subscriber
from waymark.ingest.worker import FILES_PER_REPLAY, FILES_PER_STREAM, OTHER_FILES, fit, room_for
from waymark.store.redis.client import CONNECTIONS


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    context: ZmqContext = zmq.Context()
    context.socket(zmq.PAIR).close(0)  # the first one starts libzmq's threads, with descriptors of their own
    yield context
    context.term()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


PEER = """
import sys, zmq
context = zmq.Context()
live, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
for socket, address in zip((live, replay), sys.argv[1:]):
    socket.bind(address)
    print(socket.get_string(zmq.LAST_ENDPOINT).rstrip(chr(0)), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["tcp", "ipc"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A publisher's two endpoints, in a process of its own: the other ends of the connections are not ours."""
    ends = ["tcp://127.0.0.1:*"] * 2 if request.param == "tcp" else [f"ipc://{tmp_path}/{name}" for name in "ab"]
    command = [sys.executable, "-c", PEER, *ends]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.stdout.readline().strip()
        process.stdin.close()


async def test_a_stream_and_a_replay_take_as_many_descriptors_as_are_counted(
    context: ZmqContext, peer: tuple[str, str]
) -> None:
    live, replay = peer
    before = open_files()
    subscribers = [Subscriber(context, live, buffer_bytes=1024, buffer_frames=8) for _ in range(5)]
    for subscriber in subscribers:
        subscriber.start()
    await wait_until(lambda: all(each.is_connected for each in subscribers), "all are connected")
    assert open_files() - before == 5 * FILES_PER_STREAM
    before = open_files()
    async with Replay(context, replay, 0, idle_seconds=5.0, portion_bytes=1024):
        await wait_until(lambda: open_files() - before == FILES_PER_REPLAY, "the replay is connected")
    for subscriber in subscribers:
        subscriber.close()


@pytest.mark.parametrize("files", [*range(0, 700, 7), 4000, 16_000, 20_000])
def test_what_is_taken_fits(files: int) -> None:
    room = fit(4096, 8, files)
    assert 1 <= room.streams <= 4096
    assert 1 <= room.replays <= 8
    if room.is_limited and room.streams > 1:
        assert room.files <= files
        more = FILES_PER_STREAM + 1
        assert room.streams == 4096 or room.files + more > files, "another one would fit"
    if not room.is_limited:
        assert room == fit(4096, 8, 10**6)
        assert room.files <= files


def test_the_usual_limits_are_these() -> None:
    assert fit(4096, 8, 1024 - 16).streams > 200
    assert fit(4096, 8, 65_536).is_limited is False
    assert fit(10, 8, 10 * 5 + 32 + OTHER_FILES) == (10, 8, 10 * 5 + 32 + OTHER_FILES, False)
    assert fit(2000, 8, 2000 * 4 + CONNECTIONS + 32 + OTHER_FILES).is_limited is False


def test_the_soft_limit_is_raised_before_streams_are_left_out() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "from waymark.ingest.worker import room_for\n"
        "print(room_for(40, 2).is_limited, room_for(4096, 8).is_limited)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(60))
    assert said.stdout.split() == ["False", "True", "512"]


def test_half_of_the_files_is_half() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert room_for(40, 2, part=0.5) == room_for(40, 2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft

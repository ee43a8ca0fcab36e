"""What counts as held up: a loop, a thread or a Redis that works on something else, or a wait; never a busy machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from time import monotonic, process_time

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from tests.hostile.beside import HELD_SECONDS, Cost, Processes, Times, neighbour
from tests.patience import VARIABLE, within

#: A server of lines, which says "b" to "a" at once, and does anything else first, for so many seconds.
SERVER = """
import asyncio, sys, threading, time

lock, seconds = threading.Lock(), float(sys.argv[1])

def work(count):
    began = time.thread_time()
    sum(range(count))  # in C, and so without a turn for another thread
    return time.thread_time() - began

count = int(10**6 * seconds / min(work(10**6) for _ in range(5)))

def keep():
    with lock:
        time.sleep(2 * seconds)

async def serve(reader, writer):
    while what := (await reader.readline()).decode().strip():
        if what == "loop":
            work(count)
        if what in ("gil", "lock"):
            threading.Thread(target=keep if what == "lock" else lambda: work(count)).start()
            await asyncio.sleep(0.01)
        if what == "lock":
            lock.acquire()
            lock.release()
        if what == "work":
            began = time.thread_time()
            while time.thread_time() - began < 0.1:
                pass
        writer.write(b"b\\n")

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
HOLDS_SECONDS = 0.7
#: A loop of so many times.
SCRIPT = "for _ = 1, ARGV[1] do end"


@pytest.fixture
def quiet() -> Times:
    times = Times()
    times.add(Cost(waited=0.02, held=0.004, excused=0.0))
    return times


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


class Served:
    """A client of the server."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader, self._writer = reader, writer

    async def ask(self, what: str = "a") -> None:
        async with within(60):
            self._writer.write(what.encode() + b"\n")
            assert await self._reader.readline() == b"b\n"


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-Sc", SERVER, str(HOLDS_SECONDS), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with within(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(await process.stdout.readline()))
        served = Served(process.pid, reader, writer)
        await served.ask()
        yield served
        writer.close()
    finally:
        process.kill()
        await process.wait()


@contextmanager
def busy_processor(*pids: int) -> Iterator[None]:
    """These processes and three that are never idle share one processor."""
    processor = {min(os.sched_getaffinity(0))}
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(3)]
    try:
        for pid in (*pids, *(loop.pid for loop in loops)):
            os.sched_setaffinity(pid, processor)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the load is, no thread has a large share of a processor by chance."""
    monkeypatch.setenv(VARIABLE, "1000")


@pytest.mark.parametrize("what", ["loop", "gil"])
async def test_a_thread_that_keeps_an_answer_is_found(quiet: Times, small_shares: None, what: str) -> None:
    await is_found(quiet, what)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_lock_that_keeps_an_answer_is_found(quiet: Times, is_busy: bool) -> None:
    await is_found(quiet, "lock", is_busy)


async def is_found(quiet: Times, what: str, is_busy: bool = False) -> None:
    async with serving() as served, neighbour() as beside:
        with busy_processor(served.pid) if is_busy else nullcontext():
            cost = await Processes([served.pid], None, beside).cost_of(lambda: served.ask(what))
    assert cost.waited > HELD_SECONDS
    assert cost.is_late(quiet), cost


@pytest.fixture
def patient_redis_url(redis_url: str) -> Iterator[str]:
    """That of a Redis that lets a script run on: on a busy machine, it takes more than the usual five seconds."""
    with SyncRedis.from_url(redis_url) as redis:
        before = redis.config_get("lua-time-limit")
        redis.config_set("lua-time-limit", 600_000)
        yield redis_url
        redis.config_set("lua-time-limit", before["lua-time-limit"])


async def test_a_script_that_keeps_redis_is_found(quiet: Times, small_shares: None, patient_redis_url: str) -> None:
    redis, other = (Redis.from_url(patient_redis_url, socket_timeout=None) for _ in range(2))
    async with neighbour() as beside, redis, other:
        processes = Processes([], (await redis.info("server"))["process_id"], beside)

        async def loop(count: float) -> None:
            await other.eval(SCRIPT, 0, int(count))

        costs = [await processes.cost_of(lambda: loop(2e6)) for _ in range(5)]
        script = asyncio.ensure_future(loop(2e6 * HOLDS_SECONDS / min(cost.held for cost in costs)))

        async def check() -> None:
            await redis.ping()

        async def begun() -> None:
            # It has been sent, and nobody is answered until it is over.
            await asyncio.wait([script], timeout=0.01)
            await check()

        cost = await processes.cost_of(begun)
        await script
        assert cost.is_late(quiet), cost
        assert not (await processes.cost_of(check)).is_late(quiet)


async def test_a_busy_machine_is_not_found(quiet: Times) -> None:
    async with serving() as served, neighbour() as beside:
        with busy_processor(served.pid):
            cost = await Processes([served.pid], None, beside).cost_of(lambda: served.ask("work"))
    assert cost.waited > HELD_SECONDS, "a quarter of a processor is not that fast"
    assert not cost.is_late(quiet), cost


async def test_a_client_that_works_is_not_found(quiet: Times) -> None:
    async with serving() as served, neighbour() as beside:

        async def check() -> None:
            answer = asyncio.ensure_future(served.ask())
            await asyncio.sleep(0)
            while not answer.done():
                began = monotonic()
                while monotonic() - began < 2 * HELD_SECONDS:
                    pass
                await asyncio.sleep(0)

        cost = await Processes([served.pid], None, beside).cost_of(check)
    assert cost.waited > HELD_SECONDS
    assert not cost.is_late(quiet), cost


def test_what_ran_for_its_share_while_the_machine_was_late_is_not_found(
    quiet: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "20")
    assert not Cost(waited=10.0, held=1.4, excused=9.9).is_late(quiet)
    assert Cost(waited=10.0, held=1.6, excused=9.9).is_late(quiet)


def test_what_took_long_in_the_quiet_run_may_take_long(quiet: Times) -> None:
    cost = Cost(waited=0.6, held=0.6, excused=0.0)
    assert cost.is_late(quiet)
    for _ in range(9):
        quiet.add(cost)
    assert not cost.is_late(quiet)


def test_two_threads_of_one_core_may_slow_each_other_down(quiet: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "20")
    assert not Cost(waited=0.6, held=1.9 * HELD_SECONDS, excused=0.2).is_late(quiet)
    assert Cost(waited=0.6, held=2.2 * HELD_SECONDS, excused=0.2).is_late(quiet)
    assert Cost(waited=100.0, held=0.0, excused=99.0).is_late(quiet)


async def test_a_check_that_computes_is_measured_on_the_cpu() -> None:
    async def check() -> None:
        began = process_time()
        while process_time() - began < 0.1:
            pass

    # The client's own thread, in place of an attacked one.
    cost = await Processes([os.getpid()]).cost_of(check)
    assert 0.05 < cost.held <= cost.waited + 0.01
    assert (await Processes([2**22 + 1]).cost_of(check)).held == 0.0, "a process that has ended"

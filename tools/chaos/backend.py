"""The Redis of a session, one or a Cluster: killed, emptied, frozen, and set back by its last writes.

Every node keeps an append-only file. Who kills a node and cuts the end of that file off before it starts again has
what a failover leaves: a Redis that is the same, only that its last writes never happened.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from redis import Redis
from redis.exceptions import RedisError

from tests.conftest import wait_until
from tests.e2e.redis_server import RedisServer
from tests.patience import patient
from tests.topologies import Farm, Server, farm, is_cluster_ok, start_cluster

#: What a killed node knows when it is back.
Memory: TypeAlias = Literal["all", "nothing", "all but the last"]

#: Processes are killed, machines are not: what was given to the kernel is kept.
_KEEPS_DATA = ("--save", "", "--appendonly", "yes", "--appendfsync", "no")
BACK_SECONDS = 15.0


@dataclass(eq=False)
class Node:
    """One redis-server, and what can be done to it."""

    port: int
    home: Path
    launch: Callable[[], None]
    kill: Callable[[], None]
    freeze: Callable[[], None]
    """It accepts connections (the kernel does) and never answers."""
    thaw: Callable[[], None]
    is_whole: Callable[[], bool] = lambda: True
    """Beside answering."""
    _kept: dict[str, int] = field(default_factory=dict)

    def admin(self) -> Redis:
        """For the session itself; to be closed."""
        return Redis(port=self.port, protocol=2, socket_timeout=patient(20))

    def ask(self, *command: Any) -> Any:
        with self.admin() as admin:
            return admin.execute_command(*command)

    def is_ready(self) -> bool:
        try:
            return bool(self.ask("PING")) and self.is_whole()
        except RedisError:
            return False

    def remember(self) -> None:
        """What is written from now on is what a kill may lose."""
        self._kept = {path.name: path.stat().st_size for path in self._files.glob("*.incr.aof")}

    async def back(self, memory: Memory) -> None:
        """Start it again after a kill; it answers when this returns."""
        if memory == "nothing":
            shutil.rmtree(self._files, ignore_errors=True)
        elif memory == "all but the last":
            for path in self._files.glob("*.incr.aof"):
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.truncate(min(self._kept.get(path.name, size), size))
        self.launch()
        await wait_until(self.is_ready, f"the Redis on port {self.port} is back", BACK_SECONDS)

    @property
    def _files(self) -> Path:
        return self.home / "appendonlydir"


@dataclass(frozen=True)
class Backend:
    """All nodes of one session, and how Waymark is told of them."""

    url: str
    nodes: list[Node]
    owner: Callable[[str], int] = lambda _: 0
    """Which of the nodes has a key."""

    @property
    def is_cluster(self) -> bool:
        return len(self.nodes) > 1

    def of(self, key: str) -> Node:
        return self.nodes[self.owner(key)]

    def flush(self) -> None:
        for node in self.nodes:
            node.ask("FLUSHALL")


@contextmanager
def backend(directory: Path, *, is_cluster: bool) -> Iterator[Backend]:
    """One Redis, or the three primaries of a Cluster, running."""
    if is_cluster:
        with farm() as servers:
            cluster = start_cluster(servers, *_KEEPS_DATA)
            yield Backend(cluster.url, [_member(servers, server) for server in cluster.primaries], cluster.of)
        return
    server = RedisServer(directory)

    def launch() -> None:
        server.launch(*_KEEPS_DATA)

    launch()
    try:
        yield Backend(server.url, [Node(server.port, directory, launch, server.kill, server.freeze, server.thaw)])
    finally:
        server.kill()


def _member(servers: Farm, server: Server) -> Node:
    def launch() -> None:
        server.process = subprocess.Popen(
            server.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # as it was started first

    home = servers.directory / str(server.port)
    return Node(
        server.port, home, launch, server.kill, server.pause, server.resume, is_whole=lambda: is_cluster_ok(server)
    )

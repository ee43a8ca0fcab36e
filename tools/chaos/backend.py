"""The Redis or the Cluster of a session, which can be killed, emptied, frozen, and set back to an earlier state.

Every node keeps an append-only file. Killing a node, and cutting off the end of that file before a restart, has the
effect of a failover: the same Redis, without its last writes.
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

#: The contents of a killed node when it is back.
Memory: TypeAlias = Literal["all", "nothing", "all but the last"]

#: Only processes are killed, not machines, so data that has reached the kernel is kept.
_KEEPS_DATA = ("--save", "", "--appendonly", "yes", "--appendfsync", "no")
BACK_SECONDS = 15.0


@dataclass(eq=False)
class Node:
    """One redis-server, with methods for its faults."""

    port: int
    home: Path
    launch: Callable[[], None]
    kill: Callable[[], None]
    freeze: Callable[[], None]
    """A function that stops the process: the kernel still accepts connections, but nothing answers."""
    thaw: Callable[[], None]
    is_whole: Callable[[], bool] = lambda: True
    """Returns whether the node is ready, apart from its answer to PING."""
    _kept: dict[str, int] = field(default_factory=dict)

    def admin(self) -> Redis:
        """Return a client for the session itself. The caller closes it."""
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
        """Remember this moment: ``back("all but the last")`` loses all writes from now on."""
        self._kept = {path.name: path.stat().st_size for path in self._files.glob("*.incr.aof")}

    async def back(self, memory: Memory) -> None:
        """Start the node again after a kill, with this memory, and wait until it is ready."""
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
    """All nodes of one session, and the URL at which Waymark finds them."""

    url: str
    nodes: list[Node]
    owner: Callable[[str], int] = lambda _: 0
    """A function that returns the number of the node with a key."""

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
    """Start one Redis, or the three primaries of a Cluster."""
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
        )  # with the options of its first start

    home = servers.directory / str(server.port)
    return Node(
        server.port, home, launch, server.kill, server.pause, server.resume, is_whole=lambda: is_cluster_ok(server)
    )

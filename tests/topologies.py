"""Real Redis servers on loopback for a test: one server, a Cluster, or a primary with Sentinels. All are killed at the
end.

Nothing here waits for a fixed time, only for a state that the servers report. Their timeouts are short, so that a
failover takes two or three seconds.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from tests import patience
from tests.patience import patient
from tests.ports import unused_node_port

READY_SECONDS = 30.0
#: The time without an answer after which a node or a primary counts as failed, on a quiet machine; see
#: ``node_timeout_ms``.
_NODE_TIMEOUT_MS = 1000
SLOTS = 16384
#: A replica is not on the map of a Cluster before it has received data or a ping, so pings are frequent.
_ALWAYS = ("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def wait_for(predicate: Callable[[], bool], description: str, seconds: float = READY_SECONDS) -> None:
    """Wait like ``patience.wait_for``. An error of Redis counts as false."""
    problem = ""

    def is_so() -> bool:
        nonlocal problem
        try:
            return predicate()
        except RedisError as exc:
            problem = f" ({exc})"
            return False

    patience.wait_for(is_so, lambda: description + problem, seconds)


def node_timeout_ms() -> int:
    """Return the node timeout, which is longer on a busy machine, but short enough that a failover takes no minutes
    there."""
    return int(min(patient(_NODE_TIMEOUT_MS), 5 * _NODE_TIMEOUT_MS))


@dataclass(eq=False)
class Server:
    """One server process."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    options: dict[str, Any] = field(default_factory=dict)
    """The options with which a redis-py client connects, apart from host and port."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Redis:
        return Redis(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=patient(5), **self.options)

    def ask(self, *command: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def info(self, section: str) -> dict[str, Any]:
        with self.client() as client:
            return cast("dict[str, Any]", client.info(section))

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the process, as if its machine were gone."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Stop the process: the kernel still accepts connections, but nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Farm:
    """A set of servers that end together."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: list[Server] = []

    def start(
        self, *options: str, port: int | None = None, is_tls: bool = False, more: dict[str, Any] | None = None
    ) -> Server:
        """Start a redis-server with these options, and wait until it is ready. ``more`` are the options with which a
        redis-py client connects."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None, "no redis-server on PATH: install it (Debian: apt-get install redis-server)"
        port = unused_node_port() if port is None else port
        log = self.directory / f"{port}.log"
        home = self.directory / str(port)
        home.mkdir(exist_ok=True)
        listen = ["--port", "0", "--tls-port", str(port)] if is_tls else ["--port", str(port)]
        # If there is a configuration file, it is the first option.
        files = [option for option in options[:1] if not option.startswith("--")]
        command = [
            program, *files, *listen, "--bind", "127.0.0.1", "--dir", str(home), "--logfile", str(log),
            *([] if files else _ALWAYS),
            *options[len(files) :],
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(port, process, log, more or {})
        self.servers.append(server)
        wait_for(lambda: _answers(server), f"redis-server on port {port} answers")
        return server

    def close(self) -> None:
        for server in self.servers:
            server.process.kill()
        for server in self.servers:
            server.process.wait()


def _answers(server: Server) -> bool:
    assert server.process.poll() is None, f"redis-server ended: {server.said() if server.log.exists() else 'no log'}"
    return bool(server.ask("PING"))


@contextmanager
def farm() -> Iterator[Farm]:
    """Yield an empty farm, in a directory of its own, and kill its servers at the end."""
    with tempfile.TemporaryDirectory(prefix="wm-", ignore_cleanup_errors=True) as directory:
        found = Farm(Path(directory))
        try:
            yield found
        finally:
            found.close()


# ---- a primary and its replicas ---------------------------------------------------------------------


def follow(farm: Farm, primary: Server, *options: str) -> Server:
    """Start a replica of a primary, and wait until it has caught up."""
    replica = farm.start("--replicaof", "127.0.0.1", str(primary.port), *options)
    wait_for(lambda: is_in_sync(replica), "the replica has caught up")
    return replica


def is_in_sync(replica: Server) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


@dataclass
class Sentinels:
    """A primary, a replica, and three Sentinels that watch them."""

    primary: Server
    replica: Server
    sentinels: list[Server]
    name: str = "mymaster"

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.name}"


def start_sentinels(farm: Farm, *options: str, password: str | None = None) -> Sentinels:
    """Start a primary, a replica and three Sentinels. With ``password``, clients of the Sentinels need it."""
    primary = farm.start(*options)
    replica = follow(farm, primary, *options)
    watching: list[Server] = []
    for _ in range(3):
        port = unused_node_port()
        lines = [
            f"sentinel monitor mymaster 127.0.0.1 {primary.port} 2",
            f"sentinel down-after-milliseconds mymaster {node_timeout_ms()}",
            f"sentinel failover-timeout mymaster {6 * node_timeout_ms()}",
        ]
        if password is not None:
            lines += [f"requirepass {password}", f"sentinel sentinel-pass {password}"]
        path = farm.directory / f"{port}.conf"
        path.write_text("\n".join(lines) + "\n")
        more = {} if password is None else {"password": password}
        watching.append(farm.start(str(path), "--sentinel", port=port, more=more))

    def know_all() -> bool:
        def known(sentinel: Server, what: str) -> int:
            with sentinel.client() as client:
                (state,) = client.sentinel_masters().values()
            return int(state[what])

        return all(known(each, "num-other-sentinels") == 2 and known(each, "num-slaves") == 1 for each in watching)

    wait_for(know_all, "the Sentinels know each other and the replica")
    return Sentinels(primary, replica, watching)


# ---- a Cluster --------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A Cluster: its primaries, in the order of their slots, and the replica of each, if there are replicas."""

    primaries: list[Server]
    replicas: list[Server]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in self.primaries[:2])

    def of(self, key: str) -> int:
        """Return the number of the primary that had the slot of a key at the start."""
        slot = self.slot(key)
        return next(i for i, slots in enumerate(_ranges(len(self.primaries))) if slot in slots)

    def slot(self, key: str) -> int:
        return key_slot(key.encode())


def _ranges(count: int) -> list[range]:
    return [range(SLOTS * i // count, SLOTS * (i + 1) // count) for i in range(count)]


def start_cluster(
    farm: Farm,
    *options: str,
    primaries: int = 3,
    has_replicas: bool = False,
    is_tls: bool = False,
    more: dict[str, Any] | None = None,
) -> Cluster:
    """Start a Cluster with this number of primaries, each with a replica if ``has_replicas``."""
    options = (
        "--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms()),
        "--cluster-replica-validity-factor", "0", *options,
    )  # fmt: skip
    nodes = [farm.start(*options, is_tls=is_tls, more=more) for _ in range(primaries * (2 if has_replicas else 1))]
    owners, followers = nodes[:primaries], nodes[primaries:]
    for epoch, (node, slots) in enumerate(zip(owners, _ranges(primaries), strict=True), 1):
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        node.ask("CLUSTER", "ADDSLOTS", *slots)
    for node in nodes[1:]:
        node.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    wait_for(lambda: all(_known(node) == len(nodes) for node in nodes), "the nodes know each other")
    for owner, follower in zip(owners, followers, strict=False):
        follower.ask("CLUSTER", "REPLICATE", _id(owner))
    wait_for(lambda: all(is_cluster_ok(node) for node in nodes), "the Cluster is whole")
    wait_for(lambda: all(map(is_in_sync, followers)), "the replicas have caught up")
    wait_for(lambda: all(_followed(node) == len(followers) for node in nodes), "all know who follows whom")
    return Cluster(owners, followers)


def _id(node: Server) -> str:
    return _text(node.ask("CLUSTER", "MYID"))


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _state(node: Server) -> dict[str, str]:
    reply = node.ask("CLUSTER INFO")
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}
    return dict(line.split(":", 1) for line in _text(reply).splitlines() if ":" in line)


def _known(node: Server) -> int:
    return int(_state(node)["cluster_known_nodes"])


def _followed(node: Server) -> int:
    with node.client() as client:
        rows: Sequence[Any] = client.execute_command("CLUSTER", "SLOTS")
    return sum(len(row) - 3 for row in rows)


def is_cluster_ok(node: Server) -> bool:
    return _state(node)["cluster_state"] == "ok"


def migrate(source: Server, target: Server, names: Sequence[Any]) -> None:
    """Move keys of a migrating slot to the target."""
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)


@contextmanager
def moving(cluster: Cluster, keys: Sequence[str], source: Server, target: Server) -> Iterator[Callable[[], None]]:
    """Begin to migrate the slots of ``keys`` from one primary to another. Yield a function that completes the
    migration. Undo it at the end."""
    slots = sorted({cluster.slot(key) for key in keys})

    def begin(giver: Server, taker: Server) -> None:
        for slot in slots:
            taker.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", _id(giver))
            giver.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", _id(taker))

    def arrive(giver: Server, taker: Server) -> None:
        for slot in slots:
            while names := giver.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                migrate(giver, taker, names)
            for node in (taker, giver, *cluster.primaries):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", _id(taker))

    begin(source, target)
    try:
        yield lambda: arrive(source, target)
    finally:
        arrive(source, target)
        begin(target, source)
        arrive(target, source)

"""The user of docs/configuration.md, who may do what Waymark does and nothing else, on one server and on a Cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import forked
from tests.live import start
from tests.store.flow import live_and_end
from tests.topologies import Server, farm, start_cluster
from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.redis.credentials import Credentials
from waymark.store.store import Store

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
LINES = re.findall(r"^ACL SETUSER waymark .*$", PAGE, re.MULTILINE)


def allow(server: Server) -> None:
    (line,) = LINES
    assert line.count(">password") == 1
    server.ask(*line.replace(">password", ">hunter2").split())
    server.ask("ACL", "LOG", "RESET")


def check_nothing_was_refused(server: Server) -> None:
    refused = [(entry["object"], entry["reason"]) for entry in _log(server)]
    assert refused == []


def _log(server: Server) -> list[dict[str, object]]:
    with server.client() as client:
        return list(client.acl_log())


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    return Credentials(username="waymark", password_file=secret)


async def test_the_documented_user_may_do_all_that_the_roles_do(credentials: Credentials) -> None:
    with farm() as servers:
        server = servers.start()
        allow(server)
        store = Store.open(server.url + "/1", server.url + "/1", credentials=credentials)
        async with store.hints():
            await live_and_end(store, 1)
        assert len(await store.client.infos()) == 1
        await store.close()
        check_nothing_was_refused(server)


async def test_the_documented_user_may_do_it_on_a_cluster(credentials: Credentials) -> None:
    with farm() as servers:
        cluster = start_cluster(servers)
        for node in cluster.primaries:
            allow(node)
        store = Store.open(
            cluster.url, cluster.url + "?role=replica", shards=16, credentials=credentials, timeout_seconds=5.0
        )
        await live_and_end(store, 16)
        await store.close()
        for node in cluster.primaries:
            check_nothing_was_refused(node)


async def test_the_documented_user_may_do_nothing_else(credentials: Credentials) -> None:
    with farm() as servers:
        server = servers.start()
        allow(server)
        client = RedisClient.open(server.url, credentials=credentials)
        for command in (
            ("GET", "other"),
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("PUBLISH", "other", "x"),
        ):
            with pytest.raises(StoreUnavailable, match=r"does not permit this .*WAYMARK_REDIS_USERNAME"):
                await client.several([command])
        await client.close()
        assert len(_log(server)) == 5


async def test_every_documented_permission_is_needed_by_a_script_or_a_command() -> None:
    """Nothing stands in the line that no source names."""
    root = Path(__file__).parents[2]
    folders = (root / "app" / "waymark" / "store", root / "app" / "waymark" / "console")
    sources = [*(root / "lua").glob("*.lua"), *(path for folder in folders for path in folder.rglob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources).upper()
    # Sent by the library: at the start of a connection, of a subscription, and for a count of permissions.
    words = {"SELECT", "SUBSCRIBE", "PING", "INFO", "CLUSTER|SLOTS", "SCRIPT|LOAD"}
    words.add("XGROUP|CREATE")  # two words of one command
    for word in re.findall(r" \+(\S+)", LINES[0].upper()):
        assert word in words or f"'{word}'" in text or f'"{word}"' in text, word


async def test_every_command_of_the_scripts_is_permitted_by_the_page() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "lua").glob("*.lua")]
    called = {word for text in texts for word in re.findall(r"redis\.call\('(\w+)'", text)}
    assert called <= {word.upper().partition("|")[0] for word in re.findall(r" \+(\S+)", LINES[0])}


@pytest.mark.long
async def test_the_service_runs_under_the_documented_user(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    with farm() as servers:
        server = servers.start()
        allow(server)
        server.ask("HSET", keys.fence(1, 0), "holder", "0")  # ids go on from 0
        settings = {"redis_username": "waymark", "redis_password_file": secret}
        async with start("serve", server.url, tmp_path / "log", **settings) as live, live.client() as client:
            body = {"type": "standard", "modelname": "m", "instance_id": "pod-1", "block_size": 4}
            assert (await client.post("/register", json=body)).status_code == 200
            stored = {"event_id": 1, "event_type": "stored", "backend_id": "pod-1", "base_block_idx": 0}
            answer = await client.post("/events", json=stored | {"seq_hashes": [1, 2], "token_ids": list(range(8))})
            assert answer.json() == {"applied": 1, "stale": 0}
            answer = await client.post("/query", json={"model": "m", "block_size": 4, "token_ids": list(range(8))})
            assert answer.json()["default"]["pod-1"]["longest_matched"] == 8
            for words in (["status"], ["inspect", "holder", "1", "--model", "m"], ["inspect", "keys", "--model", "m"]):
                said = await _waymark(server.url, secret, *words)
                assert "pod-1" in said or "keys" in words
            assert (await client.post("/unregister", json={"instance_id": "pod-1"})).status_code == 200
            assert "hunter2" not in live.said()
        check_nothing_was_refused(server)


async def _waymark(url: str, secret: Path, *words: str) -> str:
    """What the command line says, as the documented user."""
    environment = {"WAYMARK_REDIS_URL": url, "WAYMARK_REDIS_USERNAME": "waymark"}
    environment |= {"WAYMARK_REDIS_PASSWORD_FILE": str(secret), "PATH": os.environ["PATH"]}
    code, output, error = await forked.run(words, environment, Path(__file__).parents[2])
    assert code == 0, error
    return output

"""URLs, users, passwords and certificates: what is understood, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from waymark.base.errors import SettingsError
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.store.redis import connect
from waymark.store.redis.address import Address, parse
from waymark.store.redis.client import RedisClient
from waymark.store.redis.cluster import Cluster
from waymark.store.redis.credentials import Credentials
from waymark.store.store import Store


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", Address("server", (("cache", 6379),))),
        ("redis://[::1]:7000/3", Address("server", (("::1", 7000),), db=3)),
        ("rediss://u:p%40ss@cache:1/0", Address("server", (("cache", 1),), True, username="u", password="p@ss")),
        ("redis://:only%2Fpassword@cache?db=2", Address("server", (("cache", 6379),), db=2, password="only/password")),
        ("redis://cache?username=u&password=p", Address("server", (("cache", 6379),), username="u", password="p")),
        ("unix:///run/redis.sock?db=1", Address("socket", (), path="/run/redis.sock", db=1)),
        ("unix://u:p@/run/redis.sock", Address("socket", (), path="/run/redis.sock", username="u", password="p")),
        ("redis+sentinel://a,b:1/main", Address("sentinel", (("a", 26379), ("b", 1)), name="main")),
        (
            "rediss+sentinel://u:p@a/main/4?role=replica",
            Address("sentinel", (("a", 26379),), True, "main", db=4, is_replica=True, username="u", password="p"),
        ),
        ("redis+cluster://a:7000,b", Address("cluster", (("a", 7000), ("b", 6379)))),
        ("rediss+cluster://a:7000/0?role=replica", Address("cluster", (("a", 7000),), True, is_replica=True)),
    ],
)  # fmt: skip
def test_a_url_is_taken_apart(url: str, address: Address) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    ("url", "way_out"),
    [
        ("http://user:secret@redis:6379", "use redis://host:port/db"),
        ("redis", "use redis://host:port/db"),
        ("redis://user:sec#ret@redis:6379", "percent-encoded"),
        ("redis://user:secret@redis:port", "host:port"),
        ("redis://user:sec/ret@redis:6379", "percent-encoded"),
        ("redis://user:secret@redis:0", "host:port"),
        ("redis://user:secret@redis:65536", "host:port"),
        ("redis://user:secret@", "host:port"),
        ("redis://user:secret@redis/one", "the database is a number"),
        ("redis://user:secret@a,b", r"redis\+sentinel:// or redis\+cluster://"),
        ("redis://redis?secret=1", "it may have db, username, password, role"),
        ("redis://redis?socket_timeout=9", "socket_timeout is unknown"),
        ("redis://redis?password=secret&password=secret", "password is unknown or given twice"),
        ("redis://redis?role=replica", "the address of the replica itself"),
        ("redis+cluster://redis?role=master", "its role must be primary or replica"),
        ("unix://user:secret@host/path", "unix:///path/to/the.sock"),
        ("unix://", "unix:///path/to/the.sock"),
        ("redis+sentinel://user:secret@a:26379", "the name of the primary"),
        ("redis+sentinel://user:secret@a:26379/main/x", "the database is a number"),
        ("redis+sentinel://user:secret@a:26379,/main", "host:port"),
        ("redis+cluster://user:secret@a:7000/2", "database 0 only"),
        ("unix+cluster://a", "use redis://host:port/db"),
    ],
)
def test_a_url_that_cannot_be_used_names_the_setting_and_the_way_out_and_no_secret(url: str, way_out: str) -> None:
    with pytest.raises(SettingsError, match=f'^WAYMARK_REDIS_READ_URL: ".+" cannot be used: .*{way_out}') as caught:
        RedisClient.open(url, variable="WAYMARK_REDIS_READ_URL")
    assert "secret" not in str(caught.value).replace("?secret=1", "").replace("secret is unknown", "")
    assert "sec/ret" not in str(caught.value)
    assert "sec#ret" not in str(caught.value)
    assert "user:" not in str(caught.value)


async def test_a_store_reads_from_another_kind_of_redis_than_it_writes_to() -> None:
    store = Store.open("redis://cache", "redis+cluster://a:7000?role=replica")
    assert not isinstance(store.client._redis, Cluster)
    assert store._read_client is not None
    assert isinstance(store._read_client._redis, Cluster)
    await store.close()
    with pytest.raises(SettingsError, match=r"^WAYMARK_REDIS_READ_URL"):
        Store.open("redis://cache", "redis+cluster://a:7000/1")


def test_the_settings_say_how_redis_is_entered(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    environ = {
        "WAYMARK_REDIS_USERNAME": "waymark",
        "WAYMARK_REDIS_PASSWORD_FILE": str(secret),
        "WAYMARK_REDIS_SENTINEL": f"username=watcher,password_file={secret}",
        "WAYMARK_REDIS_TLS": "ca=/ca,cert=/cert,key=/key,verify=CA",
    }
    credentials = parts.credentials(Settings.from_env(environ))
    assert credentials == Credentials(
        "waymark", secret, "watcher", secret, Path("/ca"), Path("/cert"), Path("/key"), "ca"
    )  # fmt: skip


def login_of(url: str, credentials: Credentials) -> Any:
    """What redis-py asks for the login of each connection."""
    return connect.options_of(credentials, parse(url))["credential_provider"]


def test_a_password_file_is_read_for_every_connection(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    provider = login_of("redis://cache", Credentials(username="u", password_file=secret))
    assert provider.get_credentials() == ("u", "first")
    secret.write_text("second \r\n")
    assert provider.get_credentials() == ("u", "second ")
    alone = login_of("redis://cache", Credentials(password_file=secret))
    assert alone.get_credentials() == ("second ",)


@pytest.mark.parametrize(
    ("url", "given", "sentence"),
    [
        ("redis://cache", {"password_file": "missing"}, "REDIS_PASSWORD_FILE .*missing cannot be read: No such"),
        ("redis://cache", {"password_file": "empty"}, "WAYMARK_REDIS_PASSWORD_FILE .*empty is empty: put"),
        ("redis://cache", {"password_file": "binary"}, "REDIS_PASSWORD_FILE .*binary cannot be read: it is no UTF"),
        ("redis+sentinel://a/m", {"sentinel_password_file": "missing"}, "WAYMARK_REDIS_SENTINEL password_file"),
        ("redis://:p@cache", {"password_file": "good"}, "REDIS_URL has a password, .*WAYMARK_REDIS_PASSWORD_FILE"),
        ("redis://u@cache", {"username": "v"}, "WAYMARK_REDIS_URL has a user, .*WAYMARK_REDIS_USERNAME"),
        ("rediss://cache", {"tls_ca_file": "missing"}, "WAYMARK_REDIS_TLS ca=.*missing cannot be used: No such"),
        ("rediss://cache", {"tls_ca_file": "good"}, "WAYMARK_REDIS_TLS ca=.*good cannot be used: .*PEM"),
        ("rediss://cache", {"tls_cert_file": "good"}, "WAYMARK_REDIS_TLS cert=.*good .*cannot be used: .*PEM"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_at_the_start(
    url: str, given: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "good").write_text("hunter2\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    values = {name: value if name == "username" else tmp_path / value for name, value in given.items()}
    with pytest.raises(SettingsError, match=sentence) as caught:
        RedisClient.open(url, credentials=Credentials(**values))  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)

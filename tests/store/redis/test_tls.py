"""TLS: one server, a Cluster; certificates that are not to be trusted, and those we have to show ourselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.patience import patient
from tests.store.flow import live_and_end
from tests.topologies import Farm, Server, farm, start_cluster
from waymark.base.errors import StoreUnavailable
from waymark.store.redis.client import RedisClient
from waymark.store.redis.credentials import Credentials
from waymark.store.store import Store


@dataclass(frozen=True)
class Files:
    """PEM files: the CA's, that of the servers (for 127.0.0.1), ours, and a stranger's CA."""

    ca: Path
    server: Path
    ours: Path
    stranger: Path

    @property
    def options(self) -> tuple[str, ...]:
        """For a server that asks us for a certificate."""
        return (
            "--tls-cert-file", str(self.server), "--tls-key-file", str(self.server), "--tls-ca-cert-file", str(self.ca),
            "--tls-auth-clients", "yes", "--tls-replication", "yes", "--tls-cluster", "yes",
        )  # fmt: skip

    @property
    def client(self) -> dict[str, Any]:
        """For the client with which a test looks on."""
        return {"ssl": True, "ssl_ca_certs": str(self.ca), "ssl_certfile": str(self.ours)}

    @property
    def credentials(self) -> Credentials:
        return Credentials(tls_ca_file=self.ca, tls_cert_file=self.ours)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("tls")
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    stranger.cert_pem.write_to_path(directory / "stranger.pem")
    for name, identity in (("server", "127.0.0.1"), ("ours", "waymark")):
        ca.issue_cert(identity).private_key_and_cert_chain_pem.write_to_path(directory / f"{name}.pem")
    return Files(*(directory / f"{name}.pem" for name in ("ca", "server", "ours", "stranger")))


@pytest.fixture(scope="module")
def servers() -> Iterator[Farm]:
    with farm() as servers:
        yield servers


@pytest.fixture(scope="module")
def server(servers: Farm, files: Files) -> Server:
    return servers.start(*files.options, is_tls=True, more=files.client)


async def test_all_that_the_roles_do_works_over_tls(server: Server, files: Files) -> None:
    store = Store.open(f"rediss://127.0.0.1:{server.port}", credentials=files.credentials, timeout_seconds=patient(5.0))
    await live_and_end(store, 1)
    await store.close()


async def test_a_cluster_is_entered_over_tls(servers: Farm, files: Files) -> None:
    cluster = start_cluster(servers, *files.options, is_tls=True, more=files.client)
    store = Store.open(
        cluster.url.replace("redis+", "rediss+"), shards=16, credentials=files.credentials, timeout_seconds=patient(5.0)
    )
    await live_and_end(store, 16)
    await store.close()


async def refusal(url: str, credentials: Credentials) -> str:
    client = RedisClient.open(url, credentials=credentials, timeout_seconds=patient(5.0))
    with pytest.raises(StoreUnavailable) as caught:
        await client.ping()
    await client.close()
    return caught.value.sentence


async def test_a_server_whose_certificate_nobody_known_has_signed_is_refused(server: Server, files: Files) -> None:
    url = f"rediss://127.0.0.1:{server.port}"
    sentence = await refusal(url, replace(files.credentials, tls_ca_file=files.stranger))
    assert "certificate verify failed" in sentence
    assert "WAYMARK_REDIS_TLS" in sentence
    assert "WAYMARK_REDIS_TLS" in await refusal(url, replace(files.credentials, tls_ca_file=None))


async def test_a_certificate_for_another_host_is_refused_unless_told_otherwise(server: Server, files: Files) -> None:
    url = f"rediss://localhost:{server.port}"
    assert "WAYMARK_REDIS_TLS" in await refusal(url, files.credentials)
    for credentials in (
        replace(files.credentials, tls_verify="ca"),
        replace(files.credentials, tls_verify="none", tls_ca_file=files.stranger),
    ):
        client = RedisClient.open(url, credentials=credentials, timeout_seconds=patient(5.0))
        await client.ping()
        await client.close()
    assert "verify failed" in await refusal(
        url, replace(files.credentials, tls_verify="ca", tls_ca_file=files.stranger)
    )


async def test_plain_words_to_a_tls_port_and_no_certificate_of_ours_are_unavailable(
    server: Server, files: Files
) -> None:
    assert "is unavailable" in await refusal(f"redis://127.0.0.1:{server.port}", Credentials())
    assert "127.0.0.1" in await refusal(
        f"rediss://127.0.0.1:{server.port}", replace(files.credentials, tls_cert_file=None)
    )

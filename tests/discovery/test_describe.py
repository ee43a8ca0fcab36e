"""describe: what an engine says of itself, and what becomes of every engine that says something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.discovery.conftest import Engine, recorded, vllm_metrics, vllm_models
from tests.listening import listening, port_of
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, RemoteUnavailable
from waymark.discovery.describe import RANKS_MAX, Describer, RankSockets, instance_id_of
from waymark.domain.engines import EngineKind

pytestmark = pytest.mark.outside


@pytest.fixture
async def describer() -> AsyncIterator[Describer]:
    describer = Describer(Asker(), AllowedEndpoints(), seconds=30)
    yield describer
    await describer.close()


async def test_vllm_says_everything(engine: Engine, describer: Describer) -> None:
    engine.is_vllm(adapters=("sql", "chat"), engines=2)
    found = await describer.describe(engine.url + "/v1/")
    assert (found.kind, found.model_name, found.block_size) == (EngineKind.VLLM, "llama", 16)
    assert (found.aliases, found.adapters) == (("llama-alias",), ("sql", "chat"))
    assert found.ranks == (
        RankSockets(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
        RankSockets(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658"),
    )
    assert found.silent == {}
    assert found.release is None
    engine.answers["/version"] = {"version": "0.34.1"}
    assert (await describer.describe(engine.url)).release == "0.34.1"


async def test_sglang_says_everything(engine: Engine, describer: Describer) -> None:
    engine.is_sglang()
    found = await describer.describe(engine.url)
    assert (found.kind, found.model_name, found.block_size) == (EngineKind.SGLANG, "qwen", 16)
    assert found.release == "0.5.23"
    assert [each.endpoint for each in found.ranks] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert [each.replay_endpoint for each in found.ranks] == ["tcp://127.0.0.1:5657", "tcp://127.0.0.1:5658"]


@pytest.mark.parametrize(("part", "block_size", "replay"), [("dcp", 64, None), ("no_replay", 16, None)])
async def test_sglang_without_replay(
    engine: Engine, describer: Describer, part: str, block_size: int, replay: str | None
) -> None:
    engine.is_sglang(part)
    found = await describer.describe(engine.url)
    assert (found.block_size, found.ranks) == (block_size, (RankSockets(0, "tcp://127.0.0.1:5557", replay),))


@pytest.mark.parametrize(
    "shape",
    [
        lambda sources: list(sources.values()),
        lambda sources: {"sources": list(sources.values())},
        lambda sources: {"sources": sources},
        lambda sources: [each | {"data_parallel_rank": int(rank)} for rank, each in reversed(sources.items())],
    ],
)
async def test_the_sources_of_vllm_have_several_shapes(engine: Engine, describer: Describer, shape: Any) -> None:
    engine.is_vllm()
    engine.answers["/kv_event_sources"] = shape(recorded("vllm_0.33_kv_event_sources", "two_ranks"))
    found = await describer.describe(engine.url)
    assert [(each.dp_rank, each.endpoint) for each in found.ranks] == [
        (0, "tcp://127.0.0.1:5557"),
        (1, "tcp://127.0.0.1:5558"),
    ]


async def test_the_snapshot_sockets_of_vllm_are_read(engine: Engine, describer: Describer) -> None:
    """No release has the field yet; its name and its port are those of the open change."""
    engine.is_vllm()
    sources = recorded("vllm_0.33_kv_event_sources", "two_ranks")
    sources["0"]["snapshot_endpoint"] = "tcp://*:5757"
    engine.answers["/kv_event_sources"] = sources
    found = await describer.describe(engine.url)
    assert [each.snapshot_endpoint for each in found.ranks] == ["tcp://127.0.0.1:5757", None]
    sources["1"]["snapshot_endpoint"] = "tcp://10.9.9.9:5758"
    found = await describer.describe(engine.url)
    assert found.ranks == ()
    assert "snapshot_endpoint" in found.silent["endpoint"]


@pytest.mark.parametrize(("unit", "block_size"), [(16, 16), (20, 1536), (4, 1536), ("None", 1536)])
async def test_an_engine_that_finds_prefixes_inside_a_block_has_its_unit(
    engine: Engine, describer: Describer, unit: int | str, block_size: int
) -> None:
    engine.is_vllm(block_size=1536, unit=unit)
    assert (await describer.describe(engine.url)).block_size == block_size


async def test_full_attention_decides_the_block_size(engine: Engine, describer: Describer) -> None:
    engine.is_vllm(block_size=16, effective=64)
    assert (await describer.describe(engine.url)).block_size == 64


async def test_an_older_vllm_says_what_it_can(engine: Engine, describer: Describer) -> None:
    engine.is_vllm()
    del engine.answers["/kv_event_sources"]
    found = await describer.describe(engine.url, EngineKind.VLLM)
    assert (found.model_name, found.block_size, found.ranks) == ("llama", 16, ())
    assert "0.32" in found.silent["endpoint"]
    assert (await describer.describe(engine.url)).kind == EngineKind.VLLM  # by its metrics


async def test_the_key_that_is_missing_is_named(engine: Engine, describer: Describer) -> None:
    engine.is_vllm()
    engine.answers["/v1/models"] = 401
    assert "WAYMARK_ENGINE_API_KEY" in (await describer.describe(engine.url)).silent["modelname"]


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("ipc:///tmp/events", "cannot be reached from elsewhere"),
        ("inproc://cache", "cannot be reached from elsewhere"),
        ("tcp://10.9.9.9:5557", "on another host than its URL"),
        ("tcp://metadata.internal:80", "on another host than its URL"),
        ("tcp://*:0", "an endpoint is"),
        ("tcp://*:65536", "an endpoint is"),
        ("tcp://*", "cannot be reached from elsewhere"),
    ],
)
async def test_sockets_elsewhere_are_refused(engine: Engine, describer: Describer, endpoint: str, reason: str) -> None:
    engine.is_vllm()
    engine.answers["/kv_event_sources"] = {"0": {"publisher": "zmq", "endpoint": endpoint}}
    found = await describer.describe(engine.url)
    assert found.ranks == ()
    assert reason in found.silent["endpoint"]
    assert "rank 0" in found.silent["endpoint"]


async def test_the_loopback_of_another_host_is_refused() -> None:
    """A loopback address reaches our own host, not the engine's."""
    from waymark.discovery.describe import HostNames, UnusableSocket

    names = HostNames(AllowedEndpoints())
    with pytest.raises(UnusableSocket, match="only processes on its own host"):
        await names.own("http://10.0.0.7:8000", "tcp://127.0.0.1:5557", "endpoint", 3)
    assert await names.own("http://localhost:8000", "tcp://127.0.0.1:5557", "endpoint", 0) == "tcp://localhost:5557"
    assert await names.own("http://[fd00::7]:8000", "tcp://*:5557", "endpoint", 0) == "tcp://[fd00::7]:5557"
    allowed = HostNames(AllowedEndpoints(["10.0.0.0/24"]))
    assert await allowed.own("http://10.0.0.7:8000", "tcp://10.0.0.8:5557", "endpoint", 1) == "tcp://10.0.0.8:5557"
    with pytest.raises(UnusableSocket, match="WAYMARK_ALLOWED_ENDPOINTS"):
        await allowed.own("http://10.1.0.7:8000", "tcp://*:5557", "endpoint", 0)


@pytest.mark.parametrize("dp_size", [0, -1, RANKS_MAX + 1, 10**30, "2", None, True])
async def test_a_wrong_number_of_ranks_is_not_believed(engine: Engine, describer: Describer, dp_size: Any) -> None:
    engine.is_sglang()
    engine.answers["/server_info"]["kv_events"]["dp_size"] = dp_size
    found = await describer.describe(engine.url)
    assert found.ranks == ()
    assert "dp_size" in found.silent["endpoint"]


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({}, "is no engine"),
        ({"/v1/models": "<html>"}, "is no engine"),
        ({"/v1/models": {"data": 7}}, "is no engine"),
        ({"/v1/models": "[" * 100_000}, "is no engine"),
        ({"/v1/models": 401}, "WAYMARK_ENGINE_API_KEY"),
    ],
)
async def test_what_is_no_engine_is_named(
    engine: Engine, describer: Describer, answers: dict[str, Any], named: str
) -> None:
    engine.answers = answers
    with pytest.raises(InvalidValue, match=named) as caught:
        await describer.describe(engine.url)
    assert caught.value.field == "url"
    assert engine.url in caught.value.sentence


async def test_an_engine_that_starts_or_is_not_there_is_unavailable(
    engine: Engine, describer: Describer, free_port: int
) -> None:
    engine.answers = {"/v1/models": 503}
    with pytest.raises(RemoteUnavailable, match="status 503"):
        await describer.describe(engine.url)
    with pytest.raises(RemoteUnavailable, match=f"127.0.0.1:{free_port}"):
        await describer.describe(f"http://127.0.0.1:{free_port}")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("is_sglang", [True, False])
async def test_an_engine_that_lists_no_models_now_loses_no_adapter(
    engine: Engine, describer: Describer, is_sglang: bool, status: int
) -> None:
    if is_sglang:
        engine.is_sglang()
    else:
        engine.is_vllm()
    engine.answers["/v1/models"] = status
    with pytest.raises(RemoteUnavailable, match=f"status {status}"):
        await describer.describe(engine.url)


@pytest.mark.parametrize("status", [b"000", b"099", b"101", b"600", b"999"])
async def test_a_status_that_is_none_is_no_description(describer: Describer, status: bytes) -> None:
    body = json.dumps(vllm_models("m")).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 %b Odd\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    async with listening(answer) as server:
        with pytest.raises((InvalidValue, RemoteUnavailable)):
            await describer.describe(f"http://127.0.0.1:{port_of(server)}")


async def test_a_redirect_is_named(engine: Engine, describer: Describer) -> None:
    async def redirect(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("http://169.254.169.254/")

    engine.answers = dict.fromkeys(("/v1/models", "/metrics", "/server_info", "/kv_event_sources"), redirect)
    with pytest.raises(RemoteUnavailable, match=r"redirects to .*169\.254"):
        await describer.describe(engine.url)


async def test_one_long_answer_costs_what_it_would_have_said(engine: Engine, describer: Describer) -> None:
    engine.is_vllm()
    engine.answers["/metrics"] = "x" * 10_000_000 + vllm_metrics()
    found = await describer.describe(engine.url)
    assert found.block_size is None
    assert "longer than" in found.silent["block_size"]
    assert len(found.ranks) == 2


async def test_a_slow_engine_costs_its_time_only(engine: Engine) -> None:
    async def slow(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    engine.is_vllm()
    engine.answers["/kv_event_sources"] = slow
    describer = Describer(Asker(), AllowedEndpoints(), seconds=0.5)
    with pytest.raises(RemoteUnavailable, match=r"within 0\.5 s"):
        await describer.describe(engine.url)
    await describer.close()


@pytest.mark.parametrize("text", ['vllm:cache_config_info{block_size="x"} 1', "vllm:cache_config_info{", "\0" * 100])
async def test_metrics_that_say_no_block_size(engine: Engine, describer: Describer, text: str) -> None:
    engine.is_vllm()
    engine.answers["/metrics"] = text
    found = await describer.describe(engine.url)
    assert (found.block_size, "cache_config_info" in found.silent["block_size"]) == (None, True)


async def test_ranks_with_different_block_sizes_are_named(engine: Engine, describer: Describer) -> None:
    engine.is_vllm()
    engine.answers["/metrics"] = vllm_metrics(16) + vllm_metrics(32)
    assert "16, 32" in (await describer.describe(engine.url)).silent["block_size"]


async def test_names_beyond_bounds_are_left_out(engine: Engine, describer: Describer) -> None:
    engine.is_vllm()
    engine.answers["/v1/models"] = vllm_models("llama", adapters=("x" * 10_000, *(f"a{i}" for i in range(1000))))
    found = await describer.describe(engine.url)
    assert (len(found.adapters), found.adapters[0]) == (256, "a0")


def test_an_engine_without_a_name_is_its_host_and_port() -> None:
    assert instance_id_of("http://10.0.0.7:8000") == "10.0.0.7:8000"
    assert instance_id_of("https://a.b") == "a.b:443"


async def test_another_server_with_openais_api_is_foreign(engine: Engine, describer: Describer) -> None:
    engine.answers = {"/v1/models": vllm_models("llama3.2", "qwen3")}
    found = await describer.describe(engine.url)
    assert (found.kind, found.is_foreign, found.model_name, found.aliases) == (None, True, "llama3.2", ("qwen3",))
    engine.answers["/kv_event_sources"] = 503  # it may have it when it has started
    assert not (await describer.describe(engine.url)).is_foreign


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ('{"master_server_address": "10.0.0.9:50051"}', "http://10.0.0.9:9003"),
        ({"master_server_address": "mooncake:50051", "master_metrics_port": 9103}, "http://mooncake:9103"),
        ('{"master_server_address": 7}', None),
        ('{"master_server_address": "a b:1"}', None),
        ('{"master_server_address": "a:1", "master_metrics_port": "9003/x"}', None),
        ("[" * 10_000, None),
        ("@config.toml", None),
        (None, None),
    ],
)
async def test_the_master_of_the_store_of_sglang_is_read(
    engine: Engine, describer: Describer, config: Any, found: str | None
) -> None:
    engine.is_sglang()
    server = engine.answers["/server_info"]
    server |= {"hicache_storage_backend": "mooncake", "hicache_storage_backend_extra_config": config}
    described = await describer.describe(engine.url)
    assert (described.query_endpoint, described.query_keys) == (found, ())
    server["hicache_storage_backend"] = "file"
    assert (await describer.describe(engine.url)).query_endpoint is None


@pytest.mark.parametrize(
    ("of", "paths"),
    [
        ("vllm", ["/kv_event_sources", "/v1/models", "/metrics", "/version"]),
        ("sglang", ["/kv_event_sources", "/server_info", "/v1/models"]),
        ("other", ["/kv_event_sources", "/server_info", "/v1/models", "/metrics", "/version"]),
    ],
)
async def test_an_engine_is_asked_over_one_connection_and_not_for_what_it_has_told(
    engine: Engine, describer: Describer, of: str, paths: list[str]
) -> None:
    if of == "vllm":
        engine.is_vllm()
    elif of == "sglang":
        engine.is_sglang()
    else:
        engine.answers = {"/v1/models": vllm_models("gpt")}
    await describer.describe(engine.url)
    assert engine.asked == paths
    assert len(engine.connections) == 1

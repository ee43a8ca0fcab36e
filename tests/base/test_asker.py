"""An engine that is asked over HTTP: what bounds the call, and what becomes of every answer."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from tests.conftest import wait_until
from tests.listening import listening, port_of
from tests.patience import patient
from waymark.base import asker as module
from waymark.base import endpoints
from waymark.base.asker import Asker, EngineKey, HttpReply
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, SettingsError, Unanswered
from waymark.base.settings import Settings
from waymark.runtime import parts

pytestmark = pytest.mark.outside

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners = []

    async def started(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield started
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    asker = Asker(key=EngineKey("secret"))
    yield asker
    await asker.close()


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that are looked up: ``engine.test`` has an address, and nobody answers for any other."""
    asked: list[str] = []
    over = threading.Event()

    def looked_up(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        if host != "engine.test":
            over.wait(600)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port or 0))]

    for each in (socket, endpoints):
        monkeypatch.setattr(each, "getaddrinfo", looked_up, raising=False)
    yield asked
    over.set()


async def test_names_that_nobody_answers_for_hold_up_no_other_name(
    serve: Serve, asker: Asker, lookups: list[str]
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text="here")

    url = (await serve(answer)).replace("127.0.0.1", "engine.test")
    silent = [asyncio.ensure_future(asker.ask(f"http://{n}.test", seconds=600, bytes_max=9)) for n in range(64)]
    await wait_until(lambda: lookups.count("0.test") == 1, "the first name is looked up")
    assert await asker.ask(url, seconds=patient(10), bytes_max=9) == HttpReply(200, b"here")
    for each in silent:
        each.cancel()


async def test_a_name_that_nobody_answers_for_is_looked_up_once_at_a_time(
    asker: Asker, lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "LOOKUP_SECONDS", 0.05)
    for _ in range(3):
        with pytest.raises(Unanswered, match="its host has no address, or no name server answers"):
            await asker.ask("http://0.test", seconds=600, bytes_max=9)
    monkeypatch.setattr(endpoints, "LOOKUPS_MAX", 1)
    assert await endpoints.addresses_of("engine.test") == ()
    assert lookups == ["0.test"]


async def test_an_engine_is_asked_with_its_key(serve: Serve, asker: Asker) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        text = f"{request.method} {request.headers['Authorization']} {request.content_type} {await request.text()}"
        return web.Response(status=418, text=text)

    url = await serve(echo)
    get = await asker.ask(url, seconds=60, bytes_max=1000)
    assert get == HttpReply(418, b"GET Bearer secret application/octet-stream ")
    post = await asker.ask(url, seconds=60, bytes_max=1000, json=b"{}")
    assert post == HttpReply(418, b"POST Bearer secret application/json {}")


async def test_a_redirect_is_named_and_not_followed(serve: Serve, asker: Asker) -> None:
    asked = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        raise web.HTTPFound("http://169.254.169.254/other")

    with pytest.raises(Unanswered, match=r"redirects to \"http://169\.254\.169\.254/other\""):
        await asker.ask(await serve(redirect) + "/first", seconds=60, bytes_max=1000)
    assert asked == ["/first"]


async def test_compressed_bytes_stay_as_they_are(serve: Serve, asker: Asker) -> None:
    compressed = gzip.compress(b"1" * 2**24)

    async def bomb(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=compressed, headers={"Content-Encoding": "gzip"})

    assert (await asker.ask(await serve(bomb), seconds=60, bytes_max=2**17)).body == compressed


async def test_the_settings_of_engines_are_used(serve: Serve) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        return web.Response(text=request.headers.get("Authorization", "none"))

    settings = Settings.from_env({"WAYMARK_ENGINE_API_KEY": "k", "WAYMARK_ALLOWED_ENDPOINTS": "10.0.0.0/8"})
    url = await serve(echo)
    with pytest.raises(InvalidValue, match="WAYMARK_ALLOWED_ENDPOINTS"):
        await parts.asker(settings).ask(url, seconds=60, bytes_max=100)
    # Where an operator's tokenizer is needs no permission, and the key goes to engines only.
    for hosts, said in (("10.0.0.0/8", b"none"), ("127.0.0.1", b"Bearer k")):
        named = settings.copy_with(engine_key_hosts=(hosts,))
        asker = parts.asker(named, is_bounded=False)
        assert await asker.ask(url, seconds=60, bytes_max=100) == HttpReply(200, said)
        await asker.close()


@pytest.mark.parametrize(
    ("settings", "gets"),
    [
        ({"engine_key_hosts": "127.0.0.1"}, True),
        ({"engine_key_hosts": "*"}, True),
        ({"engine_key_hosts": "10.0.0.0/8"}, False),
        ({"allowed_endpoints": "127.0.0.0/8"}, True),
        ({"allowed_endpoints": "127.0.0.0/8", "engine_key_hosts": "*.engines.svc"}, False),
        ({"gateway_engines": "{url}/v1"}, True),
        ({"gateway_engines": "http://127.0.0.1:1"}, False),
    ],
    ids=str,
)
async def test_the_key_goes_only_where_the_operator_said(serve: Serve, settings: dict[str, str], gets: bool) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        return web.Response(text=request.headers.get("Authorization", "none"))

    url = await serve(echo)
    given: dict[str, Any] = {name: text.replace("{url}", url) for name, text in settings.items()}
    asker = parts.asker(Settings(**{"engine_api_key": "k"} | given))
    said = b"Bearer k" if gets else b"none"
    assert await asker.ask(url + "/metrics", seconds=60, bytes_max=100) == HttpReply(200, said)
    async with asker.follow(url, {}, seconds=60) as stream:
        assert [piece async for piece in stream.pieces] == [said]
    await asker.close()


def test_a_key_without_a_host_ends_the_process() -> None:
    with pytest.raises(SettingsError, match="WAYMARK_ENGINE_KEY_HOSTS"):
        Settings.from_env({"WAYMARK_ENGINE_API_KEY": "k"})


async def test_a_certificate_is_checked_against_the_ca(asker: Asker, tmp_path: Path) -> None:
    async def fine(_: web.Request) -> web.StreamResponse:
        return web.Response(text="fine")

    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    application = web.Application()
    application.router.add_get("/", fine)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}/"
    trusting = Asker(ca_file=str(tmp_path / "ca.pem"))
    assert (await trusting.ask(url, seconds=60, bytes_max=100)).body == b"fine"
    with pytest.raises(Unanswered, match="certificate"):
        await asker.ask(url, seconds=60, bytes_max=100)
    for signer, is_trusted in ((trustme.CA(), False), (authority, True)):
        signer.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        await wait_until(partial(trusts, trusting, url, is_trusted), "the file is read again")
    await trusting.close()
    await runner.cleanup()


async def trusts(asker: Asker, url: str, expected: bool) -> bool:
    try:
        await asker.ask(url, seconds=60, bytes_max=100)
    except Unanswered:
        return not expected
    return expected


async def test_an_answer_without_end_is_cut(serve: Serve, asker: Asker) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 2**16)
            await asyncio.sleep(0)

    with pytest.raises(Unanswered, match="longer than 100000 bytes"):
        await asker.ask(await serve(endless), seconds=60, bytes_max=100_000)


async def test_an_engine_that_says_nothing_is_not_waited_for(serve: Serve, asker: Asker) -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    with pytest.raises(Unanswered, match=r"not answered within 0.1 s"):
        await asker.ask(await serve(silent), seconds=0.1, bytes_max=100)


async def test_who_is_not_there_or_speaks_otherwise_is_unanswered(asker: Asker, free_port: int) -> None:
    with pytest.raises(Unanswered) as refused:
        await asker.ask(f"http://127.0.0.1:{free_port}/", seconds=60, bytes_max=100)
    assert refused.value.sentence == f"no connection to 127.0.0.1 port {free_port}: Connection refused"
    with pytest.raises(Unanswered, match=r"^no connection to nowhere\.invalid port 80: "):
        await asker.ask("http://nowhere.invalid/", seconds=60, bytes_max=100)

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n\r\n")
        writer.close()

    async with listening(speak) as server:
        with pytest.raises(Unanswered):
            await asker.ask(f"http://127.0.0.1:{port_of(server)}/", seconds=60, bytes_max=100)


async def test_a_place_that_is_not_allowed_is_not_asked(serve: Serve) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        raise AssertionError

    asker = Asker(AllowedEndpoints(["10.0.0.0/8"]))
    with pytest.raises(InvalidValue, match="WAYMARK_ALLOWED_ENDPOINTS"):
        await asker.ask(await serve(handler), seconds=60, bytes_max=100)


async def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"nothing\.pem"):
        await Asker(ca_file=str(tmp_path / "nothing.pem")).ask("https://127.0.0.1:1/", seconds=1, bytes_max=1)
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(InvalidValue, match=r"ca\.pem"):
        await Asker(ca_file=str(tmp_path / "ca.pem")).ask("https://127.0.0.1:1/", seconds=1, bytes_max=1)


async def test_a_call_whose_connections_are_closed_is_unanswered_and_not_cancelled(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp cancels the look-up of a name when it closes; a task that ended by this would end without a word."""
    looks = asyncio.Event()

    async def slowly(*_: object, **__: object) -> None:
        looks.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "addresses_of", slowly)
    calls = [asyncio.create_task(asker.ask("http://engine:8000", seconds=60, bytes_max=100)) for _ in range(2)]
    await looks.wait()
    await asyncio.sleep(0)
    await asker.close()
    for call in calls:
        with pytest.raises(Unanswered, match="connections were closed"):
            await call
    # Who is cancelled stays so.
    looks.clear()
    call = asyncio.create_task(asker.ask("http://engine:8000", seconds=60, bytes_max=100))
    await looks.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

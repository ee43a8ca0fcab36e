"""What an operator meets by hand: answers of others, a replica that is away for a while, odd words, no terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from tests.factories import publisher_row, workers_answer
from waymark import cli
from waymark.base.errors import InvalidValue
from waymark.base.shape import plain
from waymark.client import AsyncClient
from waymark.console import decisions, drain
from waymark.console.service import RemoteService
from waymark.contract.publishers import Publisher

URL = ("--url", "http://waymark")
AWAY = httpx.Response(503, json={"error": "Redis does not answer"})
ESCAPE = "\x1b]0;owned\x07"


class Waymark:
    """A service with these answers by path, one after the other; the last one stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[httpx.Response | Exception | type[BaseException]]] = {}
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append((path, json.loads(request.content or b"null")))
        known = self.answers.get(path, [httpx.Response(404, json={"error": f"no path {path}"})])
        answer = known.pop(0) if len(known) > 1 else known[0]
        if not isinstance(answer, httpx.Response):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, stream=answer.stream)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WAYMARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("waymark.base.logs.configure", lambda level, form: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(drain, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def waymark(monkeypatch: pytest.MonkeyPatch) -> Waymark:
    waymark = Waymark()
    transport = httpx.MockTransport(waymark)

    def client(*, headers: dict[str, str], **_: Any) -> httpx.Client:
        return httpx.Client(transport=transport, headers=headers)

    monkeypatch.setattr("waymark.console.service.BoundedClient", client)
    monkeypatch.setattr("waymark.cli.registering.AsyncClient", partial(AsyncClient, transport=transport))
    return waymark


def ok(content: Any) -> httpx.Response:
    return httpx.Response(200, json=content)


def workers(*publishers: Publisher) -> httpx.Response:
    return ok(plain(workers_answer(*publishers)))


def raw(content: bytes, **headers: str) -> httpx.Response:
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(content))


# ---- answers of others -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "answers", "sentence"),
    [
        ("publishers", {"/workers": raw(b"no gzip", **{"content-encoding": "gzip"})}, "decompressing"),
        ("publishers", {"/workers": raw(b"[" * 100_000)}, "is no Waymark"),
        ("publishers", {"/workers": httpx.Response(404, json={"detail": "Not Found"})}, "is no Waymark: /workers"),
        ("select --model m --tokens 1", {"/score": ok({})}, "is no Waymark of this release: of /score"),
        ("ask --model m --tokens 1", {"/query": ok([1])}, "is no Waymark of this release: of /query"),
        ("ask --tokens 1", {"/services": ok({})}, "is no Waymark of this release: of /services"),
        ("events", {"/activity": raw(b"id: 1\ndata: {}\n\n")}, "is no Waymark: of its activity"),
        ("events", {"/activity": raw(b"id: 1\ndata: [1]\n\n")}, "is no Waymark: of its activity"),
        ("events", {"/activity": raw(b'id: 1\ndata: {"at": NaN, "kind": "x"}\n\n')}, "is no Waymark: of its activity"),
        (
            "events",
            {"/activity": raw(b'id: 1\ndata: {"at": 1e300, "kind": "x"}\n\n')},
            "is no Waymark: of its activity",
        ),
        ("events", {"/activity": raw(b"id: 1\ndata: " + b"[" * 100_000 + b"\n\n")}, "is no Waymark: of its activity"),
    ],
)
def test_an_answer_of_something_else_is_one_sentence(
    words: str,
    answers: dict[str, httpx.Response],
    sentence: str,
    waymark: Waymark,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waymark.answers = {path: [answer] for path, answer in answers.items()}
    assert cli.main([*words.split(), *URL]) == cli.EXIT_NO_SERVICE
    output, error = capsys.readouterr()
    assert output == ""
    assert sentence in error
    assert len(error.splitlines()) == 1


# ---- a replica that is away for a while ------------------------------------------------------------


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_is_watched_goes_on_after_a_failover(
    form: tuple[str, ...], waymark: Waymark, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = workers(publisher_row("engine-x"))
    waymark.answers = {"/workers": [fine, fine, AWAY, fine, KeyboardInterrupt], "/ready": [ok({"status": "ready"})]}
    assert cli.main(["publishers", "--watch", "0.1", *form, *URL]) == cli.EXIT_INTERRUPTED
    output, error = capsys.readouterr()
    assert output.count("engine-x") == 2
    assert "Redis does not answer (503)" in (error if form else output)
    waymark.answers["/workers"] = [fine, httpx.Response(401, json={"error": "another token"})]
    assert cli.main(["publishers", "--watch", "0.1", *form, *URL]) == cli.EXIT_FAILED


def test_a_drain_goes_on_waiting_while_no_replica_answers(waymark: Waymark, capsys: pytest.CaptureFixture[str]) -> None:
    busy, idle = publisher_row(weight=0.0, load={"requests": 1, "tokens": 0}), publisher_row(weight=0.0)
    lost = httpx.ConnectError("refused")
    waymark.answers = {"/workers": [workers(busy), workers(busy), AWAY, lost, workers(idle)], "/weight": [ok({})]}
    assert cli.main(["drain", "a", *URL]) == cli.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0].partition(": ")[0] for line in lines] == [
        "a gets no new requests",
        "1 request under way",
        "requests that cannot be counted (Redis does not answer (503))",
        "requests that cannot be counted (no Waymark answers at http://waymark",
        "a is drained",
    ]
    waymark.answers["/workers"] = [workers(busy), AWAY]
    assert cli.main(["drain", "a", "--wait-seconds", "0", *URL]) == cli.EXIT_FAILED
    assert "a has requests that cannot be counted" in capsys.readouterr().err


def test_an_engine_that_another_command_resumes_is_not_unregistered(
    waymark: Waymark, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have no request at the moment of a look."""
    waymark.answers = {"/workers": [workers(publisher_row())], "/weight": [ok({})]}
    assert cli.main(["drain", "a", "--unregister", "--wait-seconds", "0", *URL]) == cli.EXIT_FAILED
    assert "a has a weight above 0 again after 0 s" in capsys.readouterr().err
    assert "/unregister" not in dict(waymark.asked)


@pytest.mark.parametrize(
    ("second", "weights"),
    [
        (httpx.ReadTimeout("late"), [("a", 0), ("b", 0), ("a", 2.0), ("b", 1.0)]),  # it may have been drained
        (httpx.Response(409, json={"error": "discovery sets it"}), [("a", 0), ("b", 0), ("a", 2.0)]),
    ],
)
def test_engines_of_a_drain_that_fails_get_requests_again(
    second: httpx.Response | Exception, weights: list[tuple[str, float]], waymark: Waymark
) -> None:
    targets: Any = [
        SimpleNamespace(instance_id=name, tenant_id="default", weight=weight)
        for name, weight in (("a", 2.0), ("b", 1.0))
    ]
    arguments = argparse.Namespace()
    for restored in (ok({}), AWAY):
        waymark.asked.clear()
        waymark.answers = {"/weight": [ok({}), second, restored]}
        with (
            RemoteService("http://waymark") as service,
            pytest.raises(Exception, match=r"no answer|sets it") as error,
        ):
            list(drain.drain_all(service, arguments, targets))
        assert [(body["instance_id"], body["weight"]) for _, body in waymark.asked] == weights
        assert isinstance(error.value, drain.NotDrained) == (restored is AWAY)
    names = ", ".join(name for name, weight in weights if weight)
    assert f"whether {names} get new requests is not known" in str(error.value)


def test_a_drain_without_a_reader_is_no_success(waymark: Waymark, monkeypatch: pytest.MonkeyPatch) -> None:
    waymark.answers = {"/workers": [workers(publisher_row())], "/weight": [ok({})]}
    with broken_output(monkeypatch):
        assert cli.main(["drain", "a", *URL]) == cli.EXIT_FAILED
        assert cli.main(["publishers", *URL]) == cli.EXIT_OK, "as `| head` ends it"


@contextmanager
def broken_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard output that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        yield


# ---- names and texts of strangers ------------------------------------------------------------------


def test_a_registration_shows_no_escape_of_an_engine_and_says_that_it_was_made(
    waymark: Waymark, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"status": "registered successfully", "instance_id": "e", "model": f"m{ESCAPE}", "type": "vLLM"}
    registered = names | {"block_size": 16, "ranks": [], "adapters": [f"sql{ESCAPE}"]}
    waymark.answers = {"/register": [ok(registered)], "/workers": [httpx.Response(500, json={"error": f"no{ESCAPE}"})]}
    assert cli.main(["register", "http://engine:8000", *URL]) == cli.EXIT_FAILED
    output, error = capsys.readouterr()
    assert output == "e: vLLM, model m�]0;owned�, 16 tokens a block, adapters sql�]0;owned�\n"
    assert error == "waymark register: e is registered, but the state of its streams is not known: no�]0;owned�\n"


@pytest.mark.parametrize("words", ["register http://engine:8000", "unregister e"])
def test_a_registration_without_a_waymark_has_the_code_for_that(
    words: str, waymark: Waymark, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/{words.partition(' ')[0]}"
    waymark.answers = {path: [httpx.ConnectError("refused")]}
    assert cli.main([*words.split(), *URL]) == cli.EXIT_NO_SERVICE
    waymark.answers = {path: [httpx.Response(409, json={"error": "another engine"})]}
    assert cli.main([*words.split(), *URL]) == cli.EXIT_FAILED
    assert cli.main([*words.split(), "--url", "http://h:port"]) == cli.EXIT_USAGE
    assert "it must be a URL" in capsys.readouterr().err


def test_no_line_of_a_command_has_an_escape_of_a_name(waymark: Waymark, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"e{ESCAPE}"
    waymark.answers = {
        "/workers": [workers(publisher_row(name, weight=0.0))],
        "/weight": [ok({})],
        "/unregister": [ok({"status": "unregistered successfully", "removed_instances": [f"{name}|default|0"]})],
        "/repair": [ok({"status": "repair requested", "asked_instances": [name]})],
    }
    for words in (["drain", name, "--unregister"], ["unregister", name], ["repair", name], ["drain", f"{name}!"]):
        cli.main([*words, *URL])
        output, error = capsys.readouterr()
        assert "owned" in output + error, words
        assert "\x1b" not in output + error, words


# ---- odd words, files and streams ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ask --model \udcff --tokens 1", 'the argument "\\udcff" is not UTF-8'),
        ("placement --model \udcff", 'the argument "\\udcff" is not UTF-8'),
        ("publishers --api-token s3cret\n", "api_token has a blank, a line end"),
        ("publishers --url http://h:99999", "it must be a URL"),
        ("drain a --resume --weight nan", "cannot be written as JSON"),
        ("ask --model m --messages NAN", "cannot be written as JSON"),
        ("ask --model m --messages HALF", "cannot be written as JSON"),
        ("ask --model m --messages DEEP", "the file has no JSON"),
        ("ask --model m --tokens -", "--tokens: standard input cannot be read"),
        ("ask --model m --text -", "--text: standard input cannot be read"),
        ("ask --model m --messages -", "--messages: standard input cannot be read"),
        ("inspect namespace --lora-id 99999999999999999999", "--lora-id is an integer of 67 bits"),
        ("reset --yes", "WAYMARK_REDIS_URL is memory://"),
        ("export . --redis-url redis://127.0.0.1:1/0", ". is a directory"),
        ("export / --redis-url redis://127.0.0.1:1/0", "/ is a directory"),
    ],
)
def test_a_word_that_cannot_be_used_is_one_sentence(
    words: str,
    sentence: str,
    waymark: Waymark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"NAN": '[{"content": NaN}]', "HALF": '[{"content": "\\ud83d"}]', "DEEP": "[" * 100_000}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    waymark.answers = {"/workers": [workers(publisher_row())]}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 2 \xff"), encoding="utf-8"))
    given = [str(tmp_path / word) if word in files else word for word in words.split(" ")]
    url = () if given[0] in ("inspect", "reset", "export") or "--url" in given else URL
    assert cli.main([*given, *url]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert sentence in error
    assert "s3cret" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    ["top --seconds nan", "top --seconds -1", "drain a --wait-seconds nan", "register http://e --wait-seconds inf"],
)
def test_a_time_that_is_no_number_of_seconds_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == cli.EXIT_USAGE
    assert "is not a number of seconds from" in capsys.readouterr().err


def test_an_output_in_another_encoding_gets_every_name(waymark: Waymark, monkeypatch: pytest.MonkeyPatch) -> None:
    waymark.answers = {"/workers": [workers(publisher_row("süd"))], "/ready": [ok({"status": "ready"})]}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["publishers", *URL]) == cli.EXIT_OK
    assert b"s\\xfcd" in written.getvalue()


def test_closed_streams_are_no_error(waymark: Waymark, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``>&-`` closes them: Python has None in their place."""
    waymark.answers = {"/workers": [workers(publisher_row())], "/ready": [ok({"status": "ready"})]}
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["publishers", *URL]) == cli.EXIT_OK
    assert cli.main(["ask", "--model", "m", "--tokens", "-", *URL]) == cli.EXIT_USAGE
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.parametrize("error", [FileNotFoundError("no such directory"), ValueError("no such format")])
def test_books_that_cannot_be_drawn_are_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As matplotlib, which takes seconds to import, says it."""
    figure = MagicMock()
    figure.Figure.return_value.savefig.side_effect = error
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    with pytest.raises(InvalidValue, match=f'--plot: "books.svg" cannot be written: {error}'):
        decisions.draw({"by_minute": []}, "books.svg")


def test_engines_that_are_not_considered_are_found_by_each_name_of_their_model(waymark: Waymark) -> None:
    drained = publisher_row("a", weight=0.0, model_name="Qwen/Qwen3-0.6B", aliases=["qwen"], adapters=["sql"])
    waymark.answers = {"/workers": [workers(drained)]}
    with RemoteService("http://waymark") as service:
        for name, found in (
            ("Qwen/Qwen3-0.6B", {"a": "drained"}),
            ("qwen", {"a": "drained"}),
            ("sql", {"a": "drained"}),
            ("m", {}),
        ):
            assert decisions._others(service, {"model": name, "tenant_id": None}, []) == found

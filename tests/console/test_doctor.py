"""Each check of ``waymark doctor``: what it says where all is well, and where it is not."""

from __future__ import annotations

import argparse
import socket
import time
from email.utils import formatdate
from typing import Any, cast

import httpx
import pytest

from tests.factories import publisher_row, workers_answer
from tests.ports import unused_port
from waymark import __version__
from waymark.base.errors import ServiceRefused, ServiceUnreachable
from waymark.console.doctor import Finding, examine, parts
from waymark.console.screen import Text
from waymark.console.service import RemoteService
from waymark.contract.publishers import WorkersAnswer


class Answers:
    """A service in which all is well, but for what a test changes."""

    url = "http://waymark:13333"

    def __init__(self) -> None:
        self.ready = httpx.Response(200, json={"status": "ready", "warnings": []})
        self.health, self.clock = 200, 0.0
        self.date: str | None = ""
        """The header, if it is not the time."""
        self.version: str | None = __version__
        self.refusal: ServiceRefused | None = None
        self.publishers = [publisher_row()]
        self.view: dict[str, Any] = {}

    def answer(self, method: str, path: str) -> httpx.Response:
        date = self.date if self.date != "" else formatdate(time.time() + self.clock, usegmt=True)
        headers = {} if date is None else {"date": date}
        return self.ready if path == "/ready" else httpx.Response(self.health, headers=headers)

    def get(self, path: str) -> Any:
        if self.version is None:
            raise ServiceUnreachable("there was no answer in time")
        return {"info": {"version": self.version}}

    def workers(self) -> WorkersAnswer:
        if self.refusal is not None:
            raise self.refusal
        return workers_answer(*self.publishers, **self.view)


@pytest.fixture
def service() -> Answers:
    return Answers()


def found(service: Answers, *, no_ports: bool = True, complaint: str | None = None) -> list[Finding]:
    return examine(cast(RemoteService, service), argparse.Namespace(no_ports=no_ports), complaint)


def unwell(service: Answers, *, no_ports: bool = True, complaint: str | None = None) -> Finding:
    """The only finding that is not ok."""
    (only,) = [each for each in found(service, no_ports=no_ports, complaint=complaint) if each.verdict != "ok"]
    return only


def test_where_all_is_well_each_check_says_so(service: Answers) -> None:
    names = [each.what for each in found(service) if each.verdict == "ok"]
    assert names == [
        *(
            "settings of this shell",
            "Waymark",
            "clocks",
            "Redis and readiness",
            "versions",
            "ingest workers",
            "engines",
        ),
    ]


def test_settings_that_are_wrong(service: Answers) -> None:
    complaint = "WAYMARK_PROT is not a setting\nWAYMARK_PORT is no number"
    assert unwell(service, complaint=complaint) == (
        "failed",
        "settings of this shell",
        "WAYMARK_PROT is not a setting; WAYMARK_PORT is no number",
    )


def test_a_service_that_is_not_healthy(service: Answers) -> None:
    service.health = 500
    assert unwell(service).sentence == "/health was answered with 500; look into its log"


@pytest.mark.parametrize(("seconds", "words"), [(90, "ahead of"), (-90, "behind")])
def test_clocks_that_differ(service: Answers, seconds: int, words: str) -> None:
    service.clock = seconds
    only = unwell(service)
    assert (only.verdict, only.what) == ("warning", "clocks")
    assert words in only.sentence
    assert "run NTP" in only.sentence


def test_what_is_registered_is_not_known_without_redis_and_the_other_checks_are_made(service: Answers) -> None:
    service.refusal = ServiceRefused("Redis does not answer (503)", 503)
    service.ready = httpx.Response(503, json={"error": "Redis does not answer"})
    found_now = found(service, no_ports=False)
    assert [(each.verdict, each.what) for each in found_now if each.verdict != "ok"] == [
        ("failed", "Redis and readiness"),
        ("failed", "ingest workers and engines"),
    ]
    assert [each.what for each in found_now if each.verdict == "ok"] == [
        *("settings of this shell", "Waymark", "clocks", "versions"),
    ]


def test_redis_that_is_unavailable_and_what_it_warns_of(service: Answers) -> None:
    service.ready = httpx.Response(503, json={"error": "Redis does not answer"})
    assert unwell(service).sentence.startswith("Redis does not answer; docs/troubleshooting.md")
    service.ready = httpx.Response(200, json={"status": "ready", "warnings": ["maxmemory-policy is allkeys-lru"]})
    assert unwell(service) == ("warning", "Redis and readiness", "maxmemory-policy is allkeys-lru")


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        (httpx.Response(503, html="<h1>no server</h1>"), "/ready was answered with 503; docs/troubleshooting.md"),
        (httpx.Response(200, json=[]), "/ready was answered with 200; docs/troubleshooting.md"),
    ],
)
def test_what_answers_in_the_place_of_waymark_is_no_replica_that_is_ready(
    service: Answers, ready: httpx.Response, words: str
) -> None:
    service.ready = ready
    finding = unwell(service)
    assert (finding.verdict, finding.what) == ("failed", "Redis and readiness")
    assert finding.sentence.startswith(words)


@pytest.mark.parametrize("date", ["soon", None])
def test_a_clock_that_is_not_known_is_no_finding(service: Answers, date: str | None) -> None:
    service.date = date
    assert {finding.what for finding in found(service)} == {
        *("settings of this shell", "Waymark", "Redis and readiness", "versions", "ingest workers", "engines"),
    }


def test_another_version(service: Answers) -> None:
    service.version = "0.0.1"
    assert "Waymark is 0.0.1" in unwell(service).sentence


def test_a_version_that_does_not_come_in_time_keeps_no_other_check_from_its_finding(service: Answers) -> None:
    service.version = None
    sentence = "that of Waymark is not known: there was no answer in time"
    assert unwell(service) == ("warning", "versions", sentence)
    assert len(found(service)) == 7


def test_no_ingest_worker_and_a_record_that_cannot_be_read(service: Answers) -> None:
    service.view["workers"] = []
    assert "run 'waymark ingest'" in unwell(service).sentence
    service.view = {"unreadable": [{"kind": "publisher", "key": "wm:p", "field": "1", "reason": "no JSON"}]}
    assert unwell(service) == ("failed", "records in Redis", "wm:p 1 cannot be read: no JSON; register it again")


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("lost", "failed"),
        ("failed", "failed"),
        ("degraded", "warning"),
        ("unreachable", "failed"),
        ("starting", "warning"),
    ],
)
def test_an_engine_that_is_not_active(service: Answers, status: str, verdict: str) -> None:
    service.publishers = [publisher_row(), publisher_row(instance_id="b", status=status, complaint="it is refused")]
    assert unwell(service) == (verdict, 'engine "b" rank 0', f"{status}: it is refused")


@pytest.mark.outside
def test_lines_do_not_contradict_each_other_and_the_last_one_counts_them(service: Answers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        opens, closed = f"tcp://127.0.0.1:{server.getsockname()[1]}", f"tcp://127.0.0.1:{unused_port()}"
        away = publisher_row(instance_id="b", status="unreachable", complaint="it is refused", endpoint=closed)
        service.publishers = [publisher_row(endpoint=opens), away]
        findings = found(service, no_ports=False)
    lines = [each.plain for each in parts(findings) if isinstance(each, Text)]
    assert lines[-3:] == [
        'failed  engine "b" rank 0: unreachable: it is refused',
        "ok      ports: 1 event socket can be opened from this machine",
        "8 findings: 1 failed, 0 warnings, 7 ok",
    ]


def test_an_engine_without_events_has_no_stream_that_could_be_unwell(service: Answers) -> None:
    service.publishers = [publisher_row(), publisher_row(instance_id="b", status="no events", type="none")]
    assert all(each.verdict == "ok" for each in found(service))


def test_no_engine(service: Answers) -> None:
    service.publishers = []
    assert unwell(service).sentence == "none is registered; run 'waymark register URL' for each"


@pytest.mark.outside
def test_a_host_that_cannot_be_is_a_port_that_cannot_be_opened(service: Answers) -> None:
    """An endpoint is what an engine or a client says."""
    service.publishers = [publisher_row(endpoint="tcp://a..b:5557")]
    finding = unwell(service, no_ports=False)
    assert finding.verdict == "warning"
    assert finding.sentence.startswith("tcp://a..b:5557 cannot be opened from this machine: ")


@pytest.mark.outside
def test_a_port_that_cannot_be_opened(service: Answers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        opens, closed = f"tcp://127.0.0.1:{server.getsockname()[1]}", f"tcp://127.0.0.1:{unused_port()}"
        service.publishers = [publisher_row(endpoint=opens), publisher_row(instance_id="b", endpoint=closed)]
        only = unwell(service, no_ports=False)
    assert (only.verdict, only.what) == ("warning", 'port of "b" rank 0')
    assert only.sentence.startswith(f"{closed} cannot be opened from this machine: connection refused")


@pytest.mark.parametrize(("tenant", "flag"), [("default", ""), ("acme", " --tenant-id acme")])
def test_the_command_that_ends_a_drain_names_the_tenant(service: Answers, tenant: str, flag: str) -> None:
    service.publishers = [publisher_row("a", tenant_id=tenant, weight=0.0)]
    assert f"'waymark drain a --resume{flag}' gives it requests again" in unwell(service).sentence

"""``waymark doctor``: the problems that the HTTP API and this machine show, and their remedies."""

from __future__ import annotations

import argparse
import re
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple, TypeAlias

from waymark import __version__
from waymark.base.errors import ServiceRefused, ServiceUnreachable
from waymark.base.shown import several, shown
from waymark.console.drain import way_back
from waymark.console.publishers import UNUSABLE, drain_of
from waymark.console.screen import ScreenPart, joined, text
from waymark.console.service import RemoteService, object_of
from waymark.contract.publishers import Publisher, WorkersAnswer
from waymark.domain.names import DEFAULT_TENANT
from waymark.domain.status import StreamStatus

FindingLevel: TypeAlias = Literal["ok", "warning", "failed"]

_STYLES: dict[FindingLevel, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
#: The clock of a replica has whole seconds, and an answer takes a moment.
_CLOCK_SECONDS = 5.0
_WELL = (StreamStatus.ACTIVE, StreamStatus.NO_EVENTS)
_CONNECT_SECONDS = 1.0
#: The bound on ports to try; an installation may have thousands.
_PORTS_MAX = 64
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):(\d{1,5})")


class Finding(NamedTuple):
    """The result of one check."""

    verdict: FindingLevel
    what: str
    sentence: str


def examine(service: RemoteService, arguments: argparse.Namespace, complaint: str | None) -> list[Finding]:
    """Return every check with its finding. ``complaint`` names the mistakes in the settings of this shell.

    Raise ``ServiceUnreachable`` if Waymark does not answer.
    """
    findings = [_settings(complaint), *_clock_and_health(service), *_readiness(service), _version(service)]
    try:
        view = service.workers()
    except (ServiceRefused, ServiceUnreachable) as error:
        unknown = f"what is registered is not known: {error}"
        return [*findings, Finding("failed", "ingest workers and engines", unknown)]
    findings += _workers(view)
    findings += _publishers(view)
    if not arguments.no_ports:
        findings += _ports(view)
    return findings


def parts(findings: list[Finding]) -> list[ScreenPart]:
    """Return the drawing of the findings, with their numbers at the end."""
    lines = [
        joined(text(f"{finding.verdict:8}", _STYLES[finding.verdict]), f"{finding.what}: {finding.sentence}")
        for finding in findings
    ]
    verdicts = [finding.verdict for finding in findings]
    failed, warnings = verdicts.count("failed"), several(verdicts.count("warning"), "warning")
    return [
        *lines,
        text(f"{several(len(findings), 'finding')}: {failed} failed, {warnings}, {verdicts.count('ok')} ok"),
    ]


def _settings(complaint: str | None) -> Finding:
    if complaint is not None:
        return Finding("failed", "settings of this shell", "; ".join(complaint.splitlines()))
    return Finding("ok", "settings of this shell", "all are known, and their values fit")


def _clock_and_health(service: RemoteService) -> Iterator[Finding]:
    answer = service.answer("GET", "/health")
    here = time.time()
    if not answer.is_success:
        yield Finding("failed", "Waymark", f"/health was answered with {answer.status_code}; look into its log")
    else:
        yield Finding("ok", "Waymark", f"answers at {service.url}")
    try:
        apart = parsedate_to_datetime(answer.headers["date"]).timestamp() - here
    except (KeyError, ValueError):  # there is no date, or no valid one
        return
    if abs(apart) > _CLOCK_SECONDS:
        direction = "ahead of" if apart > 0 else "behind"
        sentence = f"its clock is {abs(apart):.0f} s {direction} this machine's, so lags are wrong; run NTP on both"
        yield Finding("warning", "clocks", sentence)
    else:
        yield Finding("ok", "clocks", "this machine and Waymark agree within seconds")


def _readiness(service: RemoteService) -> Iterator[Finding]:
    answer = service.answer("GET", "/ready")
    content = object_of(answer)
    if content.get("status") != "ready":
        reason = content.get("error") or f"/ready was answered with {answer.status_code}"
        yield Finding("failed", "Redis and readiness", f"{reason}; docs/troubleshooting.md has the remedies")
        return
    answers = content.get("answers_redis")
    purpose = "" if answers is None else f"; the response cache and stored responses are for {answers}"
    yield Finding("ok", "Redis and readiness", f"Redis answers, and the replica is ready{purpose}")
    for warning in content.get("warnings") or ():
        yield Finding("warning", "Redis and readiness", warning)


def _version(service: RemoteService) -> Finding:
    try:
        theirs = service.get("/openapi.json")["info"]["version"]
    except (ServiceRefused, ServiceUnreachable, LookupError, TypeError) as error:
        # A busy replica may take long to make the document at its first request.
        return Finding("warning", "versions", f"that of Waymark is not known: {error}")
    if theirs != __version__:
        return Finding("warning", "versions", f"Waymark is {theirs}, this command {__version__}; install the same one")
    return Finding("ok", "versions", f"Waymark and this command are {theirs}")


def _workers(view: WorkersAnswer) -> Iterator[Finding]:
    if view.workers:
        streams = sum(worker.streams for worker in view.workers)
        yield Finding("ok", "ingest workers", f"{len(view.workers)} alive, with {streams} streams")
    else:
        sentence = "none is alive, so no event is applied; run 'waymark ingest' with the same WAYMARK_REDIS_URL"
        yield Finding("failed", "ingest workers", sentence)
    for record in view.unreadable:
        sentence = f"{record.key} {record.field} cannot be read: {record.reason}; register it again"
        yield Finding("failed", "records in Redis", sentence)


def _publishers(view: WorkersAnswer) -> Iterator[Finding]:
    if not view.publishers:
        yield Finding("warning", "engines", "none is registered; run 'waymark register URL' for each")
        return
    unwell = [publisher for publisher in view.publishers if publisher.status not in _WELL or publisher.complaint]
    for publisher in unwell:
        verdict: FindingLevel = "failed" if publisher.status in UNUSABLE else "warning"
        complaint = publisher.complaint or "docs/troubleshooting.md says what the status means"
        yield Finding(verdict, f"engine {_name(publisher)}", f"{publisher.status}: {complaint}")
    for publisher in view.publishers:
        if drain := drain_of(publisher):
            tenant = None if publisher.tenant_id == DEFAULT_TENANT else publisher.tenant_id
            sentence = f"{drain}: it gets no new requests; {way_back(publisher.instance_id, tenant)}"
            yield Finding("warning", f"engine {_name(publisher)}", sentence)
    if not unwell:
        yield Finding("ok", "engines", f"nothing is wrong with {several(len(view.publishers), 'stream')}")


def _ports(view: WorkersAnswer) -> Iterator[Finding]:
    """Check whether the sockets of engines can be opened from here, as the ingest workers must, except those that are
    known to be unreachable.
    """
    tried, closed = 0, 0
    for publisher in view.publishers:
        match = _TCP.fullmatch(publisher.endpoint or "")
        if match is None or publisher.status == StreamStatus.UNREACHABLE:
            continue
        if tried == _PORTS_MAX:
            yield Finding("ok", "ports", f"only the first {_PORTS_MAX} ports of engines were tried")
            return
        tried += 1
        try:
            socket.create_connection((match[1].strip("[]"), int(match[2])), _CONNECT_SECONDS).close()
        except (OSError, ValueError) as exc:  # or a name that no host can have
            closed += 1
            reason = getattr(exc, "strerror", None) or str(exc)
            sentence = (
                f"{publisher.endpoint} cannot be opened from this machine: {reason.lower()}; start the engine, "
                "check the port of its --kv-events-config, or open the network between them"
            )
            yield Finding("warning", f"port of {_name(publisher)}", sentence)
    if tried > closed:
        yield Finding("ok", "ports", f"{several(tried - closed, 'event socket')} can be opened from this machine")


def _name(publisher: Publisher) -> str:
    return f"{shown(publisher.instance_id)} rank {publisher.dp_rank}"

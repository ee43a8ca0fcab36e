"""``waymark top``: the engines of a running Waymark, drawn again every few seconds, sorted and filtered by keys.

``TopView`` has the state that keys change, and draws it, without a terminal; ``run`` has the terminal.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from waymark.base.errors import ServiceRefused, ServiceUnreachable, WaymarkError
from waymark.base.shown import several
from waymark.console.publishers import state
from waymark.console.screen import STATUS_STYLES, Grid, Screen, ScreenPart, joined, seconds_text, text
from waymark.console.service import RemoteService, may_pass
from waymark.contract.publishers import Publisher, WorkersAnswer
from waymark.domain.media import IN_EVERY_ANSWER

#: The media with a column.
_MEDIA = IN_EVERY_ANSWER
_HELP = "q quit  s sort  r reverse  / filter  j k enter details  d drain  u resume  c why"
_SPARE = (*reversed(_MEDIA[1:]), "LAST EVENT", "RANK", "COMPLAINT", _MEDIA[0], "STORED/S")
_WORST = {status: place for place, status in enumerate(reversed(STATUS_STYLES))}
#: Lines of the screen besides publishers: an error, the head, the table's head, the help, and a spare one.
_OTHER_LINES = 5
#: A key of an order -> its word, and the weight of the engine afterwards.
_ORDERS = {"d": ("drain", 0.0), "u": ("resume", 1.0)}
#: Fields of a publisher that its details show, besides those with a line of their own.
_DETAILS = ("model_name", "tenant_id", "type", "endpoint", "worker", "watermark", "gaps", "restarts")
#: How often a pending answer is looked for between keys.
_POLL_SECONDS = 0.05


#: Instance, tenant, rank and endpoint: a rank may have several sockets.
_EngineName: TypeAlias = tuple[str, str, int, str]


def _blocks(publisher: Publisher) -> int:
    return sum(publisher.blocks.values())


#: Sort key -> the value to sort rows by; the greatest comes first.
SORTS: dict[str, Callable[[Publisher, float], Any]] = {
    "stored/s": lambda publisher, rate: rate,
    "requests": lambda publisher, rate: publisher.load.requests,
    "blocks": lambda publisher, rate: _blocks(publisher),
    "status": lambda publisher, rate: -_WORST.get(publisher.status, -1),  # a later release may have further ones
    "last event": lambda publisher, rate: publisher.lag_seconds or 0.0,
}


@dataclass
class TopView:
    """The state of the screen: the order, the filter and the position."""

    sort: str = "stored/s"
    is_reversed: bool = False
    filter: str = ""
    is_typing: bool = False
    """Pressed keys are letters of the filter."""
    is_complaints: bool = False
    """The complaints are shown whole, in the place of the table."""
    first: int = 0
    cursor: int = 0
    """The place of the chosen engine among the rows."""
    is_details: bool = False
    """The chosen engine is shown alone."""
    question: tuple[str, dict[str, Any]] | None = None
    """An order, until it is confirmed."""
    order: tuple[str, dict[str, Any]] | None = None
    """A confirmed order, in words, and its body of ``POST /weight``; ``run`` sends it."""
    outcome: str = ""
    """How the last order ended."""
    is_over: bool = False
    _chosen: _EngineName | None = None
    """The engine at the cursor, if a key has moved it: the cursor stays at this engine when the order changes."""
    _visible: list[Publisher] = field(default_factory=list)
    _looks: int = 0
    _stored: dict[_EngineName, tuple[float, int]] = field(default_factory=dict)
    _rates: dict[_EngineName, float] = field(default_factory=dict)

    def saw(self, publishers: Sequence[Publisher], now: float) -> None:
        """Take a new answer: the rates are the blocks stored since the one before."""
        stored, rates = {}, {}
        for publisher in publishers:
            name, count = _name(publisher), publisher.counters.get("blocks_stored", 0)
            then, counted = self._stored.get(name, (now, count))
            stored[name] = (now, count)
            rates[name] = max(0, count - counted) / (now - then) if now > then else 0.0
        self._stored, self._rates = stored, rates
        self._looks += 1

    def key(self, key: str) -> None:
        """Apply a key."""
        if self.is_typing:
            if key in ("\r", "\n", "\x1b"):
                self.is_typing = False
            elif key in ("\x7f", "\b"):
                self.filter = self.filter[:-1]
            elif key.isprintable():
                self.filter += key
            return
        if self.question:
            if key == "y":
                self.order = self.question
            self.question = None
            return
        self.outcome = ""
        match key:
            case "q":
                self.is_over = True
            case "\r" | "\n":
                self.is_details = not self.is_details
                self._choose()
            case "d" | "u" if self.order is not None:
                self.outcome = f"{self.order[0]}: there is no answer yet"
            case "d" | "u" if self._visible and not self.is_complaints:
                self.question = self._asked_order(key)
            case "s":
                names = list(SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "/":
                self.is_typing, self.filter, self.first, self.cursor, self._chosen = True, "", 0, 0, None
            case "c":
                self.is_complaints, self.first = not self.is_complaints, 0
            case "j" | "k":
                step = 1 if key == "j" else -1
                if self.is_complaints:
                    self.first = max(0, self.first + step)
                else:
                    self.cursor = max(0, min(self.cursor + step, len(self._visible) - 1))
                    self._choose()

    def _choose(self) -> None:
        """Stay with the engine at the cursor. At the top of the table the cursor stays there."""
        is_fixed = self._visible and (self.cursor or self.is_details)
        self._chosen = _name(self._visible[self.cursor]) if is_fixed else None

    def _asked_order(self, key: str) -> tuple[str, dict[str, Any]]:
        """Return the order of a key for the engine at the cursor, as the screen shows it now."""
        word, weight = _ORDERS[key]
        engine = self._visible[self.cursor]
        body = {"instance_id": engine.instance_id, "tenant_id": engine.tenant_id, "weight": weight}
        return f"{word} {engine.instance_id}", body

    def note_end(self, reply: Future[Any]) -> None:
        """Note how an order ended."""
        assert self.order is not None
        words, self.order = self.order[0], None
        try:
            reply.result()
            self.outcome = f"{words}: done"
        except WaymarkError as error:
            self.outcome = f"{words}: {error}"

    def rows(self, publishers: Sequence[Publisher]) -> list[Publisher]:
        """Return the publishers that pass the filter, in order."""
        wanted = [
            publisher
            for publisher in publishers
            if self.filter in f"{publisher.instance_id} {publisher.model_name} {publisher.status}"
        ]
        value_of = SORTS[self.sort]
        ordered = sorted(wanted, key=lambda publisher: (publisher.instance_id, publisher.dp_rank))
        ordered.sort(
            key=lambda publisher_row: value_of(publisher_row, self._rates.get(_name(publisher_row), 0.0)),
            reverse=not self.is_reversed,
        )
        return ordered

    def parts(self, answer: WorkersAnswer, lines: int) -> list[ScreenPart]:
        """Return the screen, in at most ``lines`` lines."""
        rows = self._visible = [row for row in self.rows(answer.publishers) if row.complaint or not self.is_complaints]
        room = max(1, lines - _OTHER_LINES)
        if self._chosen is not None and not self.is_complaints:
            names = list(map(_name, rows))
            if self._chosen in names:
                self.cursor = names.index(self._chosen)
            else:  # it is not registered any more
                self._chosen, self.is_details = None, False
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        if not self.is_complaints:
            self.first = max(self.cursor - room + 1, min(self.first, self.cursor))
        self.first = min(self.first, max(0, len(rows) - room))
        count = len(answer.publishers)
        filtered = f", filter {self.filter}{'_' if self.is_typing else ''}" if self.filter or self.is_typing else ""
        head = text(
            f"{several(count, 'stream')}, {several(len(answer.workers), 'ingest worker')}; sorted by {self.sort}"
            f"{' (reversed)' if self.is_reversed else ''}{filtered}",
            "bold",
        )
        if self.question:
            head = text(f"{self.question[0]}, all of its ranks? y: yes, any other key: no", "bold red")
        elif self.outcome:
            head = text(self.outcome, "bold")
        columns = ("ENGINE", "RANK", "STATUS", "STORED/S", *_MEDIA, "REQUESTS", "LAST EVENT", "COMPLAINT")
        if self.is_details and rows:
            return [head, *_details(rows[self.cursor])[: lines - 3], text(_HELP, "dim")]
        visible = [
            self._row(row, is_at_cursor=place == self.cursor)
            for place, row in enumerate(rows[self.first : self.first + room], start=self.first)
        ]
        hidden = len(rows) - self.first - len(visible)
        footer = text(f"{f'{hidden} more below  ' if hidden > 0 else ''}{_HELP}", "dim")
        if self.is_complaints:  # which may need several lines each
            sentences = [text(f"{row.instance_id} rank {row.dp_rank}: {row.complaint}", "yellow") for row in rows]
            return [head, footer, *(sentences[self.first :] or [text("no engine has a complaint", "green")])]
        return [head, Grid(columns, visible, frozenset(columns[3:-1]) | {"RANK"}, _SPARE, columns[-1]), footer]

    def _row(self, publisher: Publisher, *, is_at_cursor: bool) -> tuple[Any, ...]:
        blocks = publisher.blocks
        return (
            text(publisher.instance_id, "reverse" if is_at_cursor else ""),
            text(publisher.dp_rank),
            state(publisher),
            text("" if self._looks < 2 else f"{self._rates.get(_name(publisher), 0.0):.0f}"),
            *(text(blocks.get(medium, 0)) for medium in _MEDIA),
            text(publisher.load.requests),
            text("" if publisher.lag_seconds is None else seconds_text(publisher.lag_seconds)),
            text(publisher.complaint or "", "yellow"),
        )


def _name(publisher: Publisher) -> _EngineName:
    return publisher.instance_id, publisher.tenant_id, publisher.dp_rank, publisher.endpoint or ""


def _details(publisher: Publisher) -> list[ScreenPart]:
    """Return the facts about an engine's rank, a line each."""
    load, age = publisher.load, publisher.lag_seconds
    values: dict[str, Any] = {name: getattr(publisher, name) for name in _DETAILS}
    values |= {
        "weight": f"{publisher.weight:g}",
        "requests": f"{load.requests}, {load.tokens} tokens to compute",
        "last event": "" if age is None else f"{seconds_text(age)} ago",
        "blocks": ", ".join(f"{medium} {count}" for medium, count in publisher.blocks.items()),
        "counters": ", ".join(f"{name} {count}" for name, count in publisher.counters.items() if count),
        "last error": publisher.last_error,
    }
    title = f"{publisher.instance_id} rank {publisher.dp_rank}"
    lines: list[ScreenPart] = [joined(text(title, "bold"), ": ", state(publisher))]
    lines += [text(f"{name:13} {value}") for name, value in values.items() if value not in ("", None)]
    return [*lines, text(publisher.complaint or "", "yellow")]


def run(service: RemoteService, seconds: float, screen: Screen) -> None:
    """Draw until ``q``; into a file or a pipe only once, after two readings, since a rate needs two."""
    view = TopView()
    answer = service.workers()
    view.saw(answer.publishers, time.monotonic())
    if screen.is_plain or not sys.stdin.isatty():
        time.sleep(seconds)
        answer = service.workers()
        view.saw(answer.publishers, time.monotonic())
        screen.show(view.parts(answer, _OTHER_LINES + len(answer.publishers))[:-1])
        return
    with _keys(), screen.live() as draw:
        due = time.monotonic() + seconds
        trouble, decoder = "", getincrementaldecoder("utf-8")("ignore")
        asked: Future[Any] | None = None
        order_reply: Future[Any] | None = None
        while not view.is_over:
            screen_parts = view.parts(answer, screen.height)
            draw([text(trouble, "bold red"), *screen_parts] if trouble else screen_parts)
            is_waiting = asked is not None or order_reply is not None
            wait = _POLL_SECONDS if is_waiting else max(0.0, due - time.monotonic())
            if select.select([sys.stdin], [], [], wait)[0]:
                # Past the buffer of Python, in which ``select`` would not see the next key.
                typed = os.read(sys.stdin.fileno(), 1)
                if not typed:
                    return  # the terminal has gone
                if key := decoder.decode(typed):
                    view.key(key)
            elif asked is None and time.monotonic() >= due:
                asked = _asked(service.workers)
            if view.order is not None and order_reply is None:
                order_reply = _asked(partial(service.post, "/weight", view.order[1]))
            if order_reply is not None and order_reply.done():
                view.note_end(order_reply)
                order_reply, due = None, time.monotonic()
            if asked is None or not asked.done():
                continue
            due = time.monotonic() + seconds
            try:
                answer, trouble = asked.result(), ""
                view.saw(answer.publishers, time.monotonic())
            except ServiceUnreachable:
                trouble = f"no Waymark answers at {service.url}; trying again"
            except ServiceRefused as error:
                if not may_pass(error):
                    raise
                trouble = f"{error}; trying again"
            asked = None


def _asked(question: Callable[[], Any]) -> Future[Any]:
    """Ask in a thread of its own, so that keys are read meanwhile and ``q`` never has to wait."""
    coming: Future[Any] = Future()

    def ask() -> None:
        try:
            coming.set_result(question())
        except Exception as error:  # of any kind: the reader of the answer raises it again
            coming.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return coming


@contextmanager
def _keys() -> Iterator[None]:
    """Switch to single keys without echo inside."""
    attributes = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)

"""``waymark top``: the engines of a running Waymark, drawn again every few seconds, sorted and filtered by keys.

``TopView`` has the state that keys change, and draws it, without a terminal; ``run`` has the terminal.
"""

from __future__ import annotations

import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from waymark.base.errors import ServiceUnreachable
from waymark.base.shown import several
from waymark.console.publishers import complaint, drains, state
from waymark.console.screen import STATUS_STYLES, Grid, Screen, ScreenPart, text
from waymark.console.service import RemoteService
from waymark.console.units import seconds_text
from waymark.domain.media import IN_EVERY_ANSWER

PublisherAnswer: TypeAlias = Mapping[str, Any]

#: The media with a column.
_MEDIA = IN_EVERY_ANSWER
_HELP = "q quit   s sort   r reverse   / filter   j k scroll   c complaints"
_SPARE = (*reversed(_MEDIA[1:]), "LAG", "RANK", "COMPLAINT", _MEDIA[0], "STORED/S")
_WORST = tuple(reversed(STATUS_STYLES))
#: Lines of the screen besides publishers: an error, the head, the table's head, the help, and a spare one.
_OTHER_LINES = 5
#: How often a pending answer is looked for between keys.
_POLL_SECONDS = 0.05


def _blocks(publisher: PublisherAnswer) -> int:
    return sum(publisher["blocks"].values())


#: Sort key -> the value to sort rows by; the greatest comes first.
SORTS: dict[str, Callable[[PublisherAnswer, float], Any]] = {
    "stored/s": lambda publisher, rate: rate,
    "requests": lambda publisher, rate: publisher["load"]["requests"],
    "blocks": lambda publisher, rate: _blocks(publisher),
    "status": lambda publisher, rate: -_WORST.index(publisher["status"]),
    "lag": lambda publisher, rate: publisher["lag_seconds"] or 0.0,
}


@dataclass
class TopView:
    """The state of the screen: the order, the filter and the position."""

    sort: str = "stored/s"
    is_reversed: bool = False
    filter: str = ""
    is_typing: bool = False
    """The keys are letters of the filter."""
    is_complaints: bool = False
    """The complaints are shown whole, in the place of the table."""
    first: int = 0
    is_over: bool = False
    _looks: int = 0
    _stored: dict[tuple[str, str, int], tuple[float, int]] = field(default_factory=dict)
    _rates: dict[tuple[str, str, int], float] = field(default_factory=dict)

    def saw(self, publishers: Sequence[PublisherAnswer], now: float) -> None:
        """Take a new answer: the rates are the blocks stored since the one before."""
        stored, rates = {}, {}
        for publisher in publishers:
            name, count = _name(publisher), publisher["counters"].get("blocks_stored", 0)
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
        match key:
            case "q":
                self.is_over = True
            case "s":
                names = list(SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "/":
                self.is_typing, self.filter, self.first = True, "", 0
            case "c":
                self.is_complaints, self.first = not self.is_complaints, 0
            case "j":
                self.first += 1
            case "k":
                self.first = max(0, self.first - 1)

    def rows(self, publishers: Sequence[PublisherAnswer]) -> list[PublisherAnswer]:
        """Return the publishers that pass the filter, in order."""
        wanted = [
            publisher
            for publisher in publishers
            if self.filter in f"{publisher['instance_id']} {publisher['model_name']} {publisher['status']}"
        ]
        value_of = SORTS[self.sort]
        ordered = sorted(wanted, key=lambda publisher: (publisher["instance_id"], publisher["dp_rank"]))
        ordered.sort(
            key=lambda publisher_row: value_of(publisher_row, self._rates.get(_name(publisher_row), 0.0)),
            reverse=not self.is_reversed,
        )
        return ordered

    def parts(self, answer: Mapping[str, Any], lines: int) -> list[ScreenPart]:
        """Return the screen, in so many lines."""
        rows = [row for row in self.rows(answer["publishers"]) if complaint(row) or not self.is_complaints]
        room = max(1, lines - _OTHER_LINES)
        self.first = min(self.first, max(0, len(rows) - room))
        count = len(answer["publishers"])
        filtered = f", filter {self.filter}{'_' if self.is_typing else ''}" if self.filter or self.is_typing else ""
        head = text(
            f"{several(count, 'stream')}, {several(len(answer['workers']), 'ingest worker')}; sorted by {self.sort}"
            f"{' (reversed)' if self.is_reversed else ''}{filtered}",
            "bold",
        )
        columns = ("ENGINE", "RANK", "STATUS", "STORED/S", *_MEDIA, "REQUESTS", "LAG", "COMPLAINT")
        drain = dict(zip(map(id, answer["publishers"]), drains(answer["publishers"]), strict=True))
        visible = [self._row(row, drain[id(row)]) for row in rows[self.first : self.first + room]]
        hidden = len(rows) - self.first - len(visible)
        footer = text(f"{_HELP}{f'   {hidden} more below' if hidden > 0 else ''}", "dim")
        if self.is_complaints:  # which may need several lines each
            sentences = [
                text(f"{row['instance_id']} rank {row['dp_rank']}: {complaint(row)}", "yellow") for row in rows
            ]
            return [head, footer, *(sentences[self.first :] or [text("no engine has a complaint", "green")])]
        return [head, Grid(columns, visible, frozenset(columns[3:-1]) | {"RANK"}, _SPARE, columns[-1]), footer]

    def _row(self, publisher: PublisherAnswer, drain: str) -> tuple[Any, ...]:
        blocks = publisher["blocks"]
        return (
            text(publisher["instance_id"]),
            text(publisher["dp_rank"]),
            state(publisher, drain),
            text("" if self._looks < 2 else f"{self._rates.get(_name(publisher), 0.0):.0f}"),
            *(text(blocks.get(medium, 0)) for medium in _MEDIA),
            text(publisher["load"]["requests"]),
            text("" if publisher["lag_seconds"] is None else seconds_text(publisher["lag_seconds"])),
            text(complaint(publisher), "yellow"),
        )


def _name(publisher: PublisherAnswer) -> tuple[str, str, int]:
    return publisher["instance_id"], publisher["tenant_id"], publisher["dp_rank"]


def run(service: RemoteService, seconds: float, screen: Screen) -> None:
    """Draw until ``q``; into a file or a pipe once, after a second look: a rate is of two."""
    view = TopView()
    answer = service.get("/workers")
    view.saw(answer["publishers"], time.monotonic())
    if screen.is_plain or not sys.stdin.isatty():
        time.sleep(seconds)
        answer = service.get("/workers")
        view.saw(answer["publishers"], time.monotonic())
        screen.show(view.parts(answer, _OTHER_LINES + len(answer["publishers"]))[:-1])
        return
    with _keys(), screen.live() as draw:
        due = time.monotonic() + seconds
        trouble = ""
        asked: Future[Any] | None = None
        while not view.is_over:
            screen_parts = view.parts(answer, screen.height)
            draw([text(trouble, "bold red"), *screen_parts] if trouble else screen_parts)
            wait = _POLL_SECONDS if asked is not None else max(0.0, due - time.monotonic())
            if select.select([sys.stdin], [], [], wait)[0]:
                view.key(sys.stdin.read(1))
            elif asked is None:
                asked = _asked(service)
            if asked is None or not asked.done():
                continue
            due = time.monotonic() + seconds
            try:
                answer, trouble = asked.result(), ""
                view.saw(answer["publishers"], time.monotonic())
            except ServiceUnreachable:
                trouble = f"no Waymark answers at {service.url}; trying again"
            asked = None


def _asked(service: RemoteService) -> Future[Any]:
    """Ask in a thread of its own, so that keys are read meanwhile and ``q`` never has to wait."""
    coming: Future[Any] = Future()

    def ask() -> None:
        try:
            coming.set_result(service.get("/workers"))
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

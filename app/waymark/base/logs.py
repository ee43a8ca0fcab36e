"""One handler on stderr, as text or as JSON lines.

A line is a constant sentence with fields after it, so that one can search for the sentence and count by a field:

    log = logging.getLogger(__name__)
    log.info("stream resynced", extra=fields(stream=str(name), missing=7))

    2026-04-01T12:00:00.123Z INFO waymark.ingest.worker: stream resynced stream="vllm-0|default|0" missing=7
    {"time": "2026-04-01T12:00:00.123Z", "level": "info", "logger": "waymark.ingest.worker",
     "message": "stream resynced", "stream": "vllm-0|default|0", "missing": 7}

Fields contain numbers and names, never any text of a prompt. As a safeguard, values of fields named like a secret and
passwords inside URLs are starred out, in tracebacks too. A line is one line, whatever a client's name holds; only a
traceback in text form has several.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from waymark.base.shown import seen

_SECRET_FIELDS = frozenset({"api_token", "authorization", "password", "secret"})
_URL_PASSWORD = re.compile(r"(?<=://)[^\s/]*@")
_FRAMES_MAX = 8
_PLAIN = re.compile(r"[\w.:/+*@-]+")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the argument of ``extra=``; any name may be used; it cannot clash with logging's own."""
    return {"fields": values}


def failure(error: BaseException) -> dict[str, object]:
    """Return the fields of an unexpected exception: its type, and where it was raised, innermost call first.

    Its text is left out: it may contain a client's text.
    """
    frames = reversed(traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:])
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return {"error": type(error).__name__, "at": places}


def configure(level: str, log_format: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Make ours the only handler of the process. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # uvicorn's logger is called "error" at every level; the process itself logs the events that uvicorn logs at INFO.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))


class TextFormatter(logging.Formatter):
    """Log lines for people: time, level, logger, sentence, fields by name, and a traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = (f" {name}={_text(value)}" for name, value in _fields(record).items())
        sentence = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname} {record.name}: {sentence}{''.join(pairs)}"
        trace = _traceback(self, record)
        return _safe(f"{line}\n{trace}" if trace else line)


class JsonFormatter(logging.Formatter):
    """Log lines for programs: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry = {**entry, **_fields(record), **entry}
        trace = _traceback(self, record)
        if trace:
            entry["traceback"] = trace
        return _safe(json.dumps(entry, default=str, ensure_ascii=False))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    values: dict[str, object] = getattr(record, "fields", {})
    return {name: "***" if name in _SECRET_FIELDS else value for name, value in values.items()}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def _text(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _safe(line: str) -> str:
    """Return the line without passwords, and without characters that a terminal would obey."""
    return seen(_URL_PASSWORD.sub("***@", line))

"""logs: a constant sentence with fields, one line each, nothing secret."""

from __future__ import annotations

import io
import json
import logging
from typing import Any, Literal

import pytest
from pydantic import SecretStr

from waymark.base.logs import configure, fields

log = logging.getLogger("waymark.test")


@pytest.fixture(autouse=True)
def _no_other_handlers(_logging_as_before: None) -> None:
    logging.getLogger().handlers = []


def start(log_format: Literal["text", "json"], level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(level, log_format, stream)
    return stream


def only_entry(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    entry: dict[str, Any] = json.loads(line)
    return entry


def test_a_text_line_has_the_sentence_and_then_the_fields() -> None:
    stream = start("text")
    log.info("stream resynced", extra=fields(stream="vllm-0|default|0", missing=7))
    time, rest = stream.getvalue().split(" ", 1)
    assert time.endswith("Z")
    assert rest == 'INFO waymark.test: stream resynced stream="vllm-0|default|0" missing=7\n'


def test_a_json_line_is_one_object() -> None:
    stream = start("json")
    log.warning("stream resynced", extra=fields(stream="vllm-0", missing=7))
    entry = only_entry(stream)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "logger": "waymark.test",
        "message": "stream resynced",
        "stream": "vllm-0",
        "missing": 7,
    }


def test_lines_below_the_level_are_not_written() -> None:
    stream = start("text", "warning")
    log.info("not this one")
    log.warning("this one")
    assert stream.getvalue().count("\n") == 1


def test_a_field_never_takes_the_place_of_what_every_line_has() -> None:
    stream = start("json")
    log.info("the sentence", extra=fields(message="another", name="x", args=1))
    entry = only_entry(stream)
    assert (entry["message"], entry["name"], entry["args"]) == ("the sentence", "x", 1)


@pytest.mark.parametrize("mark", ["\n", "\r", "\x85", "\u2028", "\x9b2J", "\u202e", "\x7f"], ids=ascii)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_name_with_a_newline_or_a_control_stays_on_its_line(log_format: Literal["text", "json"], mark: str) -> None:
    stream = start(log_format)
    name = f"a{mark}2026 ERROR forged"
    log.info("registered", extra=fields(instance_id=name))
    (line,) = stream.getvalue().splitlines()
    assert mark not in line
    said = line.partition("instance_id=")[2] if log_format == "text" else line
    assert json.loads(said) == name if log_format == "text" else json.loads(said)["instance_id"] == name


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_secret_is_written(log_format: Literal["text", "json"]) -> None:
    stream = start(log_format)
    try:
        raise ConnectionError("redis://user:hunter2@cache:6379 refused")
    except ConnectionError:
        log.exception(
            "cannot reach redis://:hunter2@cache",
            extra=fields(url="redis://:hunter2@cache", password="hunter2", api_token=SecretStr("hunter2")),
        )
    written = stream.getvalue()
    assert "hunter2" not in written
    assert "redis://***@cache" in written
    assert "ConnectionError" in written


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = start("text"), start("text")
    log.info("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)

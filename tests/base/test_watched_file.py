"""A file that is read again when it changes, and what stays valid while that fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from waymark.base.errors import SettingsError
from waymark.base.watched_file import WatchedFile


class Reader:
    """Reads the words of a file, unless it is short of something."""

    def __init__(self) -> None:
        self.is_short = False

    def __call__(self, path: Path) -> Sequence[str]:
        if self.is_short:
            raise SettingsError("too many open files")
        try:
            return path.read_text().split()
        except OSError as error:
            raise SettingsError(f"no file: {error.strerror}") from None


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_a_change_that_could_not_be_read_is_read_later_though_the_file_stays_as_it_is(
    path: Path, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader()
    watched = WatchedFile(path, reader, "words", lambda: now[0])
    path.write_text("one two")
    reader.is_short = True
    for now[0] in (1.0, 2.0, 3.0):
        assert watched.entries == ["one"]
    # It is said once.
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    reader.is_short = False
    assert watched.entries == ["one"], "a file is looked at once a second"
    now[0] = 4.0
    assert watched.entries == ["one", "two"]


def test_a_file_that_goes_and_comes_back_is_read_again(
    path: Path, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    watched = WatchedFile(path, Reader(), "words", lambda: now[0])
    for number in (1, 2):
        path.unlink()
        now[0] += 1
        assert watched.entries == ["one"] * number
        path.write_text(" ".join(["one"] * (number + 1)))
        now[0] += 1
        assert watched.entries == ["one"] * (number + 1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2

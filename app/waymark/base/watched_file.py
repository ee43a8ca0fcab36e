"""A file, read again when it changes; after a change that cannot be read, the earlier entries stay."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from waymark.base.errors import SettingsError
from waymark.base.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

FileVersion: TypeAlias = tuple[int, int, int]
"""The modification time, the size and the inode number of a file, which together identify its contents."""

_POLL_SECONDS = 1.0


def version_of(path: Path) -> FileVersion | None:
    """Return the version of a file; None if it cannot be found."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class WatchedFile(Generic[T]):
    """The entries that ``read`` makes of a file; ``what`` names them in the log.

    Raise ``SettingsError`` if the file cannot be read at the start.
    """

    def __init__(
        self, path: Path, reader: Callable[[Path], Sequence[T]], label: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._read = reader
        self._what = label
        self._clock = clock
        self._polled = clock()
        self._version = version_of(self._path)
        self._problem = ""
        self._entries = reader(path)

    @property
    def entries(self) -> Sequence[T]:
        """The entries as they are now; the file is looked at once a second, at most."""
        now = self._clock()
        if now - self._polled >= _POLL_SECONDS:
            self._polled = now
            self._poll()
        return self._entries

    def _poll(self) -> None:
        version = version_of(self._path)
        if version == self._version:
            self._problem = ""
            return
        try:
            self._entries = self._read(self._path)
        except SettingsError as exc:
            # The file is read again in any case: the process may only be short of file descriptors for a moment.
            if str(exc) != self._problem:
                self._problem = str(exc)
                log.error(
                    f"{self._what} file cannot be used, the previous {self._what} stay valid",
                    extra=fields(error=str(exc)),
                )
        else:
            self._version, self._problem = version, ""
            log.info(f"{self._what} file read again", extra=fields(**{self._what: len(self._entries)}))

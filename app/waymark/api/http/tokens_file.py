"""The file of API tokens, which says by the SHA-256 of each token who may call, and for which tenants.

The file is a JSON list. It is read again when it has changed. If it cannot be read then, the old tokens stay valid.
Neither the file nor this process has the tokens themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import orjson

from waymark.base.errors import SettingsError
from waymark.base.record import record
from waymark.base.shown import kind, shown
from waymark.base.watched_file import WatchedFile

TOKENS_MAX = 1000
_FILE_BYTES_MAX = 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENTRY = '{"name": "team-a", "sha256": "<64 hex digits>", "tenants": ["a"], "access": "read"}'


@record(frozen=True, slots=True)
class Caller:
    """A caller, with the rights of its token."""

    name: str = ""
    tenants: frozenset[str] | None = None
    """The tenants that it may see; None for all, also future ones."""
    may_write: bool = True

    def has(self, tenant_id: str) -> bool:
        """Return whether it may see and change the tenant's objects."""
        return self.tenants is None or tenant_id in self.tenants


EVERYONE: Final = Caller()
"""A caller without limits."""


class TokensFile:
    """The tokens of a file. Raise ``SettingsError`` if it cannot be read at the start."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = WatchedFile(path, _read, "tokens", clock)
        self._entries: Sequence[tuple[str, Caller]] = ()
        self._callers: dict[str, Caller] = {}

    def caller(self, token: bytes) -> Caller | None:
        """Return the caller of a token. It is found by its digest, so the time that this takes does not show how much
        of a token is right.
        """
        entries = self._file.entries
        if entries is not self._entries:
            self._entries, self._callers = entries, dict(entries)
        return self._callers.get(sha256(token).hexdigest())


def _read(path: Path) -> list[tuple[str, Caller]]:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
        entries = orjson.loads(raw) if len(raw) <= _FILE_BYTES_MAX else None
    except (OSError, orjson.JSONDecodeError) as exc:
        raise SettingsError(f"WAYMARK_API_TOKENS_FILE {shown(str(path))} cannot be read: {exc}") from None
    if not isinstance(entries, list) or len(entries) > TOKENS_MAX:
        raise SettingsError(
            f"WAYMARK_API_TOKENS_FILE {shown(str(path))} must be a JSON list of at most {TOKENS_MAX} entries such as "
            f"{_ENTRY}"
        )
    tokens: list[tuple[str, Caller]] = []
    for number, entry in enumerate(entries, 1):
        complaint = _complaint(entry, {caller.name for _, caller in tokens}, {digest for digest, _ in tokens})
        if complaint:
            raise SettingsError(f"WAYMARK_API_TOKENS_FILE, entry {number}: {complaint}")
        tenants = None if entry["tenants"] == ["*"] else frozenset(entry["tenants"])
        tokens.append((entry["sha256"], Caller(entry["name"], tenants, entry["access"] == "write")))
    return tokens


def _complaint(entry: Any, names: set[str], digests: set[str]) -> str:
    """Return a sentence about the mistake in an entry, or an empty text. No digest is shown."""
    if not isinstance(entry, dict):
        return f"it is {kind(entry)}; give {_ENTRY}"
    unknown = entry.keys() - {"name", "sha256", "tenants", "access"}
    name, digest, tenants, access = (entry.get(field) for field in ("name", "sha256", "tenants", "access"))
    if unknown:
        return f"{shown(min(unknown))} is no field of it; give {_ENTRY}"
    if not isinstance(name, str) or not name or name in names:
        return f"name is {shown(name)}; give each token a name of its own"
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or digest in digests:
        return (
            "sha256 is not 64 hex digits in lower case, or is there twice; "
            "printf %s TOKEN | sha256sum | cut -d ' ' -f 1 prints it"
        )
    is_list = isinstance(tenants, list) and tenants and all(isinstance(tenant, str) and tenant for tenant in tenants)
    if not is_list or ("*" in tenants and tenants != ["*"]):  # type: ignore[operator]
        return 'tenants is no list of tenants; give ["*"] for all'
    if access not in ("read", "write"):
        return f"access is {shown(access)}; give read or write"
    return ""

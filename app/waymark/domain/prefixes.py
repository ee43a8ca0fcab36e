"""Opaque prefixes, which a source reports by its own hashes, without tokens or blocks.

A source has two holders, one for prefixes on the device (hot) and one for prefixes in storage (warm). An entry is a
prefix of one holder, with a number of tokens; it expires.
"""

from __future__ import annotations

import re
from enum import StrEnum
from hashlib import sha256
from typing import Final, NamedTuple

from waymark.base.record import record
from waymark.domain.media import BEST, STORAGE
from waymark.domain.targets import is_url

TTL_SECONDS_MAX: Final = 86_400
ENTRIES_MIN: Final = 100
ENTRIES_MAX: Final = 10_000_000
RECONNECT_MILLISECONDS_MAX: Final = 60_000

HOT: Final = BEST.name
WARM: Final = STORAGE

_PREFIX_HASH = re.compile(r"[0-9A-Fa-f]{1,128}", re.ASCII)


@record(frozen=True, slots=True)
class PrefixSource:
    """The options that a source's registration sets for its entries. The defaults are the same as in Continuum
    Router.
    """

    storage_offloading: bool = False
    """Whether blocks that leave the device remain in storage."""
    treat_eviction_as_offload: bool = True
    """Whether an eviction that names no medium leaves the prefix in storage, if the source offloads."""
    entry_ttl_seconds: int = 600
    max_entries: int = 100_000
    reconnect_interval_ms: int | None = None
    """The pause before the first attempt to reconnect; None: one second."""


DEFAULT: Final = PrefixSource()


class PrefixEvent(StrEnum):
    """An event of a source, by the source's own name for it."""

    CREATED = "cache_created"
    RELOADED = "cache_reloaded"
    OFFLOADED = "cache_offloaded"
    EVICTED = "cache_evicted"
    PURGED = "cache_purged"


class Change(StrEnum):
    """The effect of an event on the entries of its prefix. The script ``apply_prefixes`` knows these words."""

    HOT = "hot"
    """The prefix is on the device, and nowhere else."""
    WARM = "warm"
    """The prefix is in storage, and nowhere else."""
    DEMOTE = "demote"
    """An entry on the device moves to storage. A prefix without an entry on the device stays without one."""
    REMOVE = "remove"
    """The prefix is neither on the device nor in storage."""
    FORGET_HOT = "forget_hot"
    """A bound was reached: the entry on the device is removed."""
    FORGET_WARM = "forget_warm"


class PrefixChange(NamedTuple):
    """One change of one prefix."""

    key: str
    """32 hex digits, from ``prefix_key``."""
    change: Change
    tokens: int | None = None
    """The length of the prefix. None if the event does not give it, and then the length does not change."""


def change_of(event: PrefixEvent, source: PrefixSource) -> Change:
    """Return the effect of an event under the options of its source."""
    match event:
        case PrefixEvent.CREATED | PrefixEvent.RELOADED:
            return Change.HOT
        case PrefixEvent.OFFLOADED if source.storage_offloading:
            return Change.WARM
        case PrefixEvent.EVICTED if source.storage_offloading and source.treat_eviction_as_offload:
            return Change.DEMOTE
    return Change.REMOVE


SOURCE: Final = "an http or https URL, where no part of the path is '.' or '..' or has an '@'"
"""The form that ``is_source`` requires, in the words of an error."""


def is_source(text: str) -> bool:
    """Return whether an event stream may be read from a URL. Its path must be normalized."""
    path = text.partition("://")[2].partition("?")[0]
    return is_url(text) and "@" not in text and {".", ".."}.isdisjoint(path.split("/"))


def is_prefix_hash(text: str) -> bool:
    """Return whether a text is a prefix hash: 1 to 128 hex digits."""
    return _PREFIX_HASH.fullmatch(text) is not None


def prefix_key(prefix_hash: str) -> str:
    """Return the name of a prefix in keys, as 32 hex digits. Upper and lower case make no difference in
    ``prefix_hash``.
    """
    return sha256(prefix_hash.lower().encode()).hexdigest()[:32]

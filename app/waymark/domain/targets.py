"""The facts about a publisher that a decision needs besides its blocks: address, role, and the load that the engine
reports.

They do not change the meaning of the publisher's blocks, so they may change while the blocks stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from functools import lru_cache

from waymark.base.record import record

LABELS_MAX = 64
#: The most bytes of UTF-8 in the name of a label, and in its value.
LABEL_BYTES_MAX = 256
WEIGHT_MAX = 1e6
#: The bound on the KV bytes of a token, and on the speed of copies.
KV_NUMBER_MAX = 1e9
#: The bounds on the number of an engine's adapters, and of further names of its model.
ADAPTERS_MAX = 256
_URL_CHARACTERS_MAX = 2048


#: Headers that tell proxies, sidecars and engines which other engines take part in a request, for example the one to
#: copy blocks from. With such a header a client could choose where an engine connects to.
_ENGINE_HEADERS = frozenset(
    {
        "x-data-parallel-host-port", "x-decoder-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port",
        "x-prefiller-host-port", "x-prefiller-url",
    }
)  # fmt: skip
#: The second one is also the beginning of the headers that say which endpoints may be chosen, and which one answered.
_ENGINE_HEADERS_BEGIN = ("mif-", "x-gateway-destination-endpoint")


class Role(StrEnum):
    """The work of a target, in a fleet with separate engines for prefill, decode and image encoding."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"
    ENCODE_PREFILL = "encode-prefill"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


@record(frozen=True, slots=True)
class Target:
    """The part of a registration that a router needs."""

    address: str | None = None
    """``http://host:port``, the destination of its requests."""
    role: Role = Role.BOTH
    weight: float = 1.0
    """The size of the target relative to others; with 0 it gets no new requests."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    metrics_url: str | None = None
    """The URL of its gauges, unless it is ``/metrics`` of its address."""
    adapters: tuple[str, ...] = ()
    """The adapters that the engine reports as loaded."""
    aliases: tuple[str, ...] = ()
    """Further names under which the engine serves the model."""
    release: str | None = None
    """The release that the engine reports."""
    query_endpoint: str | None = None
    """The HTTP address of the master of its pool, which decisions ask if the pool sends no events."""
    query_parts: int = 0
    """The number of objects of the pool that make up a block; 0 if it is unknown."""
    query_keys: tuple[str, ...] = ()
    """The forms of the keys of its blocks in the pool; empty: those of SGLang."""
    kv_source: str | None = None
    """``tcp://host:port``, from which other engines copy its blocks; None if they cannot."""
    kv_bytes_per_token: float = 0.0
    """The KV bytes of a token; 0 if unknown."""
    transfer_gbps: float = 0.0
    """The speed of a copy, in gigabits per second; 0 if unknown."""
    takes_kv_hints: bool = False
    """Whether the engine reads the request field ``kv_hints``."""


PLAIN = Target()
"""The target of a registration without target fields."""

URL = "an http or https URL of at most 2048 characters"
"""The form that ``is_url`` requires, in the words of an error."""
_HOST_AND_PORT = r"(?P<location>(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?)"
_ADDRESS = re.compile(rf"(?P<scheme>https?)://{_HOST_AND_PORT}(?:/[!-~]*)?", re.ASCII)


def is_url(text: str) -> bool:
    """Return whether requests may be sent to ``text``."""
    match = _ADDRESS.fullmatch(text)
    if match is None or len(text) > _URL_CHARACTERS_MAX:
        return False
    return match["port"] is None or 0 < int(match["port"]) < 65536


def names_engines(header: str) -> bool:
    """Return whether a header, in lower case, names engines that take part in a request, so that only a decision may
    set it.
    """
    return header in _ENGINE_HEADERS or header.startswith(_ENGINE_HEADERS_BEGIN)


ENGINE_URL = f"{URL} without a user, a query and a fragment"
"""The form that ``is_engine_url`` requires, in the words of an error."""


def is_engine_url(text: str) -> bool:
    """Return whether ``text`` can be the base of an engine's URLs, to which Waymark appends paths."""
    return is_url(text) and not set("?#") & set(text)


#: Each decision needs the addresses of its targets again.
@lru_cache(maxsize=4096)
def host_and_port(address: str) -> str:
    """Return ``10.0.0.7:8000`` for ``http://10.0.0.7:8000``, which is how proxies name an endpoint. A missing port
    becomes that of the scheme.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return address
    return match["location"] if match["port"] else f"{match['location']}:{443 if match['scheme'] == 'https' else 80}"


@record(frozen=True, slots=True)
class Gauges:
    """One reading of an engine's metrics."""

    waiting: int = 0
    """The number of requests in the engine's queue."""
    running: int = 0
    """The number of requests that the engine computes."""
    kv_usage: float = 0.0
    """The used share of the engine's KV cache, 0 to 1."""
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    adapters_max: int = 0

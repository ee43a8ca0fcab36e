"""The facts of a publisher that a decision needs besides its blocks: its address and role, and its own load.

They do not change the meaning of the publisher's blocks, so they may change while the blocks stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

LABELS_MAX = 64
#: Bytes of UTF-8 of a label's name, and of its value.
LABEL_BYTES_MAX = 256
WEIGHT_MAX = 1e6
#: Of the size of a token's blocks, and of the speed of copies.
KV_NUMBER_MAX = 1e9
#: The bounds on an engine's kept adapters, and on further names of its model.
ADAPTERS_MAX = 256
_URL_CHARACTERS_MAX = 2048


#: Headers by which proxies, sidecars and engines learn which other engines take part in a request, such as the one to
#: copy blocks from. A client with one of these headers could choose where an engine connects to.
_PLACE_HEADERS = frozenset(
    {
        "x-data-parallel-host-port", "x-decoder-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port",
        "x-prefiller-host-port", "x-prefiller-url",
    }
)  # fmt: skip
#: The second one also begins the names that say which endpoints may be chosen, and which one has answered.
_PLACE_HEADERS_BEGIN = ("mif-", "x-gateway-destination-endpoint")


class Role(StrEnum):
    """The work of a target, in a fleet with separate engines for prefill, decode and image encoding."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"
    ENCODE_PREFILL = "encode-prefill"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"


@dataclass(frozen=True, slots=True)
class Target:
    """A registration as a router sees it."""

    address: str | None = None
    """``http://host:port``: the destination of its requests."""
    role: Role = Role.BOTH
    weight: float = 1.0
    """The size of the target relative to others; 0: it takes no new requests."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    metrics_url: str | None = None
    """The URL of its gauges, unless it is ``/metrics`` of its address."""
    adapters: tuple[str, ...] = ()
    """The adapters that the engine has loaded, by its own account."""
    aliases: tuple[str, ...] = ()
    """Further names under which the engine serves the model."""
    release: str | None = None
    """The release of the engine, by its own account."""
    query_endpoint: str | None = None
    """The HTTP address of the master of its pool, which decisions ask if the pool sends no events."""
    query_parts: int = 0
    """The number of objects of the pool that make up a block; 0 if it is unknown."""
    query_keys: tuple[str, ...] = ()
    """The forms of the keys of its blocks there; empty: those of SGLang."""
    kv_source: str | None = None
    """``tcp://host:port``: where other engines copy its blocks from; None: they cannot."""
    kv_bytes_per_token: float = 0.0
    """The size of a token's blocks; 0: not known."""
    transfer_gbps: float = 0.0
    """The speed of a copy, in gigabits a second; 0: not known."""
    takes_kv_hints: bool = False
    """Whether the engine reads the request field ``kv_hints``."""


PLAIN = Target()
"""The target of a registration without target fields."""

URL = "an http or https URL of at most 2048 characters"
"""The form that ``is_url`` requires, in the words of an error."""
_HOST_AND_PORT = r"(?P<place>(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?)"
_ADDRESS = re.compile(rf"(?P<scheme>https?)://{_HOST_AND_PORT}(?:/[!-~]*)?", re.ASCII)


def is_url(text: str) -> bool:
    """Return whether requests may be sent to ``text``."""
    match = _ADDRESS.fullmatch(text)
    if match is None or len(text) > _URL_CHARACTERS_MAX:
        return False
    return match["port"] is None or 0 < int(match["port"]) < 65536


def names_engines(header: str) -> bool:
    """Return whether a header, in lower case, names engines that take part in a request: only a decision sets it."""
    return header in _PLACE_HEADERS or header.startswith(_PLACE_HEADERS_BEGIN)


ENGINE_URL = f"{URL} without a user, a query and a fragment"
"""The form that ``is_engine_url`` requires, in the words of an error."""


def is_engine_url(text: str) -> bool:
    """Return whether ``text`` can begin the URLs of an engine's API: Waymark adds the end of each."""
    return is_url(text) and not set("?#") & set(text)


#: Each decision asks for the addresses of its targets again.
@lru_cache(maxsize=4096)
def host_and_port(address: str) -> str:
    """Return ``10.0.0.7:8000`` for ``http://10.0.0.7:8000``, as proxies name an endpoint; without a port, the usual one
    is added.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return address
    return match["place"] if match["port"] else f"{match['place']}:{443 if match['scheme'] == 'https' else 80}"


@dataclass(frozen=True, slots=True)
class Gauges:
    """One reading of an engine's metrics."""

    waiting: int = 0
    """Requests in its queue."""
    running: int = 0
    """Requests that it computes."""
    kv_usage: float = 0.0
    """The used share of its KV cache, 0 to 1."""
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    adapters_max: int = 0

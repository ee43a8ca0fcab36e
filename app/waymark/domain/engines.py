"""The differences between kinds of publishers, one row for each kind. No other module compares a kind with a name.

The row names the module of ``waymark.engines`` that reads the events of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

from waymark.base.record import record

Scope = Literal["instance", "shared"]
Copies = Literal["count", "set"]


class EngineKind(StrEnum):
    """The kind of a publisher: the field ``type`` of a registration."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    MOONCAKE = "Mooncake"
    STANDARD = "standard"
    CONTINUUM = "continuum"
    NONE = "none"

    @property
    def traits(self) -> EngineTraits:
        return TRAITS[self]


@record(frozen=True, slots=True)
class EngineTraits:
    """The properties of every publisher of one kind. The defaults suit a new and little known kind."""

    dialect: str
    """The module of ``waymark.engines`` that reads its events."""
    first_seq: int = 0
    """The number of its first batch."""
    copies: Copies = "set"
    """Whether it may store a block several times, and then removes each copy. This is the default for registrations."""
    removes_once_from: tuple[int, int] | None = None
    """The first release that removes a block once, after its last copy, although it stores each copy."""
    scope: Scope = "instance"
    """Whether all instances read from it. This is the default for registrations."""
    needs_endpoint: bool = True
    """Whether its events are read from a socket only."""
    tells_events: bool = True
    aliases: frozenset[str] = frozenset()
    """Other names of the kind, in lower case."""
    numbers_events: bool = False
    """Whether the event_ids of each of its streams rise by one."""
    is_opaque: bool = False
    """Whether it names prefixes by its own hashes, in an event stream over HTTP, so that their blocks are unknown."""
    may_alias: bool = True
    """Whether one of its hashes can come to name another block even on a device."""
    names_salts_off_device: bool = False
    """Whether stores off the device name their salt. For other engines, a store that names none may still have one."""
    is_asked_by_hash: bool = False
    """Whether its router asks an index for blocks by the hashes in its events."""
    snapshots: Literal["batches", "records"] = "batches"
    """What a snapshot of its cache consists of."""
    sockets_path: str = ""
    """The path of its HTTP API that names its event sockets."""
    has_saltless_releases: bool = False
    """Whether some releases cannot name a salt or an image at all. Their stores are counted."""

    @property
    def tells_blocks(self) -> bool:
        """Whether its events say which blocks it has."""
        return self.tells_events and not self.is_opaque


TRAITS: Final[Mapping[EngineKind, EngineTraits]] = MappingProxyType(
    {
        EngineKind.VLLM: EngineTraits(
            "vllm",
            copies="count",
            # The change is under review. No release up to 0.33 has it; events that show otherwise overrule this.
            removes_once_from=(0, 34),
            may_alias=False,
            sockets_path="/kv_event_sources",
            has_saltless_releases=True,
        ),
        EngineKind.SGLANG: EngineTraits(
            "sglang",
            copies="count",
            names_salts_off_device=True,
            is_asked_by_hash=True,
            snapshots="records",
            sockets_path="/server_info",
        ),
        EngineKind.MOONCAKE: EngineTraits("mooncake", first_seq=1, scope="shared"),
        EngineKind.STANDARD: EngineTraits("standard", needs_endpoint=False, numbers_events=True),
        EngineKind.CONTINUUM: EngineTraits("standard", aliases=frozenset({"sse"}), is_opaque=True),
        # Requests can be sent to it, but its cache is unknown.
        EngineKind.NONE: EngineTraits("standard", needs_endpoint=False, tells_events=False),
    }
)

KINDS: Final[Mapping[str, EngineKind]] = MappingProxyType(
    {kind.lower(): kind for kind in EngineKind}
    | {alias: kind for kind, traits in TRAITS.items() for alias in traits.aliases}
)
"""Each kind by its name and its aliases, in lower case."""
UNNAMED: Final = EngineKind.VLLM
"""The kind of a registration in a dialect that does not name kinds."""
WITHOUT_EVENTS: Final = next(kind for kind, traits in TRAITS.items() if not traits.tells_events)
"""The kind of an engine whose cache is unknown."""
OVER_HTTP: Final = next(kind for kind, traits in TRAITS.items() if traits.tells_events and not traits.needs_endpoint)
"""The kind whose events come by ``POST /events``."""


def naming_sockets_at(path: str) -> EngineKind:
    """Return the kind whose HTTP API names its event sockets at this path. Raise ``StopIteration`` if there is none."""
    return next(kind for kind, traits in TRAITS.items() if traits.sockets_path == path)


def kinds_where(trait: str, value: object) -> str:
    """List the kinds with this value of a trait, in the form of a sentence: ``vLLM and SGLang``."""
    names = [str(kind) for kind, traits in TRAITS.items() if getattr(traits, trait) == value]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

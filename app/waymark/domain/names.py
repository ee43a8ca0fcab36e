"""Small frozen values that name things: publishers, registrations, holders.

No function here does I/O. Names chosen by clients are only values, never parts of a Redis key.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from waymark.base.record import record
from waymark.domain.engines import Copies, EngineKind, Scope
from waymark.domain.prefixes import DEFAULT as DEFAULT_PREFIXES
from waymark.domain.prefixes import PrefixSource
from waymark.domain.targets import PLAIN, Target

# Windows of hybrid models: the blocks that a rank must have before a boundary, in addition to those of full
# attention. A layer with a sliding window needs the last blocks before the boundary, a state-space layer the state at
# the boundary. An engine has a KV-cache group for each such kind of layer. Here such a group has holders of its own,
# which count for no prefix; ``match`` finds the boundaries at which a rank can continue.


class Window(NamedTuple):
    """The blocks that a group must have before a boundary, so that a rank can continue there."""

    group: int
    """The KV-cache group."""
    tokens: int
    """The length in tokens; 1 for a state."""
    span: int
    """The number of tokens per block of the group."""

    def blocks(self, block_size: int) -> tuple[int, int]:
        """Return the window as a number of the group's blocks, and how many blocks of the prefix one of these
        covers.
        """
        span = max(self.span, block_size)
        return -(-self.tokens // span), span // block_size

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse the text that ``str`` wrote. Raise ValueError if it is not such a text."""
        group, tokens, span = map(int, text.split(":"))
        return cls(group, tokens, span)

    def __str__(self) -> str:
        return f"{self.group}:{self.tokens}:{self.span}"


class RankWindow(NamedTuple):
    """A window that a rank needs. The instance is an index into ``View.instances``."""

    instance: int
    dp_rank: int
    window: Window


DEFAULT_TENANT = "default"

U32_MAX = 2**32 - 1
U64_MASK = 2**64 - 1

Adapter: TypeAlias = str | int | None
"""A LoRA adapter: its name, or its id if an engine gives only that; None is the base model."""


SeqCounter = Literal["publisher", "rank"]
Repair = Literal["snapshot", "replay"]


class PublisherName(NamedTuple):
    """One event socket, as registered. The text form ``inst|tenant|rank`` is for people, never a key."""

    instance_id: str
    tenant_id: str
    dp_rank: int
    socket: str = ""
    """The endpoint of a rank's additional socket, with the topic if one is registered; otherwise empty."""

    def __str__(self) -> str:
        name = f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"
        return f"{name}|{self.socket}" if self.socket else name

    @property
    def rank(self) -> tuple[str, str, int]:
        """The instance, tenant and rank that the socket belongs to."""
        return self[:3]


class GroupName(NamedTuple):
    """One (tenant, model): the unit of registration and of placement in a Cluster."""

    tenant_id: str
    model_name: str

    @property
    def text(self) -> str:
        """The name for people."""
        return f"{self.tenant_id}/{self.model_name}"


OriginKind = Literal["client", "url", "file", "discovery"]


class Origin(NamedTuple):
    """The origin of a registration. Only the same origin unregisters the publisher automatically."""

    kind: OriginKind = "client"
    """``client``: a client named the sockets. ``url``: a client named the URL, and the engine named its sockets."""
    source: str = ""
    """The URL; the path of the file; the pod, as ``<namespace>/<name>``."""


BY_CLIENT = Origin()


@record(frozen=True, slots=True)
class Registration:
    """The complete registration of a publisher, normalized, as ``wm:publishers`` has it."""

    kind: EngineKind
    instance_id: str
    tenant_id: str
    dp_rank: int
    model_name: str
    block_size: int
    endpoint: str | None
    """``tcp://host:port``, ``ipc://path``, or the URL of an event stream; None if there is nothing to subscribe to."""
    replay_endpoint: str | None
    lora_name: str | None = None
    additional_salt: str | None = None
    scope: Scope = "instance"
    copies: Copies = "count"
    sequence: SeqCounter = "publisher"
    target: Target = PLAIN
    origin: Origin = BY_CLIENT
    prefixes: PrefixSource = DEFAULT_PREFIXES
    """The options of a source of opaque prefixes."""
    object_shards: int = 0
    """The number of object shards that make up a block of a pool; 0: as many as the pool's keys have named so far."""
    is_further: bool = False
    """Whether this is an additional socket of a rank. Its blocks belong to the rank, and it is never picked."""
    topic: str | None = None
    """The topic of this publisher's frames, if several publishers share a socket and its counter."""
    snapshot_endpoint: str | None = None
    """The socket that answers with a snapshot of the engine's cache, if it has one."""

    @property
    def name(self) -> PublisherName:
        socket = " ".join(filter(None, (self.endpoint, self.topic))) if self.is_further else ""
        return PublisherName(self.instance_id, self.tenant_id, self.dp_rank, socket)

    @property
    def can_replay(self) -> bool:
        """Whether missing batches can be requested. No engine whose ranks have separate counters offers a replay."""
        return self.replay_endpoint is not None and self.sequence == "publisher"

    @property
    def repair(self) -> Repair | None:
        """The request that the stream's worker can make if the index and the engine have different blocks.

        A snapshot lists the blocks of the engine. A replay only repeats events.
        """
        if self.snapshot_endpoint is not None:
            return "snapshot"
        return "replay" if self.endpoint is not None and self.can_replay else None

    @property
    def cannot_repair(self) -> bool:
        """Whether lost blocks stay lost, because a replay is impossible, and a full report would count as copies."""
        return self.endpoint is not None and not self.can_replay and self.copies == "count"

    @property
    def group(self) -> GroupName:
        return GroupName(self.tenant_id, self.model_name)


GROUP: Final = "g"
"""Marks a group; digests of other dimensions are hex digits, which have no ``g``."""


class HolderName(NamedTuple):
    """The name of a holder within its stream. The stream's record and the scripts contain its text form."""

    dp_rank: int
    medium: str
    digest: str = ""
    """For standard events, the digest of the further dimensions of their stream. ``g<n>``: group n of a hybrid model.
    """
    epoch: int | None = None
    """The start of the holder's generation, in ms; None if there are no generations."""

    @classmethod
    def parse(cls, text: str) -> HolderName:
        """Parse the text that ``str`` wrote. Raise ValueError if it is not such a text."""
        match = _HOLDER_NAME.fullmatch(text)
        if match is None:
            raise ValueError("not a holder's name, <rank> <medium>[ <digest>][ #<epoch>]")
        rank, medium, digest, epoch = match.groups("")
        return cls(int(rank), medium, digest, int(epoch) if epoch else None)

    def __str__(self) -> str:
        digest = f" {self.digest}" if self.digest else ""
        epoch = "" if self.epoch is None else f" #{self.epoch}"
        return f"{self.dp_rank} {self.medium}{digest}{epoch}"

    @property
    def has_window(self) -> bool:
        """Whether the holder belongs to a group other than full attention."""
        return self.digest.startswith(GROUP)

    @property
    def lasting(self) -> HolderName:
        """The name without its epoch."""
        return self if self.epoch is None else HolderName(self.dp_rank, self.medium, self.digest)

    def is_of(self, unit: Unit) -> bool:
        """Return whether the holder ends with ``unit``. ``new_life.lua`` has the same rule for the text forms."""
        if unit == "*" or unit == self:
            return True
        if not isinstance(unit, HolderName):
            return unit == self.dp_rank
        return unit.epoch is None and unit[:2] == self[:2] and unit.digest in ("", self.digest)


_HOLDER_NAME = re.compile(r"(0|[1-9][0-9]{0,9}) ([^ ]+)(?: ([^ #][^ ]*))?(?: #(0|[1-9][0-9]{0,15}))?")

Unit: TypeAlias = int | HolderName | Literal["*"]
"""Holders of a stream that end together: those of a rank, those of one name (with or without an epoch), or all."""


@record(frozen=True, slots=True)
class Holder:
    """One life of one rank of a publisher on one medium; ``id`` is never used again."""

    id: int
    publisher: int
    """The publisher's integer id in its group."""
    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    backend_id: str
    """The envelope's ``backend_id`` for standard events; the instance_id otherwise."""
    scope: Scope
    window: Window | None = None
    """The blocks that a KV-cache group other than full attention needs at a boundary. The group's blocks are not a
    prefix.
    """


# ---- names and sizes that clients choose ----------------------------------------------------------

#: The most bytes of a name in UTF-8. Names are kept in Redis with every registration.
NAME_BYTES_MAX = 4096
NAME = f"a text of 1 to {NAME_BYTES_MAX} bytes"
OPTIONAL_NAME = f"a text of at most {NAME_BYTES_MAX} bytes"
BLOCK_SIZE_MAX = 65_536
BLOCK_SIZE = f"an integer of 1..{BLOCK_SIZE_MAX}, tokens per block"


def is_name(text: str) -> bool:
    """Return whether a text is a name. ``NAME`` is the requirement in the words of an error."""
    return 0 < len(text) <= NAME_BYTES_MAX and len(text.encode()) <= NAME_BYTES_MAX


# ---- endpoints -------------------------------------------------------------------------------------

_HOST = r"\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+"
_TCP = re.compile(rf"tcp://(?:{_HOST}):(?P<port>[0-9]{{1,5}})", re.ASCII)
_IPC = re.compile(r"ipc:///?(?P<path>[^\s\x00@]{1,100})")


ENDPOINT = "tcp://host:port or ipc://path, where no part of the path is empty, '.' or '..' or has an '@'"
"""The form that ``is_endpoint`` requires, in the words of an error."""


def is_endpoint(text: str) -> bool:
    """Return whether a socket may be opened to ``text``: only ``tcp://host:port`` and ``ipc://path`` are allowed.

    A path is normalized, so that a pattern for paths matches what it names: a segment is never empty, ``.`` or ``..``.
    It has no ``@``, which ZeroMQ takes for a name outside the file system.
    """
    tcp = _TCP.fullmatch(text)
    if tcp:
        return 0 < int(tcp["port"]) < 65536
    ipc = _IPC.fullmatch(text)
    return ipc is not None and {"", ".", ".."}.isdisjoint(ipc["path"].split("/"))

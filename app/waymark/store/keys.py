"""Builds every key name; ``lua/README.md`` lists the contents of each key.

Names that clients choose (tenants, models, instances) are never part of a key. They are fields and values, as JSON
arrays, so one name cannot be mistaken for another. Braces are the hash tag of a Redis Cluster: shard 0 of
a group shares the slot of the group's own keys.

All names of a process may begin with a prefix, so that two installations can use one Redis. The prefix comes before
``wm:``, and is never in the hash tag of a group. A tag that is the name of a key begins with the prefix, as the key
does.
"""

from __future__ import annotations

from functools import lru_cache

import orjson

from waymark.domain import rows
from waymark.domain.names import GroupName, PublisherName

FORMAT = f"{rows.FORMAT} keys 2"
"""The format of the index: that of its rows, and the number of the key table of ``lua/README.md``. Another number means
that processes which know one of the two tables cannot share a Redis with processes which know the other.
"""

_root: str
"""The beginning of every key, with the prefix of this process."""
ALL: str
"""The pattern of all keys of Waymark."""
GROUPS: str
PUBLISHERS: str
UNREGISTERED: str
"""The unregistered names, in the slot of ``PUBLISHERS``, so that one script can write both keys."""
PUBLISHERS_CHANGES: str
"""The last changes of ``PUBLISHERS``, in its slot."""
WORKERS: str
COUNTS: str
SEEN: str
"""The prefix keys of all decisions (a HyperLogLog), in the slot of ``COUNTS``, so that one script can write both."""
CATALOG: str
"""The descriptions of workers that clients of the Dynamo API have sent."""
PEERS: str
"""The peers that clients of the Dynamo API have registered."""
ASKED: str
"""The groups that a client asks about by the hashes of their engines."""
VALUED: str
"""The groups whose caches a client, or a pod of Kubernetes, wants valued."""
DISCOVERY: str
ACTIVITY: str
"""The activity list."""
# The response cache of gateways, in one slot: the nonce of the last clearing, the answers, and when each one expires.
ANSWERS: str
ANSWERS_KEPT: str
ANSWERS_DUE: str
# Stored responses, in one slot: their total size, the responses, when each one expires, the names of those that
# MongoDB has, and the queue of those that it does not have yet.
RESPONSES: str
RESPONSES_KEPT: str
RESPONSES_DUE: str
RESPONSES_COPIED: str
RESPONSES_QUEUE: str
INCARNATION: str
"""The nonce of the incarnation, in the slot of ``PUBLISHERS``, so that both are lost together."""
SNAPSHOTS: str
"""The places for snapshots of engines; the keys of the sockets that were asked are in its slot."""
CONTROL: str
"""The channel that announces changes of registrations. A message only makes workers read the registrations again."""


def use_prefix(prefix: str) -> None:
    """Begin all names of this process with ``prefix``, which the settings have checked.

    A process has one prefix. It is given before the first command, and changes only if no store is open.
    """
    global _root, ALL, GROUPS, PUBLISHERS, UNREGISTERED, WORKERS, COUNTS, SEEN, CATALOG, PEERS, ASKED, VALUED
    global DISCOVERY, ACTIVITY, ANSWERS, ANSWERS_KEPT, ANSWERS_DUE, RESPONSES, RESPONSES_KEPT, RESPONSES_DUE
    global RESPONSES_COPIED, RESPONSES_QUEUE, INCARNATION, SNAPSHOTS, CONTROL, PUBLISHERS_CHANGES
    _root = root = f"{prefix}wm:"
    ALL = f"{root}*"
    GROUPS = f"{root}groups"
    PUBLISHERS = f"{root}publishers"
    UNREGISTERED = f"{root}unregistered:{{{PUBLISHERS}}}"
    PUBLISHERS_CHANGES = f"{root}changes:{{{PUBLISHERS}}}"
    WORKERS = f"{root}workers"
    COUNTS = f"{root}counts"
    SEEN = f"{root}seen:{{{COUNTS}}}"
    CATALOG = f"{root}catalog"
    PEERS = f"{root}peers"
    ASKED = f"{root}asked"
    VALUED = f"{root}valued"
    DISCOVERY = f"{root}discovery"
    ACTIVITY = f"{root}activity"
    ANSWERS = f"{root}answers"
    ANSWERS_KEPT = f"{root}answers:kept:{{{ANSWERS}}}"
    ANSWERS_DUE = f"{root}answers:due:{{{ANSWERS}}}"
    RESPONSES = f"{root}responses"
    RESPONSES_KEPT = f"{root}responses:kept:{{{RESPONSES}}}"
    RESPONSES_DUE = f"{root}responses:due:{{{RESPONSES}}}"
    RESPONSES_COPIED = f"{root}responses:copied:{{{RESPONSES}}}"
    RESPONSES_QUEUE = f"{root}responses:queue:{{{RESPONSES}}}"
    INCARNATION = f"{root}birth:{{{PUBLISHERS}}}"
    SNAPSHOTS = f"{root}snapshots"
    CONTROL = f"{root}control"
    for function in (record, fence, engine, branches, block_prefix):
        function.cache_clear()


# Each call of a worker has these names, and formatting one costs as much as the rest of the call's words.
_remembered = lru_cache(4096)


def _tag(group_id: int, shard: int = 0) -> str:
    return f"{{{group_id}.{shard}}}" if shard else f"{{{group_id}}}"


def holders(group_id: int) -> str:
    return f"{_root}{_tag(group_id)}:holders"


@_remembered
def record(group_id: int, publisher: int) -> str:
    return f"{_root}{_tag(group_id)}:publisher:{publisher}"


def lease(group_id: int, publisher: int) -> str:
    return f"{_root}{_tag(group_id)}:lease:{publisher}"


def dead(group_id: int) -> str:
    return f"{_root}{_tag(group_id)}:dead"


@_remembered
def fence(group_id: int, shard: int) -> str:
    return f"{_root}{_tag(group_id, shard)}:fence"


@_remembered
def engine(group_id: int, shard: int, holder: int) -> str:
    return f"{_root}{_tag(group_id, shard)}:engine:{holder}"


@_remembered
def branches(group_id: int, shard: int) -> str:
    return f"{_root}{_tag(group_id, shard)}:branches"


def load(group_id: int) -> str:
    return f"{_root}{_tag(group_id)}:load"


def load_changes(group_id: int) -> str:
    """Return the key of the targets whose loads have changed, in the order of their changes."""
    return f"{_root}{_tag(group_id)}:changes"


def entries(group_id: int) -> str:
    """Return the key of the number of blocks that the publishers of a bounded group have."""
    return f"{_root}{_tag(group_id)}:entries"


def hashes(group_id: int, number: int | None = None) -> str:
    """Return the key of a group's blocks by engine hash: one generation, or without ``number`` the number of the newest
    generation.
    """
    return f"{_root}{_tag(group_id)}:{'hashes' if number is None else f'hash:{number}'}"


def snapshot_asked(socket: str) -> str:
    """Return the key of the last snapshot requested from a socket. ``socket`` has 16 hex digits."""
    return f"{_root}snapshot:{{{SNAPSHOTS}}}:{socket}"


def worth(group_id: int) -> str:
    """Return the key of the worth of a group's caches."""
    return f"{_root}{_tag(group_id)}:worth"


def valuing(group_id: int) -> str:
    """Return the key of the walk over the rows of a group that computes ``worth``."""
    return f"{_root}{_tag(group_id)}:valuing"


def reservations(group_id: int) -> str:
    return f"{_root}{_tag(group_id)}:reservations"


def gauges(group_id: int, publisher: int) -> str:
    return f"{_root}{_tag(group_id)}:gauges:{publisher}"


def answer_times(group_id: int, publisher: int) -> str:
    return f"{_root}{_tag(group_id)}:answer_times:{publisher}"


def books(group_id: int, hour: int) -> str:
    """Return the key of the sums of one hour, counted since 1970."""
    return f"{_root}{_tag(group_id)}:books:{hour}"


def decisions(group_id: int) -> str:
    """Return the key of the kept decisions."""
    return f"{_root}{_tag(group_id)}:decisions"


def drift(group_id: int, publisher: int) -> str:
    return f"{_root}{_tag(group_id)}:drift:{publisher}"


def counted(writer: str) -> str:
    """Return the key of the last counts that a replica has added. ``writer`` has 16 hex digits."""
    return f"{_root}counted:{{{COUNTS}}}:{writer}"


def request(group_id: int, request_id: str) -> str:
    """Return the key of the reservation of a request. ``request_id`` has 16 hex digits."""
    return f"{_root}{_tag(group_id)}:request:{request_id}"


def selection(selection_id: str) -> str:
    """Return the key of a selection, which clients name without its group. ``selection_id`` has 16 hex digits."""
    return f"{_root}selection:{selection_id}"


#: Separates the keys of prefill targets' entries from those of decode targets' entries.
_PREFILL = 0x7072656669_6C6C21


def pulls(group_id: int, publisher: int) -> str:
    """Return the key of the copies under way from one engine."""
    return f"{_root}{_tag(group_id)}:pulls:{publisher}"


def history(group_id: int, publisher: int) -> str:
    """Return the key of the blocks of prompts that went to a target."""
    return f"{_root}{_tag(group_id)}:history:{publisher}"


def spec(group_id: int, block_key: int, *, of_prefill: bool = False) -> str:
    """Return the key of a speculative entry: the target that will soon have the prompt up to this block.

    With ``of_prefill`` the entry is for the target of the prefill stage, which will have the prompt, too.
    """
    return f"{spec_prefix(group_id).decode()}{block_key ^ (_PREFILL if of_prefill else 0):016x}"


def spec_prefix(group_id: int) -> bytes:
    """Return the beginning of the key of a speculative entry; 16 hex digits follow."""
    return f"{_root}{_tag(group_id)}:spec:".encode()


def opaque_prefix(group_id: int, key: str) -> str:
    """Return the key of an opaque prefix. ``key`` has 32 hex digits."""
    return f"{_root}{_tag(group_id)}:prefix:{key}"


def opaque_prefixes(group_id: int, holder: int | None = None) -> str:
    """Return the key of the opaque prefixes of a group, or of one holder."""
    return f"{_root}{_tag(group_id)}:prefixes{'' if holder is None else f':{holder}'}"


def placement(group_id: int, block: str) -> str:
    """Return the key of the holders to which external routers have sent a prompt with this block. ``block`` has 16 hex
    digits.
    """
    return f"{_root}{_tag(group_id)}:placement:{block}"


def placements(group_id: int) -> str:
    """Return the key of the list of all blocks of a group with a ``placement`` key."""
    return f"{_root}{_tag(group_id)}:placements"


@_remembered
def block_prefix(group_id: int, shard: int) -> bytes:
    """Return the beginning of the key of a row, a branch row or a single."""
    return f"{_root}{_tag(group_id, shard)}:".encode()


def group_field(group: GroupName) -> bytes:
    return orjson.dumps([group.tenant_id, group.model_name])


def publisher_field(name: PublisherName) -> bytes:
    return orjson.dumps(list(name) if name.socket else name.rank)


use_prefix("")

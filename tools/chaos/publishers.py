"""The engines of a session: their caches, their events, and their registrations.

An engine has a cache per rank, and publishes its events over a socket, or by ``POST /events``. Answers are compared
with its caches. The session chooses the prompts; no choice here is random.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from tests.conftest import wait_until
from tests.model import Place, Space, Tokens
from tools.chaos.model import BLOCK_SIZE, Held
from waymark.domain.names import PublisherName
from waymark.simulator.cache import PrefixCache
from waymark.simulator.encode import Dimensions, Encoder, WireEvent
from waymark.simulator.options import Faults
from waymark.simulator.publisher import SimulatedPublisher

TENANTS = ("t-a", "t-b")
MODEL_NAME = "m"
SPACES = (Space(), Space(), Space(), Space("adapter"), Space(None, ("salt",)))
"""The adapters and salts that requests name; most requests name neither."""
ADAPTER_ID = 1
"""The id that old engines send in place of the adapter's name."""
ALL_SPACES = tuple(sorted({*SPACES, Space(lora_id=ADAPTER_ID)}, key=repr))
_WITHOUT_NAMES = ("vllm-list-6", "vllm-list-7")
"""The dialects whose events have the id of an adapter, and no salt."""
#: More batches than an engine publishes in a session.
ALL_BATCHES = 1_000_000
HEARD_SECONDS = 20.0
_KINDS = {"vllm": "vLLM", "sglang": "SGLang", "standard": "standard"}


@dataclass(frozen=True)
class Spec:
    """The description of a publisher: its registration, and how its engine is built."""

    instance: str
    dialect: str
    tenant: str = TENANTS[0]
    rank: int = 0
    more_ranks: int = 0
    """The number of further ranks that publish over the same socket, and are known only from their batches."""
    is_pool: bool = False
    is_http: bool = False
    buffer_batches: int = ALL_BATCHES
    """The number of batches that a replay can have; 0 for an engine without a replay endpoint."""
    lora_name: str | None = None
    gpu_blocks: int = 60
    cpu_blocks: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def names_adapters(self) -> bool:
        return self.dialect not in _WITHOUT_NAMES

    @property
    def name(self) -> PublisherName:
        return PublisherName(self.instance, self.tenant, self.rank)

    @property
    def kind(self) -> str:
        return "Mooncake" if self.is_pool else _KINDS[self.dialect.partition("-")[0]]

    @property
    def label(self) -> str:
        return f"{self.instance}/{self.rank}@{self.tenant}"

    def __str__(self) -> str:
        replay = "by HTTP" if self.is_http else {0: "no replay", ALL_BATCHES: "replay"}.get(self.buffer_batches)
        parts = [self.label, self.kind, self.dialect, replay or f"replay of {self.buffer_batches}"]
        parts += [f"ranks 0..{self.more_ranks}"] if self.more_ranks else []
        parts += [f"adapter {self.lora_name}"] if self.lora_name else []
        return ", ".join([*parts, f"{self.gpu_blocks}+{self.cpu_blocks} blocks"])


def draw(rng: random.Random, block_size: int = BLOCK_SIZE) -> list[Spec]:
    """Return publishers of every kind, in two tenants that use the same names."""
    a, b = rng.sample(TENANTS, 2)

    def vllm() -> str:
        return rng.choice(("vllm-map", "vllm-map-wide", "vllm-list-9", "vllm-list-12"))

    def tier() -> int:
        return rng.choice((0, 40))

    old = rng.choice(_WITHOUT_NAMES)
    specs = [
        Spec("i0", vllm(), a, cpu_blocks=tier()),
        Spec("i0", "standard-tokens", b, cpu_blocks=tier()),
        Spec("i1", vllm(), a, rank=0),
        Spec("i1", vllm(), a, rank=1, cpu_blocks=tier()),
        Spec("i2", "sglang-map", rng.choice((a, b)), cpu_blocks=tier()),
        Spec("i3", "standard", a, cpu_blocks=tier()),
        Spec("i4", vllm(), b, more_ranks=1, lora_name=rng.choice((None, "adapter"))),
        Spec("i5", rng.choice((vllm(), "sglang-map", "standard")), rng.choice((a, b)), buffer_batches=0),
        Spec("i6", rng.choice((vllm(), "standard-tokens")), rng.choice((a, b)), buffer_batches=40),
        Spec("pool", rng.choice(("standard", "standard-tokens")), rng.choice((a, b)), is_pool=True, buffer_batches=0),
        Spec("i7", "standard", rng.choice((a, b)), is_http=True),
        Spec("i8", old, a, more_ranks=2, cpu_blocks=tier() if old != "vllm-list-6" else 0),
        Spec("i9", vllm(), b, more_ranks=1, gpu_blocks=4),
        Spec("big", rng.choice((vllm(), "standard")), b, gpu_blocks=1000),
    ]
    return [replace(spec, block_size=block_size) for spec in specs]


class Publisher:
    """One engine. Before use it has to be opened and registered, and ``begin`` has to be called."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec = spec
        self.lock = asyncio.Lock()
        """Held while the sockets or the life of the engine change: blocks stored in the meantime would only be in its
        caches."""
        self.excuse = ""
        """The reason why batches may have been lost since ``mark_exact``; empty if none can be lost."""
        self.suspects: set[Held] = set()
        """The blocks that may still be in the index if batches were lost: all that the publisher has had since
        ``mark_exact``."""
        is_standard, is_sglang = spec.dialect.startswith("standard"), spec.dialect.startswith("sglang")
        self.caches = {
            rank: PrefixCache(
                spec.block_size,
                spec.gpu_blocks,
                spec.cpu_blocks,
                seed=f"{seed}/{spec.label}/{rank}",
                repeat_rate=0.0 if is_standard else 0.1,
                dense_offload=is_standard or is_sglang,
                removals_together=is_sglang,
                standard_hashes=spec.dialect == "standard",
            )
            for rank in range(spec.rank, spec.rank + spec.more_ranks + 1)
        }
        encoder = Encoder(spec.dialect, Dimensions(tenant_id=spec.tenant, backend_id=spec.instance))
        self.sender = Sender(encoder) if spec.is_http else None
        self._socket = None if spec.is_http else _socket(spec, encoder)

    async def open(self, stack: AsyncExitStack) -> None:
        if self._socket is not None:
            await stack.enter_async_context(self._socket)

    @property
    def socket(self) -> SimulatedPublisher:
        assert self._socket is not None, f"{self.spec.label} has none"
        return self._socket

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of ``/register``, with the present addresses of the sockets."""
        spec = self.spec
        fields = {
            "type": spec.kind,
            "modelname": MODEL_NAME,
            "tenant_id": spec.tenant,
            "instance_id": spec.instance,
            "dp_rank": spec.rank,
            "block_size": spec.block_size,
            "lora_name": spec.lora_name,
        }
        if self._socket is not None:
            fields |= {"endpoint": self._socket.endpoint, "replay_endpoint": self._socket.replay_endpoint}
        return fields

    # ---- actions of the engine --------------------------------------------------------------------------

    def prefill(self, tokens: Tokens, rank: int, space: Space) -> set[Held]:
        """Put a prompt into the cache of one rank, and publish the events. Return the blocks that the events may add to
        the index."""
        ranks = sorted(self.caches)
        rank = ranks[rank % len(ranks)]
        salt = space.salts[0] if space.salts and self.spec.names_adapters else None
        events = self.caches[rank].prefill(tokens, space.lora_name, salt)
        may_hold = set(self._of_prompt(tokens, rank, space))
        self.suspects |= may_hold
        if events:
            self._tell(events, rank)
        return may_hold

    def clear(self) -> None:
        for rank, cache in self.caches.items():
            self._tell(cache.clear(), rank)

    async def restart(self) -> None:
        """Restart the engine as another process at the same address."""
        for cache in self.caches.values():
            cache.restart()
        await self.socket.restart(rebind=True)
        await self.begin()

    async def begin(self) -> None:
        """Publish the first events of the engine. Without a replay endpoint, wait for a subscriber first."""
        if self._socket is not None and not self.spec.buffer_batches:
            socket = self._socket
            await wait_until(lambda: socket.subscribers > 0, f"{self.spec.label} is heard", HEARD_SECONDS)
        if self.spec.dialect.startswith("sglang"):
            self.clear()

    def send_empty_batch(self) -> None:
        """Send a batch without events. When it is applied, all earlier batches are applied, too."""
        self.socket.publish([], ts=time.time(), rank=self.spec.rank)

    @property
    def last_seq(self) -> int:
        return self.socket.next_seq - 1

    def _tell(self, events: list[WireEvent], rank: int) -> None:
        if self.sender is not None:
            self.sender.tell(events, rank)
        else:
            self.socket.publish(events, ts=time.time(), rank=rank)

    # ---- the truth -------------------------------------------------------------------------------------

    def contents(self) -> set[Held]:
        return {
            Held(self._space(prefix.lora_name, prefix.cache_salt), prefix.tokens, self._place(rank, medium))
            for rank, cache in self.caches.items()
            for medium, prefixes in cache.contents().items()
            for prefix in prefixes
        }

    def mark_exact(self) -> None:
        """Record that the index has exactly the blocks of the caches. From now on each block may move to another
        medium."""
        self.excuse = ""
        self.suspects = {
            held._replace(place=held.place._replace(medium=medium))
            for held in self.contents()
            for medium in self._media
        }

    def _of_prompt(self, tokens: Tokens, rank: int, space: Space) -> Iterator[Held]:
        own = self._space(space.lora_name, space.salts[0] if space.salts else None)
        for end in range(self.spec.block_size, len(tokens) + 1, self.spec.block_size):
            for medium in self._media:
                yield Held(own, tokens[:end], self._place(rank, medium))

    @property
    def _media(self) -> Sequence[str]:
        return ("GPU", "CPU") if self.spec.cpu_blocks else ("GPU",)

    def _space(self, lora_name: str | None, salt: str | None) -> Space:
        if not self.spec.names_adapters:
            return Space(lora_id=ADAPTER_ID) if lora_name else Space(self.spec.lora_name)
        return Space(lora_name or self.spec.lora_name, (salt,) if salt else ())

    def _place(self, rank: int, medium: str) -> Place:
        return Place(self.spec.instance, self.spec.rank, rank, medium)


def _socket(spec: Spec, encoder: Encoder) -> SimulatedPublisher:
    return SimulatedPublisher(
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0" if spec.buffer_batches else None,
        encoder=encoder,
        buffer_batches=spec.buffer_batches or 1,
        first_seq=1 if spec.is_pool else 0,
        faults=Faults(),
    )


class Sender:
    """A sender of standard events by ``POST /events``. It keeps the order of each stream of envelopes, and after a gap
    it sends events again from the missing one on."""

    POST_EVENTS = 16

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._told: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._acknowledged: Counter[tuple[Any, ...]] = Counter()

    def tell(self, events: list[WireEvent], rank: int) -> None:
        _, documents, _ = msgpack.unpackb(self._encoder.payload(events, ts=time.time(), rank=rank))
        for document in documents:
            stream = tuple(document[name] for name in ("dp_rank", "lora_name", "additional_salt", "medium"))
            self._told.setdefault(stream, []).append(document)

    def due(self) -> tuple[tuple[Any, ...], Sequence[Mapping[str, Any]]] | None:
        """Return a stream with unacknowledged events, and its next events; None if all events are acknowledged."""
        for stream, documents in self._told.items():
            done = self._acknowledged[stream]
            if done < len(documents):
                return stream, documents[done : done + self.POST_EVENTS]
        return None

    def acknowledge(self, stream: tuple[Any, ...], count: int) -> None:
        self._acknowledged[stream] += count

    def go_back(self, stream: tuple[Any, ...], event_id: int) -> None:
        """Go back to the event that the index expects next. The ids of a stream begin at 1."""
        self._acknowledged[stream] = event_id - 1

"""Random sessions of several engines: what hypothesis draws, what it means, and what the model makes of it.

Steps are drawn as small numbers and given a meaning only when they are carried out, so that every list of steps
is a session and shrinks well. An engine never tells what a real one could not: a child only under a parent it
has, a placeholder only for what it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypothesis import strategies as st

from tests.model import Model, Place, Space, Tokens
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import DEFAULT_TENANT, PublisherName
from waymark.simulator.encode import AllBlocksCleared, BlockRemoved, BlockStored, Dimensions, Encoder, WireEvent

MEDIA = ("GPU", "GPU", "GPU", "GPU", "GPU", "CPU", "CPU", "DISK")
MODEL_NAME = "m"

# ---- what is drawn ---------------------------------------------------------------------------------

_ENGINE_DIALECTS = (
    "vllm-map",
    "vllm-map-wide",
    "vllm-list-9",
    "vllm-list-12",
    "sglang-map",
    "standard",
    "standard-tokens",
)


@dataclass(frozen=True)
class Spec:
    """A publisher as registered, and how its engine names blocks."""

    instance: str
    rank: int
    dialect: str
    lora_name: str | None = None
    salt: str | None = None
    copies: str | None = None
    is_pool: bool = False
    first_name: int = 1
    """Names are handed out in order of need, so two engines use one name for different blocks."""

    @property
    def name(self) -> PublisherName:
        return PublisherName(self.instance, DEFAULT_TENANT, self.rank)

    @property
    def kind(self) -> str:
        engine = self.dialect.partition("-")[0]
        return "Mooncake" if self.is_pool else {"vllm": "vLLM", "sglang": "SGLang", "standard": "standard"}[engine]

    @property
    def is_counting(self) -> bool:
        return (self.copies or ("count" if self.kind in ("vLLM", "SGLang") else "set")) == "count"


@dataclass(frozen=True)
class Step:
    """One thing an engine, or the world, does. Numbers are taken modulo what there is to choose from."""

    does: str
    publisher: int
    rank: int = 0
    events: tuple[tuple[str, int, int, int, int, int], ...] = ()
    """(stored, removed or cleared; prompt; first block; blocks; medium; space)"""
    count: int = 1


_small = st.integers(0, 7)
# Most of it happens in one place, or copies would hardly ever meet.
_rank = st.sampled_from((0, 0, 0, 0, 1, 2))
_space = st.sampled_from((0, 0, 0, 0, 0, 2, 4, 7))
_first = st.sampled_from((0, 0, 0, 1, 2, 4))
_kind = st.sampled_from(("stored",) * 10 + ("removed",) * 5 + ("cleared",))
_event = st.tuples(_kind, st.integers(0, 3), _first, st.integers(0, 5), _small, _space)
_batch = st.builds(Step, st.just("batch"), _small, _rank, st.lists(_event, min_size=1, max_size=4).map(tuple))
_other = st.builds(
    Step, st.sampled_from(("restart", "crash", "crash", "lose", "toggle", "check")), _small, count=st.integers(1, 3)
)
steps = st.lists(st.integers(0, 5).flatmap(lambda n: _other if n == 0 else _batch), min_size=10, max_size=40)
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4, unique=True)
"""Each number stands for a block, so that prompts share prefixes."""


def _spec(instance: str, rank: int, *, is_pool: bool = False) -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        st.just(instance),
        st.just(rank),
        st.sampled_from(("standard", "standard-tokens") if is_pool else _ENGINE_DIALECTS),
        lora_name=st.sampled_from((None, None, "adapter")),
        salt=st.sampled_from((None, None, "w8a8")),
        copies=st.sampled_from((None, None, "set")),
        is_pool=st.just(is_pool),
        first_name=st.sampled_from((1, 2**63 - 3, 2**64 - 200)),
    )


specs = st.tuples(_spec("a", 0), _spec("b", 0), _spec("a", 1), _spec("pool", 0, is_pool=True), _spec("b", 2)).flatmap(
    lambda every: st.sampled_from((1, 1, 2, 2, 3, 4, 5)).map(lambda count: every[:count])
)

# ---- what it means ---------------------------------------------------------------------------------


@dataclass
class Publisher:
    """The engine's side of a socket."""

    spec: Spec
    encoder: Encoder
    is_registered: bool = False
    is_untrusted: bool = False
    """Batches were lost: a removal takes the block, however often it was stored."""
    names: dict[tuple[Space, Tokens], int] = field(default_factory=dict)

    def space(self, lora_name: str | None, salt: str | None) -> Space:
        """Where blocks of a request come to be, by the contract's rules for adapter and salts."""
        spec = self.spec
        salts = (spec.salt, salt) if spec.kind in ("vLLM", "SGLang") else (salt or spec.salt,)
        return Space(lora_name or spec.lora_name, tuple(each for each in salts if each))

    def name(self, space: Space, prefix: Tokens, block_size: int) -> int:
        if self.spec.dialect == "standard":
            return extend(None, token_bytes(prefix), block_size)[-1]
        return self.names.setdefault((space, prefix), self.spec.first_name + len(self.names))


class Driver(Protocol):
    """How events reach the index: past the sockets, or through them."""

    async def register(self, publisher: Publisher) -> None: ...
    async def unregister(self, publisher: Publisher) -> None: ...
    async def send(self, publisher: Publisher, events: list[WireEvent], rank: int) -> None: ...
    async def restart(self, publisher: Publisher) -> None: ...
    async def crash(self, publisher: Publisher) -> None:
        """Whoever applies this publisher's stream dies, and another takes over."""

    async def lose(self, publisher: Publisher, count: int) -> bool:
        """Batches do not arrive; whether they are lost for good."""

    async def check(self, questions: Sequence[tuple[Tokens, Space]], model: Model) -> None:
        """Compare every answer with the model's."""


class Session:
    def __init__(
        self, driver: Driver, specs: Sequence[Spec], prompts: Sequence[tuple[int, ...]], block_size: int
    ) -> None:
        self.model = Model(block_size)
        self._driver = driver
        self._publishers = [
            Publisher(spec, Encoder(spec.dialect, Dimensions(backend_id=spec.instance))) for spec in specs
        ]
        self._prompts = [
            tuple(block * block_size + i for block in prompt for i in range(block_size)) for prompt in prompts
        ]
        self._size = block_size

    async def run(self, steps: Sequence[Step]) -> None:
        for publisher in self._publishers:
            await self._toggle(publisher)
        for step in steps:
            publisher = self._publishers[step.publisher % len(self._publishers)]
            if step.does == "toggle":
                await self._toggle(publisher)
            elif step.does == "check":
                await self._check()
            elif publisher.is_registered:
                await self._do(publisher, step)
        await self._check()

    async def _do(self, publisher: Publisher, step: Step) -> None:
        spec = publisher.spec
        if step.does == "batch":
            events: list[WireEvent] = []
            for event in step.events:
                told = self._event(publisher, step.rank, *event)
                events += [told] if told is not None else []
            await self._driver.send(publisher, events, step.rank)
        elif step.does == "restart":
            publisher.encoder.reset()
            publisher.is_untrusted = False
            publisher.names.clear()
            self.model.end(spec.instance, spec.rank)
            await self._driver.restart(publisher)
        elif step.does == "crash":
            await self._driver.crash(publisher)
        elif await self._driver.lose(publisher, step.count):
            publisher.is_untrusted = True

    async def _toggle(self, publisher: Publisher) -> None:
        spec, model = publisher.spec, self.model
        if publisher.is_registered:
            await self._driver.unregister(publisher)
            model.end(spec.instance, spec.rank)
        else:
            await self._driver.register(publisher)
        publisher.is_registered = not publisher.is_registered
        publisher.is_untrusted = False
        registered = [each.spec for each in self._publishers if each.is_registered]
        model.pools = {each.instance for each in registered if each.is_pool}
        model.ranks = {each.instance: set() for each in registered if not each.is_pool}
        for each in registered:
            if not each.is_pool:
                model.ranks[each.instance].add(each.rank)

    async def _check(self) -> None:
        spaces = {space for space, _ in self.model.copies} | {Space(), Space("adapter"), Space(None, ("w8a8",))}
        await self._driver.check(
            [(prompt, space) for prompt in self._prompts for space in sorted(spaces, key=repr)], self.model
        )

    # ---- one event ---------------------------------------------------------------------------------

    def _event(
        self, publisher: Publisher, rank: int, kind: str, prompt: int, first: int, blocks: int, medium: int, space: int
    ) -> WireEvent | None:
        """The event as the engine tells it, and the model after it; None where there is nothing to tell."""
        spec = publisher.spec
        where = Place(spec.instance, spec.rank, rank, MEDIA[medium % len(MEDIA)])
        others = self.model.ranks.get(spec.instance, set()) - {spec.rank}
        is_foreign = rank in others
        if kind == "cleared":
            if not is_foreign:
                self.model.end(spec.instance, spec.rank, rank)
            return AllBlocksCleared()
        lora_name = (None, None, "adapter", "other")[space % 4]
        if lora_name == spec.lora_name:
            lora_name = None  # two spellings of one stream would have event ids of their own
        salt = (None, "salt")[space // 4]
        tokens = self._prompts[prompt % len(self._prompts)]
        prefixes = [tokens[: end + self._size] for end in range(0, len(tokens), self._size)]
        start = first % len(prefixes)
        chosen = prefixes[start : start + 1 + blocks]
        if kind == "stored":
            return self._stored(publisher, where, prefixes, start, len(chosen), lora_name, salt, is_foreign)
        return self._removed(publisher, where, chosen, lora_name, salt, is_foreign)

    def _stored(
        self,
        publisher: Publisher,
        where: Place,
        prefixes: list[Tokens],
        start: int,
        count: int,
        lora_name: str | None,
        salt: str | None,
        is_foreign: bool,
    ) -> BlockStored | None:
        space = publisher.space(lora_name, salt)
        if publisher.spec.dialect.startswith("vllm") and where.medium != "GPU":
            chosen = [each for each in prefixes[start : start + count] if self._has(where, space, each)]
            if not chosen:
                return None
            self._count(publisher, where, space, chosen, is_foreign)
            names = tuple(publisher.name(space, each, self._size) for each in chosen)
            return BlockStored(names, None, (), 0, where.medium, kv_cache_spec_kind=None)
        while publisher.spec.dialect != "standard" and start and not self._has(where, space, prefixes[start - 1]):
            start -= 1
        chosen = prefixes[start : start + count]
        self._count(publisher, where, space, chosen, is_foreign)
        names = tuple(publisher.name(space, each, self._size) for each in chosen)
        parent = publisher.name(space, prefixes[start - 1], self._size) if start else None
        tokens = chosen[-1][start * self._size :]
        return BlockStored(
            names, parent, tokens, self._size, where.medium, None, lora_name, salt, extra_keys=(None,) * len(names)
        )

    def _removed(
        self,
        publisher: Publisher,
        where: Place,
        chosen: list[Tokens],
        lora_name: str | None,
        salt: str | None,
        is_foreign: bool,
    ) -> BlockRemoved:
        space = publisher.space(lora_name, salt)
        names = tuple(publisher.name(space, each, self._size) for each in chosen)
        for prefix in chosen if not is_foreign else ():
            places = self.model.copies.get((space, prefix), Counter())
            places[where] -= 1
            if places[where] <= 0 or publisher.is_untrusted:
                del places[where]
        return BlockRemoved(names, where.medium, lora_name=lora_name, cache_salt=salt)

    def _has(self, where: Place, space: Space, prefix: Tokens) -> bool:
        """Whether this publisher's rank has the block, on any medium."""
        return any(place[:3] == where[:3] for place in self.model.copies.get((space, prefix), ()))

    def _count(self, publisher: Publisher, where: Place, space: Space, chosen: list[Tokens], is_foreign: bool) -> None:
        for prefix in chosen if not is_foreign else ():
            places = self.model.copies.setdefault((space, prefix), Counter())
            places[where] = places[where] + 1 if publisher.spec.is_counting else 1


def registration(spec: Spec, block_size: int, **fields: Any) -> dict[str, Any]:
    """The body of ``/register``."""
    body = {
        "type": spec.kind,
        "modelname": MODEL_NAME,
        "instance_id": spec.instance,
        "dp_rank": spec.rank,
        "block_size": block_size,
        "lora_name": spec.lora_name,
        "additionalsalt": spec.salt,
        "copies": spec.copies,
        "endpoint": "tcp://127.0.0.1:1",
    }
    return body | fields

"""Kept decisions: a share of the decisions of each group, with the facts that were known, and later their outcomes.

They show how another policy would have decided. Only the length of a prompt and the hashes of its first blocks are
kept. One Redis stream for each group has an entry for a decision, and another one for each later report about it.
``note_decision`` and ``note_outcome`` never wait and never fail: entries wait in a bounded queue, and an entry that
does not fit, or that Redis refuses, is counted and dropped.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import orjson

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.answer_times import NO_TIMES, AskedTimes
from waymark.domain.packing import KEY_BYTES
from waymark.domain.targets import Gauges
from waymark.store import keys
from waymark.store.gauges import gauge_words, gauges_of
from waymark.store.parsing import FORMAT, Document, Malformed, pairs
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts
from waymark.store.steps import StartTask

log = logging.getLogger(__name__)

#: The number of blocks, from the first on, whose hashes are kept. Other prompts probably begin with these blocks, too.
BLOCKS_MAX = 64
#: The most targets kept for a decision: the best ones.
TARGETS_MAX = 16
#: The approximate maximum number of entries in the stream of a group, of 1.5 KB each.
LENGTH = 100_000
KEEP_MS = 86_400_000
#: The most entries that wait for Redis.
_WAITING_MAX = 1_000
_PER_CALL = 100
#: The pause after Redis has refused entries, in seconds.
_PAUSE_SECONDS = 1.0
#: How often old entries are removed from streams that get no new ones.
_TRIM_SECONDS = 600.0
#: The entries in one reply, and the entries after which the event loop runs other tasks.
_PAGE, _ENTRIES_A_TURN = 200, 25
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class KeptTarget(NamedTuple):
    """The facts about a target that a decision used, in tokens of the prompt. New fields are added at the end, with a
    default.
    """

    publisher: int
    instance_id: str
    dp_rank: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    expected: int = 0
    """The tokens that it will have soon."""
    wait: int = 0
    active: int = 0
    context: int = 0
    health: float = 1.0
    last_cold: int = 0
    weight: float = 1.0
    role: str = ""
    labels: Mapping[str, str] = _NO_LABELS
    gauges: Gauges | None = None
    answer_times: tuple[float, ...] | None = None
    """The numbers of its ``AnswerTimes``."""

    @property
    def name(self) -> tuple[str, int]:
        return self.instance_id, self.dp_rank


class ShadowChoice(NamedTuple):
    """The choice of another policy."""

    publisher: int
    expected: int
    """The tokens that this target would have reused."""
    work: int
    """The prefill tokens that it would have had to compute until the first token of the answer."""


#: The names of the first fields of a decision in its entry.
_WHOLE = (
    *("time_ms", "nonce", "tenant", "policy", "decision", "tokens", "block_size"),
    *("chosen", "expected", "work", "targets"),
)


class KeptDecision(NamedTuple):
    """A decision, and its outcome."""

    time_ms: int
    nonce: str
    """The nonce of its reservation; empty without one."""
    tenant_id: str
    policy: str
    decision: str
    tokens: int
    block_size: int
    chosen: int
    """The publisher of the target that Redis took, by the loads of that instant."""
    expected: int
    """The tokens that the chosen target should reuse."""
    work: int
    """The prefill tokens that it had to compute until the first token of the answer."""
    targets: Sequence[KeptTarget] = ()
    """The targets in the order of the policy, as far as they are kept. The policy preferred the first one."""
    shadows: Mapping[str, ShadowChoice] = MappingProxyType({})
    blocks: bytes = b""
    """The packed keys of the first blocks."""
    has_tokens: bool = True
    prefix_key: bytes | None = None
    lora_name: str | None = None
    session: str | None = None
    is_multimodal: bool = False
    pool: int = 0
    active_bound: int | None = None
    """The most requests that ``sticky`` allowed a target."""
    profile: str | None = None
    asked: AskedTimes = NO_TIMES
    """The times that the client asked for."""
    delivered: int | None = None
    """The tokens that the engine has reused; None if it did not say so, or not yet."""
    ttft_ms: float | None = None

    def text(self) -> bytes:
        """Return the entry of the decision; ``delivered`` and ``ttft_ms`` have entries of their own."""
        optional: dict[str, Any] = {
            "prefix_key": self.prefix_key and self.prefix_key.hex(),
            "lora_name": self.lora_name,
            "session": self.session,
            "is_multimodal": self.is_multimodal,
            "pool": self.pool and f"{self.pool:x}",
            "active_bound": self.active_bound,
            "profile": self.profile,
            "asked_ttft_ms": self.asked.ttft_ms,
            "asked_tpot_ms": self.asked.tpot_ms,
            "shadows": {name: list(choice) for name, choice in self.shadows.items()},
        }
        whole: dict[str, Any] = {"format": FORMAT} | dict(zip(_WHOLE, self, strict=False))
        whole["targets"] = [_target_words(target) for target in self.targets]
        whole |= {"blocks": b64encode(self.blocks).decode(), "has_tokens": self.has_tokens}
        return orjson.dumps(whole | {name: value for name, value in optional.items() if value})

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse an entry. Raise ``Malformed`` if it cannot be read. A field that an earlier release did not write has
        its default.
        """
        document = Document(raw)
        prefix_key = document.optional_text("prefix_key")
        try:
            blocks = b64decode(document.text("blocks"), validate=True)
            key = None if prefix_key is None else bytes.fromhex(prefix_key)
            pool = int(document.optional_text("pool") or "0", 16)
        except (ValueError, binascii.Error):
            raise Malformed("blocks, prefix_key or pool has a wrong form") from None
        if len(blocks) % KEY_BYTES:
            raise Malformed("blocks is not a list of hashes")
        return cls(
            document.integer("time_ms"),
            document.text("nonce"),
            document.text("tenant"),
            document.text("policy"),
            document.text("decision"),
            document.integer("tokens"),
            document.integer("block_size", least=1),
            document.integer("chosen"),
            document.integer("expected"),
            document.integer("work"),
            tuple(_target(words) for words in document.lists("targets")),
            {name: _shadow(words) for name, words in document.lists_by_name("shadows").items()},
            blocks,
            has_tokens=document.flag("has_tokens"),
            prefix_key=key,
            lora_name=document.optional_text("lora_name"),
            session=document.optional_text("session"),
            is_multimodal=document.flag("is_multimodal"),
            pool=pool,
            active_bound=document.optional_integer("active_bound"),
            profile=document.optional_text("profile"),
            asked=AskedTimes(_ms(document, "asked_ttft_ms"), _ms(document, "asked_tpot_ms")),
        )


class _DecisionReport(NamedTuple):
    """A report about a decision that was made before."""

    nonce: str
    delivered: int | None
    ttft_ms: float | None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        document = Document(raw)
        return cls(document.text("nonce"), document.optional_integer("delivered"), _ms(document, "ttft_ms"))


class KeptReading(NamedTuple):
    """The kept decisions of a group, oldest first."""

    decisions: Sequence[KeptDecision]
    unreadable: int
    """Entries that were left out, because another release or a person wrote them in another form."""


class KeptDecisions:
    """Writes the kept decisions of all groups, and reads them."""

    def __init__(self, client: RedisClient, scripts: Scripts, metrics: Metrics, begin: StartTask) -> None:
        self._client = client
        self._scripts = scripts
        self._metrics = metrics
        self._begin = begin
        self._waiting: deque[tuple[int, str, bytes]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._written_at: dict[int, float] = {}
        """The time of the last entry by group, of groups that may still have entries."""

    # ---- writing -----------------------------------------------------------------------------------

    def note_decision(self, group_id: int, decision: KeptDecision) -> None:
        """Queue a decision and return at once."""
        self._note(group_id, "decision", decision.text())

    def note_outcome(self, group_id: int, nonce: str, *, delivered: int | None, ttft_ms: float | None) -> None:
        """Queue a report about a kept decision and return at once."""
        outcome = {"format": FORMAT, "nonce": nonce, "delivered": delivered, "ttft_ms": ttft_ms}
        self._note(group_id, "outcome", orjson.dumps(outcome))

    def _note(self, group_id: int, name: str, entry: bytes) -> None:
        if len(self._waiting) >= _WAITING_MAX:
            self._metrics.decision_records_dropped.labels(reason="full").inc()
            return
        self._waiting.append((group_id, name, entry))
        if self._writing is None or self._writing.done():
            self._writing = self._begin(self._write())
        if self._trimming is None or self._trimming.done():
            self._trimming = self._begin(self._keep_trimming())

    async def _write(self) -> None:
        while self._waiting:
            group_id = self._waiting[0][0]
            words: list[str | bytes] = []
            while self._waiting and self._waiting[0][0] == group_id and len(words) < 2 * _PER_CALL:
                words += self._waiting.popleft()[1:]
            count = len(words) // 2
            try:
                await self._keep(group_id, words)
            except StoreUnavailable as exc:
                self._metrics.decision_records_dropped.labels(reason="redis").inc(count)
                log.debug("decisions not kept", extra=fields(count=count, error=exc.sentence))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self._metrics.decision_records.inc(count)
                self._written_at[group_id] = time.monotonic()

    async def _keep(self, group_id: int, words: Sequence[str | bytes]) -> None:
        await self._scripts.run(
            "keep_decisions", decisions=keys.decisions(group_id), length=LENGTH, keep_ms=KEEP_MS, entry=words
        )

    async def _keep_trimming(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            try:
                await self.trim()
            except StoreUnavailable as exc:
                log.debug("kept decisions not trimmed", extra=fields(error=exc.sentence))

    async def trim(self) -> None:
        """Remove old entries, even if no new ones come. Raise StoreUnavailable."""
        now = time.monotonic()
        for group_id, written_at in list(self._written_at.items()):
            if now - written_at > KEEP_MS / 1000:
                self._written_at.pop(group_id, None)  # the stream has ended
            else:
                await self._keep(group_id, ())

    def clear(self) -> None:
        """Forget all ids, because Redis came back empty and uses them for other objects."""
        self._waiting.clear()
        self._written_at.clear()

    # ---- reading -----------------------------------------------------------------------------------

    async def read(self, group_id: int, *, since_ms: int, decisions_max: int) -> KeptReading:
        """Read the newest kept decisions of a group, with their outcomes. Raise StoreUnavailable.

        ``since_ms`` is a time by the clock of Redis, in ms since 1970.
        """
        key, end = keys.decisions(group_id), "+"
        decisions: dict[str, KeptDecision] = {}
        outcomes: dict[str, _DecisionReport] = {}
        unreadable = 0
        while len(decisions) < decisions_max:
            (page,) = await self._client.several([("XREVRANGE", key, end, since_ms, "COUNT", _PAGE)], is_lenient=True)
            for index, (entry_id, words) in enumerate(page or ()):
                if index % _ENTRIES_A_TURN == 0:
                    await asyncio.sleep(0)
                for kind, raw in pairs(words):
                    try:
                        if kind == b"outcome":
                            outcome = _DecisionReport.parse(raw)
                            outcomes[outcome.nonce] = _joined(outcome, outcomes.get(outcome.nonce))
                        elif kind == b"decision" and len(decisions) < decisions_max:
                            decision = KeptDecision.parse(raw)
                            # A repeated decision has the nonce of the first one. The later record replaces the earlier
                            # one.
                            decisions.pop(decision.nonce, None)
                            decisions[decision.nonce or entry_id.decode()] = decision
                    except Malformed as exc:
                        log.debug("kept decision not read", extra=fields(key=key, entry=entry_id, error=str(exc)))
                        unreadable += 1
                end = f"({entry_id.decode()}"
            if not page or len(page) < _PAGE:
                break
        # The reports about a decision come after it.
        whole = [_with_outcome(decision, outcomes.get(decision.nonce)) for decision in decisions.values()]
        return KeptReading(whole[::-1], unreadable)


def _with_outcome(decision: KeptDecision, outcome: _DecisionReport | None) -> KeptDecision:
    if outcome is None:
        return decision
    return decision._replace(delivered=outcome.delivered, ttft_ms=outcome.ttft_ms)


def _ms(document: Document, name: str) -> float | None:
    return document.number(name, 1e12, 0.0) if document.has(name) else None


def _joined(outcome: _DecisionReport, later: _DecisionReport | None) -> _DecisionReport:
    if later is None:
        return outcome
    return _DecisionReport(
        outcome.nonce,
        later.delivered if outcome.delivered is None else outcome.delivered,
        later.ttft_ms if outcome.ttft_ms is None else outcome.ttft_ms,
    )


_DEFAULTS = KeptTarget(0, "")


def _target_words(target: KeptTarget) -> list[Any]:
    """Return the fields of a target, without defaults at the end."""
    words: list[Any] = list(target)
    if target.gauges is not None:
        words[KeptTarget._fields.index("gauges")] = gauge_words(target.gauges)
    words[KeptTarget._fields.index("labels")] = dict(target.labels)
    while len(words) > 2 and target[len(words) - 1] == _DEFAULTS[len(words) - 1]:
        words.pop()
    return words


def _target(words: Any) -> KeptTarget:
    """Return a target, without later fields that this release does not know. Raise ``Malformed`` for other words."""
    fields_here = words[: len(KeptTarget._fields)] if isinstance(words, list) else []
    if len(fields_here) < 2:
        raise Malformed("a target has no publisher and instance")
    target = KeptTarget(*fields_here)
    numbers = (target.publisher, *target[2 : KeptTarget._fields.index("role")])
    if not (
        isinstance(target.instance_id, str)
        and isinstance(target.role, str)
        and isinstance(target.labels, Mapping)
        and all(isinstance(number, int | float) and 0 <= number < 2**63 for number in numbers)
        and target.weight > 0
    ):
        raise Malformed("a target has a field with a wrong form")
    return target._replace(gauges=_gauges(target.gauges), answer_times=_answer_times(target.answer_times))


def _gauges(words: Any) -> Gauges | None:
    if words is None:
        return None
    try:
        return gauges_of(words)
    except (TypeError, ValueError):
        raise Malformed("the gauges of a target have a wrong form") from None


def _answer_times(words: Any) -> tuple[float, ...] | None:
    if words is None:
        return None
    try:
        return tuple(map(float, words))
    except (TypeError, ValueError):
        raise Malformed("the answer times of a target have a wrong form") from None


def _shadow(words: Any) -> ShadowChoice:
    if not isinstance(words, list) or len(words) < 3 or not all(isinstance(word, int) for word in words[:3]):
        raise Malformed("the choice of a shadow is not three numbers")
    return ShadowChoice(*words[:3])

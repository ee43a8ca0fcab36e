"""The requests of the contract, and the meaning of their answers: every method of both clients, before it is sent.

A function that returns a ``ClientCall`` is a method of ``Client`` and of ``AsyncClient``, with the same arguments; its
result contains the request and the parser of the answer. ``block_hashes`` makes the hashes for
``query_by_hash``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack, cast

import httpx
import msgpack

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.client import answers
from waymark.client.keywords import (
    EngineKeywords,
    EventKeywords,
    HashQueryKeywords,
    PublisherKeywords,
    QueryKeywords,
    ScoreKeywords,
    SelectKeywords,
    check,
)
from waymark.domain.answer_times import tpot_ms as _tpot_ms
from waymark.domain.books import USAGE_MAX, more_cached
from waymark.domain.engines import UNNAMED
from waymark.domain.hashing import DEFAULT_SEED, token_bytes
from waymark.domain.multimodal import items_of, seq_hashes_with

C = TypeVar("C")
T = TypeVar("T")

_IN_JSON = {"Content-Type": "application/json"}
_IN_MSGPACK = {"Content-Type": "application/msgpack"}
#: Marks a call without a default result: it raises an error if there is no answer.
_RAISED: Final[object] = object()


@record(frozen=True, slots=True)
class ClientCall(Generic[T]):
    """One request, and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: dict[str, Any] | None = None
    is_retried: bool = True
    """Whether a 503 is tried again after a while. Not if a user's request waits for the answer."""
    deadline: float | None = None
    """Seconds for the whole call, over all URLs; then each URL is asked once."""
    otherwise: T | object = _RAISED
    """The result if there is no answer."""
    is_named: bool = False
    """Whether the call needs an id, so that it counts once if several replicas get it."""
    is_done_by_404: bool = False
    """Whether a 404 after an earlier try may mean that the earlier try, whose answer is lost, has succeeded."""

    def sent(self, more: dict[str, Any]) -> dict[str, Any]:
        """Return the body, with ``more`` fields, as httpx takes it: in msgpack if a field is packed, else in JSON.

        Raise Refused if neither can hold a value: half of a surrogate pair, NaN, or an integer of more than 64 bits.
        """
        if self.body is None:
            return {}
        body = self.body | more
        try:
            if any(isinstance(value, bytes) for value in body.values()):
                return {"content": msgpack.packb(body, use_bin_type=True), "headers": _IN_MSGPACK}
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            return {"content": text.encode(), "headers": _IN_JSON}
        except (ValueError, OverflowError, RecursionError) as error:
            raise answers.Refused(400, f"the request cannot be sent: {error}", "invalid_value", None) from error

    def unanswered(self, error: answers.Unavailable) -> T:
        """Return the result for a missing answer, or raise the error."""
        if self.otherwise is _RAISED:
            raise error
        return cast("T", self.otherwise)


def register(
    instance_id: str,
    endpoint: str | None,
    *,
    model: str,
    block_size: int,
    type: str = UNNAMED,
    **options: Unpack[PublisherKeywords],
) -> ClientCall[list[str]]:
    """Have a publisher's events indexed; a repeated registration has no effect.

    Return the warnings, one for each ability that this registration lacks. ``options`` are further fields of ``POST
    /register``.
    """
    body = {"instance_id": instance_id, "endpoint": endpoint, "model": model, "block_size": block_size, "type": type}
    return ClientCall("POST", "/register", answers.read_warnings, body | check("register", PublisherKeywords, options))


def register_url(url: str, **options: Unpack[EngineKeywords]) -> ClientCall[answers.Registered]:
    """Have every rank of the engine at ``url`` indexed, by what the engine says of itself.

    ``options`` are fields of ``POST /register`` that the engine does not know, such as ``tenant_id``. Raises
    Refused with the missing field, and Unavailable if the engine does not answer.
    """
    # A 503 may mean that the engine does not answer, so there is no second try.
    body = {"url": url} | check("register_url", EngineKeywords, options)
    return ClientCall("POST", "/register", answers.read_registered, body, is_retried=False)


def unregister(instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None) -> ClientCall[list[str]]:
    """Unregister a rank, or all ranks. Return ``inst|tenant|rank`` of each. Raise ``Refused`` (404) if there is no such
    rank, unless it was sent twice: the first try may have succeeded without an answer, so the list is empty then.
    """
    body = {"instance_id": instance_id, "tenant_id": tenant_id, "dp_rank": dp_rank}
    return ClientCall("POST", "/unregister", _removed_instances, body, is_done_by_404=True)


def _removed_instances(answer: httpx.Response) -> list[str]:
    return [] if answer.status_code == 404 else list(answer.json()["removed_instances"])


def query(
    model: str,
    token_ids: Iterable[int] | None = None,
    block_size: int | None = None,
    *,
    deadline: float | None = None,
    or_empty: bool = False,
    must_know: bool = False,
    **options: Unpack[QueryKeywords],
) -> ClientCall[answers.Matches]:
    """Return each instance's share of a prompt.

    Each URL is asked once; ``deadline`` is the most seconds that all of them together may take. If no replica answers,
    it raises Unavailable, or with ``or_empty`` returns no matches. There are no matches either if nobody has registered
    the model, and ``Matches.note`` names the nearest one; with ``must_know`` this raises ModelNotFound.

    The prompt is ``token_ids``, ``messages`` of a chat request, or a text as ``prompt``. ``block_size`` may be left out
    if all engines of the model have the same. ``features`` names images among ``token_ids``.
    """
    fields = check("query", QueryKeywords, options)
    body = {"model": model, "block_size": block_size} | _packed_prompt(token_ids) | fields
    return ClientCall("POST", "/query", _reader(must_know), body, False, deadline, _empty(or_empty))


def query_by_hash(
    model: str,
    seq_hashes: Iterable[int],
    block_size: int | None = None,
    *,
    deadline: float | None = None,
    or_empty: bool = False,
    must_know: bool = False,
    **options: Unpack[HashQueryKeywords],
) -> ClientCall[answers.Matches]:
    """Query like ``query``, with seq_hashes in place of token ids."""
    fields = check("query_by_hash", HashQueryKeywords, options)
    body = {"model": model, "block_size": block_size, "seq_hashes": _packed_hashes(seq_hashes)} | fields
    return ClientCall("POST", "/query_by_hash", _reader(must_know), body, False, deadline, _empty(or_empty))


def stored(
    instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Unpack[EventKeywords]
) -> ClientCall[answers.Applied]:
    """Report new blocks of an engine of type ``standard`` without a socket; ``event_id`` rises by one each time.

    ``options`` are fields of a standard event: ``base_block_idx`` or ``parent_hash``, ``medium``, ``dp_rank``,
    ``token_ids``. Raise Refused (409, ``gap``) if an earlier event is missing.
    """
    return _event("stored", instance_id, event_id, seq_hashes, check("stored", EventKeywords, options))


def removed(
    instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Unpack[EventKeywords]
) -> ClientCall[answers.Applied]:
    """Report removed blocks of such an engine."""
    return _event("removed", instance_id, event_id, seq_hashes, check("removed", EventKeywords, options))


def score(
    model: str, token_ids: Iterable[int] | None = None, **options: Unpack[ScoreKeywords]
) -> ClientCall[list[answers.Score]]:
    """Return all targets for a prompt, best first; ``options`` are the fields of ``POST /score``, as for ``query``."""
    body = {"model": model} | _prompt(token_ids) | check("score", ScoreKeywords, options)
    return ClientCall("POST", "/score", answers.read_scores, body, is_retried=False)


def select(
    model: str,
    token_ids: Iterable[int] | None = None,
    *,
    deadline: float | None = None,
    **options: Unpack[SelectKeywords],
) -> ClientCall[answers.Selection]:
    """Return a target. A request waits for it, so only the caller retries; another replica is asked at once."""
    return _selected(model, _prompt(token_ids), deadline, check("select", SelectKeywords, options))


def select_by_hash(
    model: str, seq_hashes: Iterable[int], *, deadline: float | None = None, **options: Unpack[SelectKeywords]
) -> ClientCall[answers.Selection]:
    """Select a target like ``select``, with seq_hashes in place of token ids."""
    fields = check("select_by_hash", SelectKeywords, options)
    return _selected(model, {"seq_hashes": list(seq_hashes)}, deadline, fields)


def outcome_of(error: BaseException | None) -> Literal["ok", "failed"]:
    """Return the outcome of a block that ended with this error. A cancellation, or a refusal by Waymark, is not a
    failure of the target.
    """
    return "failed" if isinstance(error, Exception) and not isinstance(error, answers.Refused) else "ok"


class Usage(TypedDict, total=False):
    """The usage that an engine reports for a request."""

    cached_tokens: int | None
    prompt_tokens: int | None
    completion_tokens: int | None


def usage_of(**tokens: int | None) -> Usage:
    """Return a usage. Raise Refused if no request can have it, as the service would."""
    for name, number in tokens.items():
        if number is not None and (type(number) is not int or not 0 <= number <= USAGE_MAX):
            sentence = f"{name} is {shown(number)}, and has to be an integer of 0 to {USAGE_MAX}, or None"
            raise answers.Refused(400, sentence, "invalid_value", name)
    complaint = more_cached(tokens["cached_tokens"], tokens["prompt_tokens"])
    if complaint is not None:
        raise answers.Refused(400, complaint, "out_of_range", "cached_tokens")
    return cast("Usage", tokens)


def is_about_usage(error: answers.Refused) -> bool:
    """Return whether a reservation can be released without its usage and times."""
    return error.field in Usage.__annotations__ or error.field == "tpot_ms"


def tpot_ms_of(usage: Usage, first_token_at: float | None) -> float | None:
    """Return the ms of each token after the first one, of an answer that ends now; None if they are unknown.

    ``first_token_at`` is by ``perf_counter``.
    """
    if first_token_at is None:
        return None
    return _tpot_ms(perf_counter() - first_token_at, usage.get("completion_tokens"))


def release(
    reservation: str,
    *,
    part: Literal["all", "prefill", "renew"] = "all",
    outcome: Literal["ok", "failed"] = "ok",
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    cached_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> ClientCall[None]:
    """End a reservation by its text, even another process's; with ``part``, only end its prefill, or renew it.

    ``ttft_ms`` is the time to the first token, ``tpot_ms`` that of each further one, and the numbers of tokens are what
    the engine says in its usage, as far as they are known. A reservation that cannot be released runs out.
    """
    fields = {
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "cached_tokens": cached_tokens,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }
    body: dict[str, Any] = {"reservation": reservation, "part": part, "outcome": outcome}
    body |= {name: value for name, value in fields.items() if value is not None}
    return ClientCall("POST", "/release", lambda _: None, body, is_retried=False, otherwise=None)


def services() -> ClientCall[list[answers.Service]]:
    """Return every registration."""
    return ClientCall("GET", "/services", answers.read_services)


def workers() -> ClientCall[answers.Workers]:
    """Return the state of every publisher's stream, and the workers that apply them."""
    return ClientCall("GET", "/workers", answers.read_workers)


def ready() -> ClientCall[bool]:
    """Return whether queries can be answered now; asked once, it never raises an error for an unavailable service."""
    return ClientCall("GET", "/ready", lambda _: True, is_retried=False, otherwise=False)


def _prompt(token_ids: Iterable[int] | None) -> dict[str, Any]:
    """Return the field of token ids; empty if the prompt is a text or messages among the options. Raise TypeError for a
    text in their place.
    """
    if isinstance(token_ids, str):
        raise TypeError("token_ids is a text, not token ids; give a text by the keyword prompt")
    return {} if token_ids is None else {"token_ids": list(token_ids)}


def _packed_prompt(token_ids: Iterable[int] | None) -> dict[str, Any]:
    """Return the same field with 4 bytes a token. Ids that cannot be packed stay a list, for which the service names
    the mistake.
    """
    prompt = _prompt(token_ids)
    try:
        return {name: struct.pack(f"<{len(ids)}I", *ids) for name, ids in prompt.items()}
    except struct.error:
        return prompt


def _packed_hashes(seq_hashes: Iterable[int]) -> bytes | list[int]:
    """Pack the seq_hashes in 8 bytes each, like ``_packed_prompt``."""
    hashes = list(seq_hashes)
    try:
        return struct.pack(f"<{len(hashes)}Q", *hashes)
    except struct.error:
        return hashes  # signed ones, or texts


def _reader(must_know: bool) -> Callable[[httpx.Response], answers.Matches]:
    return _known_matches if must_know else answers.read_matches


def _known_matches(answer: httpx.Response) -> answers.Matches:
    """Read the matches of a registered model. Raise ModelNotFound for any other."""
    matches = answers.read_matches(answer)
    if matches.unknown == "model":
        raise answers.ModelNotFound(answer.status_code, matches.note or "", "not_found", "model")
    return matches


def _empty(or_empty: bool) -> answers.Matches | object:
    return answers.Matches({}, True) if or_empty else _RAISED


def _event(
    event_type: str, instance_id: str, event_id: int, seq_hashes: Sequence[int], fields: dict[str, Any]
) -> ClientCall[answers.Applied]:
    """Return one event of an engine without a socket. A repeated event is stale, so there may be a second try."""
    body = {"event_type": event_type, "backend_id": instance_id, "event_id": event_id, "seq_hashes": list(seq_hashes)}
    body |= fields
    return ClientCall("POST", "/events", answers.read_applied, body)


def _selected(
    model: str, prompt: dict[str, Any], deadline: float | None, fields: dict[str, Any]
) -> ClientCall[answers.Selection]:
    body = {"model": model} | prompt | fields
    return ClientCall(
        "POST", "/select", answers.read_selection, body, is_retried=False, deadline=deadline, is_named=True
    )


class TargetInUse(Generic[C]):
    """The parts of ``Selecting`` and ``AsyncSelecting`` that send nothing."""

    __slots__ = ("_began", "_call", "_client", "_fallback", "_first_token_at", "_usage", "selection")

    _began: float
    selection: answers.Selection
    """The decision; it is set when the block begins, or when ``begin`` returns."""

    def __init__(
        self, client: C, call: ClientCall[answers.Selection], fallback: Callable[[], str] | None = None
    ) -> None:
        self._client = client
        self._call = call
        self._fallback = fallback
        self._usage: Usage = {}
        self._first_token_at: float | None = None

    def _prefilled(self, reservation: str) -> ClientCall[None]:
        """Return the call that reports the first token."""
        if self._first_token_at is None:
            self._first_token_at = perf_counter()
        ttft_ms = 1e3 * (self._first_token_at - self._began)
        return replace(release(reservation, part="prefill", ttft_ms=ttft_ms), deadline=self._call.deadline)

    def used(
        self,
        cached_tokens: int | None = None,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """Note the usage that the engine reports: the tokens, and how many of the prompt were not computed.

        The usage is sent with the end, for the books. After ``first_token`` the tokens of the answer also tell how long
        each took. Raise Refused for numbers that no request can have; the reservation ends without them.
        """
        self._usage = usage_of(
            cached_tokens=cached_tokens, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, features: Mapping[str, Any] | None = None, seed: int = DEFAULT_SEED
) -> list[int]:
    """Return the seq_hash of each complete block of ``block_size`` tokens; an incomplete last block has no hash.

    ``features`` names the images among the tokens, as vLLM's render endpoints answer it: ``mm_hashes`` and
    ``mm_placeholders``. A router that asks several times about one prompt, or must not send the prompt itself, hashes
    it once and asks ``query_by_hash``. ``seed`` is ``WAYMARK_HASH_SEED`` of the service. Raise ``ValueError`` if
    ``block_size`` is below 1, a token id is not within 0..2^32-1, or ``features`` does not fit.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it is at least 1")
    wrong = next((token for token in token_ids if not (isinstance(token, int) and 0 <= token < 2**32)), None)
    if wrong is not None:
        raise ValueError(f"token_ids contains {shown(wrong)}; a token id is an integer within 0..4294967295")
    try:
        items = () if features is None else items_of(features)
    except InvalidValue as error:
        raise ValueError(error.sentence) from None
    return seq_hashes_with(items, None, token_bytes(token_ids), block_size, seed=seed)


def seq_hashes(token_ids: Sequence[int], block_size: int, *, seed: int = DEFAULT_SEED) -> list[int]:
    """Return ``block_hashes`` of a prompt without images."""
    return block_hashes(token_ids, block_size, seed=seed)

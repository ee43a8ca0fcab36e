"""``indexer.v1.IndexerService/GetPodScores`` of llm-d-kv-cache, and ``KVIndexer/MatchExternalKvPrefix`` of SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.api.conftest import Hold, hold
from tests.epp.conftest import Epp, StartEpp, register
from tests.patience import within
from tests.store.factories import registration
from tests.tokenization import small
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.known import Spot
from waymark.domain.names import GroupName
from waymark.domain.rows import Place
from waymark.domain.targets import Target
from waymark.epp.scores import CLASSES, PREFIX_CLASSES, PREFIX_SERVICE, SERVICE
from waymark.epp.server import EppOptions
from waymark.store.hashes import ReportedBlock
from waymark.store.store import Store

__all__ = ["hold"]

TEXT = "The quick brown fox jumps over the lazy dog. " * 30


async def scores(epp: Epp, **fields: Any) -> dict[str, float]:
    call = epp.channel.unary_unary(
        f"/{SERVICE}/GetPodScores",
        request_serializer=CLASSES["GetPodScoresRequest"].SerializeToString,
        response_deserializer=CLASSES["GetPodScoresResponse"].FromString,
    )
    async with within(20.0):
        answer = await call(CLASSES["GetPodScoresRequest"](**fields))
    return {each.pod: each.score for each in answer.scores}


def test_the_messages_are_on_the_wire_as_published() -> None:
    request = CLASSES["GetPodScoresRequest"](prompt="p", model_name="m", pod_identifiers=["a"])
    assert request.SerializeToString() == b"\x0a\x01p\x12\x01m\x1a\x01a"
    answer = CLASSES["GetPodScoresResponse"]()
    answer.scores.add(pod="a", score=1.0)
    assert answer.SerializeToString() == b"\x0a\x0c\x0a\x01a\x11\x00\x00\x00\x00\x00\x00\xf0\x3f"


async def test_each_pod_has_its_blocks_by_any_of_its_names(
    store: Store, start_epp: StartEpp, tmp_path: Path, hold: Hold
) -> None:
    small.directory(tmp_path / "llama")
    for name in ("pod-1", "pod-2", "pod-3", "space/pod-4"):
        number = int(name[-1])
        target = Target(address=f"http://10.0.0.{number}:8000")
        endpoint = f"tcp://10.0.0.{number}:5557"
        await store.registry.register(registration(name, model_name="llama", endpoint=endpoint, target=target))
    tokens = small.tokenizer().encode(TEXT).ids
    await hold("pod-1", tokens[:64])
    await hold("pod-1", tokens[:96], medium="CPU", blocks=range(4, 6))
    await hold("pod-2", tokens[:16], medium="CPU")
    await hold("space/pod-4", tokens[:16])
    epp = await start_epp(store, tokenizers_dir=str(tmp_path))
    asked = {"prompt": TEXT, "model_name": "llama"}
    assert await scores(epp, **asked) == {"pod-1": 4 + 0.8 * 2, "pod-2": 0.8, "space/pod-4": 1.0}
    named = ["10.0.0.1:8000", "10.0.0.2", "pod-4", "http://10.0.0.3:8000", "nobody"]
    found = await scores(epp, **asked, pod_identifiers=named)
    assert found == {"10.0.0.1:8000": 4 + 0.8 * 2, "10.0.0.2": 0.8, "pod-4": 1.0}
    assert await scores(epp, prompt="Something else altogether. " * 8, model_name="llama") == {}


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"prompt": "p", "model_name": "llama"}, grpc.StatusCode.FAILED_PRECONDITION, "WAYMARK_TOKENIZERS"),
        ({"prompt": "p"}, grpc.StatusCode.INVALID_ARGUMENT, "model_name"),
        ({"prompt": "p" * 8 * 2**20, "model_name": "llama"}, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger"),
    ],
)
async def test_what_cannot_be_scored_is_said(
    store: Store, start_epp: StartEpp, fields: dict[str, Any], code: Any, word: str
) -> None:
    await register(store, "pod-1")
    epp = await start_epp(store)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scores(epp, **fields)
    assert caught.value.code() == code
    assert word in caught.value.details()
    assert await scores(epp, prompt="p", model_name="unknown") == {}


# ---- SGLang's router --------------------------------------------------------------------------------

NAMED = 2**63
"""Added to a block's number: an engine hash that is signed on the wire."""


async def matches(epp: Epp, hashes: Sequence[int], max_blocks: int = 0) -> Any:
    """The answer of the service, to a client of the same messages."""
    call = epp.channel.unary_unary(
        f"/{PREFIX_SERVICE}/MatchExternalKvPrefix",
        request_serializer=PREFIX_CLASSES["MatchExternalKvPrefixRequest"].SerializeToString,
        response_deserializer=PREFIX_CLASSES["MatchExternalKvPrefixResponse"].FromString,
    )
    signed = [each - 2**64 if each >= 2**63 else each for each in hashes]
    async with within(20.0):
        return await call(PREFIX_CLASSES["MatchExternalKvPrefixRequest"](hashes=signed, max_blocks=max_blocks))


def named(answer: Any) -> list[tuple[str, int, str]]:
    return [(each.worker_address, each.matched_prefix_blocks, each.worker_id) for each in answer.matches]


def patient_options() -> EppOptions:
    """An answer may take as long as a busy machine needs."""
    return EppOptions("127.0.0.1", 0, 0, has_tls=False, drain_seconds=0.0, finish_seconds=0.1, prefix_seconds=20.0)


async def keep_hashes(store: Store, instance_id: str, tokens: Sequence[int], *, model: str = "llama") -> list[int]:
    """What the stream of an engine keeps: the block of 16 tokens that each of its hashes names."""
    (claim,) = [
        each
        for each in await store.directory.claims()
        if (each.registration.instance_id, each.registration.model_name) == (instance_id, model)
    ]
    grant = await store.leases.take(claim, "test", 60.0, force=True)
    assert grant is not None
    hashes = extend(None, token_bytes(tokens), 16)
    named = [NAMED + number for number in range(len(hashes))]
    spots = [Spot(Place(hashes[0]), 0, number % 32, each) for number, each in enumerate(hashes)]
    assert await store.hashes.kept(grant, 10_000).keep(list(map(ReportedBlock, named, spots)))
    return named


async def sglang(store: Store, number: int, model: str = "llama", **changes: Any) -> str:
    given: dict[str, Any] = {"target": Target(address=f"http://10.0.0.{number}:30000/"), "kind": EngineKind.SGLANG}
    await store.registry.register(
        registration(f"s-{number}", model_name=model, endpoint=f"tcp://10.0.0.{number}:5557", **given | changes)
    )
    return f"http://10.0.0.{number}:30000/"


def test_the_messages_of_sglang_are_on_the_wire_as_published() -> None:
    request = PREFIX_CLASSES["MatchExternalKvPrefixRequest"](hashes=[1, -1], max_blocks=3)
    assert request.SerializeToString() == b"\x0a\x10\x01" + 7 * b"\0" + 8 * b"\xff" + b"\x10\x03"
    answer = PREFIX_CLASSES["MatchExternalKvPrefixResponse"](best_prefix_blocks=2, blocks_read=4)
    answer.matches.add(worker_address="a", matched_prefix_blocks=2, worker_id="w")
    assert answer.SerializeToString() == b"\x0a\x08\x0a\x01a\x10\x02\x1a\x01w\x10\x02\x18\x04"


async def test_a_router_finds_who_has_a_prompt_by_the_hashes_of_the_engines(
    store: Store, start_epp: StartEpp, hold: Hold, metrics: Metrics
) -> None:
    one, two = await sglang(store, 1), await sglang(store, 2)
    await sglang(store, 3, target=Target())  # without an address it is left out
    tokens = list(range(16 * 40))
    for name, count in (("s-1", 40), ("s-2", 3), ("s-3", 40)):
        await hold(name, tokens[: 16 * count])
    hashes = await keep_hashes(store, "s-1", tokens)
    epp = await start_epp(store, options=patient_options())
    answer = await matches(epp, [*hashes, 7])
    assert named(answer) == [(one, 40, "s-1"), (two, 3, "s-2")]
    assert (answer.best_prefix_blocks, answer.blocks_read) == (40, 41)
    answer = await matches(epp, hashes, max_blocks=2)
    assert named(answer) == [(one, 2, "s-1"), (two, 2, "s-2")]
    assert answer.blocks_read == 2
    # What follows an unknown hash is not reusable, nor is what does not begin at the first block.
    assert named(await matches(epp, [*hashes[:5], 7, *hashes[5:]])) == [(one, 5, "s-1"), (two, 3, "s-2")]
    for none in ([7, *hashes], hashes[1:], []):
        answer = await matches(epp, none)
        assert (named(answer), answer.best_prefix_blocks) == ([], 0)
    assert metrics.prefix_queries.labels(outcome="match").value == 3  # waymark_prefix_queries_total
    assert metrics.prefix_queries.labels(outcome="empty").value == 3
    # Streams learn of it, in this group alone.
    groups = await store.directory.groups()
    assert await store.hashes.asked.read() == {entry.group_id for entry in groups.values()}


async def test_only_groups_of_such_engines_and_of_the_tenant_are_asked_about(store: Store, start_epp: StartEpp) -> None:
    await sglang(store, 1)
    await sglang(store, 2, "other", kind=EngineKind.VLLM)
    await sglang(store, 3, "foreign", tenant_id="t")
    epp = await start_epp(store, options=patient_options())
    assert named(await matches(epp, [1])) == []
    groups = await store.directory.groups()
    assert await store.hashes.asked.read() == {groups[GroupName("default", "llama")].group_id}


async def test_an_answer_to_sglang_is_in_time_or_a_status(start_epp: StartEpp, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open("memory://")
    await sglang(store, 1)
    epp = await start_epp(store)

    async def hangs(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(store.hashes, "find", hangs)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await matches(epp, [1])
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def is_away(*_: Any) -> Any:
        raise StoreUnavailable("Redis is unavailable")

    monkeypatch.setattr(store.hashes, "find", is_away)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await matches(epp, [1])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await store.close()

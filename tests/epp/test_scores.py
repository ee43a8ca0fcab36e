"""``indexer.v1.IndexerService/GetPodScores``, as llm-d-kv-cache describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.api.conftest import Hold, hold
from tests.epp.conftest import Epp, StartEpp, register
from tests.patience import within
from tests.store.factories import registration
from tests.tokenization import small
from waymark.domain.targets import Target
from waymark.epp.scores import CLASSES, SERVICE
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

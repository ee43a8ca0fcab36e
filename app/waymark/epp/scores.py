"""``indexer.v1.IndexerService/GetPodScores`` of llm-d-kv-cache: how much of a prompt each pod has.

A score counts the blocks of the prompt's prefix that a pod has: 1 for a block on the device, 0.8 below it. Pods that
have nothing of it are left out, as they are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import grpc

from waymark.base.errors import InvalidValue, RemoteUnavailable, StoreUnavailable
from waymark.base.protobuf import message_classes
from waymark.chat.requests import Form, InferenceRequest
from waymark.decide.policies.target import Candidate
from waymark.decide.requests import RequestSelector
from waymark.domain.targets import host_and_port

PACKAGE = "indexer.v1"
SERVICE = f"{PACKAGE}.IndexerService"
_BELOW_DEVICE = 0.8

CLASSES = message_classes(
    "waymark/indexer.proto",
    PACKAGE,
    {
        "GetPodScoresRequest": "string prompt, string model_name, string* pod_identifiers",
        "PodScore": "string pod, double score",
        "GetPodScoresResponse": "PodScore* scores",
    },
)


class PodScores:
    """The service, over the targets of one tenant."""

    def __init__(self, selector: RequestSelector, tenant_id: str) -> None:
        self._selector = selector
        self._tenant_id = tenant_id

    @property
    def handler(self) -> Any:
        """What a gRPC server adds."""
        method = grpc.unary_unary_rpc_method_handler(
            self.get_pod_scores,
            request_deserializer=CLASSES["GetPodScoresRequest"].FromString,
            response_serializer=CLASSES["GetPodScoresResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"GetPodScores": method})

    async def get_pod_scores(self, request: Any, context: Any) -> Any:
        """The scores of all pods, by instance; or of the pods that the request names, by the names that it uses."""
        if not request.model_name:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "model_name is empty; name a registered model")
        said = InferenceRequest(request.model_name, Form.COMPLETIONS, prompts=(request.prompt,))
        try:
            ranked = await self._selector.score(said, tenant_id=self._tenant_id)
        except InvalidValue as exc:
            has_no_source = exc.reason == "no_tokenizer"
            code = grpc.StatusCode.FAILED_PRECONDITION if has_no_source else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(code, exc.sentence)
        except (RemoteUnavailable, StoreUnavailable) as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, exc.sentence)
        answer = CLASSES["GetPodScoresResponse"]()
        if ranked is not None:
            wanted = frozenset(request.pod_identifiers)
            best: dict[str, float] = {}
            for each in ranked.scored:
                score = _score(each.candidate, ranked.block_size)
                for name in _names(each.candidate) & wanted if wanted else {each.candidate.instance_id}:
                    best[name] = max(score, best.get(name, 0.0))  # ranks of one pod are one pod
            for name, score in best.items():
                if score > 0:
                    answer.scores.add(pod=name, score=score)
        return answer


def _score(candidate: Candidate, block_size: int) -> float:
    below = candidate.host + candidate.disk + candidate.shared
    return (candidate.device + _BELOW_DEVICE * below) / block_size


def _names(candidate: Candidate) -> set[str]:
    """What a caller may call a pod: its instance, ``namespace/name`` without the namespace, its address, its IP."""
    names: Iterable[str] = (candidate.instance_id, candidate.instance_id.rpartition("/")[2])
    if candidate.address is None:
        return set(names)
    host = urlsplit(candidate.address).hostname
    return {*names, candidate.address, host_and_port(candidate.address), *([host] if host else [])}

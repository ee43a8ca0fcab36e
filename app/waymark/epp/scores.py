"""Two services of other projects: how much of a prompt each engine has, by its text and by hashes.

``indexer.v1.IndexerService/GetPodScores`` of llm-d-kv-cache counts the blocks of the prompt's prefix that a pod has: 1
for a block on the device, 0.8 below it. ``kv_indexer.v1.KVIndexer/MatchExternalKvPrefix`` of SGLang's router counts
blocks by the hashes that its engines name in their events. Engines without blocks are left out, as in that router.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import grpc

from waymark.base.errors import InvalidValue, RemoteUnavailable, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.protobuf import message_classes, reader_of
from waymark.chat.requests import Form, InferenceRequest
from waymark.decide.reported import ReportedPrompts
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


PREFIX_PACKAGE = "kv_indexer.v1"
PREFIX_SERVICE = f"{PREFIX_PACKAGE}.KVIndexer"
#: Blocks of a prompt to look up.
_PREFIX_MAX = 16_384
_U64 = 2**64 - 1

PREFIX_CLASSES = message_classes(
    "waymark/kv_indexer.proto",
    PREFIX_PACKAGE,
    {
        "MatchExternalKvPrefixRequest": "sfixed64* hashes, uint32 max_blocks",
        "ExternalKvPrefixMatch": "string worker_address, uint32 matched_prefix_blocks, string worker_id",
        "MatchExternalKvPrefixResponse": (
            "ExternalKvPrefixMatch* matches, uint32 best_prefix_blocks, uint32 blocks_read"
        ),
    },
)


class PodScores:
    """The service, over the targets of one tenant."""

    def __init__(self, selector: RequestSelector, tenant_id: str) -> None:
        self._selector = selector
        self._tenant_id = tenant_id

    @property
    def handler(self) -> Any:
        """The handler for a gRPC server."""
        method = grpc.unary_unary_rpc_method_handler(
            self.get_pod_scores,
            request_deserializer=reader_of(CLASSES["GetPodScoresRequest"]),
            response_serializer=CLASSES["GetPodScoresResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"GetPodScores": method})

    async def get_pod_scores(self, request: Any, context: Any) -> Any:
        """Return the scores of all pods, by instance; or of the pods that the request names, by the names that it
        uses.
        """
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no GetPodScoresRequest")
        if not request.model_name:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "model_name is empty; name a registered model")
        inference = InferenceRequest(request.model_name, Form.COMPLETIONS, prompts=(request.prompt,))
        try:
            ranked = await self._selector.score(inference, tenant_id=self._tenant_id)
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
            for candidate in (scored.candidate for scored in ranked.scored):
                lower = candidate.host + candidate.disk + candidate.shared
                score = (candidate.device + _BELOW_DEVICE * lower) / ranked.block_size
                names = _names(candidate.instance_id, candidate.address)
                for name in names & wanted if wanted else {candidate.instance_id}:
                    best[name] = max(score, best.get(name, 0.0))  # the ranks of a pod count as one
            for name, score in best.items():
                if score > 0:
                    answer.scores.add(pod=name, score=score)
        return answer


class PrefixMatches:
    """The service that SGLang's router asks, over the targets of one tenant; an ingest worker reads the events."""

    def __init__(self, prompts: ReportedPrompts, metrics: Metrics, seconds: float) -> None:
        """``seconds`` is how long an answer may take."""
        self._prompts = prompts
        self._metrics = metrics
        self._seconds = seconds

    @property
    def handler(self) -> Any:
        """The handler for a gRPC server."""
        method = grpc.unary_unary_rpc_method_handler(
            self.match_external_kv_prefix,
            request_deserializer=reader_of(PREFIX_CLASSES["MatchExternalKvPrefixRequest"]),
            response_serializer=PREFIX_CLASSES["MatchExternalKvPrefixResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(PREFIX_SERVICE, {"MatchExternalKvPrefix": method})

    async def match_external_kv_prefix(self, request: Any, context: Any) -> Any:
        """Return the addresses of the engines with the beginning of a prompt, the longest match first."""
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no MatchExternalKvPrefixRequest")
        hashes = [
            engine_hash & _U64 for engine_hash in request.hashes[: min(request.max_blocks or _PREFIX_MAX, _PREFIX_MAX)]
        ]
        try:
            async with asyncio.timeout(self._seconds):
                matches, count = await self._prompts.match_engine_hashes(hashes, self._seconds)
        except TimeoutError:
            self._metrics.prefix_queries.labels(outcome="late").inc()
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"Redis did not answer within {self._seconds:g} s")
        except StoreUnavailable as exc:
            self._metrics.prefix_queries.labels(outcome="unavailable").inc()
            await context.abort(grpc.StatusCode.UNAVAILABLE, exc.sentence)
        self._metrics.prefix_queries.labels(outcome="match" if matches else "empty").inc()
        answer = PREFIX_CLASSES["MatchExternalKvPrefixResponse"](blocks_read=count)
        for holder_match in matches:
            answer.matches.add(
                worker_address=holder_match.holder,
                matched_prefix_blocks=holder_match.blocks,
                worker_id=holder_match.instance_id,
            )
        answer.best_prefix_blocks = max((holder_match.blocks for holder_match in matches), default=0)
        return answer


def _names(instance_id: str, address: str | None) -> set[str]:
    """Return a caller's possible names for a pod: its instance, ``namespace/name`` without the namespace, its address,
    its IP.
    """
    names = {instance_id, instance_id.rpartition("/")[2]}
    if address is None:
        return names
    host = urlsplit(address).hostname
    return names | {address, host_and_port(address)} | ({host} if host else set())

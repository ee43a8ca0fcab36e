"""Every metric moves when what it says happens, and those of several processes add up to the whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from tests.base.test_metrics import EXPORTED
from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines, Service, Start
from tests.live import lines_of
from tests.patience import patient
from tests.ports import unused_port
from waymark.domain.names import PublisherName
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.workload import SimulatedPrompt
from waymark.store.store import Store

ROOT = Path(__file__).parents[2]

PATIENCE_SECONDS = 15.0

TRICKLE = "test_publishers_that_trickle_their_replays_hold_up_nobody"

HOT = "test_hot_rows_are_not_asked_for_again_and_ended_holders_vanish_at_once"

#: Moved by a test of its own: file and name.
ELSEWHERE = {
    **dict.fromkeys(
        ("waymark_shadow_decisions_total", "waymark_shadow_tokens_total"),
        ("tests/decide/test_shadows.py", "test_decisions_are_the_same_with_shadows_and_without"),
    ),
    "waymark_unreachable_targets": (
        "tests/decide/test_snapshot.py",
        "test_who_cannot_be_reached_is_said_by_the_snapshot",
    ),
    "waymark_waiting_dropped_total": ("tests/ingest/test_pools.py", "test_what_waits_is_bounded_and_counted"),
    "waymark_decision_records_total": (
        "tests/store/test_kept_decisions.py",
        "test_outcomes_are_joined_with_their_decision",
    ),
    "waymark_decision_records_dropped_total": (
        "tests/store/test_kept_decisions.py",
        "test_what_does_not_fit_and_what_redis_refuses_is_counted",
    ),
    "waymark_activity_clients": (
        "tests/api/test_activity.py",
        "test_what_happens_is_sent_and_a_client_goes_on_where_it_was",
    ),
    "waymark_activity_dropped_total": ("tests/store/test_activity.py", "test_what_does_not_fit_is_dropped_and_counted"),
    "waymark_replays_running": (
        "tests/ingest/test_replays_in_turn.py",
        "test_publishers_that_trickle_their_replays_hold_up_nobody",
    ),
    "waymark_discovery_requests_total": (
        "tests/discovery/test_kubernetes.py",
        "test_an_api_server_that_fails_unregisters_nothing",
    ),
    **dict.fromkeys(
        (
            "waymark_response_cache_entries",
            "waymark_response_cache_hit_rate",
            "waymark_response_cache_requests_total",
            "waymark_response_cache_size_bytes",
        ),
        ("tests/gateway/test_response_cache.py", "test_an_equal_request_gets_the_same_answer"),
    ),
    "waymark_response_cache_evictions_total": (
        "tests/gateway/test_response_cache.py",
        "test_the_cache_has_a_bound_in_entries_and_in_bytes",
    ),
    **dict.fromkeys(
        (
            "waymark_cache_backend_type",
            "waymark_cache_redis_connections_active",
            "waymark_cache_redis_connections_idle",
            "waymark_cache_redis_latency_seconds",
        ),
        ("tests/gateway/test_response_cache.py", "test_gateways_share_answers_and_one_of_them_clears_all"),
    ),
    "waymark_cache_fallback_active": (
        "tests/gateway/test_response_cache.py",
        "test_answers_are_in_memory_while_redis_is_away",
    ),
    "waymark_cache_redis_errors_total": (
        "tests/gateway/test_response_cache.py",
        "test_evictions_and_errors_are_those_of_all_gateways",
    ),
    **dict.fromkeys(
        (
            "waymark_kv_consumer_connected",
            "waymark_kv_consumer_reconnects_total",
            "waymark_kv_event_dropped_total",
            "waymark_kv_event_processed_total",
            "waymark_kv_event_received_total",
        ),
        ("tests/ingest/test_prefix_stream.py", "test_a_source_is_counted_with_the_names_of_continuum_router"),
    ),
    **dict.fromkeys(
        (
            "waymark_kv_index_routing_decisions_total",
            "waymark_prefix_routing_backend_distribution",
            "waymark_prefix_routing_prefix_cardinality",
            "waymark_prefix_routing_requests_total",
        ),
        ("tests/gateway/test_gateway.py", "test_decisions_are_counted_with_the_names_of_continuum_router"),
    ),
    "waymark_renderings_stopped_total": (
        "tests/tokenization/test_renderers.py",
        "test_what_stops_a_rendering_is_counted_and_the_next_one_works",
    ),
    "waymark_copies_contradicted_total": (
        "tests/ingest/test_publisher_ids.py",
        "test_an_engine_that_has_another_number_of_copies_is_counted",
    ),
    "waymark_takeovers_total": (
        "tests/e2e/test_activity_noted.py",
        "test_a_restart_a_takeover_a_loss_and_a_sweep_are_noted",
    ),
    "waymark_responses_total": (
        "tests/gateway/test_responses.py",
        "test_a_conversation_goes_on_from_its_last_answer",
    ),
    **dict.fromkeys(
        ("waymark_responses_stored", "waymark_responses_stored_bytes", "waymark_responses_evicted_total"),
        ("tests/gateway/test_responses.py", "test_what_is_stored_has_bounds_altogether"),
    ),
    "waymark_responses_copied_total": ("tests/gateway/test_mongo.py", "test_nothing_is_lost_while_it_is_of_no_use"),
    "waymark_gateway_retries_total": (
        "tests/gateway/test_proxy.py",
        "test_an_engine_without_a_listener_is_replaced_at_most_twice",
    ),
    "waymark_gateway_interrupted_total": (
        "tests/gateway/test_proxy.py",
        "test_a_stream_that_breaks_off_ends_with_an_error_event",
    ),
    "waymark_gateway_requests": ("tests/gateway/test_proxy.py", "test_a_stream_arrives_while_it_is_made"),
    "waymark_ttft_seconds": ("tests/gateway/test_proxy.py", "test_prefill_ends_with_the_first_content"),
    **dict.fromkeys(
        ("waymark_discovery_engines", "waymark_discovery_unregistered_total"),
        ("tests/discovery/test_kubernetes.py", "test_a_pod_that_goes_is_unregistered_and_may_come_back"),
    ),
    **dict.fromkeys(
        (
            "waymark_tokenize_duration_seconds",
            "waymark_tokenize_segments_total",
            "waymark_tokens_cache_bytes",
        ),
        ("tests/tokenization/test_tokenizers.py", "test_what_was_made_is_counted"),
    ),
    "waymark_decisions_without_tokens_total": (
        "tests/decide/test_requests.py",
        "test_without_tokens_the_prefix_decides_and_it_is_counted",
    ),
    **dict.fromkeys(
        ("waymark_epp_requests_total", "waymark_epp_streams"),
        ("tests/epp/test_ext_proc.py", "test_a_request_is_held_picked_for_and_sent_on_as_it_came"),
    ),
    **dict.fromkeys(
        ("waymark_epp_bodies_bytes", "waymark_epp_streams_cut_total"),
        ("tests/epp/test_ext_proc.py", "test_a_request_that_never_ends_is_cut"),
    ),
    **dict.fromkeys(
        ("waymark_placements_total", "waymark_index_queries_total"),
        ("tests/epp/test_radix_index.py", "test_placements_are_acknowledged_and_found_by_every_gateway"),
    ),
    "waymark_prefix_queries_total": (
        "tests/epp/test_scores.py",
        "test_a_router_finds_who_has_a_prompt_by_the_hashes_of_the_engines",
    ),
    "waymark_pool_queries_total": ("tests/decide/test_asked_pools.py", "test_a_decision_counts_what_a_silent_pool_has"),
    "waymark_index_streams": ("tests/epp/test_radix_index.py", "test_streams_that_never_end_have_a_bound_of_their_own"),
    "waymark_placements_dropped_total": ("tests/epp/test_radix_index.py", "test_the_oldest_placements_are_dropped"),
    "waymark_index_evictions_total": (
        "tests/ingest/test_prefix_stream.py",
        "test_the_number_of_entries_is_bounded_and_the_oldest_go_first",
    ),
    **dict.fromkeys(
        ("waymark_tokenizers_closed_total", "waymark_tokenizers_open"),
        ("tests/tokenization/test_places.py", "test_models_beyond_the_bound_have_their_ids_in_turn_and_at_once"),
    ),
    "waymark_tokenizers_long_bytes": (
        "tests/tokenization/test_places.py",
        "test_a_long_text_waits_for_room_and_short_ones_and_other_models_do_not",
    ),
    "waymark_tokenizers_whole": (
        "tests/api/test_texts.py",
        "test_ready_and_a_metric_name_a_tokenizer_whose_texts_are_not_split",
    ),
    "waymark_batches_over_ceiling_total": (
        "tests/ingest/test_large_frames.py",
        "test_a_batch_above_a_ceiling_is_lost_once_for_all_workers",
    ),
    "waymark_gauge_scrapes_total": (
        "tests/ingest/test_scraping.py",
        "test_an_engine_is_scraped_once_for_all_its_ranks_and_its_gauges_decide",
    ),
    "waymark_calls_waiting": ("tests/ingest/test_flood.py", "test_streams_that_wait_for_long_keep_their_leases"),
    "waymark_records_unreadable": (
        "tests/ingest/test_unreadable.py",
        "test_what_cannot_be_read_is_shown_counted_and_logged_once",
    ),
    "waymark_snapshots_total": (
        "tests/ingest/test_snapshots.py",
        "test_a_snapshot_that_cannot_be_used_is_asked_for_again",
    ),
    "waymark_replay_places_yielded_total": ("tests/ingest/test_replays_in_turn.py", TRICKLE),
    "waymark_replays_waiting": ("tests/ingest/test_replays_in_turn.py", TRICKLE),
    "waymark_streams_left": (
        "tests/e2e/test_few_descriptors.py",
        "test_a_worker_with_few_descriptors_reads_what_fits_and_leaves_the_rest",
    ),
    "waymark_http_trailer_fields_dropped_total": (
        "tests/serving/test_edge.py",
        "test_fields_behind_a_body_are_dropped_and_counted",
    ),
    "waymark_event_memory_bytes": ("tests/api/test_kept.py", "test_memories_are_bounded_in_bytes"),
    "waymark_hot_block_bytes": ("tests/store/test_row_reader.py", HOT),
    "waymark_hot_block_hits_total": ("tests/store/test_row_reader.py", HOT),
    "waymark_publishers_unclaimed_total": (
        "tests/ingest/test_sweeping.py",
        "test_a_damaged_table_does_not_delay_the_next_group",
    ),
    "waymark_publishers_refused": (
        "tests/ingest/test_worker.py",
        "test_what_the_file_says_otherwise_moves_or_is_told_and_what_it_does_not_name_stays",
    ),
    **dict.fromkeys(
        (
            "waymark_avoidable_prefill_tokens_total",
            "waymark_kv_index_overlap_score",
            "waymark_router_shared_cache_beyond_blocks",
            "waymark_router_shared_cache_hit_rate",
        ),
        ("tests/api/test_decision_contract.py", "test_what_targets_have_and_lack_is_counted"),
    ),
    **dict.fromkeys(
        (
            "waymark_drifts_total",
            "waymark_tokens_available_total",
            "waymark_tokens_chosen_total",
            "waymark_tokens_delivered_total",
            "waymark_tokens_expected_total",
        ),
        ("tests/api/test_books.py", "test_a_target_that_delivers_less_is_worth_less_until_it_delivers_again"),
    ),
    "waymark_query_partial_total": ("tests/api/test_conductor.py", "test_partial_reading_is_marked_and_counted"),
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def metrics_of(port: int) -> str:
    """The metrics of a process."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        return (await client.get("/metrics")).raise_for_status().text


async def scrape(port: int, name: str) -> Samples:
    """The samples of one name of a process, by their name and labels."""
    families = text_string_to_metric_families(lines_of(await metrics_of(port), name))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels among theirs."""
    return sum(
        value for (other, found), value in samples.items() if other == name and labels.items() <= dict(found).items()
    )


def new_prompts(first: int = 1) -> Any:
    """Prompts of three blocks that nobody had before."""
    return (SimulatedPrompt(tuple(range(1000 * n, 1000 * n + 3 * BLOCK_SIZE))) for n in count(first))


class Watched:
    """A process, and which of the exported metrics have been seen above zero."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.moved: set[str] = set()

    async def scrape_once(self) -> None:
        names = {exported.partition("{")[0] for exported in EXPORTED}
        for line in (await metrics_of(self.port)).splitlines():
            # A histogram has moved when something other than zero was observed.
            family = line.partition("{")[0].partition(" ")[0].removesuffix("_sum")
            if family in names and float(line.rpartition(" ")[2]) > 0:
                self.moved.add(family)

    async def sees(self, *names: str) -> None:
        expected = {f"waymark_{name}" for name in names}

        async def has_moved() -> bool:
            await self.scrape_once()
            return self.moved.issuperset(expected)

        await wait_until(has_moved, lambda: f"these have moved: {expected - self.moved}", PATIENCE_SECONDS)


@pytest.fixture
async def evicting(redis_url: str) -> AsyncIterator[Redis]:
    """A Redis that has thrown keys away, and may do so again, until the test is over."""
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        await redis.config_set("maxmemory", 2**20 + (await redis.info("memory"))["used_memory"])
        for n in range(20):
            await redis.set(f"junk:{n}", bytes(2**17))
        await redis.flushall()
        await redis.config_set("maxmemory", "1gb")
        try:
            yield redis
        finally:
            await redis.config_set("maxmemory-policy", "noeviction")
            await redis.config_set("maxmemory", 0)
            await redis.config_resetstat()
            await redis.client_unpause()


@pytest.mark.long
async def test_every_metric_moves(start: Start, redis_url: str, evicting: Redis, engines: Engines) -> None:
    port = unused_port()
    service = await start(
        "serve",
        redis_url,
        port=port,
        lease_seconds=min(60.0, patient(4)),
        stream_buffer_bytes=40 * 3356,  # 40 frames
        sweep_blocks_per_second=20,
        redis_timeout_seconds=1,
    )
    watched, prompts = Watched(port), new_prompts()
    await watched.sees("redis_misconfigured", "redis_memory_bytes", "redis_memory_max_bytes")
    await watched.sees("redis_up", "redis_evicted_keys")

    honest = await engines.open(service, "honest")
    await has_subscriber(honest)
    first = next(prompts)
    await honest.prefill(first)
    await engines.agree([service], first.tokens)
    await watched.sees("streams", "publishers", "instances", "groups", "workers", "holders")
    await watched.sees("known_blocks", "known_bytes")
    await watched.sees("leases_taken_total")
    await ask(service, engines, first)

    await misbehave(honest, prompts)
    await overtake(honest, prompts, watched)
    await lose(await engines.open(service, "silent", gpu_blocks=9), prompts)
    await service.post(
        "/register",
        **(engines.registrations["honest"] | {"instance_id": "misread", "block_size": 2 * BLOCK_SIZE}),
    )
    await watched.sees(
        *("decode_errors_total", "frames_malformed_total", "events_ignored_total", "gaps_total", "replays_total"),
        *("batches_lost_total", "waiting_blocks", "missing_blocks", "unresolved_total"),
    )
    await honest.restart()
    await honest.prefill(next(prompts))
    await watched.sees("restarts_total", "dead_holders", "sweep_blocks_total", "sweeps_total")

    await has_subscriber(honest)
    await evicting.client_pause(int(patient(60) * 1000), all=False)
    # Looked at meanwhile: the buffer ends with its stream, and that with its lease.
    seen = asyncio.ensure_future(watched.sees("buffer_bytes", "buffer_frames", "redis_errors_total"))
    for _ in range(80):
        await honest.prefill(next(prompts))
    await seen
    await evicting.client_unpause()
    await watched.sees("buffer_dropped_total")
    await steal(redis_url, PublisherName("honest", engines.tenant_id, 0))
    await honest.prefill(next(prompts))
    await watched.sees("leases_lost_total")
    await decide(port, engines.tenant_id, next(prompts))
    await watched.sees("decision_duration_seconds", "decisions_total", "reservations", "speculative_tokens_total")
    await watched.sees("prefill_released_total", "reservations_expired_total")
    async with misbehaving_clients(port):
        await watched.sees("http_bodies_bytes", "http_connections_cut_total", "http_connections")

    names = {exported.partition("{")[0] for exported in EXPORTED}
    assert names - watched.moved <= set(ELSEWHERE)


@pytest.mark.parametrize(("metric", "where"), ELSEWHERE.items())
def test_what_is_moved_elsewhere_is_moved_there(metric: str, where: tuple[str, str]) -> None:
    path, test = where
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {test}(" in text
    assert metric.removeprefix("waymark_") in text.partition(f"def {test}(")[2].partition("\ndef ")[0]


async def test_several_processes_add_up_to_the_whole(start: Start, redis_url: str, engines: Engines) -> None:
    replicas = [unused_port(), unused_port()]
    workers = [unused_port(), unused_port()]
    services = [await start("query", redis_url, port=port) for port in replicas]
    for number, port in enumerate(workers):
        await start("ingest", redis_url, port=port, worker_id=f"worker-{number}")
    names = [f"pod-{n}" for n in range(6)]
    pods = [await engines.open(services[0], name) for name in names]

    async def over(ports: list[int], name: str, **labels: str) -> list[float]:
        return [total(await scrape(port, name), name, **labels) for port in ports]

    async def are_all_active() -> bool:
        return sum(await over(workers, "waymark_streams", status="active")) == len(pods)

    await wait_until(are_all_active, "every stream is active", PATIENCE_SECONDS)
    prompts = new_prompts()
    asked = [next(prompts) for _ in range(5)]
    for pod in pods:
        for prompt in asked:
            await pod.prefill(prompt)
    await engines.agree(services, *(prompt.tokens for prompt in asked))

    stored = sum(cache.totals.stored for pod in pods for cache in pod.caches)
    for name, labels, whole in (
        ("waymark_batches_total", {}, len(pods) * len(asked)),
        ("waymark_blocks_applied_total", {"op": "stored", "model": "m"}, stored),
        ("waymark_events_total", {"type": "stored"}, len(pods) * len(asked)),
        ("waymark_leases_taken_total", {}, len(pods)),
        ("waymark_streams", {}, len(pods)),
        ("waymark_holders", {}, len(pods)),
    ):
        parts = await over(workers, name, **labels)
        assert all(parts), f"{name}: {parts} leaves one out"
        assert sum(parts) == whole, f"{name}: {parts}"
    # What every worker sees of the whole is not added up: the largest counts.
    assert await over(workers, "waymark_workers") == [2, 2]
    assert max(await over(workers, "waymark_publishers", feed="socket")) == len(pods)

    hits = {"model": "m", "result": "hit"}
    before = await over(replicas, "waymark_queries_total", **hits)
    for service, times in zip(services, (3, 4), strict=True):
        for _ in range(times):
            await service.query(asked[0].tokens, **engines.group)
    after = await over(replicas, "waymark_queries_total", **hits)
    assert [now - then for then, now in zip(before, after, strict=True)] == [3, 4]
    # Every query so far was for a prompt of three blocks.
    queries = sum(await over(replicas, "waymark_queries_total"))
    assert sum(await over(replicas, "waymark_query_blocks_sum")) == 3 * queries


async def has_subscriber(engine: SimulatedEngine) -> None:
    await wait_until(lambda: engine.publisher.subscribers > 0, "the engine has a subscriber")


async def ask(service: Service, engines: Engines, known: SimulatedPrompt) -> None:
    """A query with every result."""
    await service.query(known.tokens, **engines.group)
    await service.query([7] * len(known.tokens), **engines.group)
    await service.query(known.tokens[: BLOCK_SIZE - 1], **engines.group)
    await service.query(known.tokens, model="nobody has it")


async def misbehave(engine: SimulatedEngine, prompts: Any) -> None:
    """Frames and payloads that are none."""
    wrong = dict.fromkeys(("garbage_every", "malformed_every", "unknown_every"), 1)
    engine.publisher.faults = engine.publisher.faults.model_copy(update=wrong)
    await engine.prefill(next(prompts))
    wrong = dict.fromkeys(("garbage_every", "malformed_every", "unknown_every"), 0)
    engine.publisher.faults = engine.publisher.faults.model_copy(update=wrong)


async def overtake(engine: SimulatedEngine, prompts: Any, watched: Watched) -> None:
    """A gap, and frames behind it that its replay overtakes, unless they are slow: then once more."""
    for _ in range(20):
        engine.publisher.faults = engine.publisher.faults.model_copy(update={"drop_every": 1})
        await engine.prefill(next(prompts))
        engine.publisher.faults = engine.publisher.faults.model_copy(update={"drop_every": 0})
        for _ in range(10):
            await engine.prefill(next(prompts))
        await watched.scrape_once()
        if "waymark_stale_batches_total" in watched.moved:
            return


async def lose(engine: SimulatedEngine, prompts: Any) -> None:
    """Batches that are lost for good: what follows them has no parent, or removes what nobody knows."""
    await has_subscriber(engine)
    await engine.prefill(next(prompts))
    engine.publisher.faults = engine.publisher.faults.model_copy(update={"replay_silent": True, "drop_every": 1})
    lost = next(prompts)
    await engine.prefill(lost)
    engine.publisher.faults = engine.publisher.faults.model_copy(update={"drop_every": 0})
    for length in (2, 4, 6):
        await engine.prefill(SimulatedPrompt(lost.tokens + tuple(range(length * BLOCK_SIZE))))
    for _ in range(4):
        await engine.prefill(next(prompts))


async def decide(port: int, tenant_id: str, prompt: SimulatedPrompt) -> None:
    """Two requests for a prompt that nobody has: the first is told where, and forgotten; the second goes there, too."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        body: dict[str, Any] = {"model": "m", "tenant_id": tenant_id, "token_ids": list(prompt.tokens)}
        body |= {"block_size": BLOCK_SIZE, "expect": True}
        answer = await client.post("/select", json=body | {"timeout_seconds": 1})
        assert answer.status_code == 200, answer.text
        first = answer.json()
        assert first["reservation"]
        only = {"only": [first["target"]["instance_id"]]}
        second = (await client.post("/select", json=body | only)).raise_for_status().json()
        released = await client.post("/release", json={"reservation": second["reservation"], "part": "prefill"})
        assert released.raise_for_status().json() == {"released": 1, "gone": 0}


async def steal(redis_url: str, name: PublisherName) -> None:
    """Take a stream from whoever has it, as a worker does that takes it for dead."""
    store = Store.open(redis_url)
    try:
        claim = next(claim for claim in await store.directory.claims() if claim.registration.name == name)
        assert await store.leases.take(claim, "thief", 0.1, force=True)
    finally:
        await store.close()


class misbehaving_clients:
    """Two connections: one that speaks no HTTP, and one that sends half a body."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> None:
        _, noise = await asyncio.open_connection("127.0.0.1", self._port)
        _, self._half = await asyncio.open_connection("127.0.0.1", self._port)
        noise.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        await noise.drain()
        noise.close()
        self._half.write(b"POST /query HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + b" " * 500)
        await self._half.drain()

    async def __aexit__(self, *_: object) -> None:
        self._half.close()

"""metrics: exported names and labels are an API for dashboards, so here is the list."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from waymark import __version__
from waymark.base.instruments import MetricRow, rows
from waymark.base.metrics import Metrics

EXPORTED = [
    "waymark_activity_clients",
    "waymark_activity_dropped_total",
    "waymark_answer_cache_bytes",
    "waymark_answer_cache_hits_total",
    "waymark_apply_duration_seconds",
    "waymark_avoidable_prefill_tokens_total",
    "waymark_batches_lost_total",
    "waymark_batches_over_ceiling_total{ceiling}",
    "waymark_batches_total",
    "waymark_blocks_applied_total{op,model}",
    "waymark_buffer_bytes",
    "waymark_buffer_dropped_total",
    "waymark_buffer_frames",
    "waymark_build_info{version,python,role,native}",
    "waymark_cache_backend_type{backend}",
    "waymark_cache_fallback_active",
    "waymark_cache_redis_connections_active",
    "waymark_cache_redis_connections_idle",
    "waymark_cache_redis_errors_total{type}",
    "waymark_cache_redis_latency_seconds{operation}",
    "waymark_calls_waiting",
    "waymark_copies_contradicted_total",
    "waymark_dead_holders",
    "waymark_decision_duration_seconds{part}",
    "waymark_decision_records_dropped_total{reason}",
    "waymark_decision_records_total",
    "waymark_decisions_total{policy,decision}",
    "waymark_decisions_without_tokens_total{reason}",
    "waymark_decode_errors_total{reason}",
    "waymark_discovery_engines{state}",
    "waymark_discovery_leader",
    "waymark_discovery_requests_total{outcome}",
    "waymark_discovery_unregistered_total",
    "waymark_drifts_total",
    "waymark_epp_bodies_bytes",
    "waymark_epp_requests_total{outcome}",
    "waymark_epp_streams",
    "waymark_epp_streams_cut_total{reason}",
    "waymark_event_memory_bytes",
    "waymark_events_ignored_total{reason}",
    "waymark_events_total{type}",
    "waymark_fetch_duration_seconds",
    "waymark_frame_bytes_total",
    "waymark_frames_malformed_total",
    "waymark_frames_total",
    "waymark_gaps_total",
    "waymark_gateway_interrupted_total",
    "waymark_gateway_requests",
    "waymark_gateway_retries_total{reason}",
    "waymark_gauge_scrapes_total{outcome}",
    "waymark_groups",
    "waymark_holders",
    "waymark_hot_block_bytes",
    "waymark_hot_block_hits_total",
    "waymark_http_bodies_bytes",
    "waymark_http_connections",
    "waymark_http_connections_cut_total{reason}",
    "waymark_http_request_duration_seconds{route}",
    "waymark_http_requests_total{route,method,status}",
    "waymark_http_trailer_fields_dropped_total",
    "waymark_index_evictions_total{reason}",
    "waymark_index_queries_total{outcome}",
    "waymark_index_streams",
    "waymark_instances",
    "waymark_known_blocks",
    "waymark_known_bytes",
    "waymark_kv_consumer_connected{backend}",
    "waymark_kv_consumer_reconnects_total{backend}",
    "waymark_kv_event_dropped_total{backend}",
    "waymark_kv_event_processed_total{backend}",
    "waymark_kv_event_received_total{backend}",
    "waymark_kv_index_overlap_score",
    "waymark_kv_index_routing_decisions_total{decision}",
    "waymark_lag_seconds",
    "waymark_last_batch_timestamp_seconds",
    "waymark_leases_lost_total",
    "waymark_leases_taken_total",
    "waymark_missing_blocks",
    "waymark_placements_dropped_total",
    "waymark_placements_total{outcome}",
    "waymark_pool_queries_total{outcome}",
    "waymark_prefill_released_total{by}",
    "waymark_prefix_queries_total{outcome}",
    "waymark_prefix_routing_backend_distribution{backend}",
    "waymark_prefix_routing_prefix_cardinality",
    "waymark_prefix_routing_requests_total{strategy}",
    "waymark_publishers_refused",
    "waymark_publishers_unclaimed_total",
    "waymark_publishers{feed}",
    "waymark_queries_total{model,result}",
    "waymark_query_blocks",
    "waymark_query_looked_up_blocks_total",
    "waymark_query_matched_blocks",
    "waymark_query_partial_total",
    "waymark_query_round_trips",
    "waymark_records_unreadable{record}",
    "waymark_redis_errors_total{reason}",
    "waymark_redis_evicted_keys{primary}",
    "waymark_redis_memory_bytes{primary}",
    "waymark_redis_memory_max_bytes{primary}",
    "waymark_redis_misconfigured{reason}",
    "waymark_redis_up",
    "waymark_renderings_stopped_total{reason}",
    "waymark_replay_places_yielded_total{reason}",
    "waymark_replays_running",
    "waymark_replays_total{outcome}",
    "waymark_replays_waiting",
    "waymark_reservations",
    "waymark_reservations_expired_total",
    "waymark_response_cache_entries",
    "waymark_response_cache_evictions_total",
    "waymark_response_cache_hit_rate",
    "waymark_response_cache_requests_total{result}",
    "waymark_response_cache_size_bytes",
    "waymark_responses_copied_total{outcome}",
    "waymark_responses_evicted_total",
    "waymark_responses_stored",
    "waymark_responses_stored_bytes",
    "waymark_responses_total{outcome}",
    "waymark_restarts_total",
    "waymark_router_shared_cache_beyond_blocks",
    "waymark_router_shared_cache_hit_rate",
    "waymark_script_duration_seconds{script}",
    "waymark_script_replies_total{script,verdict}",
    "waymark_shadow_decisions_total{shadow,choice}",
    "waymark_shadow_tokens_total{shadow,by}",
    "waymark_snapshots_total{outcome}",
    "waymark_speculative_tokens_total",
    "waymark_stale_batches_total",
    "waymark_streams_left",
    "waymark_streams_max",
    "waymark_streams{status}",
    "waymark_sweep_blocks_total",
    "waymark_sweeps_total",
    "waymark_takeovers_total",
    "waymark_text_cache_bytes",
    "waymark_text_cache_hits_total",
    "waymark_tokenize_duration_seconds{source}",
    "waymark_tokenize_segments_total{known}",
    "waymark_tokenizers_closed_total",
    "waymark_tokenizers_long_bytes",
    "waymark_tokenizers_open",
    "waymark_tokenizers_whole",
    "waymark_tokens_available_total",
    "waymark_tokens_cache_bytes",
    "waymark_tokens_chosen_total",
    "waymark_tokens_delivered_total",
    "waymark_tokens_expected_total",
    "waymark_ttft_seconds",
    "waymark_unreachable_targets",
    "waymark_unresolved_total",
    "waymark_waiting_blocks",
    "waymark_waiting_dropped_total",
    "waymark_workers",
]


def touch(row: MetricRow[Any], metrics: Metrics) -> None:
    """Make a metric with labels appear, by one series."""
    series = getattr(metrics, row.name)
    if row.labels:
        series = series.labels(**dict.fromkeys(row.labels, "x"))
    if row.kind == "histogram":
        series.observe(0.001)
    else:
        series.inc()


def test_names_and_labels_are_as_listed() -> None:
    exported = [row.full_name + (f"{{{','.join(row.labels)}}}" if row.labels else "") for row in rows(Metrics)]
    assert sorted(exported) == EXPORTED


def test_help_is_a_sentence_that_says_how_many_how_long_or_when() -> None:
    for row in rows(Metrics):
        assert re.fullmatch(r"(How many|How long|Whether|Which|When) .+\.", row.help), row.name


def test_the_page_of_operations_holds_their_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("<!-- metrics -->")[2].partition("<!-- /metrics -->")[0].strip()
    lines = ["| Metric | Labels | Over processes | What it is |", "|---|---|---|---|"]
    for row in rows(Metrics):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.full_name}` | {labels} | {row.over} | {row.help} |")
    wanted = "\n".join(lines)
    assert table == wanted, f"put this between the markers in docs/operations.md:\n\n{wanted}\n"


def test_what_is_rendered_can_be_read_by_prometheus() -> None:
    metrics = Metrics()
    for row in rows(Metrics):
        touch(row, metrics)
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    ours = {name for name in families if name.startswith("waymark_")}
    assert len(ours) == len(EXPORTED)
    assert not [name for name in ours if name.endswith("_created")]
    assert {"version": __version__} in [
        {"version": sample.labels["version"]} for sample in families["waymark_build_info"].samples
    ]


def test_a_request_of_a_hundred_microseconds_has_a_bucket_of_its_own() -> None:
    metrics = Metrics()
    metrics.http_request_duration_seconds.labels(route="/query").observe(0.00009)
    body, _ = metrics.render()
    assert b'waymark_http_request_duration_seconds_bucket{le="0.0001",route="/query"} 1.0' in body


def test_observations_are_rendered_as_the_library_would() -> None:
    metrics, library = Metrics(), CollectorRegistry()
    ours = metrics.query_blocks
    bounds = [float(line.split('"')[1]) for line in _lines(metrics.registry, "waymark_query_blocks_bucket")]
    theirs = prometheus_client.Histogram("waymark_query_blocks", "x", buckets=bounds, registry=library)
    for rounds in range(2):
        for amount in (-1.0, 0.0, 0.5, 1.0, 511.9, 512.0, 512.1, 1e9, 7 * rounds):
            ours.observe(amount)
            theirs.observe(amount)
        assert _lines(metrics.registry, "waymark_query_blocks_") == _lines(library, "waymark_query_blocks_")
        assert len(_lines(library, "waymark_query_blocks_")) == len(bounds) + 2


def _lines(registry: CollectorRegistry, name: str) -> list[str]:
    return [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith(name) and "_created" not in line
    ]


def test_a_model_has_a_label_of_its_own_up_to_the_ceiling() -> None:
    metrics = Metrics(models_max=2)
    assert [metrics.model(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
    assert Metrics(models_max=0).model("a") == "other"
    assert [metrics.backend(name) for name in ("x", "y", "z", "x")] == ["x", "y", "other", "x"]


def test_a_series_can_be_forgotten() -> None:
    metrics = Metrics()
    metrics.kv_consumer_connected.labels(backend="a").set(1)
    metrics.kv_consumer_connected.remove(backend="a")
    metrics.kv_consumer_connected.remove(backend="b")
    assert b"kv_consumer_connected{" not in metrics.render()[0]


def test_two_roles_in_one_process_do_not_meet() -> None:
    one, other = Metrics(), Metrics()
    one.gaps.inc()
    assert b"waymark_gaps_total 1.0" in one.render()[0]
    assert b"waymark_gaps_total 0.0" in other.render()[0]


@pytest.mark.parametrize(
    "labels", [{"mdel": "m", "result": "hit"}, {"model": "m"}, {"model": "m", "result": "x", "y": 1}, {}]
)
def test_a_misspelt_label_is_an_error(labels: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the labels are model, result; given were"):
        Metrics().queries.labels(**labels)


def test_a_misspelt_metric_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(AttributeError):
        metrics.gasp.inc()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        metrics.queries.inc()  # type: ignore[attr-defined]  # it has labels
    with pytest.raises(AttributeError):
        metrics.gaps.observe(1)  # type: ignore[attr-defined]


def test_a_counter_only_rises() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="a counter only rises, and -1 is less than 0"):
        metrics.gaps.inc(-1)
    assert metrics.gaps.value == 0


def test_a_gauge_is_what_was_set_or_what_its_function_says() -> None:
    metrics = Metrics()
    metrics.holders.set(3)
    metrics.holders.inc(2)
    metrics.holders.dec()
    assert b"\nwaymark_holders 4.0\n" in metrics.render()[0]
    metrics.holders.set_function(lambda: 7)
    assert b"\nwaymark_holders 7.0\n" in metrics.render()[0]
    metrics.redis_memory_bytes.labels(primary=0).set(1)
    metrics.redis_memory_bytes.clear()
    assert b"waymark_redis_memory_bytes{" not in metrics.render()[0]


def test_every_metric_without_labels_is_there_from_the_start() -> None:
    text = Metrics().render()[0].decode()
    for row in rows(Metrics):
        assert f"# TYPE {row.full_name} {row.kind}\n" in text
        if not row.labels:
            assert re.search(rf"^{row.full_name}(_count)? 0\.0$", text, re.MULTILINE), row.name

"""Gauges as the engines write them, and what is made of text that no engine writes."""

from __future__ import annotations

import pytest

from waymark.domain.gauges import Gauges
from waymark.engines.gauges import gauges_of, read_gauges

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="llama"} 7.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="llama",reason="capacity"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.42
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="llama"} 0.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql, chat",waiting_lora_adapters="code"} 1.8e+09
"""
RANKS = b"""\
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting{engine="1"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""
SGLANG = b"""\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 162.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2826.0
"""
TRTLLM = b"""\
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.62
trtllm_num_requests_running{model_name="m"} 5
trtllm_num_requests_waiting{model_name="m"} 1
"""


def test_vllm() -> None:
    expected = Gauges(7, 3, 0.42, frozenset({"sql", "chat"}), frozenset({"code"}), 4)
    ranks = read_gauges(VLLM)
    assert ranks[0].waiting == 7
    assert gauges_of({0: ranks[0]}, 3) == Gauges(7, 3, 0.42)
    assert ranks[None] == Gauges(
        adapters_running=expected.adapters_running, adapters_waiting=expected.adapters_waiting, adapters_max=4
    )


def test_adapters_are_of_the_rank_that_names_them() -> None:
    text = VLLM.replace(b'max_lora="4"', b'engine="0",max_lora="4"')
    assert read_gauges(text) == {0: Gauges(7, 3, 0.42, frozenset({"sql", "chat"}), frozenset({"code"}), 4)}


def test_the_ranks_of_an_engine_are_told_apart() -> None:
    ranks = read_gauges(RANKS)
    assert (gauges_of(ranks, 0), gauges_of(ranks, 1)) == (Gauges(1, 0, 0.25), Gauges(2, 0, 0.5))
    assert gauges_of(ranks, 2) is None


@pytest.mark.parametrize(
    ("text", "expected"), [(SGLANG, Gauges(2826, 162, 0.28)), (TRTLLM, Gauges(1, 5, 0.62))], ids=["sglang", "trtllm"]
)
def test_the_others(text: bytes, expected: Gauges) -> None:
    assert gauges_of(read_gauges(text), 1) == expected


@pytest.mark.parametrize("text", [b"", b"\x00\xff" * 100, b"<html>no</html>", b"python_gc_objects 1\n"])
def test_text_without_gauges_has_none(text: bytes) -> None:
    assert read_gauges(text) == {}


@pytest.mark.parametrize(
    "text",
    [
        b"vllm:num_requests_waiting{engine=",
        b"vllm:num_requests_waiting much\n",
        b'vllm:num_requests_waiting{engine="0"} 1\n' * 5000,
    ],
    ids=["cut off", "no number", "without end"],
)
def test_what_is_no_such_text_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_gauges(text)


@pytest.mark.parametrize("value", ["NaN", "-5", "+Inf", "1e300"])
def test_impossible_numbers_become_possible_ones(value: str) -> None:
    text = f"vllm:num_requests_waiting {value}\nsglang:token_usage {value}\n".encode()
    gauges = gauges_of(read_gauges(text), 0)
    assert gauges is not None
    assert 0 <= gauges.waiting <= 2**31
    assert 0 <= gauges.kv_usage <= 1

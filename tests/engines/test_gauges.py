"""Gauges as the engines write them, and what is made of text that no engine writes."""

from __future__ import annotations

from contextlib import suppress
from time import thread_time

import pytest

from waymark.base.samples import BYTES_MAX, LINE_BYTES_MAX
from waymark.domain.targets import Gauges
from waymark.engines.gauges import GaugesParser, gauges_of

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


def read_gauges(text: bytes, size: int = 2**16) -> dict[int | None, Gauges]:
    parser = GaugesParser()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    return parser.end()


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


@pytest.mark.parametrize("size", [1, 7, 64, 2**16])
@pytest.mark.parametrize("text", [VLLM, RANKS, SGLANG.replace(b"\n", b"\r\n"), TRTLLM.rstrip(b"\n")])
def test_pieces_of_any_size_are_one_text(text: bytes, size: int) -> None:
    assert read_gauges(text, size) == read_gauges(text)


WAITING = b"vllm:num_requests_waiting"
#: Texts by their length that take a parser which tries again, or which copies what is left, ever longer.
HOSTILE = {
    "a word": lambda n: b"m" * n,
    "a name": lambda n: WAITING * (n // len(WAITING)),
    "labels": lambda n: WAITING + b"{" + b'a="x",' * (n // 6) + b"} 1",
    "an open label": lambda n: WAITING + b'{a="' + b"x" * n,
    "escapes": lambda n: WAITING + b'{a="' + b"\\\\" * (n // 2),
    "blanks": lambda n: WAITING + b"{" + b" " * n,
    "blanks before the value": lambda n: WAITING + b" " * n,
    "many short lines": lambda n: b"\n" * n,
    "many long lines": lambda n: (b"# " + b"x" * 30_000 + b"\n") * (n // 30_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_each_byte_of_hostile_text_costs_the_same(name: str) -> None:
    def seconds(text: bytes) -> float:
        began = thread_time()
        with suppress(ValueError):
            read_gauges(text)
        return thread_time() - began

    short, long = HOSTILE[name](2**17), HOSTILE[name](2**21)
    # A quadratic parser needs 256 times as long. The millisecond is the clock's.
    bound = 64 * (min(seconds(short) for _ in range(5)) + 0.001)
    assert any(seconds(long) <= bound for _ in range(5))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (WAITING + b'{a="' + b"x" * LINE_BYTES_MAX + b'"} 1\n', "longer than 65536 bytes"),
        ((WAITING + b'{a="' + b"x" * (LINE_BYTES_MAX - 100) + b'"} 1\n') * 17, f"or {BYTES_MAX} bytes"),
    ],
    ids=["a line", "lines"],
)
def test_text_above_a_bound_is_an_error(text: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_gauges(text)


def test_a_long_line_of_another_name_is_skipped() -> None:
    text = b'other{a="' + b"x" * 2**20 + b'"} 1\n' + WAITING + b" 3\n"
    assert read_gauges(text) == {None: Gauges(waiting=3)}

"""request_cache: what a query says beside its prompt is read once, never mixed up, and bounded."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from waymark.api.http.bodies import Body, Format, LongList, RequestCache, decode
from waymark.api.http.errors import InvalidBody
from waymark.api.query_schemas import QueryByHashRequest, QueryRequest
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics


def lists(cache: RequestCache, operation: bytes = b"/query") -> LongList:
    return LongList(("token_ids",), False, 1000, cache, operation)


def body(tokens: list[int], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "block_size": 16, "token_ids": tokens} | fields).encode()


def value_of(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"waymark_text_cache_{name}")


def read(raw: bytes, of: LongList) -> Body:
    found = decode(raw, Format.JSON, long_list=of)
    assert found.text is not None
    return found


def test_a_text_is_read_once_and_its_prompt_each_time(implementation: str) -> None:
    metrics = Metrics()
    of = lists(RequestCache(2**20, metrics))
    calls: list[dict[str, Any]] = []

    def made(fields: dict[str, Any]) -> QueryRequest:
        calls.append(fields)
        return QueryRequest.of(fields)

    first, second = read(body([1, 2]), of), read(body([3]), of)
    assert first.asked(made) is second.asked(made)
    assert len(calls) == 1
    assert (first.numbers, second.numbers) == (b"\1\0\0\0\2\0\0\0", b"\3\0\0\0")
    assert read(body([3], instance_id="pod-1"), of).asked(made).instance_id == "pod-1"
    assert value_of(metrics, "hits_total") == 1
    assert value_of(metrics, "bytes") == of.cache.bytes > 0


def test_a_refusal_is_not_remembered(implementation: str) -> None:
    of = lists(RequestCache(2**20, Metrics()))
    for _ in range(2):
        with pytest.raises(InvalidBody) as refused:
            read(body([1], block_size="16"), of).asked(QueryRequest.of)
        assert refused.value.field == "block_size"


def test_another_operation_makes_something_else_of_the_same_text(implementation: str) -> None:
    cache = RequestCache(2**20, Metrics())
    raw = b'{"model":"m","block_size":16,"seq_hashes":[],"token_ids":[1]}'
    one, other = read(raw, lists(cache)), read(raw, lists(cache, b"/query_by_hash"))
    assert isinstance(one.asked(QueryRequest.of), QueryRequest)
    assert isinstance(other.asked(QueryByHashRequest.of), QueryByHashRequest)


def test_no_body_passes_for_a_text_of_another_operation(implementation: str) -> None:
    cache = RequestCache(2**20, Metrics())
    text = b'{"seq_hashes":[],"token_ids":[%b]}'
    read(text % b"", lists(cache, b"/query_by_hash"))
    with pytest.raises(InvalidValue):
        decode(b"_by_hash" + text % b"1", Format.JSON, long_list=lists(cache))


def test_no_list_passes_for_one_of_another_name(implementation: str) -> None:
    """A list within another field, so long that the first name is not looked for to the end."""
    of = LongList(("seq_hashes", "block_hash"), True, 1000, RequestCache(2**20, Metrics()), b"/query_by_hash")
    text = b'{"seq_hashes":[],"x":{"block_hash":[%b]}}'
    decode(text % b"", Format.JSON, long_list=of)
    found = decode(text % b",".join([b'"7"'] * 300), Format.JSON, long_list=of)
    assert (found.numbers or b"", found.fields["seq_hashes"]) == (b"", [])


def test_a_text_of_many_values_takes_what_they_take(implementation: str) -> None:
    of = lists(RequestCache(2**20, Metrics()))
    found = read(body([1], x=[[] for _ in range(1000)]), of)
    assert of.cache.bytes > sum(map(sys.getsizeof, found.fields["x"])) + sys.getsizeof(found.fields["x"])


def test_a_text_without_room_takes_none_from_others(implementation: str) -> None:
    of = lists(RequestCache(10_000, Metrics()))
    found = read(body([1]), of)
    for size in (4096, 10_000):
        read(body([1], cache_salt="x" * size), of)
    assert read(body([1]), of).text is found.text is not None


@pytest.mark.parametrize("bytes_max", [0, 10_000])
def test_it_never_takes_more_than_it_may(implementation: str, bytes_max: int) -> None:
    metrics = Metrics()
    of = lists(RequestCache(bytes_max, metrics))
    for number in range(200):
        found = read(body([number], instance_id=f"pod-{number % 50}", cache_salt="x" * (20 * number)), of)
        assert found.asked(QueryRequest.of).instance_id == f"pod-{number % 50}"
        assert of.cache.bytes <= bytes_max
    assert value_of(metrics, "bytes") == of.cache.bytes

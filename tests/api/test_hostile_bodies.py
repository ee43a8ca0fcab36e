"""Whatever a client sends is answered with a 4xx that names it: never a 500, never taken for something else."""

from __future__ import annotations

from typing import Any

import httpx
import msgpack
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import examples
from waymark.api.http.bodies import Format, decode
from waymark.api.http.errors import InvalidBody
from waymark.api.http.prompts import hashes, token_bytes
from waymark.base.errors import InvalidValue

pytestmark = pytest.mark.slow

QUERY = b'{"model": "m", "block_size": 2, "token_ids": %b}'
BY_HASH = b'{"model": "m", "block_size": 2, "seq_hashes": %b}'


async def refused(api: httpx.AsyncClient, path: str, body: bytes, **headers: str) -> dict[str, Any]:
    answer = await api.post(path, content=body, headers={"content-type": "application/json"} | headers)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()
    assert len(error["error"]) < 300
    return error


@pytest.mark.parametrize(
    ("element", "reason", "shown"),
    [
        (b"-1", "out_of_range", "-1"),
        (b"4294967296", "out_of_range", "4294967296"),
        (b"9223372036854775808", "out_of_range", "9223372036854775808"),
        (b"18446744073709551616", "out_of_range", "1.8446744073709552e+19"),
        (b"-9223372036854775809", "out_of_range", "-9.22"),
        (b"123456789012345678901234567890", "out_of_range", "1.23"),
        (b"1.0", "invalid_type", "1.0"),
        (b"1e3", "invalid_type", "1000.0"),
        (b"true", "invalid_type", "true"),
        (b"false", "invalid_type", "false"),
        (b"null", "invalid_type", "null"),
        (b'"1"', "invalid_type", '"1"'),
        (b"[1]", "invalid_type", "a list"),
        (b'{"a": 1}', "invalid_type", "an object"),
    ],
)
async def test_each_token_id_is_exact(api: httpx.AsyncClient, element: bytes, reason: str, shown: str) -> None:
    error = await refused(api, "/query", QUERY % (b"[77777, 88888, " + element + b", 99999]"))
    assert (error["reason"], error["field"], error["index"]) == (reason, "token_ids", 2)
    assert f"token_ids[2] is {shown}" in error["error"]
    assert not any(token in error["error"] for token in ("77777", "88888", "99999"))


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (b"18446744073709551616", "out_of_range"),
        (b"-9223372036854775809", "out_of_range"),
        (b'"18446744073709551616"', "out_of_range"),
        (b'"-9223372036854775809"', "out_of_range"),
        (b'"123456789012345678901234567890"', "out_of_range"),
        (b'""', "invalid_value"),
        (b'"-"', "invalid_value"),
        (b'"0x1f"', "invalid_value"),
        (b'" 1"', "invalid_value"),
        (b'"1_0"', "invalid_value"),
        ('"\u0661"'.encode(), "invalid_value"),
        (b"1.5", "invalid_type"),
        (b"true", "invalid_type"),
        (b"null", "invalid_type"),
        (b"[]", "invalid_type"),
    ],
)
async def test_each_hash_is_exact(api: httpx.AsyncClient, element: bytes, reason: str) -> None:
    error = await refused(api, "/query_by_hash", BY_HASH % (b"[1, -1, " + element + b"]"))
    assert (error["reason"], error["field"], error["index"]) == (reason, "seq_hashes", 2)


@pytest.mark.parametrize("spelling", ["seq_hashes", "block_hash", "block_hashes"])
async def test_errors_name_hashes_as_the_client_did(api: httpx.AsyncClient, spelling: str) -> None:
    body = BY_HASH.replace(b"seq_hashes", spelling.encode())
    for value, index in ((b"[1, 1.5]", 1), (b"7", None)):
        error = await refused(api, "/query_by_hash", body % value)
        assert (error["field"], error.get("index")) == (spelling, index)
        assert error["error"].startswith(spelling)


@pytest.mark.parametrize(
    ("wire", "number"),
    [
        (b"0", 0),
        (b"18446744073709551615", 2**64 - 1),
        (b'"18446744073709551615"', 2**64 - 1),
        (b"-1", 2**64 - 1),
        (b'"-1"', 2**64 - 1),
        (b"-9223372036854775808", 2**63),
        (b"9223372036854775808", 2**63),
        (b'"007"', 7),
    ],
)
def test_a_hash_is_64_bits_however_it_is_written(wire: bytes, number: int) -> None:
    fields = decode(BY_HASH % (b"[" + wire + b"]"), Format.JSON).fields
    assert list(hashes(fields["seq_hashes"], field="seq_hashes", max_tokens=9)) == [number]


@pytest.mark.parametrize(
    "value", [b"7", b'"1,2"', b"{}", b"true", b"1.5"], ids=["number", "string", "object", "boolean", "float"]
)
@pytest.mark.parametrize(("path", "template"), [("/query", QUERY), ("/query_by_hash", BY_HASH)])
async def test_what_is_no_list_is_refused(api: httpx.AsyncClient, path: str, template: bytes, value: bytes) -> None:
    error = await refused(api, path, template % value)
    assert error["reason"] == "invalid_type"
    assert error["field"] == ("token_ids" if path == "/query" else "seq_hashes")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"{'model': 1}",
        b'{"model": "m",}',
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": 1e999}',
        b'{"model": 01}',
        b'{"model": "m"} x',
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'\xef\xbb\xbf{"model": "m"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x00" * 100,
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/register", "/unregister", "/dynamo/query"])
async def test_what_is_no_json_is_refused(api: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await api.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "is not JSON" in answer.json()["error"]
    if not path.startswith("/dynamo"):
        assert answer.json()["reason"] == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        b"\x81\x01\x02",
        b"\x81\x90\x01",
        b"\x81\xa1\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        msgpack.packb({"model": "m"}) + b"\x01",
    ],
    ids=lambda body: body[:10].hex() or "empty",
)
async def test_what_is_no_msgpack_is_refused_in_msgpack(api: httpx.AsyncClient, body: bytes) -> None:
    answer = await api.post("/query", content=body, headers={"content-type": "application/msgpack"})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgpack.unpackb(answer.content)["reason"] == "invalid_msgpack"


@pytest.mark.parametrize("body", [b"[]", b"null", b"7", b'"text"', b"true"])
async def test_what_is_no_object_is_refused(api: httpx.AsyncClient, body: bytes) -> None:
    assert (await refused(api, "/query", body))["reason"] == "invalid_type"
    assert (await api.post("/dynamo/query", content=body)).status_code == 422


@pytest.mark.parametrize(
    ("fields", "reason", "index"),
    [
        ({"token_ids": b"123"}, "invalid_value", None),
        ({"token_ids": [1, True]}, "invalid_type", 1),
        ({"token_ids": [1, b"1"]}, "invalid_type", 1),
        ({"token_ids": [1, msgpack.ExtType(5, b"x")]}, "invalid_type", 1),
        ({"token_ids": [1, float("nan")]}, "invalid_type", 1),
        ({"token_ids": [2**64 - 1]}, "out_of_range", 0),
        ({"token_ids": msgpack.Timestamp(1)}, "invalid_type", None),
        ({"token_ids": "1234"}, "invalid_type", None),
        ({"token_ids": [1], "model": b"m"}, "invalid_type", None),
        ({"token_ids": [1], "block_size": float("inf")}, "invalid_type", None),
    ],
)
async def test_msgpack_values_are_exact_too(
    api: httpx.AsyncClient, fields: dict[str, Any], reason: str, index: int | None
) -> None:
    body = msgpack.packb({"model": "m", "block_size": 2} | fields)
    answer = await api.post("/query", content=body, headers={"content-type": "application/msgpack"})
    error = msgpack.unpackb(answer.content)
    assert (answer.status_code, error["reason"], error.get("index")) == (400, reason, index)


@pytest.mark.parametrize("body_format", Format)
def test_of_a_repeated_key_the_last_counts(body_format: Format) -> None:
    twice = {Format.JSON: b'{"a": 1, "a": 2}', Format.MSGPACK: b"\x82\xa1a\x01\xa1a\x02"}
    assert decode(twice[body_format], body_format).fields == {"a": 2}


@pytest.mark.parametrize(
    ("body", "may_hold"),
    [
        (b'{"model": "m", "block_size": 2, "token_ids": [1, 2]}', False),
        (b'{"tenant_id": "default", "token_ids": [1]}', False),
        (b'{"token_ids": [true]}', True),
        (b'{"tenant_id": "default", "token_ids": [1, false]}', True),
        (b'{"x": "uuuuuuuuuuuuuuuuuuuuuuuu", "token_ids": [true]}', True),
        (b'{"x": "ffffffffffffffffffffffff", "token_ids": [false]}', True),
        (b'{"x": "ffffffffffffffffffffffff"}', True),
    ],
)
def test_no_boolean_goes_unnoticed(body: bytes, may_hold: bool) -> None:
    assert decode(body, Format.JSON).may_hold_booleans is may_hold


async def test_one_thing_under_two_names_must_be_the_same(api: httpx.AsyncClient) -> None:
    body = {"model": "m", "model_name": "m", "block_size": 2, "token_ids": []}
    assert (await api.post("/query", json=body)).status_code == 200
    error = await refused(api, "/query", orjson.dumps(body | {"modelname": "other"}))
    assert (error["reason"], error["field"]) == ("invalid_value", "modelname")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NAMES = ["model", "model_name", "block_size", "token_ids", "seq_hashes", "tenant_id", "instance_id", "lora_name"]
NAMES += ["lora_id", "cache_salt", "endpoint", "type", "dp_rank", "block_hashes", "url", "routing_group", "scope"]
PATHS = ["/query", "/query_by_hash", "/register", "/unregister", "/dynamo/query", "/dynamo/query_by_hash"]
PATHS += ["/dynamo/register", "/dynamo/unregister", "/dynamo/register_peer", "/dynamo/deregister_peer"]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(PATHS),
    fields=st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=8),
    body_format=st.sampled_from(Format),
)
async def test_no_fields_make_it_fail(
    api: httpx.AsyncClient, path: str, fields: dict[str, Any], body_format: Format
) -> None:
    body = orjson.dumps(fields) if body_format is Format.JSON else msgpack.packb(fields)
    answer = await api.post(path, content=body, headers={"content-type": body_format.value.decode()})
    assert answer.status_code < 500, (path, fields, answer.text)


@given(st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=50))
def test_valid_token_ids_come_out_as_they_went_in(tokens: list[int]) -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    for value in (tokens, packed):
        assert token_bytes(value, field="token_ids", max_tokens=50) == packed


WIRE_INTEGERS = st.integers(min_value=-(2**63), max_value=2**64 - 1)


@given(st.lists(st.one_of(WIRE_INTEGERS, st.booleans(), st.floats(), st.none(), st.text(max_size=3)), max_size=9))
def test_a_list_is_taken_whole_or_refused_at_its_first_bad_element(elements: list[Any]) -> None:
    bad = [i for i, e in enumerate(elements) if type(e) is not int or not 0 <= e < 2**32]
    if bad:
        with pytest.raises(InvalidBody) as caught:
            token_bytes(elements, field="token_ids", max_tokens=9)
        assert caught.value.index == bad[0]
    else:
        assert len(token_bytes(elements, field="token_ids", max_tokens=9)) == 4 * len(elements)


@pytest.mark.parametrize("wire", [b"[1, 2, 3]", b"[1, -2, 3]", b'["1", 2, 3]'])
def test_too_many_elements_are_not_looked_at(wire: bytes) -> None:
    with pytest.raises(InvalidValue) as caught:
        hashes(orjson.loads(wire), field="seq_hashes", max_tokens=2)
    assert caught.value.reason == "too_large"

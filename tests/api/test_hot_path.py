"""Queries take short cuts: past the JSON parser, past Starlette. Nobody can tell by an answer."""

from __future__ import annotations

import json
import struct
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.conftest import Hold
from tests.api.http.test_lists import NOT_BELIEVED, PIECES, PLAIN, UNUSUAL
from tests.unit import examples
from waymark.api.http.bodies import CONTAINERS_MAX, Format, LongList, RequestCache, decode
from waymark.api.http.errors import InvalidBody
from waymark.api.http.prompts import hashes, token_bytes
from waymark.api.query_schemas import QueryByHashRequest
from waymark.base import native
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics

pytestmark = pytest.mark.usefixtures("implementation_kept")

TOKENS_MAX = 100_000
TEXTS = RequestCache(2**20, Metrics())
TOKENS = LongList(("token_ids",), False, TOKENS_MAX, TEXTS, b"/query")
HASHES = LongList(("seq_hashes", "block_hash"), True, TOKENS_MAX, TEXTS, b"/query_by_hash")


def read(body: bytes, wanted: str) -> Any:
    """What a query makes of a body: all its fields with the tokens packed, or the sentence of a refusal.

    ``wanted`` is a way of the loops, or "parser": no short cut at all.
    """
    native.select(wanted == "native")
    try:
        found = decode(body, Format.JSON, long_list=None if wanted == "parser" else TOKENS)
        fields = dict(found.fields)
        if "token_ids" in fields:
            value = fields["token_ids"] if found.numbers is None else found.numbers
            fields["token_ids"] = token_bytes(value, field="token_ids", max_tokens=TOKENS_MAX)
    except InvalidValue as exc:
        return type(exc), exc.sentence, exc.reason, exc.field, exc.index
    return fields


def check_read_the_same(body: bytes) -> None:
    assert read(body, "native") == read(body, "pure") == read(body, "parser")


def read_hashes(body: bytes, wanted: str) -> Any:
    """As ``read``, of a query by hash: what the client's spelling of the field holds."""
    native.select(wanted == "native")
    try:
        found = decode(body, Format.JSON, long_list=HASHES)
        value = found.asked(QueryByHashRequest.of).seq_hashes if found.numbers is None else found.numbers
        return list(hashes(value, field="seq_hashes", max_tokens=TOKENS_MAX))
    except InvalidValue as exc:
        return type(exc), exc.sentence, exc.reason, exc.field, exc.index


ELEMENTS = st.sampled_from(
    [str(number) for number in (0, 1, -1, 99_999_999, 100_000_000, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)]
    + ["12345678901234567", "1234567890123456789", "9999999999999999999"]
    + [
        '"18446744073709551615"',
        '"-9223372036854775808"',
        '"7"',
        '" 7"',
        '"7 "',
        '"+7"',
        '"007"',
        '""',
        '"-"',
        '"7',
        '7"',
    ]
    + ["18446744073709551616", "99999999999999999999", "123456789012345678901", "-9223372036854775809"]
    + ["-0", "01", "--1", "1.0", "1e3", "true", "null", "[]", "{}", '"\\u0031"', "", " 5 ", "\n6", "\x0b7", "-"]
)


@settings(deadline=None, max_examples=examples(400))
@given(
    st.lists(ELEMENTS, max_size=4),
    st.sampled_from(["seq_hashes", "block_hash"]),
    st.sampled_from(
        ["", ',"block_hash":[1]', ',"seq_hashes":[]', ',"block_hash":null', ',"x":"\\u0041"', "]", ',"y":[[]]']
    ),
)
def test_hashes_are_read_the_same_with_and_without_short_cuts(elements: list[str], name: str, more: str) -> None:
    body = f'{{"model":"m","block_size":2,"{name}":[{",".join(elements)}]{more}}}'.encode()
    for spoilt in (body, body[:-2], body.replace(b":[", b": [ ", 1)):
        assert read_hashes(spoilt, "native") == read_hashes(spoilt, "pure")


def test_the_short_cut_was_taken_for_hashes_as_clients_send_them(implementation: str) -> None:
    numbers = [0, 5, 2**63 - 1, 2**63, 2**64 - 1, 1234567890123456789]
    signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
    for name in ("seq_hashes", "block_hash"):
        for sent in (numbers, signed, [str(number) for number in numbers], [str(number) for number in signed]):
            for body in (json.dumps({"model": "m", name: sent}), json.dumps({name: sent}, separators=(",", ":"))):
                found = decode(body.encode(), Format.JSON, long_list=HASHES)
                assert (found.numbers is not None) == (implementation == "native")
                value = found.fields[name] if found.numbers is None else found.numbers
                assert list(hashes(value, field=name, max_tokens=9)) == numbers


BOTH = LongList(("token_ids",), False, TOKENS_MAX, TEXTS, b"/select", HASHES)


@pytest.mark.parametrize("kind", ["token_ids", "seq_hashes", "block_hash"])
def test_of_two_kinds_of_prompt_each_is_read_without_the_parser(implementation: str, kind: str) -> None:
    sent = list(range(1, 300))
    body = json.dumps({"model": "m", kind: sent}).encode()
    found = decode(body, Format.JSON, long_list=BOTH)
    assert (found.numbers is not None) == (implementation == "native" or kind == "token_ids")
    if found.numbers is not None:
        width = 4 if kind == "token_ids" else 8
        assert found.numbers == b"".join(number.to_bytes(width, "little") for number in sent)
        assert found.fields == {"model": "m", kind: []}
        again = decode(body, Format.JSON, long_list=BOTH)
        assert again.text is found.text


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [1, 2], "seq_hashes": [3, 4]},
        {"token_ids": [], "seq_hashes": [3, 4]},
        {"token_ids": [1.5], "seq_hashes": [3, 4]},
        {"token_ids": [True], "seq_hashes": [3, 4]},
    ],
)
@pytest.mark.parametrize("path", ["/query", "/score", "/select"])
async def test_two_prompts_are_refused_whichever_was_read_first(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json={"model": "m"} | body)
    assert answer.status_code == 400
    assert "one" in answer.json()["error"]


async def test_what_was_asked_before_is_no_answer_to_another_question(
    client: httpx.AsyncClient, register: Any, hold: Hold, implementation: str
) -> None:
    """What a text asks, and the rows of what was found, are remembered; nothing else of a query is."""
    await register("1")
    await hold("1", [1, 2, 3, 4])

    async def longest(ids: list[int], **more: Any) -> dict[str, int]:
        answer = await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": ids} | more)
        assert answer.status_code == 200, answer.text
        return {name: row["longest_matched"] for name, row in answer.json()["default"].items()}

    for _ in range(2):
        assert await longest([1, 2, 3, 4]) == {"1": 4}
        assert await longest([1, 2, 9, 9]) == {"1": 2}
        assert await longest([9, 9, 3, 4]) == {"1": 0}
        assert await longest([1, 2, 3, 4], instance_id="2") == {"2": 0}
        assert await longest([1, 2, 3, 4], block_size=1) == {"1": 0}
        assert await longest([1, 2, 3, 4], cache_salt="s") == {"1": 0}
        refused = await client.post("/query", json={"model": "m", "block_size": True, "token_ids": [1]})
        assert (refused.status_code, refused.json()["field"]) == (400, "block_size")
    # The same blocks have the same value; it is the table that has changed.
    await register("2")
    assert await longest([1, 2, 3, 4]) == {"1": 4, "2": 0}
    await hold("2", [1, 2])
    assert await longest([1, 2, 3, 4]) == {"1": 4, "2": 2}
    assert (await client.post("/unregister", json={"instance_id": "1"})).status_code == 200
    assert await longest([1, 2, 3, 4]) == {"2": 2}


@pytest.mark.parametrize("body", [*PLAIN, *UNUSUAL, *NOT_BELIEVED])
def test_a_body_is_read_the_same_with_and_without_short_cuts(body: bytes) -> None:
    check_read_the_same(body)


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(PIECES, max_size=14))
def test_any_pieces_of_a_body_are_read_the_same(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    check_read_the_same(body)


@settings(deadline=None, max_examples=examples(300))
@given(st.sampled_from(PLAIN[:6] + PLAIN[7:]), st.integers(0, 200), st.integers(0, 3), PIECES | st.binary(max_size=2))
def test_a_body_with_a_wrong_place_is_read_the_same(body: bytes, at: int, cut: int, put: bytes) -> None:
    at %= len(body)
    spoilt = body[:at] + put + body[at + cut :]
    check_read_the_same(spoilt)


def test_the_short_cut_was_taken_for_what_writers_of_json_send(implementation: str) -> None:
    """Else all of the above compares the parser with itself."""
    query = {"model": "m", "block_size": 16, "token_ids": list(range(99, 2000)), "tenant_id": "t", "lora_name": "größe"}
    for fields in (query, dict(reversed(query.items()))):
        for body in (
            json.dumps(fields),
            json.dumps(fields, separators=(",", ":")),
            json.dumps(fields, indent=1),
            json.dumps(fields, ensure_ascii=False),
        ):
            found = decode(body.encode(), Format.JSON, long_list=TOKENS)
            assert (found.numbers is not None) == ("\\" not in body)
            tokens = found.fields["token_ids"] if found.numbers is None else found.numbers
            assert token_bytes(tokens, field="", max_tokens=TOKENS_MAX) == struct.pack("<1901I", *range(99, 2000))


def test_what_surrounds_the_tokens_has_its_bounds_too() -> None:
    body = b'{"token_ids":[1],"x":[' + b"[]," * CONTAINERS_MAX + b"1]}"
    check_read_the_same(body)
    assert read(body, "native")[2] == "too_large"
    check_read_the_same(b'{"token_ids":[%b1]}' % (b"1," * TOKENS_MAX))


@pytest.mark.parametrize("prefix", ["", "/dynamo"])
async def test_an_answer_is_the_same_however_its_question_is_written(
    client: httpx.AsyncClient, register: Any, hold: Hold, implementation: str, prefix: str
) -> None:
    ids = [101, 15, 100, 55, 89, 63, 4294967295, 0]
    await register("7", block_size=2)
    await register("8", block_size=2, lora_name="sql", additionalsalt="w8a8")
    await hold("7", ids[:6])
    await hold("8", ids[:4], adapter="sql", salts=["w8a8", "mine"])
    path, model = f"{prefix}/query", "model_name" if prefix else "model"
    wanted = {"block_size": 2, "token_ids": ids, model: "m"}
    salts = {"cache_salt": "mine"} if prefix else {"cache_salt": "mine", "additional_salt": "w8a8", "instance_id": "8"}
    answers = []
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"tenant_id": "default", "lora_name": "sql", **salts},
        {"lora_name": "sql"},
        {"x": [[], {}]},
    )
    for more in variants:
        fields = wanted | more
        texts = [json.dumps(fields), json.dumps(fields, separators=(",", ":")), json.dumps(fields, indent=2)]
        texts.append(json.dumps(dict(reversed(fields.items()))))
        texts.append(json.dumps(fields | {"note": 'a "quoted" word'}))  # with a backslash: for the parser
        found = [await client.post(path, content=text) for text in texts]
        packed = {"content-type": "application/msgpack"}
        for tokens in (ids, struct.pack("<8I", *ids)):
            answer = await client.post(path, content=msgpack.packb(fields | {"token_ids": tokens}), headers=packed)
            told = msgpack.unpackb(answer.content)
            if not prefix:
                del told["instances"]  # the newer form, in msgpack alone
            found.append(httpx.Response(answer.status_code, json=told))
        assert {answer.status_code for answer in found} == {200}
        assert all(answer.json() == found[0].json() for answer in found)
        answers.append(found[0].json())
    assert answers[0] == answers[3] != answers[2]
    if prefix:
        assert [list(answer["instances"]) for answer in answers] == [["7"], [], [], ["7"]]
        assert answers[0]["scores"] == {"7": {"0": 6}}
    else:
        assert answers[0]["default"]["7"]["longest_matched"] == 6
        assert answers[1]["default"]["8"]["longest_matched"] == 4


@pytest.mark.parametrize("path", ["/query", "/dynamo/query"])
async def test_an_element_that_is_no_token_id_is_named_whatever_the_way(
    api: httpx.AsyncClient, implementation: str, path: str
) -> None:
    for element, shown in (("-1", "-1"), ("1.5", "1.5"), ("4294967296", "4294967296"), ("true", "true")):
        body = f'{{"model":"m","model_name":"m","block_size":2,"token_ids":[1,{element}]}}'
        answer = await api.post(path, content=body)
        assert answer.status_code == (422 if "dynamo" in path else 400)
        assert f"token_ids[1] is {shown}" in answer.json()["error"]


def test_a_refusal_is_of_the_body_as_it_was_sent() -> None:
    """The place that the parser names is one in the client's text, not in what was left of it."""
    body = b'{"token_ids":[' + b"1," * 500 + b'1],"model":m}'
    with pytest.raises(InvalidValue, match="column 10") as caught:
        decode(body, Format.JSON, long_list=TOKENS)
    assert not isinstance(caught.value, InvalidBody)

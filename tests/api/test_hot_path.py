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

from app.api.bodies import CONTAINERS_MAX, Format, decode
from app.api.errors import Unfit
from app.api.prompts import token_bytes
from app.domain import native
from app.errors import InvalidValue
from tests.api.conftest import Hold
from tests.domain.test_native import NOT_BELIEVED, PIECES, PLAIN, UNUSUAL

pytestmark = pytest.mark.usefixtures("way_kept")

TOKENS_MAX = 100_000


def read(body: bytes, wanted: str) -> Any:
    """What a query makes of a body: all its fields with the tokens packed, or the sentence of a refusal."""
    native.use(wanted == "native")
    try:
        fields = dict(decode(body, Format.JSON, tokens_max=TOKENS_MAX).fields)
        if "token_ids" in fields:
            fields["token_ids"] = token_bytes(fields["token_ids"], field="token_ids", max_tokens=TOKENS_MAX)
    except InvalidValue as exc:
        return type(exc), exc.sentence, exc.reason, exc.field, exc.index
    return fields


def check_read_the_same(body: bytes) -> None:
    assert read(body, "native") == read(body, "pure")


@pytest.mark.parametrize("body", [*PLAIN, *UNUSUAL, *NOT_BELIEVED])
def test_a_body_is_read_the_same_with_and_without_short_cuts(body: bytes) -> None:
    check_read_the_same(body)


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=14))
def test_any_pieces_of_a_body_are_read_the_same(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    check_read_the_same(body)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(PLAIN[:6] + PLAIN[7:]), st.integers(0, 200), st.integers(0, 3), PIECES | st.binary(max_size=2))
def test_a_body_with_a_wrong_place_is_read_the_same(body: bytes, at: int, cut: int, put: bytes) -> None:
    at %= len(body)
    spoilt = body[:at] + put + body[at + cut :]
    check_read_the_same(spoilt)


def test_the_short_cut_was_taken_for_what_writers_of_json_send(way: str) -> None:
    """Else all of the above compares the parser with itself."""
    query = {"model": "m", "block_size": 16, "token_ids": list(range(99, 2000)), "tenant_id": "t", "lora_name": "größe"}
    for fields in (query, dict(reversed(query.items()))):
        for body in (
            json.dumps(fields),
            json.dumps(fields, separators=(",", ":")),
            json.dumps(fields, indent=1),
            json.dumps(fields, ensure_ascii=False),
        ):
            tokens = decode(body.encode(), Format.JSON, tokens_max=TOKENS_MAX).fields["token_ids"]
            assert isinstance(tokens, bytes) == (way == "native" and "\\" not in body)
            assert token_bytes(tokens, field="", max_tokens=TOKENS_MAX) == struct.pack("<1901I", *range(99, 2000))


def test_what_surrounds_the_tokens_has_its_bounds_too() -> None:
    body = b'{"token_ids":[1],"x":[' + b"[]," * CONTAINERS_MAX + b"1]}"
    check_read_the_same(body)
    assert read(body, "native")[2] == "too_large"
    check_read_the_same(b'{"token_ids":[%b1]}' % (b"1," * TOKENS_MAX))


@pytest.mark.parametrize("prefix", ["", "/dynamo"])
async def test_an_answer_is_the_same_however_its_question_is_written(
    client: httpx.AsyncClient, register: Any, hold: Hold, way: str, prefix: str
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
            found.append(httpx.Response(answer.status_code, json=msgpack.unpackb(answer.content)))
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
    api: httpx.AsyncClient, way: str, path: str
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
        decode(body, Format.JSON, tokens_max=TOKENS_MAX)
    assert not isinstance(caught.value, Unfit)

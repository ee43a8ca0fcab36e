"""Drafts of registrations: their checks, what fills them, and the models of bodies that make them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from waymark.api.http.errors import InvalidBody
from waymark.api.registration_schemas import RegisterByUrlRequest, RegisterRequest
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue
from waymark.discovery.drafts import Draft
from waymark.domain.engines import WITHOUT_EVENTS, EngineKind
from waymark.domain.targets import Role

ANYWHERE = AllowedEndpoints()
DRAFT = Draft(type="vLLM", modelname="m", instance_id="i", block_size=16, endpoint="tcp://10.0.0.7:5557")


def test_bodies_have_the_fields_and_the_defaults_of_a_draft() -> None:
    names = {item.name for item in fields(Draft)}
    assert set(RegisterRequest.model_fields) == names
    assert set(RegisterByUrlRequest.model_fields) - {"url"} == names - {"topic"}
    assert RegisterByUrlRequest.of({"url": "http://10.0.0.7:8000"}).draft() == Draft()
    body = {"type": "vLLM", "modelname": "m", "instance_id": "i", "block_size": 16, "endpoint": "tcp://10.0.0.7:5557"}
    assert RegisterRequest.of(body).draft() == replace(DRAFT, dp_rank=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "tcp://10.0.0.7:0"),
        ("endpoint", "http://user:secret@host:1"),
        ("tenant_id", "t" * 5000),
        ("address", "http://10.0.0.7:8000/path?query"),
        ("role", "chef"),
        ("type", "triton"),
        ("modelname", ""),
        ("modelname", "ä" * 2049),
        ("instance_id", "i" * 4097),
        ("block_size", 0),
        ("block_size", -16),
        ("block_size", 65_537),
        ("type", None),
        ("modelname", None),
        ("instance_id", None),
        ("block_size", None),
    ],
)
def test_a_pod_or_an_engine_is_refused_in_the_words_of_a_client(field: str, value: Any) -> None:
    body = {item.name: getattr(DRAFT, item.name) for item in fields(Draft) if getattr(DRAFT, item.name) is not None}
    with pytest.raises(InvalidBody) as from_client:
        RegisterRequest.of(body | {field: value})
    with pytest.raises(InvalidValue) as caught:
        replace(DRAFT, **{field: value}).registration(ANYWHERE)
    complaint, expected = caught.value, from_client.value
    assert (complaint.sentence, complaint.reason, complaint.field) == (
        expected.sentence, expected.reason, expected.field,
    )  # fmt: skip


def test_names_at_their_bounds_are_taken() -> None:
    longest = "ä" * 2048
    registration = replace(DRAFT, modelname=longest, instance_id=longest, block_size=65_536).registration(ANYWHERE)
    assert (registration.model_name, registration.instance_id, registration.block_size) == (longest, longest, 65_536)


@pytest.mark.parametrize("text", ["sglang", "SGLANG", "SGLang"])
def test_a_kind_is_named_in_upper_or_lower_case(text: str) -> None:
    assert replace(DRAFT, type=text).registration(ANYWHERE).kind is EngineKind.SGLANG


def test_another_draft_fills_only_the_fields_that_were_not_given() -> None:
    given = Draft(modelname="mine", weight=0.0, labels={}, role=Role.DECODE)
    said = Draft(type=WITHOUT_EVENTS, modelname="its", block_size=32, address="http://10.0.0.7:8000", weight=3.0)
    filled = given.filled(said).filled(Draft(type="vLLM", instance_id="known", block_size=64))
    assert filled == replace(
        given, type=WITHOUT_EVENTS, block_size=32, address="http://10.0.0.7:8000", instance_id="known"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "tcp://10.0.0.9:1"),
        ("replay_endpoint", "tcp://10.0.0.9:1"),
        ("snapshot_endpoint", "tcp://10.0.0.9:1"),
        ("address", "http://10.0.0.9:1"),
        ("metrics_url", "http://10.0.0.9:1/metrics"),
        ("query_endpoint", "http://10.0.0.9:1"),
        ("kv_source", "tcp://10.0.0.9:1"),
    ],
)
def test_a_place_that_is_not_allowed_is_refused(field: str, value: Any) -> None:
    allowed = AllowedEndpoints(["10.0.0.7"])
    DRAFT.registration(allowed)
    with pytest.raises(InvalidValue, match="WAYMARK_ALLOWED_ENDPOINTS") as caught:
        replace(DRAFT, **{field: value}).registration(allowed)
    assert caught.value.field == field


def test_each_socket_of_a_rank_has_to_be_allowed() -> None:
    allowed = AllowedEndpoints(["10.0.0.7"])
    sockets = {"cpu": "tcp://10.0.0.7:2", "npu": "tcp://10.0.0.7:1", "disk": "tcp://10.0.0.7:2"}
    of_rank = replace(DRAFT, endpoint=None, medium_endpoints=sockets)
    assert [(item.endpoint, item.is_further) for item in of_rank.registrations(allowed)] == [
        ("tcp://10.0.0.7:1", False),
        ("tcp://10.0.0.7:2", True),
    ]
    with pytest.raises(InvalidValue, match="WAYMARK_ALLOWED_ENDPOINTS") as caught:
        replace(of_rank, medium_endpoints=sockets | {"disk": "tcp://10.0.0.9:2"}).registrations(allowed)
    assert caught.value.field == "medium_endpoints"


def test_a_draft_of_a_registration_makes_the_same_again() -> None:
    whole = replace(
        DRAFT,
        type="Mooncake", tenant_id="t", lora_name="l", additionalsalt="s", scope="shared", copies="set",
        sequence="rank", shards=4, address="http://10.0.0.7:8000", role="decode", weight=2.0, labels={"zone": "a"},
        metrics_url="http://10.0.0.7:8000/metrics", kv_source="tcp://10.0.0.7:9000", kv_bytes_per_token=1.0,
        transfer_gbps=2.0, kv_hints=True,
    )  # fmt: skip
    registration = whole.registration(ANYWHERE)
    own = Draft(type="Mooncake", modelname="m", block_size=16, endpoint="tcp://10.0.0.7:5557")
    assert Draft.of(registration).filled(own).registration(ANYWHERE) == registration

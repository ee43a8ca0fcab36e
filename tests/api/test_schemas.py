"""Fields, aliases and defaults of the root API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waymark.api.conductor import BY_HASH, BY_PROMPT, usual, validated_by_hash, validated_by_prompt
from waymark.api.query_schemas import QueryByHashRequest, QueryRequest
from waymark.api.registration_schemas import RegisterRequest, UnregisterRequest
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue
from waymark.domain.engines import EngineKind
from waymark.domain.names import NAME_BYTES_MAX, GroupName, Registration
from waymark.domain.prefixes import PrefixSource
from waymark.domain.targets import Role, Target

REGISTER: dict[str, Any] = {
    "endpoint": "tcp://1.1.1.1:5557",
    "type": "vLLM",
    "modelname": "deepseek",
    "instance_id": "node1",
    "block_size": 128,
}
QUERY: dict[str, Any] = {"model": "m", "block_size": 2, "token_ids": [1]}


def registration(**fields: Any) -> Registration:
    return RegisterRequest.of(REGISTER | fields).draft().registration(AllowedEndpoints())


def test_published_registration_is_taken_whole() -> None:
    published = {
        "endpoint": "tcp://1.1.1.1:5557",
        "replay_endpoint": "tcp://1.1.1.1:5558",
        "type": "vLLM",
        "modelname": "deepseek",
        "lora_name": "sql-adapter",
        "tenant_id": "default",
        "instance_id": "vllm-prefill-node1",
        "block_size": 128,
        "dp_rank": 0,
        "additionalsalt": "w8a8",
    }
    assert RegisterRequest.of(published).draft().registration(AllowedEndpoints()) == Registration(
        kind=EngineKind.VLLM,
        instance_id="vllm-prefill-node1",
        tenant_id="default",
        dp_rank=0,
        model_name="deepseek",
        block_size=128,
        endpoint="tcp://1.1.1.1:5557",
        replay_endpoint="tcp://1.1.1.1:5558",
        lora_name="sql-adapter",
        additional_salt="w8a8",
        scope="instance",
        copies="count",
        sequence="publisher",
    )


@pytest.mark.parametrize("nothing", [{}, None, ""])
@pytest.mark.parametrize(
    ("field", "attribute", "default"),
    [
        ("tenant_id", "tenant_id", "default"),
        ("lora_name", "lora_name", None),
        ("additionalsalt", "additional_salt", None),
        ("replay_endpoint", "replay_endpoint", None),
        ("snapshot_endpoint", "snapshot_endpoint", None),
    ],
)
def test_absent_null_and_empty_are_the_same(nothing: Any, field: str, attribute: str, default: Any) -> None:
    given = {} if nothing == {} else {field: nothing}
    assert getattr(registration(**given), attribute) == default


@pytest.mark.parametrize("spelling", ["modelname", "model_name", "model"])
def test_names_of_the_model(spelling: str) -> None:
    fields = {name: value for name, value in REGISTER.items() if name != "modelname"}
    assert RegisterRequest.of(fields | {spelling: "x"}).draft().registration(AllowedEndpoints()).model_name == "x"
    query = {name: value for name, value in QUERY.items() if name != "model"}
    assert QueryRequest.of(query | {spelling: "x"}).group == GroupName("default", "x")


@pytest.mark.parametrize("spelling", ["additionalsalt", "additional_salt"])
def test_names_of_the_salt(spelling: str) -> None:
    assert registration(**{spelling: "w8a8"}).additional_salt == "w8a8"
    assert QueryRequest.of(QUERY | {spelling: "w8a8", "cache_salt": "c"}).salts == ["w8a8", "c"]


@pytest.mark.parametrize("name", ["vllm", "VLLM", "vLLM", "sglang", "SGLANG", "mooncake", "Standard"])
def test_type_in_any_case(name: str) -> None:
    assert registration(type=name).kind.lower() == name.lower()


@pytest.mark.parametrize(
    ("kind", "scope", "copies"),
    [
        ("vLLM", "instance", "count"),
        ("SGLang", "instance", "count"),
        ("Mooncake", "shared", "set"),
        ("standard", "instance", "set"),
    ],
)
def test_scope_and_copies_follow_the_type_unless_given(kind: str, scope: str, copies: str) -> None:
    default = registration(type=kind)
    assert (default.scope, default.copies) == (scope, copies)
    given = registration(type=kind, scope="instance", copies="set", sequence="rank")
    assert (given.scope, given.copies, given.sequence) == ("instance", "set", "rank")
    shards = [registration(type=kind, shards=8, scope=scope).object_shards for scope in ("shared", "instance")]
    assert shards == [8, 0], "only a pool has objects"


def test_what_it_is_as_a_target() -> None:
    assert registration().target == Target()
    assert registration(address="", weight=None, labels=None).target == Target()
    told = {"address": "https://pod:8000/v1", "role": "encode-prefill", "weight": 0, "labels": {"a": "b"}}
    told |= {"metrics_url": "http://[::1]/metrics"}
    wanted = Target("https://pod:8000/v1", Role.ENCODE_PREFILL, 0.0, {"a": "b"}, "http://[::1]/metrics")
    assert registration(**told).target == wanted


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("address", "10.0.0.7:8000", "invalid_value"),
        ("address", "http://pod:0", "invalid_value"),
        ("address", "http://pod:8000/a b", "invalid_value"),
        ("address", "http://user@pod:8000", "invalid_value"),
        ("address", "http://" + "a" * 2048, "invalid_value"),
        ("address", 8000, "invalid_type"),
        ("metrics_url", "ftp://pod", "invalid_value"),
        ("role", "Decode", "invalid_value"),
        ("role", 1, "invalid_type"),
        ("weight", -1, "out_of_range"),
        ("weight", 1e7, "out_of_range"),
        ("weight", "1", "invalid_type"),
        ("weight", float("nan"), "invalid_value"),
        ("labels", ["a"], "invalid_type"),
        ("labels", {"a": 1}, "invalid_type"),
        ("labels", {"a": "b" * 257}, "out_of_range"),
        ("labels", {"\u00e9" * 129: "b"}, "out_of_range"),
        ("labels", {str(i): "" for i in range(65)}, "out_of_range"),
    ],
)
def test_a_target_that_does_not_fit_is_named(field: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        registration(**{field: value})
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert caught.value.sentence.startswith(f"{field} is ")


SOURCE = "http://vllm-1:8000/v1/kv_events"


@pytest.mark.parametrize("kind", ["continuum", "SSE", "Continuum"])
def test_a_source_of_opaque_prefixes_is_a_url_with_options(kind: str) -> None:
    plain = registration(type=kind, endpoint=SOURCE)
    assert (plain.kind, plain.endpoint, plain.prefixes) == (EngineKind.CONTINUUM, SOURCE, PrefixSource())
    assert (plain.scope, plain.copies) == ("instance", "set")
    fields: dict[str, Any] = {
        "storage_offloading": True,
        "treat_eviction_as_offload": False,
        "entry_ttl_seconds": 86_400,
        "max_entries": 100,
        "reconnect_interval_ms": 5000,
    }
    assert registration(type=kind, endpoint=SOURCE, **fields).prefixes == PrefixSource(**fields)
    assert registration(entry_ttl_seconds=5).prefixes == PrefixSource(), "no option of other types"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"endpoint": "tcp://1.1.1.1:5557"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "ws://vllm-1:8000/events"}, "endpoint"),
        ({"endpoint": "http://user@vllm-1:8000/"}, "endpoint"),
        ({"endpoint": "http://vllm-1:8000/a/../b"}, "endpoint"),
        ({"endpoint": "http://vllm-1:8000/@b"}, "endpoint"),
        ({"replay_endpoint": "tcp://a:1"}, "replay_endpoint"),
        ({"entry_ttl_seconds": 0}, "entry_ttl_seconds"),
        ({"entry_ttl_seconds": 86_401}, "entry_ttl_seconds"),
        ({"max_entries": 99}, "max_entries"),
        ({"max_entries": 10_000_001}, "max_entries"),
        ({"reconnect_interval_ms": 0}, "reconnect_interval_ms"),
        ({"storage_offloading": "yes"}, "storage_offloading"),
    ],
)
def test_a_source_that_does_not_fit_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        registration(**({"type": "continuum", "endpoint": SOURCE} | fields))
    assert caught.value.field == field


def test_a_snapshot_endpoint_belongs_to_one_counter() -> None:
    assert registration(snapshot_endpoint="tcp://1.1.1.1:5757").snapshot_endpoint == "tcp://1.1.1.1:5757"
    for fields in (
        {"type": "continuum", "endpoint": SOURCE},
        {"type": "standard", "endpoint": None},
        {"topic": "kv"},
        {"sequence": "rank"},
    ):
        with pytest.raises(InvalidValue, match="one ZMQ endpoint") as caught:
            registration(**{"snapshot_endpoint": "tcp://1.1.1.1:5757", **fields})
        assert caught.value.field == "snapshot_endpoint"


def test_type_none_has_no_endpoint() -> None:
    assert registration(type="none", endpoint=None).kind is EngineKind.NONE
    with pytest.raises(InvalidValue) as caught:
        registration(type="none")
    assert caught.value.field == "endpoint"


def test_only_a_standard_publisher_needs_no_endpoint() -> None:
    assert registration(type="standard", endpoint=None).endpoint is None
    for nothing in (None, ""):
        with pytest.raises(InvalidValue) as caught:
            registration(endpoint=nothing)
        assert (caught.value.field, caught.value.reason) == ("endpoint", "missing")
    with pytest.raises(InvalidValue) as caught:
        registration(type="standard", endpoint=None, replay_endpoint="tcp://a:1")
    assert caught.value.field == "replay_endpoint"


@pytest.mark.parametrize("field", ["endpoint", "type", "modelname", "instance_id", "block_size"])
def test_required_fields_are_named_when_missing_or_null(field: str) -> None:
    for fields in ({name: value for name, value in REGISTER.items() if name != field}, REGISTER | {field: None}):
        with pytest.raises(InvalidValue) as caught:
            RegisterRequest.of(fields).draft().registration(AllowedEndpoints())
        assert (caught.value.field, caught.value.reason) == (field, "missing")
        assert caught.value.sentence.startswith(f"{field} is missing; ")


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"type": "triton"}, "type", "invalid_value"),
        ({"type": 7}, "type", "invalid_type"),
        ({"endpoint": "http://a:1"}, "endpoint", "invalid_value"),
        ({"endpoint": "tcp://a"}, "endpoint", "invalid_value"),
        ({"endpoint": "tcp://a:70000"}, "endpoint", "invalid_value"),
        ({"endpoint": "tcp://a:1\n"}, "endpoint", "invalid_value"),
        ({"endpoint": "tcp://*:5557"}, "endpoint", "invalid_value"),
        ({"endpoint": ["tcp://a:1"]}, "endpoint", "invalid_type"),
        ({"replay_endpoint": "udp://a:1"}, "replay_endpoint", "invalid_value"),
        ({"modelname": ""}, "modelname", "invalid_value"),
        ({"modelname": 7}, "modelname", "invalid_type"),
        ({"instance_id": 7}, "instance_id", "invalid_type"),
        ({"instance_id": ""}, "instance_id", "invalid_value"),
        ({"block_size": 0}, "block_size", "out_of_range"),
        ({"block_size": 65537}, "block_size", "out_of_range"),
        ({"block_size": -1}, "block_size", "out_of_range"),
        ({"block_size": 2.0**70}, "block_size", "out_of_range"),
        ({"block_size": 16.0}, "block_size", "invalid_type"),
        ({"block_size": "16"}, "block_size", "invalid_type"),
        ({"block_size": True}, "block_size", "invalid_type"),
        ({"dp_rank": -1}, "dp_rank", "out_of_range"),
        ({"dp_rank": 2**32}, "dp_rank", "out_of_range"),
        ({"tenant_id": 7}, "tenant_id", "invalid_type"),
        ({"scope": "global"}, "scope", "invalid_value"),
        ({"copies": "twice"}, "copies", "invalid_value"),
        ({"sequence": "batch"}, "sequence", "invalid_value"),
        ({"shards": 0}, "shards", "out_of_range"),
        ({"shards": 1025}, "shards", "out_of_range"),
        ({"shards": "8"}, "shards", "invalid_type"),
        ({"additionalsalt": "s3cret" * 1000}, "additionalsalt", "out_of_range"),
        ({"additionalsalt": ["s3cret"]}, "additionalsalt", "invalid_type"),
        ({"additional_salt": 12345678}, "additional_salt", "invalid_type"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        registration(**fields)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert "it must be" in caught.value.sentence
    assert "s3cret" not in caught.value.sentence
    assert "12345678" not in caught.value.sentence


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"block_size": 0}, "block_size", "out_of_range"),
        ({"model": None}, "model", "missing"),
        ({"lora_id": -1}, "lora_id", "out_of_range"),
        ({"lora_id": True}, "lora_id", "invalid_type"),
        ({"lora_id": "7"}, "lora_id", "invalid_type"),
        ({"lora_name": 7}, "lora_name", "invalid_type"),
        ({"cache_salt": 12345678}, "cache_salt", "invalid_type"),
        ({"instance_id": 7}, "instance_id", "invalid_type"),
    ],
)
def test_what_does_not_fit_in_a_query_is_named(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        QueryRequest.of(QUERY | fields)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert "12345678" not in caught.value.sentence


NAMES = st.sampled_from(["m", "", "é", "x" * NAME_BYTES_MAX, "x" * (NAME_BYTES_MAX + 1)]) | st.integers() | st.none()
LISTS = st.lists(st.integers()) | st.text() | st.none()
#: The fields of queries with values that fit, or nearly.
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("model", "model_name", "modelname", "tenant_id", "lora_name", "other"), NAMES),
        "block_size": st.sampled_from([0, 1, 16, 65_536, 65_537, True, "16", 16.0, None]),
        **dict.fromkeys(("token_ids", "seq_hashes", "block_hash", "prompt"), LISTS),
    },
)
PLAIN_FIELDS = st.fixed_dictionaries(
    {"model": NAMES, "block_size": st.sampled_from([0, 1, 16, 2**32, True])},
    optional={"tenant_id": NAMES, **dict.fromkeys(("token_ids", "seq_hashes"), LISTS)},
)


@example(fields=QUERY | {"seq_hashes": [1]})
@given(fields=FIELDS | PLAIN_FIELDS)
def test_a_usual_query_is_read_as_pydantic_reads_it(fields: dict[str, Any]) -> None:
    for prompts, validated in ((BY_PROMPT, validated_by_prompt), (BY_HASH, validated_by_hash)):
        asked = usual(fields, prompts)
        assert asked is None or asked == validated(fields)


@pytest.mark.parametrize(
    "fields", [QUERY, QUERY | {"tenant_id": "t"}, {"modelname": "m", "block_size": 1, "seq_hashes": []}]
)
def test_a_usual_query_needs_no_pydantic(fields: dict[str, Any]) -> None:
    assert usual(fields, BY_PROMPT) is not None


def test_hashes_missing_under_every_name() -> None:
    with pytest.raises(InvalidValue) as caught:
        QueryByHashRequest.of({"model": "m", "block_size": 2})
    assert (caught.value.field, caught.value.reason) == ("seq_hashes", "missing")


@pytest.mark.parametrize("name", ["a|b", "{x}", "{17}:holders", "two\nlines", "\x00", "é" * 2048, "x" * NAME_BYTES_MAX])
def test_names_are_any_text_of_bounded_length(name: str) -> None:
    assert registration(instance_id=name, modelname=name, tenant_id=name, lora_name=name).group == (name, name)
    assert UnregisterRequest.of({"instance_id": name}).instance_id == name


@pytest.mark.parametrize("name", ["x" * 2**20, "x" * (NAME_BYTES_MAX + 1), "é" * 2049])
@pytest.mark.parametrize("field", ["instance_id", "modelname", "tenant_id", "lora_name", "additionalsalt"])
def test_longer_names_are_refused_and_shown_short(name: str, field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        registration(**{field: name})
    assert (caught.value.field, caught.value.reason) == (field, "out_of_range")
    assert len(caught.value.sentence) < 250

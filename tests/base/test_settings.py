"""settings: read once, wrong values named, nothing secret shown."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.settings_table import describe
from waymark.base.errors import SettingsError
from waymark.base.setting_types import validate
from waymark.base.settings import _NUMBERS, _TEXTS, _URLS, _WORDS, FORMER, RENAMED, SETTINGS, Settings, _plain
from waymark.base.shown import hide_password


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert (settings.redis_url, settings.redis_read_url, settings.port) == ("memory://", None, 13333)
    assert (settings.hash_seed, settings.shards, settings.on_gap) == (1337, 1, "keep")
    assert (settings.max_body_bytes, settings.max_tokens) == (16 * 2**20, 2**21)
    assert (settings.allowed_endpoints, settings.medium_ttl, settings.api_token) == ((), {}, None)


def test_every_kind_of_value_is_read() -> None:
    settings = Settings.from_env(
        {
            "WAYMARK_REDIS_URL": "redis://cache:6379/0",
            "WAYMARK_HASH_SEED": str(2**64 - 1),
            "WAYMARK_REDIS_TIMEOUT_SECONDS": "0.5",
            "WAYMARK_ACCESS_LOG": "true",
            "WAYMARK_ALLOWED_ENDPOINTS": "tcp://10.0.0.*:5557, 10.1.0.0/16,",
            "WAYMARK_MEDIUM_TTL": "disk=3600, CPU=600",
            "WAYMARK_TOKENIZERS": '{"a": "file:///models/a", "b": "http://engine:8000"}',
            "WAYMARK_ON_GAP": "RESET",
            "WAYMARK_API_TOKEN": "s3cret",
        }
    )
    assert settings.hash_seed == 2**64 - 1
    assert settings.redis_timeout_seconds == 0.5
    assert settings.access_log is True
    assert settings.allowed_endpoints == ("tcp://10.0.0.*:5557", "10.1.0.0/16")
    assert settings.medium_ttl == {"DISK": 3600, "CPU": 600}
    assert settings.tokenizers == {"a": "file:///models/a", "b": "http://engine:8000"}
    assert settings.on_gap == "reset"
    assert settings.api_token is not None
    assert settings.api_token.get_secret_value() == "s3cret"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may have variables of their own, such as the factor of their deadlines.
    for name in [name for name in os.environ if name.startswith("WAYMARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WAYMARK_PORT", "8080")
    assert Settings.from_env().port == 8080
    assert Settings().port == 13333, "only from_env reads the environment"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        pytest.param("WAYMARK_PORT", "http", ['"http"', "1 to 65535", "13333"], id="not-a-number"),
        pytest.param("WAYMARK_PORT", "65536", ['"65536"', "1 to 65535"], id="too-large"),
        pytest.param("WAYMARK_HASH_SEED", "-1", ['"-1"', "0 to 18446744073709551615"], id="negative-seed"),
        pytest.param("WAYMARK_LEASE_SECONDS", "nan", ['"nan"'], id="not-finite"),
        pytest.param("WAYMARK_ON_GAP", "drop", ['"drop"', "`keep` or `reset`"], id="no-such-choice"),
        pytest.param("WAYMARK_ACCESS_LOG", "maybe", ['"maybe"', "`true` or `false`"], id="not-a-truth"),
        pytest.param("WAYMARK_REDIS_URL", "cache:6379", ['"cache:6379"', "redis://"], id="url-without-scheme"),
        pytest.param("WAYMARK_MEDIUM_TTL", "DISK", ['"DISK"', "NAME=VALUE"], id="ttl-without-seconds"),
        pytest.param("WAYMARK_MEDIUM_TTL", "DISK=1,disk=2", ["once"], id="ttl-given-twice"),
        pytest.param("WAYMARK_TOKENIZERS", "a=b", ["JSON object"], id="sources-that-are-no-json"),
        pytest.param("WAYMARK_TOKENIZERS", '{"a": "ftp://x"}', ['"ftp://x"', "file:///"], id="no-such-source"),
        pytest.param(
            "WAYMARK_TOKENIZERS", '{"a": "file:///m?engine=x"}', ['"engine=x"', "engine=sglang"], id="no-such-reader"
        ),
        pytest.param("WAYMARK_MEDIUM_TTL", "DISK=-1", ['"DISK=-1"'], id="ttl-of-less-than-nothing"),
    ],
)
def test_a_wrong_value_names_the_variable_the_value_and_the_way_out(
    variable: str, value: str, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({variable: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"{variable} is ")
    assert [word for word in words if word not in sentence] == []


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match="WAYMARK_SHARD is not a setting: did you mean WAYMARK_SHARDS"):
        Settings.from_env({"WAYMARK_SHARD": "2"})
    with pytest.raises(SettingsError, match="waymark_port is not a setting: did you mean WAYMARK_PORT"):
        Settings.from_env({"waymark_port": "2"})


def test_a_former_setting_is_warned_of_and_what_it_names_is_there(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.from_env({**dict.fromkeys(FORMER, "7"), "WAYMARK_PORT": "2000"})
    assert settings == Settings(port=2000, worker_id=settings.worker_id)
    assert len(caplog.records) == len(FORMER)
    for record in caplog.records:
        variable, _, constant = record.getMessage().partition(" is not a setting any more, and has no effect: it is ")
        found = re.fullmatch(r"(.+), (\w+) in ([\w.]+)", constant)
        if found is None:
            followed = {name.removeprefix("WAYMARK_").lower() for name in re.findall(r"WAYMARK_\w+", constant)}
            assert followed, variable
            assert followed <= set(SETTINGS), variable
            continue
        value, name, module = found.groups()
        number, _, unit = value.partition(" ")
        count = number.replace(",", "")
        expected = float(count) * (2**20 if unit else 1) if count[:1].isdigit() else count
        assert getattr(import_module(module), name) == expected, variable


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({"GATEWAY_DRAIN_SECONDS": "7", "FINISH_SECONDS": "8"}, {"finish_seconds": 7}),
        ({"EPP_FINISH_SECONDS": "", "FINISH_SECONDS": "8"}, {"finish_seconds": 8}),
        ({"EPP_FINISH_SECONDS": "0"}, {"finish_seconds": 0}),
        ({"INGEST_PORT": "7"}, {"probe_port": 7}),
        ({"EPP_METRICS_PORT": "0"}, {"probe_port": 0}),
        ({"PICKER_CONFIG": "/picker.yaml", "POLICY": "llm-d"}, {"policy": "/picker.yaml"}),
        (
            {"REDIS_TLS_CA_FILE": "/ca", "REDIS_TLS_CERT_FILE": "/cert", "REDIS_TLS_KEY_FILE": "/key"},
            {"redis_tls": {"ca": "/ca", "cert": "/cert", "key": "/key"}},
        ),
        (
            {"REDIS_TLS_FILES": "cert=/c", "REDIS_TLS_CA_FILE": "/ca"},
            {"redis_tls": {"ca": "/ca", "cert": "/c"}},
        ),
        (
            {"REDIS_TLS_FILES": "ca=/ca", "REDIS_TLS_VERIFY": "None", "REDIS_SENTINEL_PASSWORD_FILE": "/p"},
            {"redis_tls": {"ca": "/ca", "verify": "none"}, "redis_sentinel": {"password_file": "/p"}},
        ),
        ({"REDIS_SENTINEL_USERNAME": "u"}, {"redis_sentinel": {"username": "u"}}),
        ({"EPP_TLS_FILES": "cert=/c,key=/k", "EPP_TLS": "true"}, {"epp_tls": {"cert": Path("/c"), "key": Path("/k")}}),
        ({"RESPONSE_CACHE": "Redis", "RESPONSES": "off"}, {"answers": {"cache": "redis", "responses": "off"}}),
        ({"EPP_CERT_FILE": "/c", "EPP_KEY_FILE": "/k"}, {"epp_tls": {"cert": Path("/c"), "key": Path("/k")}}),
        (
            {"DISCOVERY_API_PORT": "1", "DISCOVERY_PORT": "2", "DISCOVERY_REPLAY_PORT": "0"},
            {"discovery_ports": {"api": 1, "events": 2, "replay": 0}},
        ),
        ({"ENTRY_TTL_SECONDS": "0", "MEDIUM_TTL": "disk=5"}, {"medium_ttl": {"*": 0, "DISK": 5}}),
        ({"PICKER_CONFIG": "picker.yaml"}, {"policy": "./picker.yaml"}),
        ({"GATEWAY_KEYS_FILE": "../keys"}, {"gateway_keys": ("./../keys",)}),
        ({"GATEWAY_KEYS": "a:1", "GATEWAY_KEYS_FILE": "/keys"}, {"gateway_keys": ("a:1", "/keys")}),
        (
            {"GATEWAY_KEY_REQUESTS": "1", "GATEWAY_KEY_TOKENS": "2"},
            {"gateway_key_limits": {"requests": 1, "tokens": 2}},
        ),
        (
            {"ANSWERS_BYTES": "cache=4096", "RESPONSES_BYTES": "2048", "RESPONSES_MONGO_TTL_SECONDS": "7"},
            {"answers_bytes": {"cache": 4096, "responses": 2048}, "answers_ttl": {"mongo": 7}},
        ),
        (
            {"RESPONSE_CACHE_BYTES": "4096", "RESPONSE_CACHE_TTL_SECONDS": "5", "RESPONSES_TTL_SECONDS": "6"},
            {"answers_bytes": {"cache": 4096}, "answers_ttl": {"cache": 5, "responses": 6}},
        ),
    ],
)
def test_a_renamed_setting_has_its_value_under_the_new_name(
    environ: dict[str, str], values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings.from_env({f"WAYMARK_{name}": value for name, value in environ.items()})
    assert settings == Settings(worker_id=settings.worker_id, **values)
    former = [name for name in environ if f"WAYMARK_{name}" in RENAMED and environ[name]]
    assert sorted(message.split()[0] for message in caplog.messages) == sorted(f"WAYMARK_{name}" for name in former)


def test_what_a_renamed_setting_is_called_now_is_a_setting() -> None:
    settings = {f"WAYMARK_{name.upper()}" for name in SETTINGS}
    assert {new for new, _ in RENAMED.values()} <= settings
    assert RENAMED.keys() & (settings | FORMER.keys()) == set()


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"WAYMARK_PORT": "x", "WAYMARK_SHARDS": "0", "WAYMARK_ZZZZ": "1"})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "WAYMARK_ZZZZ",
        "WAYMARK_SHARDS",
        "WAYMARK_PORT",
    ]


def test_what_kubernetes_adds_for_a_service_called_waymark_is_not_ours() -> None:
    links = {
        "WAYMARK_SERVICE_HOST": "10.0.0.7",
        "WAYMARK_SERVICE_PORT_HTTP": "13333",
        "WAYMARK_PORT": "tcp://10.0.0.7:13333",
        "WAYMARK_PORT_13333_TCP_ADDR": "10.0.0.7",
        "WAYMARK_QUERY_PORT": "tcp://10.0.0.8:13333",
        "WAYMARK_QUERY_PORT_13333_TCP": "tcp://10.0.0.8:13333",
    }
    assert Settings.from_env(links).port == 13333


def test_an_empty_value_counts_as_none_but_an_empty_token_is_refused() -> None:
    assert Settings.from_env({"WAYMARK_REDIS_READ_URL": "", "WAYMARK_PORT": ""}).redis_read_url is None
    with pytest.raises(SettingsError, match="WAYMARK_API_TOKEN is not usable"):
        Settings.from_env({"WAYMARK_API_TOKEN": ""})


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        pytest.param({"WAYMARK_PROTECT_READS": "true"}, "WAYMARK_API_TOKEN", id="reads-protected-by-no-token"),
        pytest.param({"WAYMARK_REDIS_READ_URL": "memory://"}, "WAYMARK_REDIS_READ_URL", id="reading-nowhere"),
        pytest.param(
            {"WAYMARK_REDIS_TLS": "ca=/ca,key=/key"},
            "WAYMARK_REDIS_TLS has a key",
            id="a-key-without-its-certificate",
        ),
        pytest.param({"WAYMARK_REDIS_TLS": "verify=some"}, 'WAYMARK_REDIS_TLS is "verify=some": verify', id="verify"),
        pytest.param({"WAYMARK_EPP_TLS": "cert=/c"}, "WAYMARK_EPP_TLS needs cert and key", id="half-a-certificate"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        Settings.from_env(environ)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, "memory"),
        ({"REDIS_URL": "redis://one"}, "redis"),
        ({"ANSWERS_REDIS_URL": "redis://two"}, "redis"),
        ({"REDIS_URL": "redis://one", "ANSWERS": "responses=memory"}, "memory"),
        ({"REDIS_URL": "redis://one", "ANSWERS": "responses=off,cache=redis"}, "off"),
    ],
)
def test_responses_are_kept_where_other_gateways_find_them(environ: dict[str, str], place: str) -> None:
    assert Settings.from_env({f"WAYMARK_{name}": value for name, value in environ.items()}).responses_place == place


def test_nothing_secret_is_shown() -> None:
    url = "redis://user:hunter2@cache:6379/0?sentinel_password=hunter2&db=1"
    settings = Settings.from_env({"WAYMARK_REDIS_URL": url, "WAYMARK_API_TOKEN": "hunter2"})
    for shown in (repr(settings), str(settings), f"{settings}"):
        assert "hunter2" not in shown
        assert "redis://***@cache:6379/0?sentinel_password=***&db=1" in shown
    assert settings.redis_url == url

    for environ in (
        {"WAYMARK_REDIS_URL": "user:hunter2@cache"},
        {"WAYMARK_API_TOKEN": "hunter2\n"},
        {"WAYMARK_REDIS_URL": url, "WAYMARK_PORT": "x"},
    ):
        with pytest.raises(SettingsError) as caught:
            Settings.from_env(environ)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__context__ is None or "hunter2" not in str(caught.value.__context__)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://:p@ss/word@cache:6379", "redis://***@cache:6379"),
        ("rediss://a@cache?ssl_password=x", "rediss://***@cache?ssl_password=***"),
        ("unix:///run/redis.sock?password=x&db=2", "unix:///run/redis.sock?password=***&db=2"),
        ("memory://", "memory://"),
    ],
)
def test_a_password_in_a_url_is_hidden(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_settings_are_frozen_and_closed() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Settings(prot=1)  # type: ignore[call-arg]


def test_two_processes_on_one_host_have_different_worker_ids() -> None:
    assert Settings().worker_id != Settings().worker_id


def test_every_setting_is_described_by_a_sentence() -> None:
    described = describe()
    assert len(described) == len(SETTINGS)
    for variable, kind, default, sentence, group in described:
        assert group, variable
        assert variable.startswith("WAYMARK_")
        assert kind
        assert default
        assert sentence[0].isupper(), variable
        assert sentence.endswith("."), variable
        assert "|" not in kind + default + sentence, "it would break the table"


#: The settings that some values need no pydantic for, and texts that are values of one of them, or nearly.
PLAIN = sorted({*_TEXTS, *_URLS, *_WORDS, *_NUMBERS})
TEXTS = (
    "",
    "0",
    "07",
    "+7",
    "7.0",
    "1_0",
    "٣",
    "true",
    "TRUE",
    "info",
    "INFO",
    "redis://h",
    "redis:",
    "memory://",
    "\ud800",
)


@given(
    name=st.sampled_from(PLAIN), text=st.sampled_from(TEXTS) | st.integers(0, 2**65).map(str) | st.text() | st.none()
)
def test_a_plain_value_is_what_pydantic_makes_of_it(name: str, text: str | None) -> None:
    plain = _plain(name, text)
    if plain is not None:
        value = validate(Settings, {name: text})[name]
        assert (type(plain), plain) == (type(value), value)


@pytest.mark.parametrize(("name", "most"), _NUMBERS.items())
def test_a_plain_number_has_the_bound_of_its_setting(name: str, most: int) -> None:
    assert (_plain(name, str(most)), _plain(name, str(most + 1))) == (most, None)
    with pytest.raises(ValidationError, match=f"less than or equal to {most}"):
        validate(Settings, {name: most + 1})

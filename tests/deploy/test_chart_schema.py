"""What the chart may be given: its schema is closed, and every setting is in it as the settings say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    ELSEWHERE,
    REDIS,
    SETTINGS,
    WRITE,
    at,
    between,
    documented,
    in_config,
    kinds_schema,
    merged,
    render,
    schema,
    settings_schema,
    settings_text,
    variables,
)
from tests.deploy.values import every_value, given
from tests.settings_table import describe
from waymark.api.publishers_file import read_publishers
from waymark.api.registration_schemas import RegisterRequest
from waymark.base.settings import Settings

# ---- the schema ------------------------------------------------------------------------------------


def test_the_schema_is_closed_but_for_maps_that_are_said_to_be_open() -> None:
    whole = schema()
    open_maps = [
        rule for rule in _rules(whole) if rule.get("type") == "object" and rule.get("additionalProperties") is not False
    ]
    # `required` alone is an addition to another rule.
    unsaid = [rule for rule in open_maps if "description" not in rule and set(rule) != {"type", "required"}]
    assert unsaid == []
    assert {rule["description"] for rule in open_maps if "description" in rule} == {
        "What a parent chart hands to all its parts; not used here.",
        "Names of the operator's own.",
        "In a shape that Kubernetes defines and checks.",
        "Names of resources.",
        "Endpoints by medium.",
    }


def _rules(rule: Any) -> Iterator[dict[str, Any]]:
    if isinstance(rule, dict):
        yield rule
    for part in rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ():
        yield from _rules(part)


def _maps(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """The paths of all maps that are the chart's own."""
    free = {value.path for value in documented()}
    for name, value in values.items():
        if isinstance(value, dict) and before + name not in free:
            yield before + name
            yield from _maps(value, f"{before}{name}.")


@pytest.mark.parametrize(
    "path", ["", "config", *_maps(yaml.load((CHART / "values.yaml").read_bytes(), Loader=yaml.CSafeLoader))]
)
def test_a_misspelt_value_fails_the_installation(path: str) -> None:
    misspelt = at(f"{path}.mispelt" if path else "mispelt", 1)
    with pytest.raises(helm_python.HelmError, match="mispelt"):
        render(merged(REDIS, misspelt))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"query": {"replicas": "two"}}, id="text-for-a-number"),
        pytest.param({"query": {"service": {"port": 0}}}, id="no-port"),
        pytest.param({"image": {"pullPolicy": "Sometimes"}}, id="not-one-of-the-choices"),
        pytest.param({"config": {"WAYMARK_LEASE_SECONDS": 0}}, id="setting-out-of-its-bounds"),
        pytest.param({"config": {"WAYMARK_ACCESS_LOG": "yes"}}, id="setting-of-another-type"),
        pytest.param({"config": {"WAYMARK_REDIS_URL": "redis://elsewhere"}}, id="setting-that-has-a-value-of-its-own"),
        pytest.param({"publishers": [{"instance_id": "a", "type": "vLLM"}]}, id="publisher-without-a-block-size"),
        pytest.param({"config": {"WAYMARK_POLICY": "least_work"}}, id="no-such-policy"),
        pytest.param(
            {"publishers": [{"instance_id": "a", "type": "vLM", "modelname": "m", "block_size": 16}]}, id="no-such-kind"
        ),
        pytest.param({"query": {"resources": {"limit": {"memory": "1Gi"}}}}, id="misspelt-in-resources"),
    ],
)
def test_a_value_that_does_not_fit_fails_the_installation(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError, match=r"(?i)schema"):
        render(merged(REDIS, values))


def test_publishers_have_the_fields_of_a_registration() -> None:
    fields: set[str] = set()
    for name, field in RegisterRequest.model_fields.items():
        alias = field.validation_alias
        fields |= {name, *(str(choice) for choice in getattr(alias, "choices", ()))}
    assert set(schema()["properties"]["publishers"]["items"]["properties"]) == fields


def test_a_worker_reads_the_publishers_as_they_are_given(tmp_path: Path) -> None:
    # A name that YAML would take for a number stays a name.
    publisher = every_value()["publishers"][0] | {"modelname": "1e3"}
    (_, rendered) = render(merged(REDIS, {"publishers": [publisher]}))["configmap.yaml"]
    (name, text) = rendered["data"].popitem()
    (tmp_path / name).write_text(text, encoding="utf-8")
    (registration,) = read_publishers(str(tmp_path / name))
    assert registration.model_name == "1e3"
    assert registration.endpoint == publisher["endpoint"]
    assert registration.block_size == publisher["block_size"]


# ---- settings --------------------------------------------------------------------------------------


def test_every_setting_is_in_the_values_and_in_the_schema() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    assert between(text, SETTINGS) == settings_text(), WRITE
    assert schema()["properties"]["config"] == settings_schema(), WRITE
    assert schema()["properties"]["publishers"]["items"]["properties"]["type"] == kinds_schema(), WRITE
    assert set(ELSEWHERE) <= {setting.variable for setting in describe()}
    for variable in ELSEWHERE:
        assert variable in text, f"{variable} is not in config: name it where it is set"


def test_the_settings_that_are_shown_fit_and_are_the_defaults() -> None:
    shown = yaml.safe_load(settings_text().replace("#   ", ""))
    assert set(shown) == {setting.variable for setting in in_config()}
    given_to = variables(merged(REDIS, {"config": shown}), "ingest")
    settings = Settings.from_env({name: given_to[name] for name in shown} | {"WAYMARK_WORKER_ID": "w"})
    assert settings == Settings(worker_id="w")


@pytest.mark.parametrize("role", ["query", "ingest", "epp", "gateway"])
def test_a_process_takes_every_setting_the_chart_gives_it(role: str) -> None:
    environ = {name: value for name, value in variables(given("every value"), role).items() if isinstance(value, str)}
    settings = Settings.from_env(environ | {"WAYMARK_API_TOKEN": "from-a-secret", "WAYMARK_WORKER_ID": "w"})
    assert {setting.variable for setting in in_config()} <= set(environ)
    assert settings.max_body_bytes == settings_schema()["properties"]["WAYMARK_MAX_BODY_BYTES"]["maximum"]
    assert settings.hash_seed == 2**64 - 1
    assert (settings.probe_port if role in ("ingest", "epp") else settings.port) == 13333


def test_what_is_set_elsewhere_reaches_the_pods() -> None:
    given_to = set().union(*(variables(every_value(), role) for role in ("ingest", "query", "epp", "gateway")))
    assert set(ELSEWHERE) - {"WAYMARK_WORKER_ID"} <= given_to

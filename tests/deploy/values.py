"""Values to install the chart with: the least, all, and those that exclude each other."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import CHART, REDIS, at, merged, settings_schema

#: Values that say where Redis is, of which there is one at a time, and what shows only with one of them.
REDIS_PLACES = ("redis.existingSecret", "redis.existingSecretKeys", "redis.bundled")


@lru_cache(maxsize=1)
def every_value() -> dict[str, Any]:
    """All values, none as by default, but for the places of Redis that exclude each other."""
    values = yaml.safe_load((Path(__file__).with_name("every_value.yaml")).read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


@lru_cache(maxsize=1)
def minimal() -> dict[str, Any]:
    """What the tutorial installs."""
    values = yaml.safe_load((CHART / "values-minimal.yaml").read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


@lru_cache(maxsize=1)
def every_setting() -> dict[str, Any]:
    """A value within its bounds for every setting in ``config``; numbers are at their largest."""
    allowed = settings_schema()["properties"]
    return {name: _sample(rule) for name, rule in allowed.items()} | {
        "WAYMARK_TOKENIZERS": '{"m": "file:///models/m"}',
        "WAYMARK_GATEWAY_ENGINES": "http://10.0.0.7:8000",
        "WAYMARK_TENANT_HEADER": "X-Tenant",
        "WAYMARK_KEY_PREFIX": "staging:",
        "WAYMARK_DISCOVERY_PORTS": "api=8001,events=5558",
        "WAYMARK_GATEWAY_KEY_LIMITS": "requests=8,tokens=9000",
        "WAYMARK_REDIS_SENTINEL": "username=watcher",
        "WAYMARK_REDIS_TLS": "verify=ca",
        "WAYMARK_ANSWERS": "cache=redis,responses=off",
        "WAYMARK_ANSWERS_BYTES": "cache=2048,responses=4096",
        "WAYMARK_ANSWERS_TTL": "cache=60,mongo=9000",
    }


def _sample(rule: dict[str, Any]) -> Any:
    if "anyOf" in rule:
        return _sample(rule["anyOf"][0]) if "enum" in rule["anyOf"][0] else str(2**64 - 1)
    if "enum" in rule:
        return rule["enum"][-1]
    return {"boolean": True, "string": "DISK=60"}.get(rule["type"], rule.get("maximum"))


ALL = ("required", "every value", "bundled Redis", "Redis by Secret", "minimal")


def given(name: str) -> dict[str, Any]:
    return {
        "required": REDIS,
        "every value": merged(every_value(), {"config": every_setting()}),
        "minimal": minimal(),
        "bundled Redis": at("redis", {"bundled": {"enabled": True, "image": "valkey/valkey:8.1", "maxmemory": "4gb"}}),
        "Redis by Secret": at("redis", {"existingSecret": "mine", "existingSecretKeys": {"url": "a", "readUrl": "b"}}),
    }[name]

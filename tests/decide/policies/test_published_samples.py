"""Heimdall's page on plugins: its samples load as they are, and so does every parameter of its tables."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import yaml

from tests.decide.policies.conftest import busy, prompt, target
from waymark.base.errors import InvalidValue
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.plugins import PLUGINS
from waymark.decide.policies.profile import PickerConfig
from waymark.domain.targets import Role

SAMPLES = {
    "tokenizer": """
- type: tokenizer
  parameters:
    modelName: meta-llama/Llama-3.2-1B-Instruct
    udsTokenizerConfig:
      socketFile: /tmp/tokenizer/tokenizer-uds.socket
""",
    "responses in memory": """
- type: responses-store
  parameters:
    storeConfig:
      inMemoryConfig:
        ttl: 24h
        maxEntries: 10000
        maxEntryBytes: 1048576
""",
    "responses in Redis and MongoDB": """
- type: responses-store
  parameters:
    storeConfig:
      tieredConfig:
        redis:
          address: redis://redis.responses-store.svc:6379
          ttl: 24h
        mongo:
          uri: mongodb://mongo.responses-store.svc:27017
          database: heimdall
          collection: responses
          ttl: 720h
        stream:
          key: heimdall:responses:mongo_sync
          consumerGroup: mongo-sync
          batchSize: 100
          blockTimeout: 1s
          claimAge: 30s
""",
}
LOCAL = {
    "autoDiscoveryDir": "/mnt/models", "autoDiscoveryTokenizerFileName": "tokenizer.json", "tokenizer": "",
    "modelTokenizerMap": {"m": "/mnt/m"}, "tokenizerMode": "auto", "tokenizerRevision": "",
}  # fmt: skip
REDIS_INDEX = {"address": "redis://127.0.0.1:6379", "backendType": "redis", "enableRDMA": False}
SCORERS: dict[str, dict[str, Any]] = {
    "active-request-scorer": {"requestTimeout": "2m", "idleThreshold": 0, "maxBusyScore": 1.0},
    "load-aware-scorer": {"threshold": 128},
    "no-hit-lru-scorer": {
        "prefixPluginType": "prefix-cache-scorer", "prefixPluginName": "prefix-cache-scorer", "lruSize": 1024,
    },
    "precise-prefix-cache-scorer": {
        "tokenProcessorConfig": {"blockSize": 16},
        "indexerConfig": {
            "kvBlockIndexConfig": {
                "inMemoryConfig": {"size": 100000000, "podCacheSize": 10},
                "redisConfig": REDIS_INDEX, "valkeyConfig": REDIS_INDEX | {"backendType": "valkey"},
                "costAwareMemoryConfig": {"size": "2GiB"}, "enableMetrics": False, "metricsLoggingInterval": "0s",
            },
            "tokenizersPoolConfig": {
                "modelName": "m", "workersCount": 5, "local": LOCAL,
                "hf": {
                    "enabled": True, "huggingFaceToken": "", "tokenizersCacheDir": "bin", "tokenizer": "",
                    "tokenizerMode": "auto", "tokenizerRevision": "",
                },
                "uds": {"socketFile": "/tmp/a.socket", "useTCP": False, "modelTokenizerMap": {"m": "/mnt/m"}},
            },
        },
        "kvEventsConfig": {
            "zmqEndpoint": "tcp://indexer:5557", "topicFilter": "kv@", "concurrency": 4, "discoverPods": True,
            "podDiscoveryConfig": {"podNamespace": "", "socketPort": 5557},
        },
        "speculativeIndexing": False, "speculativeTTL": "2s",
    },
    "prefix-cache-scorer": {
        "autoTune": True, "blockSizeTokens": 16, "blockSize": 64, "maxPrefixBlocksToMatch": 256,
        "lruCapacityPerServer": 31250,
    },
    "session-affinity-scorer": {}, "kv-cache-utilization-scorer": {}, "lora-affinity-scorer": {}, "queue-scorer": {},
    "running-requests-size-scorer": {}, "predicted-latency-scorer": {},
    "context-length-aware": {"label": "mif.moreh.io/context-length-range", "enableFiltering": False},
}  # fmt: skip
FILTERS: dict[str, dict[str, Any]] = {
    "by-label": {"label": "zone", "validValues": ["a"], "allowsNoLabel": True},
    "by-label-selector": {
        "matchLabels": {}, "matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["b"]}],
    },
    "label-selector-filter": {"matchExpressions": [{"key": "drained", "operator": "DoesNotExist"}]},
    "prefill-filter": {}, "decode-filter": {}, "encode-filter": {},
}  # fmt: skip
PICKERS = {name: {"maxNumOfEndpoints": 1} for name in ("max-score-picker", "random-picker", "weighted-random-picker")}
OTHERS: dict[str, dict[str, Any]] = {
    "disagg-headers-handler": {"prefillProfile": "prefill", "encodeProfile": "encode"},
    "prefill-header-handler": {"prefillProfile": "prefill"},
    "tokenizer": {"modelName": "m", "udsTokenizerConfig": {"socketFile": "/tmp/a.socket"}},
    "response-header-handler": {},
    "models-data-source": {"scheme": "http", "path": "/v1/models", "insecureSkipVerify": True},
    "model-server-protocol-models": {},
    "responses-store": {
        "storeConfig": {
            "tieredConfig": {
                "redis": {
                    "address": "redis://r:6379", "addresses": ["r:6379"], "masterName": "", "username": "",
                    "password": "", "db": 0, "ttl": "24h", "maxEntryBytes": 1048576,
                },
                "mongo": {
                    "uri": "mongodb://m:27017", "database": "heimdall", "collection": "responses", "ttl": "720h",
                    "timeout": "500ms",
                },
                "stream": {
                    "key": "heimdall:responses:mongo_sync", "consumerGroup": "mongo-sync", "maxLen": 1000000,
                    "batchSize": 100, "blockTimeout": "1s", "claimAge": "30s",
                },
            },
        },
    },
}  # fmt: skip
DECIDERS: dict[str, dict[str, Any]] = {
    "prefix-based-pd-decider": {"nonCachedTokens": 16},
    "always-disagg-pd-decider": {},
    "always-disagg-multimodal-decider": {},
}
DISAGG = {
    "profiles": {"decode": "decode", "prefill": "prefill", "encode": "encode"},
    "deciders": {"prefill": "prefix-based-pd-decider", "encode": "always-disagg-multimodal-decider"},
}
LEGACY = {
    "decodeProfile": "decode", "prefillProfile": "prefill", "encodeProfile": "encode",
    "prefillDeciderPluginName": "prefix-based-pd-decider",
    "encodeDeciderPluginName": "always-disagg-multimodal-decider", "deciderPluginName": "always-disagg-pd-decider",
}  # fmt: skip
OLDER = {
    "decodeProfile": "decode", "prefillProfile": "prefill", "prefixPluginType": "prefix-cache-scorer",
    "prefixPluginName": "prefix-cache-scorer", "primaryPort": 8000, "deciderPluginName": "prefix-based-pd-decider",
}  # fmt: skip


def read(plugins: dict[str, dict[str, Any]], **profiles: list[str]) -> PickerConfig:
    declared = [{"type": name, "parameters": parameters} for name, parameters in plugins.items()]
    named = [{"name": name, "plugins": [{"pluginRef": each} for each in of]} for name, of in profiles.items()]
    return read_picker_config(yaml.safe_dump({"plugins": declared, "schedulingProfiles": named}))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_loads_and_the_log_names_the_setting(name: str) -> None:
    config = read_picker_config(f"plugins:{SAMPLES[name]}schedulingProfiles: [{{name: default}}]\n")
    (note,) = config.notes
    assert ("WAYMARK_TOKENIZERS" if name == "tokenizer" else "WAYMARK_ANSWERS") in note


@pytest.mark.parametrize(
    ("handler", "parameters"),
    [
        ("single-profile-handler", {}),
        ("disagg-profile-handler", DISAGG),
        ("disagg-profile-handler", LEGACY),
        ("pd-profile-handler", OLDER),
    ],
)
def test_every_documented_plugin_takes_its_documented_parameters(handler: str, parameters: dict[str, Any]) -> None:
    stages = ["decode"] if handler == "single-profile-handler" else ["decode", "prefill", "encode"]
    plugins = OTHERS | DECIDERS | FILTERS | SCORERS | PICKERS | {handler: parameters}
    config = read(plugins, **{name: [f"{name}-filter", *SCORERS, "max-score-picker"] for name in stages})

    # `lmetric-scorer` is llm-d's alone.
    handlers = {"single-profile-handler", "disagg-profile-handler", "pd-profile-handler"}
    assert plugins.keys() | handlers | {"lmetric-scorer"} == PLUGINS.keys()
    some = [target("d", gauges=busy(1)), target("p", role=Role.PREFILL), target("e", role=Role.ENCODE)]
    found = config.run(prompt(64, is_multimodal=True), some, Random(1))
    assert {*found.decode[0].parts} == {*SCORERS}
    names = [[each.candidate.instance_id for each in stage] for stage in (found.decode, found.prefill, found.encode)]
    assert names == [["d"], ["p"] if "prefill" in stages and handler != "single-profile-handler" else [], names[2]]
    assert names[2] == (["e"] if handler == "disagg-profile-handler" else [])
    # 16 tokens that are not cached are asked for; `deciderPluginName` counts for less than the newer name.
    assert config.run(prompt(15), some, Random(1)).prefill == ()


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_is_found_by_its_name(name: str) -> None:
    some = [
        target("zone", labels={"zone": "b"}),
        target("drained", labels={"drained": "yes"}),
        target("prefill", role=Role.PREFILL),
        target("encode", role=Role.ENCODE),
    ]
    found = read({name: FILTERS[name]}, any=[name]).run(prompt(64), some, Random(1)).decode

    assert {each.candidate.instance_id for each in found} == {
        "by-label": {"drained", "prefill", "encode"},
        "by-label-selector": {"drained", "prefill", "encode"},
        "label-selector-filter": {"zone", "prefill", "encode"},
        "prefill-filter": {"prefill"},
        "decode-filter": {"zone", "drained"},
        "encode-filter": {"encode"},
    }[name]


def test_without_parameters_the_documented_defaults_hold() -> None:
    scorers = ["active-request-scorer", "load-aware-scorer", "prefix-cache-scorer", "context-length-aware"]
    plain: dict[str, dict[str, Any]] = {name: {} for name in scorers}
    full = {name: SCORERS[name] for name in scorers}
    some = [
        target("a", active=3, expected=16 * 100, gauges=busy(64)),
        target("b", active=1, gauges=busy(128), labels={"mif.moreh.io/context-length-range": "0-10"}),
    ]
    runs = [read(of, any=list(of)).run(prompt(16 * 512), some, Random(1)).decode for of in (plain, full)]

    assert [dict(each.parts) for each in runs[0]] == [dict(each.parts) for each in runs[1]]
    # A decider of 0 tokens never runs prefill.
    config = read(
        OTHERS | {"prefix-based-pd-decider": {}, "disagg-profile-handler": DISAGG | {"deciders": {}}}, decode=[]
    )
    assert config.run(prompt(64), some, Random(1)).prefill == ()
    names = {"deciders": {"prefill": "prefix-based-pd-decider"}}
    config = read(OTHERS | {"prefix-based-pd-decider": {}, "disagg-profile-handler": names}, decode=[], prefill=[])
    assert config.run(prompt(64), some, Random(1)).prefill == ()


def test_the_log_names_the_setting_of_fields_beside_plugins() -> None:
    config = read_picker_config("data: {}\nsaturationDetector: {}\nschedulingProfiles: [{name: default}]\n")

    assert [note.partition(":")[0] for note in config.notes] == ["data", "saturationDetector"]
    assert "WAYMARK_GAUGES_SECONDS" in config.notes[0]
    assert "WAYMARK_TARGET_REQUESTS_MAX" in config.notes[1]


def test_the_port_of_a_registration_counts_and_not_that_of_the_file() -> None:
    config = read(OTHERS | DECIDERS | {"pd-profile-handler": OLDER}, decode=[], prefill=[])

    assert any(note.startswith("primaryPort: ") for note in config.notes)


@pytest.mark.parametrize(
    ("plugins", "sentence"),
    [
        ({"prefix-cache-scorer": {"blockSize": 64}}, "give blockSizeTokens"),
        (DECIDERS | {"pd-profile-handler": {"primaryPort": 65536}}, "primaryPort is 65536; it must be a port"),
        ({"active-request-scorer": {"maxBusyScore": float("nan")}}, "maxBusyScore is nan"),
        ({"load-aware-scorer": {"threshold": -1}}, "threshold is -1"),
        ({"load-aware-scorer": {"threshold": float("inf")}}, "threshold is inf"),
        ({"prefix-based-pd-decider": {"nonCachedTokens": -1}}, "nonCachedTokens is -1"),
        ({"prefix-based-pd-decider": {"nonCachedTokens": float("nan")}}, "nonCachedTokens is nan"),
        ({"max-score-picker": {"maxNumOfEndpoints": 0}}, "maxNumOfEndpoints is 0"),
        ({"max-score-picker": {"maxNumOfEndpoints": 1.5}}, "maxNumOfEndpoints is 1.5"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_by_name(plugins: dict[str, dict[str, Any]], sentence: str) -> None:
    asked = {"deciders": {"prefill": "prefix-based-pd-decider"}}
    handler = {} if "pd-profile-handler" in plugins else {"disagg-profile-handler": asked}
    used = [name for name in plugins if name in SCORERS or name in PICKERS]
    with pytest.raises(InvalidValue, match=sentence):
        read(OTHERS | DECIDERS | plugins | handler, decode=used, prefill=[])


@pytest.mark.parametrize("weight", ["-1", ".nan", ".inf", "'1'", "true"])
def test_a_weight_that_does_not_fit_is_refused(weight: str) -> None:
    profiles = f"[{{name: a, plugins: [{{pluginRef: queue-scorer, weight: {weight}}}]}}]"
    text = f"plugins: [{{type: queue-scorer}}]\nschedulingProfiles: {profiles}\n"
    with pytest.raises(InvalidValue, match=r"plugins\[0\].weight is"):
        read_picker_config(text)

"""The plugins that an ``EndpointPickerConfig`` may name, with the parameters of each.

A parameter's kind is a word (``number``, ``bool``, ``text``, ``texts``, ``labels``, ``expressions``, ``duration``) or a
table of further parameters. Plugins for other purposes than picking are known, too: each has a setting here, which its
sentence names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

from waymark.base.record import record
from waymark.decide.policies.profile import PICKERS
from waymark.decide.policies.scorers import SCORERS

Parameters = Mapping[str, Any]


class PluginKind(StrEnum):
    """The work of a plugin, which decides the places for its name."""

    HANDLER = "profile handler"
    DECIDER = "decider"
    FILTER = "filter"
    SCORER = "scorer"
    FILTER_AND_SCORER = "filter and scorer"
    PICKER = "picker"
    OTHER = "other"
    """A plugin that no profile names; a setting of Waymark replaces it."""


@record(frozen=True, slots=True)
class Plugin:
    """One type of plugin."""

    type: str
    kind: PluginKind
    parameters: Parameters = field(default_factory=dict)
    note: str = ""
    """The part of its work that Waymark does differently, for the log at start."""
    is_open: bool = False
    """Whether it has further parameters, which are named in the log and not used."""


_PREFIX_NAMES: dict[str, Any] = {"prefixPluginType": "text", "prefixPluginName": "text"}
_REDIS_INDEX: Parameters = {"address": "text", "backendType": "text", "enableRDMA": "bool"}
_LOCAL_TOKENIZER: Parameters = {
    "autoDiscoveryDir": "text",
    "autoDiscoveryTokenizerFileName": "text",
    "modelTokenizerMap": "labels",
    "tokenizer": "text",
    "tokenizerMode": "text",
    "tokenizerRevision": "text",
}
_PRECISE: Parameters = {
    "tokenProcessorConfig": {"blockSize": "number", "hashSeed": "text"},
    "indexerConfig": {
        "kvBlockIndexConfig": {
            "inMemoryConfig": {"size": "number", "podCacheSize": "number"},
            "redisConfig": _REDIS_INDEX,
            "valkeyConfig": _REDIS_INDEX,
            "costAwareMemoryConfig": {"size": "text"},
            "enableMetrics": "bool",
            "metricsLoggingInterval": "duration",
        },
        "tokenizersPoolConfig": {
            "modelName": "text",
            "workersCount": "number",
            "hf": {
                "enabled": "bool",
                "huggingFaceToken": "text",
                "tokenizersCacheDir": "text",
                "tokenizer": "text",
                "tokenizerMode": "text",
                "tokenizerRevision": "text",
            },
            "local": _LOCAL_TOKENIZER,
            "uds": {"socketFile": "text", "useTCP": "bool", "modelTokenizerMap": "labels"},
        },
    },
    "kvEventsConfig": {
        "zmqEndpoint": "text",
        "topicFilter": "text",
        "concurrency": "number",
        "discoverPods": "bool",
        "podDiscoveryConfig": {"podNamespace": "text", "socketPort": "number"},
    },
    "speculativeIndexing": "bool",
    "speculativeTTL": "duration",
}
_RESPONSES: Parameters = {
    "storeConfig": {
        "inMemoryConfig": {"ttl": "duration", "maxEntries": "number", "maxEntryBytes": "number"},
        "tieredConfig": {
            "redis": {
                "address": "text",
                "addresses": "texts",
                "masterName": "text",
                "username": "text",
                "password": "text",
                "db": "number",
                "ttl": "duration",
                "maxEntryBytes": "number",
            },
            "mongo": {
                "uri": "text",
                "database": "text",
                "collection": "text",
                "ttl": "duration",
                "timeout": "duration",
            },
            "stream": {
                "key": "text",
                "consumerGroup": "text",
                "maxLen": "number",
                "batchSize": "number",
                "blockTimeout": "duration",
                "claimAge": "duration",
            },
        },
    }
}
_HEADERS_NOTE = "/select returns headers with the targets of the other stages"

#: The parameters of a scorer beside the numbers of its own table.
_SCORER_EXTRAS: Mapping[str, tuple[Parameters, str]] = {
    "precise-prefix-cache-scorer": (
        _PRECISE,
        "the index is Waymark's own: engines are registered or discovered, tokenizers are WAYMARK_TOKENIZERS, "
        "speculative entries follow speculativeIndexing and speculativeTTL",
    ),
    "prefix-cache-scorer": (
        {"autoTune": "bool", "blockSizeTokens": "number", "blockSize": "number"},
        "Redis has the blocks that went to each target, of the engines' block size, and nothing is tuned",
    ),
    "no-hit-lru-scorer": (_PREFIX_NAMES | {"lruSize": "number"}, "every target's last cold request is kept"),
    "active-request-scorer": (
        {"requestTimeout": "duration"},
        "a request that is never released ends by its own timeout_seconds",
    ),
}

_PLUGINS = (
    Plugin("single-profile-handler", PluginKind.HANDLER),
    Plugin(
        "disagg-profile-handler",
        PluginKind.HANDLER,
        {
            "profiles": {"decode": "text", "prefill": "text", "encode": "text"},
            "deciders": {"prefill": "text", "encode": "text"},
            "decodeProfile": "text",
            "prefillProfile": "text",
            "encodeProfile": "text",
            "prefillDeciderPluginName": "text",
            "encodeDeciderPluginName": "text",
            "deciderPluginName": "text",
        },
    ),
    Plugin(
        "pd-profile-handler",
        PluginKind.HANDLER,
        _PREFIX_NAMES
        | {"decodeProfile": "text", "prefillProfile": "text", "primaryPort": "number", "deciderPluginName": "text"},
    ),
    Plugin("prefix-based-pd-decider", PluginKind.DECIDER, {"nonCachedTokens": "number"}),
    Plugin("always-disagg-pd-decider", PluginKind.DECIDER),
    Plugin("always-disagg-multimodal-decider", PluginKind.DECIDER),
    Plugin("by-label", PluginKind.FILTER, {"label": "text", "validValues": "texts", "allowsNoLabel": "bool"}),
    Plugin("by-label-selector", PluginKind.FILTER, {"matchLabels": "labels", "matchExpressions": "expressions"}),
    Plugin("label-selector-filter", PluginKind.FILTER, {"matchLabels": "labels", "matchExpressions": "expressions"}),
    Plugin("prefill-filter", PluginKind.FILTER),
    Plugin("decode-filter", PluginKind.FILTER),
    Plugin("encode-filter", PluginKind.FILTER),
    Plugin("context-length-aware", PluginKind.FILTER_AND_SCORER, {"label": "text", "enableFiltering": "bool"}),
    *(
        Plugin(
            scorer.name,
            PluginKind.SCORER,
            {row.name: "text" if isinstance(row.default, str) else "number" for row in scorer.parameters}
            | dict(_SCORER_EXTRAS.get(scorer.name, ({}, ""))[0]),
            _SCORER_EXTRAS.get(scorer.name, ({}, ""))[1],
            is_open=scorer.name == "predicted-latency-scorer",
        )
        for scorer in SCORERS.values()
    ),
    *(Plugin(name, PluginKind.PICKER, {"maxNumOfEndpoints": "number"}) for name in PICKERS),
    Plugin(
        "disagg-headers-handler", PluginKind.OTHER, {"prefillProfile": "text", "encodeProfile": "text"}, _HEADERS_NOTE
    ),
    Plugin(
        "prefill-header-handler", PluginKind.OTHER, {"prefillProfile": "text", "encodeProfile": "text"}, _HEADERS_NOTE
    ),
    Plugin(
        "tokenizer",
        PluginKind.OTHER,
        {"modelName": "text", "udsTokenizerConfig": {"socketFile": "text"}},
        "WAYMARK_TOKENIZERS names the tokenizers; a tokenizer on a unix socket is unix:///path/of/the.socket",
    ),
    Plugin(
        "response-header-handler",
        PluginKind.OTHER,
        {},
        "waymark gateway puts the targets of a request into these headers; /select has them in its answer",
    ),
    Plugin(
        "responses-store",
        PluginKind.OTHER,
        _RESPONSES,
        "an endpoint picker stores no responses; waymark gateway does (WAYMARK_ANSWERS)",
    ),
    Plugin(
        "models-data-source",
        PluginKind.OTHER,
        {"scheme": "text", "path": "text", "insecureSkipVerify": "bool"},
        "the registration of an engine names its models and adapters",
    ),
    Plugin(
        "model-server-protocol-models",
        PluginKind.OTHER,
        {},
        "the registration of an engine names its models and adapters",
    ),
)
PLUGINS: Mapping[str, Plugin] = {plugin.type: plugin for plugin in _PLUGINS}

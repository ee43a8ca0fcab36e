"""Every setting once: its name, type, bounds and default, and its meaning in one or two sentences.

The variable of a field is ``WAYMARK_`` and the field's name in capitals. Settings are read once, in the command line.
``waymark.runtime`` fills the options of all other rooms from them, and no other room knows them. A wrong or unknown
variable stops the process with a sentence for each, and one of ``FORMER`` is named in a warning: it must not stop an
upgrade. Passwords and the token are in no ``repr`` and in no error. The comment above a group is its title in the docs.

pydantic validates the settings. A process whose variables are all plain, such as ``WAYMARK_PORT=8080``, starts without
it, because a new replica imports pydantic after its first answers.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, dataclass_transform

from waymark.base.errors import SettingsError
from waymark.base.shown import hide_password

if TYPE_CHECKING:
    from pydantic import Field, SecretStr

    from waymark.base.setting_types import (
        AnswersBytes,
        AnswersTtl,
        EngineUrl,
        KeyPrefix,
        Limit,
        Lower,
        MediumName,
        ParsedSources,
        Port,
        RedisUrl,
        Split,
        SplitFiles,
        SplitKeys,
        SplitLower,
        SplitSeconds,
        SplitTls,
        SplitValues,
        Token,
        TokenSource,
        Ttl,
        ZeroOrHundred,
    )

PREFIX = "WAYMARK_"

log = logging.getLogger(__name__)

_MIB = 2**20
_DAY = 86_400
_NOTHING: Any = MappingProxyType({})


def _new_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}.{os.getpid()}.{os.urandom(4).hex()}"


_worker_id_factory: Any = _new_worker_id


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Table:
    """The methods of the settings. Each field is an attribute of the class, its default, until it is given."""

    def __init__(self, **values: Any) -> None:
        """Validate the values. Raise pydantic's ``ValidationError``, and ``SettingsError`` if they contradict each
        other.
        """
        plain = {name: _plain(name, value) for name, value in values.items()}
        if None in plain.values():
            from waymark.base.setting_types import validate

            plain = validate(type(self), values)
        vars(self).update({"worker_id": _new_worker_id()} | plain)
        contradiction = self._contradiction()
        if contradiction is not None:
            raise SettingsError(contradiction)

    def _contradiction(self) -> str | None:
        """Return a sentence about values that contradict each other, or None."""
        return None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"settings are frozen: {name}")

    def __eq__(self, settings: object) -> bool:
        return isinstance(settings, _Table) and all(getattr(self, name) == getattr(settings, name) for name in SETTINGS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in SETTINGS}
        values |= {name: hide_password(url) for name in _REDIS_URLS if (url := values[name])}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in values.items())})"


# ---- the settings ----------------------------------------------------------------------------------


class Settings(_Table):
    """The settings of a process, frozen. ``Settings(port=1)`` reads no environment; ``Settings.from_env()`` does."""

    # What has to be set
    redis_url: RedisUrl = "memory://"
    """The URL of the Redis that holds the index; `memory://` is an emulated Redis inside this process, for a trial."""
    hash_seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 1337
    """The seed of the block hashes; all processes that share a Redis need the same seed."""
    tokenizers: Annotated[dict[str, TokenSource], ParsedSources] = _NOTHING
    """The source of token ids for each model, such as `{"llama": "file:///models/llama"}`."""
    allowed_endpoints: Annotated[tuple[str, ...], Split] = ()
    """The globs and CIDRs that registered endpoints must match; the default allows every endpoint."""
    api_token: Token | None = None
    """The bearer token for requests that write; without this setting every client may write."""

    # Redis
    redis_read_url: RedisUrl | None = None
    """The URL of the Redis that queries read from, such as a replica; the default is `WAYMARK_REDIS_URL`."""
    answers_redis_url: RedisUrl | None = None
    """The URL of the Redis for the response cache and stored responses of a gateway; the default is the main one."""
    key_prefix: KeyPrefix | None = None
    """The beginning of all keys and of the channel, so that several Waymarks can use one Redis, such as `staging:`."""
    shards: Annotated[int, Field(ge=1, le=256)] = 1
    """The number of Redis Cluster slots that the blocks of a new group are spread over."""
    redis_username: Annotated[str | None, Field(min_length=1)] = None
    """The user name for Redis, if its URL contains none."""
    redis_password_file: Path | None = None
    """The file with the password for Redis; it is read for every new connection."""
    redis_sentinel: Annotated[dict[Literal["username", "password_file"], str], SplitValues] = _NOTHING
    """The user and the password of the Sentinels, `username=NAME,password_file=FILE`; they are not those of Redis."""
    redis_tls: Annotated[dict[Literal["ca", "cert", "key", "verify"], str], SplitTls] = _NOTHING
    """TLS of Redis: its CA, a certificate of a client, and what is checked: `ca=FILE,cert=FILE,key=FILE,verify=ca`."""
    redis_timeout_seconds: Annotated[float, Field(ge=0.05, le=60)] = 2.0
    """How long to wait for a connection to Redis, and for a reply."""

    # Ports and access
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """The address that the HTTP API listens on; for a trial on `memory://` the default is `127.0.0.1`."""
    port: Annotated[int, Field(ge=1, le=65535)] = 13333
    """The TCP port that the HTTP API listens on."""
    probe_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """The TCP port of `/health`, `/ready` and `/metrics` of a worker, or of a picker (9090 by default); 0: none."""
    epp_port: Annotated[int, Field(ge=1, le=65535)] = 9002
    """The TCP port on which an endpoint picker answers Envoy over gRPC."""
    epp_health_port: Annotated[int, Field(ge=0, le=65535)] = 9003
    """The TCP port for gRPC health checks of an endpoint picker, without TLS; 0 means only on `WAYMARK_EPP_PORT`."""
    epp_tls: Annotated[bool | dict[Literal["cert", "key"], Path], SplitFiles] = True
    """TLS of an endpoint picker: `cert=FILE,key=FILE`, or `true` for a certificate that it makes when it starts."""
    api_tokens_file: str | None = None
    """The JSON file with the SHA-256 of further tokens, and their tenants; with it, reads need a token, too."""
    protect_reads: bool = False
    """Whether requests that only read need the token, too."""
    ui: bool = True
    """Whether `GET /ui` shows the page."""

    # Models and tokenizers
    tokenizers_dir: Path | None = None
    """A directory with tokenizers: each model is a directory there, with a `tokenizer.json`."""
    model_aliases: Annotated[dict[str, str], SplitValues] = _NOTHING
    """Further names of models in a gateway: `gpt-4o=llama,fast=qwen`. A client's name stays when the model changes."""

    # Engines and their events
    publishers_file: str | None = None
    """A JSON or YAML file of publishers that workers register when they start, and when Redis has lost its data."""
    discovery: Annotated[Literal["off", "kubernetes"], Lower] = "off"
    """Whether an ingest worker registers the pods that it finds in Kubernetes."""
    discovery_namespace: str | None = None
    """The namespace of the pods to register; the default is every namespace that the ServiceAccount may list."""
    discovery_selector: str = "llm-d.ai/inference-serving=true"
    """The label selector of the pods of engines."""
    discovery_ports: Annotated[dict[Literal["api", "events", "replay"], Port], SplitValues] = _NOTHING
    """The ports of rank 0 that a pod and its engine do not name: `api=8000,events=5557,replay=5657`; 0: no replays."""
    discovery_url: str | None = None
    """The API server of Kubernetes, with its CA in `SSL_CERT_FILE`: `https://host:6443?token_file=/run/token`."""
    deletion_cost: Annotated[Literal["off", "on"], Lower] = "off"
    """Whether discovery annotates pods with the worth of their caches, so that Kubernetes stops the cheapest first."""
    engine_api_key: Token | None = None
    """The bearer token for engines, only on hosts of `WAYMARK_ENGINE_KEY_HOSTS` and `WAYMARK_GATEWAY_ENGINES`."""
    engine_key_hosts: Annotated[tuple[str, ...], Split] = ()
    """The globs and CIDRs of the hosts that get the key of the engines; the default is `WAYMARK_ALLOWED_ENDPOINTS`."""
    engine_keys: Annotated[dict[str, SecretStr], SplitKeys] = _NOTHING
    """Keys of single engines or providers, by the host that gets them: `api.example.com=KEY,10.0.0.0/8=OTHER`."""
    engine_ca_file: str | None = None
    """The PEM file with the CA of the engines' certificates, which is read again; the default is the system's CAs."""
    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] = _worker_id_factory
    """The name of this ingest worker; no two running workers may have the same name."""
    lease_seconds: Annotated[float, Field(ge=1, le=300)] = 8.0
    """After how long without a heartbeat an ingest worker loses the lease of a stream."""
    publisher_timeout: Annotated[float, Field(ge=0, le=7 * _DAY)] = 60.0
    """After how many seconds without a connection queries no longer count a publisher's blocks; 0 means never."""
    on_gap: Annotated[Literal["keep", "reset"], Lower] = "keep"
    """What happens to the blocks of a stream when batches are lost: `keep` leaves them, `reset` ends the life."""
    probe_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """After how many seconds without a frame, or after an unanswered replay, a worker asks for a replay."""
    hybrid: Annotated[Literal["boundary", "off"], Lower] = "boundary"
    """What a match of a hybrid model needs: blocks of full attention (`off`), or also its windows (`boundary`)."""
    medium_ttl: Annotated[dict[MediumName, Ttl], SplitSeconds] = _NOTHING
    """After how many seconds blocks expire if they were not stored again, by medium: `DISK=3600,*=600`; 0: never."""
    max_entries: Annotated[int, Field(ge=0, le=10**9), ZeroOrHundred] = 0
    """The most blocks of one tenant and model: 0 for no limit, else 100 or more. The oldest are removed first."""

    # Decisions
    policy: Annotated[str, Field(min_length=1)] = "least-work"
    """The policy that ranks targets if a request names none, or the path of an `EndpointPickerConfig` file in YAML."""
    profile: Annotated[Literal["auto", "single", "disagg"], Lower] = "auto"
    """Whether one engine (`single`) or two (`disagg`) prefill and decode a request; with `auto` the policy decides."""
    min_initial_workers: Annotated[int, Field(ge=0, le=100_000)] = 0
    """How many engines must be registered before a replica is ready and decides; 0 means none."""
    target_requests_max: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How many reservations a target may have at once; 0 means no limit."""
    prefill_tokens_per_second: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """The assumed prefill speed of a target without events. With 0, the prefill ends when the request ends."""
    gauges_seconds: Annotated[float, Field(ge=0, le=60)] = 1.0
    """The seconds between two reads of an engine's metrics. A worker reads at most 100 engines a second. 0: never."""
    loads_ms: Annotated[int, Field(ge=0, le=10_000)] = 100
    """How long, in milliseconds, a replica reuses the loads that it read from Redis. 0 reads them for each decision."""
    speculative: bool = False
    """Whether a target counts as having the blocks of a prompt as soon as it is picked for the prompt."""
    shadow: str | None = None
    """Policies that order the targets of each decision, but decide nothing: presets and picker files, with commas."""
    decisions_kept: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The share of decisions that is kept in Redis for a day, without tokens and texts; 0 keeps none."""
    epp_tenant: Annotated[str, Field(min_length=1)] = "default"
    """The tenant whose targets an endpoint picker picks."""

    # Gateway
    gateway_engines: Annotated[tuple[EngineUrl, ...], Split] = ()
    """The URLs of engines that a gateway registers when it starts."""
    gateway_keys: Annotated[tuple[str, ...], Split] = ()
    """Keys of clients, `name:sha256` or `name:sha256:tenant`, and `/file` with one in each line; none: all may call."""
    tenant_header: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] = None
    """The header that names the tenant of a request to a gateway without keys."""
    gateway_key_limits: Annotated[dict[Literal["requests", "tokens"], Limit], SplitValues] = _NOTHING
    """What one key may have under way in a gateway, such as `requests=8,tokens=100000` of prompts; 0: no limit."""
    gateway_origins: Annotated[tuple[str, ...], Split] = ()
    """The origins of pages whose scripts may use a gateway (CORS), `https://chat.example.com`; `*` is every page."""
    gateway_idle_seconds: Annotated[float, Field(ge=0.1, le=_DAY)] = 300.0
    """How long an engine may pause within an answer at a gateway; twice as long before the answer begins."""
    cache_control_injection: bool = False
    """Whether a gateway marks the system prompt of `/v1/messages` with `cache_control`, if no block of it has one."""
    answers: Annotated[dict[Literal["cache", "responses"], Literal["off", "memory", "redis"]], SplitLower] = _NOTHING
    """Where a gateway caches answers, and stores those of `/v1/responses`: `cache=off,responses=redis`, or `memory`."""
    responses_mongo_url: SecretStr | None = None
    """The MongoDB that gets a copy of every stored answer: `mongodb://host/waymark?timeoutMS=500`."""
    answers_bytes: Annotated[dict[Literal["cache", "responses"], AnswersBytes], SplitValues] = _NOTHING
    """The bytes of answers in the response cache and of `/v1/responses`, `cache=268435456,responses=268435456`."""
    answers_ttl: Annotated[dict[Literal["cache", "responses", "mongo"], AnswersTtl], SplitValues] = _NOTHING
    """How many seconds answers are kept, by place: `cache=300,responses=86400,mongo=2592000`."""

    # Limits
    max_body_bytes: Annotated[int, Field(ge=1024, le=1024 * _MIB)] = 16 * _MIB
    """The largest request body that is accepted, in bytes. Sixteen of this size may be in memory at once."""
    max_tokens: Annotated[int, Field(ge=1, le=2**26)] = 2**21
    """The most tokens or hashes that one request may contain, and the most bytes of a text that is tokenized."""
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """How many HTTP connections, or streams of a picker, are open at once; above it, the one idle longest is closed."""
    request_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """How long a client may take to send a request, and to read the answer, before its connection is closed."""
    query_deadline_ms: Annotated[int, Field(ge=1, le=60_000)] = 1000
    """How long a query may take before it answers with what it has found."""
    frame_bytes_max: Annotated[int, Field(ge=65_536, le=256 * _MIB)] = 16 * _MIB
    """The largest frame, in bytes. With 16 MiB a batch has at most 65,536 events, and an event 262,144 hashes."""
    stream_blocks_max: Annotated[int, Field(ge=1, le=100_000_000)] = 4_000_000
    """The most blocks of one stream that a worker indexes; more are ignored. A pool has a quarter as many hashes."""
    stream_buffer_bytes: Annotated[int, Field(ge=1024, le=64 * 1024 * _MIB)] = 64 * _MIB
    """The most bytes of waiting frames of a stream; 64 MiB allow 20,000 frames. A worker keeps four times as many."""
    sweep_blocks_per_second: Annotated[int, Field(ge=1, le=10_000_000)] = 30_000
    """How many blocks of dead holders an ingest worker sweeps per second, and how many it reads for /placement."""

    # The rest
    conductor_shape: Literal["auto", "published", "instances"] = "auto"
    """The form of `/query` answers: `published` (old), `instances` (new), or `auto`: JSON is old, msgpack has both."""
    native: bool = True
    """Whether the native module is used if it was built; `false` selects the pure-Python path."""
    epp_drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long an endpoint picker accepts requests after SIGTERM; its health check already reports that it stops."""
    finish_seconds: Annotated[int, Field(ge=0, le=_DAY)] = 60
    """How long the requests of a gateway or picker may take to end after it stopped accepting new ones."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = "info"
    """The lowest level of log lines that are written."""
    log_format: Annotated[Literal["text", "json"], Lower] = "text"
    """The format of log lines: `text` for people, `json` for programs."""
    access_log: bool = False
    """Whether every HTTP request is logged."""

    def _contradiction(self) -> str | None:
        """Return why these settings do not fit together, or None."""
        if self.responses_mongo_url is not None and self.responses_place != "redis":
            return (
                f"WAYMARK_RESPONSES_MONGO_URL is set but WAYMARK_ANSWERS has responses={self.responses_place}: only "
                "what is in Redis is copied to MongoDB, so give responses=redis, or leave the former out"
            )
        if self.protect_reads and self.api_token is None and self.api_tokens_file is None:
            return "WAYMARK_PROTECT_READS is true but there is no WAYMARK_API_TOKEN: set one, or leave the former out"
        if self.engine_api_key is not None and not (
            self.engine_key_hosts or self.allowed_endpoints or self.gateway_engines
        ):
            return (
                "WAYMARK_ENGINE_API_KEY is set but no host that it may go to: name the hosts of the engines "
                "in WAYMARK_ENGINE_KEY_HOSTS, such as 10.0.0.0/8 or *.engines.svc; * is every host that is registered"
            )
        if self.redis_read_url is not None and self.redis_read_url.startswith("memory://"):
            return "WAYMARK_REDIS_READ_URL is memory://, which would stay empty: leave it out"
        if self.answers_redis_url is not None and self.answers_redis_url.startswith("memory://"):
            return (
                "WAYMARK_ANSWERS_REDIS_URL is memory://, which no other gateway can see: leave it out, and give "
                "cache=memory,responses=memory in WAYMARK_ANSWERS"
            )
        if not isinstance(self.epp_tls, bool) and len(self.epp_tls) == 1:
            return "WAYMARK_EPP_TLS needs cert and key: give cert=FILE,key=FILE, or leave it out"
        if "key" in self.redis_tls and "cert" not in self.redis_tls:
            return "WAYMARK_REDIS_TLS has a key without cert: give both"
        return None

    @property
    def responses_place(self) -> Literal["off", "memory", "redis"]:
        """Where answers of ``/v1/responses`` are stored: in Redis, if there is one that other gateways reach."""
        url = self.answers_redis_url or self.redis_url
        return self.answers.get("responses") or ("memory" if url == "memory://" else "redis")

    def is_given(self, name: str) -> bool:
        """Return whether a value of the setting was given, even if it is the default."""
        return name in vars(self)

    def copy_with(self, **values: Any) -> Settings:
        """Return the settings with other values, which are not validated."""
        settings = object.__new__(Settings)
        vars(settings).update(vars(self) | values)
        return settings

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from ``environ`` (the process's own by default); an empty value counts as unset.

        Raise ``SettingsError``, one line for each wrong or unknown variable.
        """
        environ = os.environ if environ is None else environ
        variables = {
            name: value
            for name, value in environ.items()
            if name.upper().startswith(PREFIX) and name != CLIENT_URL and not _is_service_link(name, value)
        }
        if not variables.get(_MIN_WORKERS) and environ.get(_DYNAMO_MIN_WORKERS):
            variables[_MIN_WORKERS] = environ[_DYNAMO_MIN_WORKERS]
        _rename(variables)
        for name in sorted(variables.keys() & FORMER.keys()):
            log.warning("%s is not a setting any more, and has no effect: it is %s", name, FORMER[name])
        complaints = [_unknown(name) for name in sorted(variables) if name not in _FIELDS and name not in FORMER]
        # A token may not be empty: a secret that did not arrive must not open the door.
        values: dict[str, Any] = {
            _FIELDS[name]: value for name, value in variables.items() if name in _FIELDS and (value or name in _TOKENS)
        }
        try:
            settings = cls(**values)
        except SettingsError as exc:
            complaints.append(str(exc))
        except ValueError as exc:
            from waymark.base.setting_types import complaints_of

            complaints += complaints_of(exc, cls, variables)
        if complaints:
            raise SettingsError("\n".join(complaints))
        return settings


#: Where commands find a running Waymark; no setting of a process.
CLIENT_URL = PREFIX + "URL"

_REDIS_URLS = frozenset({"redis_url", "redis_read_url", "answers_redis_url"})
#: The variables of settings that were renamed or became a part of another one, with that setting and the part's label.
RENAMED: Final = {
    PREFIX + "GATEWAY_DRAIN_SECONDS": (PREFIX + "FINISH_SECONDS", None),
    PREFIX + "EPP_FINISH_SECONDS": (PREFIX + "FINISH_SECONDS", None),
    PREFIX + "INGEST_PORT": (PREFIX + "PROBE_PORT", None),
    PREFIX + "EPP_METRICS_PORT": (PREFIX + "PROBE_PORT", None),
    PREFIX + "PICKER_CONFIG": (PREFIX + "POLICY", None),
    PREFIX + "REDIS_TLS_CA_FILE": (PREFIX + "REDIS_TLS", "ca="),
    PREFIX + "REDIS_TLS_CERT_FILE": (PREFIX + "REDIS_TLS", "cert="),
    PREFIX + "REDIS_TLS_KEY_FILE": (PREFIX + "REDIS_TLS", "key="),
    PREFIX + "REDIS_TLS_FILES": (PREFIX + "REDIS_TLS", ""),
    PREFIX + "REDIS_TLS_VERIFY": (PREFIX + "REDIS_TLS", "verify="),
    PREFIX + "REDIS_SENTINEL_USERNAME": (PREFIX + "REDIS_SENTINEL", "username="),
    PREFIX + "REDIS_SENTINEL_PASSWORD_FILE": (PREFIX + "REDIS_SENTINEL", "password_file="),
    PREFIX + "EPP_TLS_FILES": (PREFIX + "EPP_TLS", ""),
    PREFIX + "EPP_CERT_FILE": (PREFIX + "EPP_TLS", "cert="),
    PREFIX + "EPP_KEY_FILE": (PREFIX + "EPP_TLS", "key="),
    PREFIX + "DISCOVERY_API_PORT": (PREFIX + "DISCOVERY_PORTS", "api="),
    PREFIX + "DISCOVERY_PORT": (PREFIX + "DISCOVERY_PORTS", "events="),
    PREFIX + "DISCOVERY_REPLAY_PORT": (PREFIX + "DISCOVERY_PORTS", "replay="),
    PREFIX + "ENTRY_TTL_SECONDS": (PREFIX + "MEDIUM_TTL", "*="),
    PREFIX + "GATEWAY_KEYS_FILE": (PREFIX + "GATEWAY_KEYS", ""),
    PREFIX + "GATEWAY_KEY_REQUESTS": (PREFIX + "GATEWAY_KEY_LIMITS", "requests="),
    PREFIX + "GATEWAY_KEY_TOKENS": (PREFIX + "GATEWAY_KEY_LIMITS", "tokens="),
    PREFIX + "RESPONSE_CACHE": (PREFIX + "ANSWERS", "cache="),
    PREFIX + "RESPONSES": (PREFIX + "ANSWERS", "responses="),
    PREFIX + "RESPONSE_CACHE_BYTES": (PREFIX + "ANSWERS_BYTES", "cache="),
    PREFIX + "RESPONSES_BYTES": (PREFIX + "ANSWERS_BYTES", "responses="),
    PREFIX + "RESPONSE_CACHE_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "cache="),
    PREFIX + "RESPONSES_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "responses="),
    PREFIX + "RESPONSES_MONGO_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "mongo="),
}
#: The ones whose value is a path. The new setting takes other values, too, so a path begins with ``/`` or ``./``.
_PATHS = frozenset({PREFIX + "PICKER_CONFIG", PREFIX + "GATEWAY_KEYS_FILE"})
#: The variables of former settings, now constants, with the value and the place of each.
FORMER: Final = {
    PREFIX + "METRICS_MODELS_MAX": "100, MODELS_MAX in waymark.base.metrics",
    PREFIX + "STREAM_BUFFER_FRAMES": "20,000 for 64 MiB of WAYMARK_STREAM_BUFFER_BYTES, and follows that setting",
    PREFIX + "BATCH_EVENTS_MAX": "65,536 for 16 MiB of WAYMARK_FRAME_BYTES_MAX, and follows that setting",
    PREFIX + "EVENT_HASHES_MAX": "262,144 for 16 MiB of WAYMARK_FRAME_BYTES_MAX, and follows that setting",
    PREFIX + "BODIES_MAX_BYTES": "16 times WAYMARK_MAX_BODY_BYTES",
    PREFIX + "INSPECT_SECONDS": "2.5 times WAYMARK_REDIS_TIMEOUT_SECONDS",
    PREFIX + "POOL_HASHES_MAX": "a quarter of WAYMARK_STREAM_BLOCKS_MAX, at least 1,000",
    PREFIX + "TOKENIZER_THREADS": "4, THREADS in waymark.tokenization.encoding",
    PREFIX + "PREFIX_BYTES": "1,024, PREFIX_BYTES in waymark.chat.prefix_key",
    PREFIX + "REPLAY_SECONDS": "600, REPLAY_SECONDS in waymark.ingest.options",
    PREFIX + "RESERVATIONS_MAX": "1,000,000, RESERVATIONS_MAX in waymark.decide.options",
    PREFIX + "DISCOVERY_TOKEN_FILE": "token_file in the query of WAYMARK_DISCOVERY_URL, or the file of the pod",
    PREFIX + "TEXT_BYTES_MAX": "a byte for each token of WAYMARK_MAX_TOKENS",
    PREFIX + "RESPONSE_CACHE_ENTRIES": "1,000 for 256 MiB of WAYMARK_ANSWERS_BYTES, and follows that setting",
    PREFIX + "RESPONSE_CACHE_RESPONSE_BYTES": "1 MiB for 256 MiB of WAYMARK_ANSWERS_BYTES, and follows that setting",
    PREFIX + "RESPONSE_CACHE_STREAM_BYTES": "10 MiB for 256 MiB of WAYMARK_ANSWERS_BYTES, and follows that setting",
    PREFIX + "RESPONSE_CACHE_REDIS_MS": "half of WAYMARK_REDIS_TIMEOUT_SECONDS",
    PREFIX + "GATEWAY_FIRST_BYTE_SECONDS": "twice WAYMARK_GATEWAY_IDLE_SECONDS",
    PREFIX + "RESPONSES_ENTRIES": "10,000 for 256 MiB of WAYMARK_ANSWERS_BYTES, and follows that setting",
    PREFIX + "RESPONSES_ENTRY_BYTES": "1 MiB for 256 MiB of WAYMARK_ANSWERS_BYTES, and follows that setting",
    PREFIX + "RESPONSES_MONGO_MS": "timeoutMS in the query of WAYMARK_RESPONSES_MONGO_URL, or 500",
    PREFIX + "RESPONSES_MONGO_DATABASE": "the path of WAYMARK_RESPONSES_MONGO_URL, or waymark",
    PREFIX + "RESPONSES_MONGO_COLLECTION": "responses, COLLECTION in waymark.gateway.mongo",
    PREFIX + "EPP_STREAMS_MAX": "WAYMARK_CONNECTIONS_MAX",
    PREFIX + "DISCOVERY_CA_FILE": "the CA of the pod, or with WAYMARK_DISCOVERY_URL the file of SSL_CERT_FILE",
    PREFIX + "INSPECT_AT_ONCE": "2, AT_ONCE in waymark.api.inspections",
    PREFIX + "HOT_BLOCK_BYTES": "64 MiB, BYTES_MAX in waymark.store.hot",
    PREFIX + "HOT_BLOCK_MS": "200, MILLISECONDS in waymark.store.hot",
    PREFIX + "DRIFT_MAX": "0.2, DRIFT_MAX in waymark.decide.options",
    PREFIX + "EVENT_MEMORY_BYTES": "64 MiB, BYTES_MAX in waymark.apply.resuming",
    PREFIX + "REPLAY_BYTES_PER_SECOND_MIN": "16,384, BYTES_PER_SECOND_MIN in waymark.ingest.options",
    PREFIX + "EPP_IDLE_SECONDS": "600, IDLE_SECONDS in waymark.epp.server",
    PREFIX + "ANSWER_CACHE_BYTES": "8 MiB, BYTES_MAX in waymark.api.conductor",
    PREFIX + "TOKENS_CACHE_BYTES": "64 MiB, CACHE_BYTES in waymark.tokenization.tokenizers",
    PREFIX + "TEXT_CACHE_BYTES": "1 MiB, CACHE_BYTES_MAX in waymark.api.http.bodies",
    PREFIX + "INSPECT_BLOCKS_MAX": "16,384, BLOCKS_MAX in waymark.api.explanations",
    PREFIX + "REQUESTS_AT_ONCE": "16, AT_ONCE in waymark.api.http.admission",
    PREFIX + "ACTIVITY_CLIENTS": "32, CLIENTS_MAX in waymark.api.activity",
    PREFIX + "GATEWAY_AVOID_SECONDS": "5, AVOID_SECONDS in waymark.gateway.proxy",
    PREFIX + "RESPONSE_CACHE_FALLBACK_ENTRIES": "1,000, FALLBACK_ENTRIES in waymark.gateway.response_cache",
    PREFIX + "RESPONSE_CACHE_FALLBACK_TTL_SECONDS": "300, FALLBACK_TTL_SECONDS in waymark.gateway.response_cache",
    PREFIX + "RESPONSES_MONGO_QUEUE": "1,000,000, MONGO_QUEUE_MAX in waymark.gateway.responses",
    PREFIX + "EPP_INDEX_STREAMS_MAX": "256, INDEX_STREAMS_MAX in waymark.epp.server",
    PREFIX + "PLACEMENT_SECONDS": "180, PLACEMENT_SECONDS in waymark.decide.reported",
    PREFIX + "PLACEMENTS_MAX": "1,000,000, PLACEMENTS_MAX in waymark.decide.reported",
    PREFIX + "DISCOVERY_SECONDS": "300, AGAIN_SECONDS in waymark.discovery.run",
    PREFIX + "APPLY_BLOCKS_MAX": "896, BLOCKS_MAX in waymark.store.pacing",
    PREFIX + "REPLAY_IDLE_SECONDS": "2, REPLAY_IDLE_SECONDS in waymark.ingest.options",
    PREFIX + "FOLD_BATCHES": "64, FOLD_BATCHES in waymark.ingest.options",
    PREFIX + "REPLAYS_MAX": "8, REPLAYS_MAX in waymark.ingest.options",
    PREFIX + "REJECTED_EVENTS_MAX": "1,000, REJECTED_EVENTS in waymark.apply.options",
    PREFIX + "WAITING_BLOCKS": "10,000, WAITING_BLOCKS in waymark.apply.options",
    PREFIX + "SPECULATIVE_TTL_MS": "2,000, SPECULATIVE_MILLISECONDS in waymark.decide.policies.profile",
    PREFIX + "SOURCE_MIN_TOKENS": "1,024, TOKENS_MIN in waymark.decide.sources",
    PREFIX + "SOURCE_PULLS_MAX": "4, PULLS_MAX in waymark.decide.sources",
    PREFIX + "APPROXIMATE_SECONDS": "600,000, APPROXIMATE_MILLISECONDS in waymark.decide.reserve",
}
#: The names of all settings, in their order.
SETTINGS = tuple(Settings.__annotations__)
_FIELDS = {PREFIX + name.upper(): name for name in SETTINGS}
_TOKENS = frozenset({PREFIX + "API_TOKEN", PREFIX + "ENGINE_API_KEY"})

_MIN_WORKERS = PREFIX + "MIN_INITIAL_WORKERS"
#: Dynamo's name for the same setting, used if ours is unset.
_DYNAMO_MIN_WORKERS = "DYN_ROUTER_MIN_INITIAL_WORKERS"

# Kubernetes gives every container the address of each Service: one called `waymark` sets WAYMARK_SERVICE_HOST,
# WAYMARK_PORT=tcp://10.0.0.7:13333 and more, which are not meant as settings.
_SERVICE_LINK = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)


def _rename(variables: dict[str, str]) -> None:
    """Give the values of former variables to the settings that have them now."""
    for name in sorted(variables.keys() & RENAMED.keys()):
        new, label = RENAMED[name]
        value = variables.pop(name)
        if not value:
            continue
        if name in _PATHS and not value.startswith(("/", "./")):
            value = f"./{value}"
        log.warning("%s is %s now; its value is used", name, f"{new}={label}..." if label else new)
        parts = [value] if label is None else [variables.get(new), label + value]
        variables[new] = ",".join(filter(None, parts))


def _is_service_link(name: str, value: str) -> bool:
    if name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value):
        return True
    return _SERVICE_LINK.fullmatch(name) is not None


def _unknown(name: str) -> str:
    import difflib  # only an error needs it

    names = [variable.removeprefix(PREFIX) for variable in _FIELDS]
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), names, n=1)
    return f"{name} is not a setting: " + (
        f"did you mean {PREFIX}{near[0]}?" if near else "take it out of the environment."
    )


# ---- values without pydantic -----------------------------------------------------------------------

_TRUTHS = {"true": True, "false": False}
_PATH_NAMES = ("redis_password_file", "tokenizers_dir")
#: The values that pydantic would accept as they are, of the settings that most processes have: any text but an empty
#: one, a URL with a usual scheme, a word, or an integer up to a bound.
_TEXTS: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("host", "policy", "redis_username", "publishers_file", "api_tokens_file"), str),
    **dict.fromkeys(_PATH_NAMES, Path),
}
_URLS: Final = frozenset({"redis_url", "redis_read_url"})
_WORDS: Final[dict[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("access_log", "native", "protect_reads", "speculative", "ui"), _TRUTHS),
    "log_format": {word: word for word in ("text", "json")},
    "log_level": {word: word for word in ("debug", "info", "warning", "error")},
}
_NUMBERS: Final = {
    "connections_max": 1_000_000,
    "finish_seconds": 86_400,
    "hash_seed": 2**64 - 1,
    "max_tokens": 2**26,
    "port": 65_535,
    "probe_port": 65_535,
    "query_deadline_ms": 60_000,
}


def _plain(name: str, value: Any) -> Any:
    """Return the setting for a plain value. Return None for any other value: pydantic has to validate it."""
    if not isinstance(value, str) or not value.isascii() or not value:
        return None
    if name in _TEXTS:
        return _TEXTS[name](value)
    if name in _URLS:
        return value if value.startswith(("redis://", "rediss://", "unix://")) else None
    if name in _WORDS:
        return _WORDS[name].get(value)
    if name in _NUMBERS and value.isdigit() and value[0] != "0" and len(value) <= 20:
        number = int(value)
        return number if number <= _NUMBERS[name] else None
    return None

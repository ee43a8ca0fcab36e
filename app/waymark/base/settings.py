"""Every setting once: its name, type, bounds and default, and its meaning in one or two sentences.

The variable of a field is ``WAYMARK_`` and the field's name in capitals. Settings are read once, in the command line.
``waymark.runtime`` fills the options of all other rooms from them, and no other room knows them. A wrong or unknown
variable stops the process with a sentence for each, and one of ``FORMER`` is named in a warning: it must not stop an
upgrade. Passwords and the token are in no ``repr`` and in no error. The comment above a group is its title in the docs.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from waymark.base.errors import SettingsError
from waymark.base.shown import hide_password, shown

PREFIX = "WAYMARK_"

log = logging.getLogger(__name__)

_MIB = 2**20
_DAY = 86_400


# ---- types of their own ----------------------------------------------------------------------------


def _checked_url(url: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*://", url):
        raise ValueError("it has no scheme: give a URL such as redis://host:6379/0")
    return url


def _checked_prefix(prefix: str) -> str:
    # A brace would be a hash tag of a Cluster, and the pattern of one Waymark's keys must match no key of another.
    if not re.fullmatch(r"[A-Za-z0-9_.:/-]{0,64}", prefix) or "wm:" in prefix:
        raise ValueError(
            "keys may begin with at most 64 letters, digits and characters of _.:/- without 'wm:' among them, "
            "such as staging:"
        )
    return prefix


def _checked_token(token: SecretStr) -> SecretStr:
    # A file's last newline is the usual way for a blank to get in; such a token would match no header.
    if not re.fullmatch(r"[!-~]+", token.get_secret_value()):
        raise ValueError("a token is one or more printable ASCII characters without blanks")
    return token


def _split(text: Any) -> Any:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else text


def _zero_or_hundred(number: int) -> int:
    if 0 < number < 100:
        raise ValueError("it must be 0, or at least 100")
    return number


def _split_values(text: Any) -> Any:
    """Return ``a=1,b=2`` as a dict; a part without ``=`` or a name given twice is refused."""
    if not isinstance(text, str):
        return text
    values: dict[str, str] = {}
    for part in _split(text):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name or not value or name in values:
            raise ValueError(f"{shown(part)} is not NAME=VALUE with a name given once")
        values[name] = value
    return values


def _split_seconds(text: Any) -> Any:
    return _split_values(text.upper() if isinstance(text, str) else text)


def _split_keys(text: Any) -> Any:
    """Return ``HOST=KEY,HOST=KEY`` as a dict. No error shows a part: it may be a key."""
    if not isinstance(text, str):
        return text
    keys: dict[str, str] = {}
    for number, part in enumerate(_split(text), 1):
        host, _, key = part.partition("=")
        if not host or not re.fullmatch(r"[!-~]+", key) or host in keys:
            raise ValueError(f"entry {number} is not HOST=KEY with a host named once and a key of printable ASCII")
        keys[host] = key
    return keys


def _parsed_sources(text: Any) -> Any:
    """Parse a JSON object of URLs by model; the parser's message becomes the error's."""
    if not isinstance(text, str):
        return text
    try:
        sources = json.loads(text)
    except ValueError:
        sources = None
    if not isinstance(sources, dict):
        raise ValueError("it is no JSON object with a URL for each model")
    return sources


def _checked_source(url: str) -> str:
    if not re.match(r"(file:///|hf://[^/]+/[^/]|https?://[^/]|unix:///|engine:$)", url):
        raise ValueError(
            f"{shown(hide_password(url))} is no source of tokens: give file:///..., hf://org/name, http://host, "
            "unix:///... or engine:"
        )
    query = re.match(r"(?:file|hf):[^?]*\?(.*)", url)
    if query is not None and query[1] not in ("engine=vllm", "engine=sglang"):
        raise ValueError(
            f"{shown(hide_password(url))} has {shown(query[1])} after its '?'; use engine=vllm or engine=sglang"
        )
    return url


def _checked_engine(url: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url):
        raise ValueError(f"{shown(hide_password(url))} is no URL of an engine: give http://host:port")
    return url


def _lower(text: Any) -> Any:
    return text.lower() if isinstance(text, str) else text


def _new_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(4)}"


_RedisUrl = Annotated[str, AfterValidator(_checked_url)]
_KeyPrefix = Annotated[str, AfterValidator(_checked_prefix)]
_EngineUrl = Annotated[str, AfterValidator(_checked_engine)]
_TokenSource = Annotated[str, AfterValidator(_checked_source)]
_MediumName = Annotated[str, Field(pattern=r"^([A-Z0-9_]{1,32}|\*)$")]
_Ttl = Annotated[int, Field(ge=0, le=365 * _DAY)]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Limit = Annotated[int, Field(ge=0, le=10**12)]
_AnswersBytes = Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)]
_AnswersTtl = Annotated[int, Field(ge=1, le=3650 * _DAY)]


# ---- the settings ----------------------------------------------------------------------------------


class Settings(BaseModel):
    """The settings of a process, frozen. ``Settings(port=1)`` reads no environment; ``Settings.from_env()`` does."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    # What has to be set
    redis_url: _RedisUrl = "memory://"
    """The URL of the Redis that holds the index; `memory://` is an emulated Redis inside this process, for a trial."""
    hash_seed: int = Field(1337, ge=0, le=2**64 - 1)
    """The seed of the block hashes; all processes that share a Redis need the same seed."""
    tokenizers: Annotated[dict[str, _TokenSource], BeforeValidator(_parsed_sources)] = Field(default_factory=dict)
    """The source of token ids for each model, such as `{"llama": "file:///models/llama"}`."""
    allowed_endpoints: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """The globs and CIDRs that registered endpoints must match; the default allows every endpoint."""
    api_token: Annotated[SecretStr, AfterValidator(_checked_token)] | None = None
    """The bearer token for requests that write; without this setting every client may write."""

    # Redis
    redis_read_url: _RedisUrl | None = None
    """The URL of the Redis that queries read from, such as a replica; the default is `WAYMARK_REDIS_URL`."""
    answers_redis_url: _RedisUrl | None = None
    """The URL of the Redis for the response cache and stored responses of a gateway; the default is the main one."""
    key_prefix: _KeyPrefix | None = None
    """The beginning of all keys and of the channel, so that several Waymarks can use one Redis, such as `staging:`."""
    shards: int = Field(1, ge=1, le=256)
    """The number of Redis Cluster slots that the blocks of a new group are spread over."""
    redis_username: str | None = Field(None, min_length=1)
    """The user name for Redis, if its URL contains none."""
    redis_password_file: Path | None = None
    """The file with the password for Redis; it is read for every new connection."""
    redis_sentinel_username: str | None = Field(None, min_length=1)
    """The user name for the Sentinels; it is separate from that for Redis."""
    redis_sentinel_password_file: Path | None = None
    """The file with the password for the Sentinels; it is read for every new connection."""
    redis_tls_files: Annotated[dict[Literal["ca", "cert", "key"], Path], BeforeValidator(_split_values)] = Field(
        default_factory=dict
    )
    """PEM files: `ca` signs the certificate of Redis, by default one of the system; `cert` and `key` of a client."""
    redis_tls_verify: Annotated[Literal["full", "ca", "none"], BeforeValidator(_lower)] = "full"
    """What is checked of a certificate of Redis: its CA and host name, its CA only, or nothing."""
    redis_timeout_seconds: float = Field(2.0, ge=0.05, le=60)
    """How long to wait for a connection to Redis, and for a reply."""

    # Ports and access
    host: str = Field("0.0.0.0", min_length=1)
    """The address that the HTTP API listens on; for a trial on `memory://` the default is `127.0.0.1`."""
    port: int = Field(13333, ge=1, le=65535)
    """The TCP port that the HTTP API listens on."""
    probe_port: int | None = Field(None, ge=0, le=65535)
    """The TCP port of `/health`, `/ready` and `/metrics` of a worker, or of a picker (9090 by default); 0: none."""
    epp_port: int = Field(9002, ge=1, le=65535)
    """The TCP port on which an endpoint picker answers Envoy over gRPC."""
    epp_health_port: int = Field(9003, ge=0, le=65535)
    """The TCP port for gRPC health checks of an endpoint picker, without TLS; 0 means only on `WAYMARK_EPP_PORT`."""
    epp_tls: bool = True
    """Whether the gRPC port of an endpoint picker has TLS."""
    epp_tls_files: Annotated[dict[Literal["cert", "key"], Path], BeforeValidator(_split_values)] = Field(
        default_factory=dict
    )
    """The PEM files of an endpoint picker, `cert=FILE,key=FILE`; by default it makes a certificate when it starts."""
    api_tokens_file: str | None = None
    """The JSON file with the SHA-256 of further tokens, and their tenants; with it, reads need a token, too."""
    protect_reads: bool = False
    """Whether requests that only read need the token, too."""
    ui: bool = True
    """Whether `GET /ui` shows the page."""

    # Models and tokenizers
    tokenizers_dir: Path | None = None
    """A directory with tokenizers: each model is a directory there, with a `tokenizer.json`."""
    model_aliases: Annotated[dict[str, str], BeforeValidator(_split_values)] = Field(default_factory=dict)
    """Further names of models in a gateway: `gpt-4o=llama,fast=qwen`. A client's name stays when the model changes."""

    # Engines and their events
    publishers_file: str | None = None
    """A JSON or YAML file of publishers that workers register when they start, and when Redis has lost its data."""
    discovery: Annotated[Literal["off", "kubernetes"], BeforeValidator(_lower)] = "off"
    """Whether an ingest worker registers the pods that it finds in Kubernetes."""
    discovery_namespace: str | None = None
    """The namespace of the pods to register; the default is every namespace that the ServiceAccount may list."""
    discovery_selector: str = "llm-d.ai/inference-serving=true"
    """The label selector of the pods of engines."""
    discovery_ports: Annotated[dict[Literal["api", "events", "replay"], _Port], BeforeValidator(_split_values)] = Field(
        default_factory=dict
    )
    """The ports of rank 0 that a pod and its engine do not name: `api=8000,events=5557,replay=5657`; 0: no replays."""
    discovery_url: str | None = None
    """The API server of Kubernetes, with its CA in `SSL_CERT_FILE`: `https://host:6443?token_file=/run/token`."""
    deletion_cost: Annotated[Literal["off", "on"], BeforeValidator(_lower)] = "off"
    """Whether discovery annotates pods with the worth of their caches, so that Kubernetes stops the cheapest first."""
    engine_api_key: Annotated[SecretStr, AfterValidator(_checked_token)] | None = None
    """The bearer token for engines, only on hosts of `WAYMARK_ENGINE_KEY_HOSTS` and `WAYMARK_GATEWAY_ENGINES`."""
    engine_key_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """The globs and CIDRs of the hosts that get the key of the engines; the default is `WAYMARK_ALLOWED_ENDPOINTS`."""
    engine_keys: Annotated[dict[str, SecretStr], BeforeValidator(_split_keys)] = Field(default_factory=dict)
    """Keys of single engines or providers, by the host that gets them: `api.example.com=KEY,10.0.0.0/8=OTHER`."""
    engine_ca_file: str | None = None
    """The PEM file with the CA of the engines' certificates, which is read again; the default is the system's CAs."""
    worker_id: str = Field(default_factory=_new_worker_id, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    """The name of this ingest worker; no two running workers may have the same name."""
    lease_seconds: float = Field(8.0, ge=1, le=300)
    """After how long without a heartbeat an ingest worker loses the lease of a stream."""
    publisher_timeout: float = Field(60.0, ge=0, le=7 * _DAY)
    """After how many seconds without a connection queries no longer count a publisher's blocks; 0 means never."""
    on_gap: Annotated[Literal["keep", "reset"], BeforeValidator(_lower)] = "keep"
    """What happens to the blocks of a stream when batches are lost: `keep` leaves them, `reset` ends the life."""
    probe_seconds: float = Field(30.0, ge=1, le=3600)
    """After how many seconds without a frame, or after an unanswered replay, a worker asks for a replay."""
    hybrid: Annotated[Literal["boundary", "off"], BeforeValidator(_lower)] = "boundary"
    """What a match of a hybrid model needs: blocks of full attention (`off`), or also its windows (`boundary`)."""
    medium_ttl: Annotated[dict[_MediumName, _Ttl], BeforeValidator(_split_seconds)] = Field(default_factory=dict)
    """After how many seconds blocks expire if they were not stored again, by medium: `DISK=3600,*=600`; 0: never."""
    max_entries: Annotated[int, AfterValidator(_zero_or_hundred)] = Field(0, ge=0, le=10**9)
    """The most blocks of one tenant and model: 0 for no limit, else 100 or more. The oldest are removed first."""

    # Decisions
    policy: str = Field("least-work", min_length=1)
    """The policy that ranks targets if a request names none, or the path of an `EndpointPickerConfig` file in YAML."""
    profile: Annotated[Literal["auto", "single", "disagg"], BeforeValidator(_lower)] = "auto"
    """Whether one engine (`single`) or two (`disagg`) prefill and decode a request; with `auto` the policy decides."""
    min_initial_workers: int = Field(0, ge=0, le=100_000)
    """How many engines must be registered before a replica is ready and decides; 0 means none."""
    target_requests_max: int = Field(0, ge=0, le=1_000_000)
    """How many reservations a target may have at once; 0 means no limit."""
    prefill_tokens_per_second: float = Field(0, ge=0, le=1e9)
    """The assumed prefill speed of a target without events. With 0, the prefill ends when the request ends."""
    gauges_seconds: float = Field(1.0, ge=0, le=60)
    """The seconds between two reads of an engine's metrics. A worker reads at most 100 engines a second. 0: never."""
    loads_ms: int = Field(100, ge=0, le=10_000)
    """How long, in milliseconds, a replica reuses the loads that it read from Redis. 0 reads them for each decision."""
    speculative: bool = False
    """Whether a target counts as having the blocks of a prompt as soon as it is picked for the prompt."""
    shadow: str | None = None
    """Policies that order the targets of each decision, but decide nothing: presets and picker files, with commas."""
    decisions_kept: float = Field(0.01, ge=0, le=1)
    """The share of decisions that is kept in Redis for a day, without tokens and texts; 0 keeps none."""
    epp_tenant: str = Field("default", min_length=1)
    """The tenant whose targets an endpoint picker picks."""

    # Gateway
    gateway_engines: Annotated[tuple[_EngineUrl, ...], BeforeValidator(_split)] = ()
    """The URLs of engines that a gateway registers when it starts."""
    gateway_keys: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Keys of clients, `name:sha256` or `name:sha256:tenant`, and `/file` with one in each line; none: all may call."""
    tenant_header: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """The header that names the tenant of a request to a gateway without keys."""
    gateway_key_limits: Annotated[dict[Literal["requests", "tokens"], _Limit], BeforeValidator(_split_values)] = Field(
        default_factory=dict
    )
    """What one key may have under way in a gateway, such as `requests=8,tokens=100000` of prompts; 0: no limit."""
    gateway_origins: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """The origins of pages whose scripts may use a gateway (CORS), `https://chat.example.com`; `*` is every page."""
    gateway_idle_seconds: float = Field(300.0, ge=0.1, le=_DAY)
    """How long an engine may pause within an answer at a gateway; twice as long before the answer begins."""
    cache_control_injection: bool = False
    """Whether a gateway marks the system prompt of `/v1/messages` with `cache_control`, if no block of it has one."""
    response_cache: Annotated[Literal["off", "memory", "redis"], BeforeValidator(_lower)] = "off"
    """Where a gateway caches answers to equal requests without a `temperature` or with 0; gateways share `redis`."""
    responses: Annotated[Literal["off", "memory", "redis"], BeforeValidator(_lower)] | None = None
    """Where answers of `/v1/responses` are stored; the default is `redis`, but `memory` on the emulated Redis."""
    responses_mongo_url: SecretStr | None = None
    """The MongoDB that gets a copy of every stored answer: `mongodb://host/waymark?timeoutMS=500`."""
    answers_bytes: Annotated[dict[Literal["cache", "responses"], _AnswersBytes], BeforeValidator(_split_values)] = (
        Field(default_factory=dict)
    )
    """The bytes of answers in the response cache and of `/v1/responses`, `cache=268435456,responses=268435456`."""
    answers_ttl: Annotated[
        dict[Literal["cache", "responses", "mongo"], _AnswersTtl], BeforeValidator(_split_values)
    ] = Field(default_factory=dict)
    """How many seconds answers are kept, by place: `cache=300,responses=86400,mongo=2592000`."""

    # Limits
    max_body_bytes: int = Field(16 * _MIB, ge=1024, le=1024 * _MIB)
    """The largest request body that is accepted, in bytes. Sixteen of this size may be in memory at once."""
    max_tokens: int = Field(2**21, ge=1, le=2**26)
    """The most tokens or hashes that one request may contain, and the most bytes of a text that is tokenized."""
    connections_max: int = Field(4096, ge=1, le=1_000_000)
    """How many HTTP connections, or streams of a picker, are open at once; above it, the one idle longest is closed."""
    request_seconds: float = Field(30.0, ge=0.1, le=3600)
    """How long a client may take to send a request, and to read the answer, before its connection is closed."""
    query_deadline_ms: int = Field(1000, ge=1, le=60_000)
    """How long a query may take before it answers with what it has found."""
    frame_bytes_max: int = Field(16 * _MIB, ge=65_536, le=256 * _MIB)
    """The largest frame, in bytes. With 16 MiB a batch has at most 65,536 events, and an event 262,144 hashes."""
    stream_blocks_max: int = Field(4_000_000, ge=1, le=100_000_000)
    """The most blocks of one stream that a worker indexes; more are ignored. A pool has a quarter as many hashes."""
    stream_buffer_bytes: int = Field(64 * _MIB, ge=1024, le=64 * 1024 * _MIB)
    """The most bytes of waiting frames of a stream; 64 MiB allow 20,000 frames. A worker keeps four times as many."""
    sweep_blocks_per_second: int = Field(30_000, ge=1, le=10_000_000)
    """How many blocks of dead holders an ingest worker sweeps per second, and how many it reads for /placement."""

    # The rest
    conductor_shape: Literal["auto", "published", "instances"] = "auto"
    """The form of `/query` answers: `published` (old), `instances` (new), or `auto`: JSON is old, msgpack has both."""
    native: bool = True
    """Whether the native module is used if it was built; `false` selects the pure-Python path."""
    epp_drain_seconds: float = Field(5.0, ge=0, le=3600)
    """How long an endpoint picker accepts requests after SIGTERM; its health check already reports that it stops."""
    finish_seconds: int = Field(60, ge=0, le=_DAY)
    """How long the requests of a gateway or picker may take to end after it stopped accepting new ones."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = "info"
    """The lowest level of log lines that are written."""
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = "text"
    """The format of log lines: `text` for people, `json` for programs."""
    access_log: bool = False
    """Whether every HTTP request is logged."""

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if self.responses_mongo_url is not None and self.responses_place != "redis":
            raise ValueError(
                f"WAYMARK_RESPONSES_MONGO_URL is set but WAYMARK_RESPONSES is {self.responses_place}: only what is in "
                "Redis is copied to MongoDB, so set the latter to redis, or leave the former out"
            )
        if self.protect_reads and self.api_token is None and self.api_tokens_file is None:
            raise ValueError(
                "WAYMARK_PROTECT_READS is true but there is no WAYMARK_API_TOKEN: set one, or leave the former out"
            )
        if self.engine_api_key is not None and not (
            self.engine_key_hosts or self.allowed_endpoints or self.gateway_engines
        ):
            raise ValueError(
                "WAYMARK_ENGINE_API_KEY is set but no host that it may go to: name the hosts of the engines "
                "in WAYMARK_ENGINE_KEY_HOSTS, such as 10.0.0.0/8 or *.engines.svc; * is every host that is registered"
            )
        if self.redis_read_url is not None and self.redis_read_url.startswith("memory://"):
            raise ValueError("WAYMARK_REDIS_READ_URL is memory://, which would stay empty: leave it out")
        if self.answers_redis_url is not None and self.answers_redis_url.startswith("memory://"):
            raise ValueError(
                "WAYMARK_ANSWERS_REDIS_URL is memory://, which no other gateway can see: leave it out, and set "
                "WAYMARK_RESPONSE_CACHE and WAYMARK_RESPONSES to memory"
            )
        if len(self.epp_tls_files) == 1:
            raise ValueError("WAYMARK_EPP_TLS_FILES needs cert and key: give cert=FILE,key=FILE, or leave it out")
        if "key" in self.redis_tls_files and "cert" not in self.redis_tls_files:
            raise ValueError("WAYMARK_REDIS_TLS_FILES has a key without cert: give both")
        return self

    @property
    def responses_place(self) -> Literal["off", "memory", "redis"]:
        """Where answers of ``/v1/responses`` are stored: in Redis, if there is one that other gateways reach."""
        url = self.answers_redis_url or self.redis_url
        return self.responses or ("memory" if url == "memory://" else "redis")

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
        values = {
            _FIELDS[name]: value for name, value in variables.items() if name in _FIELDS and (value or name in _TOKENS)
        }
        try:
            settings = cls.model_validate(values)
        except ValidationError as exc:
            complaints += [_wrong(error, variables) for error in exc.errors(include_url=False, include_input=False)]
        if complaints:
            raise SettingsError("\n".join(complaints))
        return settings

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hide_password(value) if name in _REDIS_URLS and value else value


#: Where commands find a running Waymark; no setting of a process.
CLIENT_URL = PREFIX + "URL"

_REDIS_URLS = frozenset({"redis_url", "redis_read_url", "answers_redis_url"})
#: The variables of renamed settings, and of those within another one now, with the setting and the label of the value.
RENAMED: Final = {
    PREFIX + "GATEWAY_DRAIN_SECONDS": (PREFIX + "FINISH_SECONDS", None),
    PREFIX + "EPP_FINISH_SECONDS": (PREFIX + "FINISH_SECONDS", None),
    PREFIX + "INGEST_PORT": (PREFIX + "PROBE_PORT", None),
    PREFIX + "EPP_METRICS_PORT": (PREFIX + "PROBE_PORT", None),
    PREFIX + "PICKER_CONFIG": (PREFIX + "POLICY", None),
    PREFIX + "REDIS_TLS_CA_FILE": (PREFIX + "REDIS_TLS_FILES", "ca="),
    PREFIX + "REDIS_TLS_CERT_FILE": (PREFIX + "REDIS_TLS_FILES", "cert="),
    PREFIX + "REDIS_TLS_KEY_FILE": (PREFIX + "REDIS_TLS_FILES", "key="),
    PREFIX + "EPP_CERT_FILE": (PREFIX + "EPP_TLS_FILES", "cert="),
    PREFIX + "EPP_KEY_FILE": (PREFIX + "EPP_TLS_FILES", "key="),
    PREFIX + "DISCOVERY_API_PORT": (PREFIX + "DISCOVERY_PORTS", "api="),
    PREFIX + "DISCOVERY_PORT": (PREFIX + "DISCOVERY_PORTS", "events="),
    PREFIX + "DISCOVERY_REPLAY_PORT": (PREFIX + "DISCOVERY_PORTS", "replay="),
    PREFIX + "ENTRY_TTL_SECONDS": (PREFIX + "MEDIUM_TTL", "*="),
    PREFIX + "GATEWAY_KEYS_FILE": (PREFIX + "GATEWAY_KEYS", ""),
    PREFIX + "GATEWAY_KEY_REQUESTS": (PREFIX + "GATEWAY_KEY_LIMITS", "requests="),
    PREFIX + "GATEWAY_KEY_TOKENS": (PREFIX + "GATEWAY_KEY_LIMITS", "tokens="),
    PREFIX + "RESPONSE_CACHE_BYTES": (PREFIX + "ANSWERS_BYTES", "cache="),
    PREFIX + "RESPONSES_BYTES": (PREFIX + "ANSWERS_BYTES", "responses="),
    PREFIX + "RESPONSE_CACHE_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "cache="),
    PREFIX + "RESPONSES_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "responses="),
    PREFIX + "RESPONSES_MONGO_TTL_SECONDS": (PREFIX + "ANSWERS_TTL", "mongo="),
}
#: Of these, those whose value is a path, among other things by the new name, where a path begins with ``/`` or ``./``.
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
_FIELDS = {PREFIX + name.upper(): name for name in Settings.model_fields}
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
    names = [variable.removeprefix(PREFIX) for variable in _FIELDS]
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), names, n=1)
    return f"{name} is not a setting: " + (
        f"did you mean {PREFIX}{near[0]}?" if near else "take it out of the environment."
    )


def _wrong(error: Any, variables: Mapping[str, str]) -> str:
    """Return one sentence for one complaint of pydantic's; ``variables`` is our part of the environment."""
    reason = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return reason
    variable = PREFIX + str(error["loc"][0]).upper()
    field = Settings.model_fields[_FIELDS[variable]]
    value = variables[variable]
    text = "not usable" if _is_secret(field) else shown(hide_password(value))
    return (
        f"{variable} is {text}: {reason[:1].lower()}{reason[1:]}."
        f" Expected: {type_text(field)}; left out, it is {default_text(field)}."
    )


# ---- fields, described for people ------------------------------------------------------------------


def _leaves(annotation: Any) -> list[Any]:
    """Return the types in ``annotation``, with unions and ``Annotated`` taken apart."""
    if get_origin(annotation) is Annotated:
        return _leaves(get_args(annotation)[0])
    if get_origin(annotation) in (Literal, tuple, dict) or not get_args(annotation):
        return [annotation]
    return [leaf for part in get_args(annotation) for leaf in _leaves(part) if leaf is not type(None)]


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in _leaves(field.annotation)


def type_text(field: FieldInfo) -> str:
    """Return the allowed values of the field's variable, with its bounds, for people."""
    (kind,) = _leaves(field.annotation)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list, separated by commas"
    if get_origin(kind) is dict:
        return "JSON object" if field.annotation == dict[str, _TokenSource] else "`NAME=VALUE`, separated by commas"
    if kind is bool:
        return "`true` or `false`"
    if kind in (int, float):
        least = next(mark.ge for mark in field.metadata if isinstance(mark, Ge))
        most = next(mark.le for mark in field.metadata if isinstance(mark, Le))
        return f"{'integer' if kind is int else 'number'}, {least} to {most}"
    return "secret" if kind is SecretStr else "text"


def default_text(field: FieldInfo) -> str:
    """Return the value of the setting when its variable is unset, for people."""
    if field.default_factory is _new_worker_id:
        return "host name, process id, random"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)

"""The parts that processes of several kinds have, made from the settings.

No lower room knows the settings: each has options of its own, and this module fills them. The parts that only
a gateway, an endpoint picker or an ingest worker has are made in the module of that process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from waymark.api.options import AccessOptions, ApiOptions
from waymark.apply.options import ApplyOptions
from waymark.base.asker import Asker, EngineKey
from waymark.base.endpoints import AllowedEndpoints, is_loopback
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.served import PromptOptions
from waymark.store import keys, pacing
from waymark.store.directory import EngineAddresses
from waymark.store.hot import BYTES_MAX, MILLISECONDS, HotRows
from waymark.store.store import Credentials, Store

if TYPE_CHECKING:
    from waymark.decide.options import SelectionOptions
    from waymark.tokenization.tokenizers import Tokenizers

log = logging.getLogger(__name__)


# ---- Redis -----------------------------------------------------------------------------------------


def credentials(settings: Settings) -> Credentials:
    return Credentials(
        settings.redis_username,
        settings.redis_password_file,
        settings.redis_sentinel.get("username"),
        _file(settings.redis_sentinel.get("password_file")),
        _file(settings.redis_tls.get("ca")),
        _file(settings.redis_tls.get("cert")),
        _file(settings.redis_tls.get("key")),
        settings.redis_tls.get("verify", "full"),
    )


def _file(path: str | None) -> Path | None:
    return None if path is None else Path(path)


def open_store(settings: Settings, metrics: Metrics | None = None, *, keeps_answers: bool = False) -> Store:
    """Return the store of a process, and let the names of all its keys begin as the settings say.

    It connects on the first command. ``metrics`` None: the process is a command, which reads the primary and remembers
    no rows. ``keeps_answers``: the process is a gateway.
    """
    keys.use_prefix(settings.key_prefix or "")
    return Store.open(
        settings.redis_url,
        None if metrics is None else settings.redis_read_url,
        answers_url=settings.answers_redis_url if keeps_answers else None,
        shards=settings.shards,
        timeout_seconds=settings.redis_timeout_seconds,
        credentials=credentials(settings),
        hot=None if metrics is None else HotRows(MILLISECONDS / 1000, BYTES_MAX, metrics),
        metrics=metrics,
        are_shards_set=settings.is_given("shards"),
        hash_seed=settings.hash_seed,
        apply_blocks_max=pacing.BLOCKS_MAX,
    )


# ---- engines ---------------------------------------------------------------------------------------


def engine_key(settings: Settings) -> EngineKey:
    """Return the key of the engines, and the hosts that it may go to."""
    key = None if settings.engine_api_key is None else settings.engine_api_key.get_secret_value()
    keys_of_hosts = {host: secret.get_secret_value() for host, secret in settings.engine_keys.items()}
    named = settings.engine_key_hosts or settings.allowed_endpoints
    return EngineKey(key, AllowedEndpoints(named), settings.gateway_engines, keys_of_hosts)


def asker(settings: Settings, *, is_bounded: bool = True) -> Asker:
    """Return the client of engines. ``is_bounded=False``: for URLs from an operator, which need no permission."""
    return Asker(
        AllowedEndpoints(settings.allowed_endpoints if is_bounded else ()),
        key=engine_key(settings),
        ca_file=settings.engine_ca_file,
    )


def tokenizers(settings: Settings, metrics: Metrics, store: Store | None = None) -> Tokenizers:
    """Return the sources of tokens. ``store`` finds the engines of a model; None: no engine is asked."""
    # A replica answers its first queries before it has imported them.
    from waymark.tokenization.tokenizers import Engines, Tokenizers

    addresses = None if store is None else EngineAddresses(store.directory, store.polled_claims)
    return Tokenizers(
        settings.tokenizers,
        settings.tokenizers_dir,
        metrics,
        text_bytes_max=max(1024, settings.max_tokens),  # a token has at least one byte
        new_asker=lambda: asker(settings, is_bounded=False),
        # Their addresses are from registrations.
        engines=None if addresses is None else Engines(addresses, asker(settings), {}),
    )


# ---- bounds ----------------------------------------------------------------------------------------


def in_proportion(count: int, settings: Settings, name: str, *, least: int = 1) -> int:
    """Return a bound that is ``count`` at the default of the setting ``name``, and grows and shrinks with it."""
    return max(least, count * int(getattr(settings, name)) // int(getattr(Settings, name)))


def bodies_bytes_max(settings: Settings) -> int:
    """Return how many bytes of bodies are held at once: a few large ones, or many usual ones."""
    return 16 * settings.max_body_bytes


# ---- options ---------------------------------------------------------------------------------------


def prompt_options(settings: Settings) -> PromptOptions:
    return PromptOptions(
        hash_seed=settings.hash_seed, tokens_max=settings.max_tokens, deadline_seconds=settings.query_deadline_ms / 1000
    )


def selection_options(settings: Settings) -> SelectionOptions:
    """Read the options of decisions, and the files that the settings name.

    Raise ``SettingsError`` if a policy is unknown, or a file cannot be read.
    """
    # A replica answers its first queries before it has imported the policies.
    from waymark.decide.options import SelectionOptions, read_policy, read_shadows

    options = SelectionOptions(
        policy=read_policy(settings.policy, "WAYMARK_POLICY"),
        profile=None if settings.profile == "auto" else settings.profile,
        deadline_seconds=settings.query_deadline_ms / 1000,
        loads_seconds=settings.loads_ms / 1000,
        target_requests_max=settings.target_requests_max,
        is_speculative=settings.speculative,
        prefill_tokens_per_second=settings.prefill_tokens_per_second,
        shadows=read_shadows(settings.shadow or ""),
        decisions_kept=settings.decisions_kept,
    )
    if options.needs_gauges and settings.gauges_seconds == 0:
        log.warning("the policy needs gauges of engines, but WAYMARK_GAUGES_SECONDS is 0: none are read")
    return options


def apply_options(settings: Settings) -> ApplyOptions:
    return ApplyOptions(
        hash_seed=settings.hash_seed,
        stream_blocks_max=settings.stream_blocks_max,
        pool_hashes_max=max(1000, settings.stream_blocks_max // 4),
        max_entries=settings.max_entries,
        entry_ttl_seconds=settings.medium_ttl.get("*", 0),
        medium_ttl={medium: seconds for medium, seconds in settings.medium_ttl.items() if medium != "*"},
        frame_bytes_max=settings.frame_bytes_max,
        batch_events_max=in_proportion(65_536, settings, "frame_bytes_max", least=1024),
        event_hashes_max=in_proportion(262_144, settings, "frame_bytes_max", least=1024),
        hybrid=settings.hybrid,
    )


def api_options(settings: Settings, *, is_gateway: bool = False) -> ApiOptions:
    return ApiOptions(
        access=AccessOptions(
            token=None if settings.api_token is None else settings.api_token.get_secret_value(),
            tokens_file=_file(settings.api_tokens_file),
            protects_reads=settings.protect_reads,
            is_closed=is_gateway and bool(settings.gateway_keys),
            allowed_endpoints=settings.allowed_endpoints,
            warning=openness(settings, is_gateway=is_gateway),
        ),
        prompts=prompt_options(settings),
        apply=apply_options(settings),
        body_bytes_max=settings.max_body_bytes,
        shape=settings.conductor_shape,
        inspect_seconds=2.5 * settings.redis_timeout_seconds,  # a look at the whole index reads often, but in bulk
        min_initial_workers=settings.min_initial_workers,
        injects_cache_control=settings.cache_control_injection,
        has_page=settings.ui,
        has_access_log=settings.access_log,
    )


def openness(settings: Settings, *, is_gateway: bool = False) -> str | None:
    """Return the warning of a process whose port is open to strangers, or None if it is not.

    Loopback and a trial on the embedded Redis are closed to strangers, except for a gateway, whose port is for clients.
    """
    if settings.api_token is not None or settings.api_tokens_file is not None:
        return None
    is_local = is_loopback(settings.host)
    if settings.gateway_keys if is_gateway else is_local or settings.redis_url == "memory://":
        return None
    names = "WAYMARK_API_TOKEN and WAYMARK_GATEWAY_KEYS" if is_gateway else "WAYMARK_API_TOKEN"
    reach = (
        "as it listens on loopback, only this machine reaches it"
        if is_local
        else "or let only hosts that you trust reach it"
    )
    return f"this port is open: every client may read and change everything; set {names}; {reach}"

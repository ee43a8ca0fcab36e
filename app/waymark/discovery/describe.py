"""Asks an engine for the facts of a registration: its model, its block size, and the event sockets of its ranks.

vLLM answers ``/kv_event_sources`` (0.32 and later), ``/v1/models``, ``/version`` and ``/metrics``; SGLang
``/server_info`` and ``/v1/models``; any other server with OpenAI's API ``/v1/models`` alone. An engine is not trusted:
every answer has a bound, and ``HostNames`` says which of its sockets are its own. For each fact that an engine does not
report, ``silent`` names the field to set instead.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from waymark.base.asker import Asker, HttpReply, in_pieces
from waymark.base.bounded_json import bounded_loads
from waymark.base.endpoints import AllowedEndpoints, addresses_of, is_loopback
from waymark.base.errors import InvalidValue, RemoteUnavailable, Unanswered
from waymark.base.record import record
from waymark.base.samples import SampleParser
from waymark.base.shown import shown
from waymark.domain.chunks import CHUNK_BLOCKS_MAX
from waymark.domain.engines import EngineKind, naming_sockets_at
from waymark.domain.names import ENDPOINT, is_endpoint
from waymark.domain.pool_keys import key_forms, sglang_forms
from waymark.domain.targets import ADAPTERS_MAX, is_engine_url

#: How long an engine may take for all of its answers.
SECONDS = 5.0
ANSWER_BYTES_MAX = 4 * 2**20
#: An engine that claims to have more ranks is not believed: each costs an ingest worker a socket and a task.
RANKS_MAX = 256
#: The most characters of a name that an engine gives itself or a model.
NAME_MAX = 256

_SOURCES, _SERVER, _MODELS, _METRICS = "/kv_event_sources", "/server_info", "/v1/models", "/metrics"
_VERSION = "/version"
_PATHS = (_SOURCES, _SERVER, _MODELS, _METRICS, _VERSION)
_NOT_ASKED = HttpReply(404, b"")
#: The port on which Mooncake's master answers HTTP by default.
_MASTER_PORT = 9003
_CACHE_CONFIG = "vllm:cache_config_info"
_VLLM_METRIC = re.compile(rb"^vllm:", re.MULTILINE)


@record(frozen=True, slots=True)
class RankSockets:
    """The sockets of one rank: its events, its replay, and its snapshots."""

    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    snapshot_endpoint: str | None = None


_FIELDS = ("endpoint", "replay_endpoint", "snapshot_endpoint")
_Stated = tuple[int, str, str | None, str | None]
"""A rank, and its sockets in the order of ``_FIELDS``, as an engine states them."""


@record(frozen=True, slots=True)
class Description:
    """The fields of its registration that an engine reports."""

    url: str
    kind: EngineKind | None
    model_name: str | None
    aliases: tuple[str, ...]
    """Further names that it serves the model under."""
    adapters: tuple[str, ...]
    block_size: int | None
    ranks: tuple[RankSockets, ...]
    release: str | None = None
    """The release of the engine."""
    query_endpoint: str | None = None
    """The HTTP address of the master of its Mooncake store."""
    query_keys: tuple[str, ...] = ()
    """The forms of its keys there, unless they follow from the name of the model."""
    names_sockets: bool = True
    """Whether the engine answers the path that names its sockets."""
    is_foreign: bool = False
    """Whether it is another server with OpenAI's API: it has no path by which engines name sockets."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """The reason why the engine does not report a field, by field."""


class Describer:
    """Asks engines, with the key and within the places that the settings allow."""

    def __init__(self, asker: Asker, allowed: AllowedEndpoints, *, seconds: float = SECONDS) -> None:
        self._asker = asker
        self.allowed = allowed
        self._names = HostNames(allowed)
        self._seconds = seconds

    async def describe(self, url: str, kind: EngineKind | None = None) -> Description:
        """Describe the engine at ``url``, as an engine of ``kind`` if the kind is known.

        Raise RemoteUnavailable if the engine does not answer, and InvalidValue on ``url`` if another server does.
        """
        base = base_of(url)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._read(base, kind, await self._replies(base, kind))
        except TimeoutError:
            raise _unavailable(base, f"it has not answered within {self._seconds:g} s") from None

    async def close(self) -> None:
        await self._asker.close()

    async def _replies(self, base: str, kind: EngineKind | None) -> Mapping[str, HttpReply | Unanswered]:
        """Return the engine's answers by path, asked one after the other over one connection.

        A path is asked only if it can tell more than the earlier answers.
        """
        replies: dict[str, HttpReply | Unanswered] = dict.fromkeys(_PATHS, _NOT_ASKED)

        async def ask(path: str) -> Any:
            replies[path] = await self._ask(base + path)
            return _json(replies[path])

        sources, server = await ask(_SOURCES), None
        if not isinstance(sources, dict | list):
            server = await ask(_SERVER)
        await ask(_MODELS)
        kind = kind or _kind(server, sources)
        if kind is None or kind.traits.sockets_path != _SERVER:
            await ask(_METRICS)
        if _release(server) is None:
            await ask(_VERSION)
        return replies

    async def _ask(self, url: str) -> HttpReply | Unanswered:
        try:
            return await self._asker.ask(url, seconds=self._seconds, bytes_max=ANSWER_BYTES_MAX)
        except Unanswered as error:
            return error

    async def _read(
        self, base: str, kind: EngineKind | None, replies: Mapping[str, HttpReply | Unanswered]
    ) -> Description:
        models = _json(replies[_MODELS])
        cards = _cards(models)
        server, sources = _json(replies[_SERVER]), _json(replies[_SOURCES])
        if cards is None:
            refusal = _no_engine(base, replies[_MODELS])
            # An engine that does not answer now keeps the adapters and the further names that it has reported before.
            is_silent = isinstance(refusal, RemoteUnavailable)
            if is_silent or not (isinstance(server, dict) or isinstance(sources, dict | list)):
                raise refusal
        is_foreign = kind is None
        kind = kind or _kind(server, sources) or _kind_by_metrics(replies[_METRICS])
        is_foreign = is_foreign and kind is None and all(map(_is_absent, (replies[_SOURCES], replies[_SERVER])))
        silent: dict[str, str] = {}
        if kind is not None and kind.traits.sockets_path == _SERVER:
            stated, ranks_text = server if isinstance(server, dict) else {}, _SERVER
            ranks, block_size = _ranks_of_sglang(stated, silent, replies[_SERVER])
            names = [stated["served_model_name"]] if isinstance(stated.get("served_model_name"), str) else []
        else:
            ranks_text = _SOURCES
            ranks = _ranks_of_vllm(sources, silent, replies[_SOURCES])
            block_size = await _block_size(replies[_METRICS], silent)
            names = []
        names += [name for name, parent in cards or () if parent is None and name not in names]
        if not names:
            silent["modelname"] = f"its {_MODELS} names no model{_because(replies[_MODELS])}"
        if kind is None:
            silent["type"] = f"it answers neither {_SOURCES} nor {_SERVER}, and its {_METRICS} are not those of vLLM"
        sockets: list[RankSockets] = []
        try:
            for rank, endpoint, *endpoints in ranks:
                own = await self._names.own(base, endpoint, "endpoint", rank)
                replay, snapshot = [
                    None if text is None else await self._names.own(base, text, name, rank)
                    for name, text in zip(_FIELDS[1:], endpoints, strict=True)
                ]
                sockets.append(RankSockets(rank, own, replay, snapshot))
        except UnusableSocket as error:
            sockets, silent["endpoint"] = [], error.sentence
        if not sockets and "endpoint" not in silent:
            silent["endpoint"] = f"its {ranks_text} names no socket; start it with --kv-events-config"
        master, tag = _master_of(server)
        return Description(
            url=base,
            kind=kind,
            model_name=names[0] if names else None,
            aliases=tuple(names[1:ADAPTERS_MAX]),
            adapters=tuple(name for name, parent in cards or () if parent is not None)[:ADAPTERS_MAX],
            block_size=block_size,
            ranks=tuple(sockets),
            query_endpoint=master,
            query_keys=() if tag is None or not names else sglang_forms(names[0], 0, tag),
            release=_release(server) or _release(_json(replies[_VERSION])),
            names_sockets=_names_sockets(kind, server, sources),
            is_foreign=is_foreign,
            silent=silent,
        )


# ---- vLLM ------------------------------------------------------------------------------------------


def _ranks_of_vllm(sources: Any, silent: dict[str, str], reply: HttpReply | Unanswered) -> list[_Stated]:
    """Return the ranks and their sockets in ``{"0": {...}}``, a list, or ``{"sources": [...]}``."""
    if isinstance(sources, dict) and isinstance(sources.get("sources"), list | dict):
        sources = sources["sources"]
    if isinstance(sources, list):
        sources = {_rank_in(source, i): source for i, source in enumerate(sources)}
    if not isinstance(sources, dict):
        silent["endpoint"] = f"it has no {_SOURCES}, which vLLM has from 0.32 on{_because(reply)}"
        return []
    ranks = []
    for rank, source in sources.items():
        if not isinstance(source, dict) or not _is_number(str(rank)):
            continue
        endpoint = source.get("endpoint")
        replay, snapshot = (
            value if isinstance(value, str) and value else None for value in (source.get(name) for name in _FIELDS[1:])
        )
        if isinstance(endpoint, str) and source.get("publisher", "zmq") == "zmq":
            ranks.append((int(str(rank)), endpoint, replay, snapshot))
    if len(ranks) > RANKS_MAX:
        silent["endpoint"] = f"it names the sockets of {len(ranks)} ranks, and at most {RANKS_MAX} are read"
        return []
    # By the rank alone: ranks may be equal, and None cannot be compared with an endpoint.
    return sorted(ranks, key=lambda value: value[0])


def _rank_in(source: Any, position: int) -> Any:
    if isinstance(source, dict):
        for name in ("data_parallel_rank", "dp_rank", "rank"):
            if isinstance(source.get(name), int):
                return source[name]
    return position


async def _block_size(reply: HttpReply | Unanswered, silent: dict[str, str]) -> int | None:
    """Return the tokens per block that the engine chose at its start: of full attention if groups of layers differ.

    An engine with ``prefix_match_unit`` finds prefixes that end inside a block, so that unit is the block here.
    """
    sizes: set[int] = set()
    parser = SampleParser([_CACHE_CONFIG])
    body = reply.body if isinstance(reply, HttpReply) and reply.status == 200 else b""
    try:
        async for piece in in_pieces(body + b"\n"):
            for sample in parser.feed(piece):
                sizes.update(_stated_size(sample.labels))
    except ValueError as error:
        silent["block_size"] = f"its {_METRICS} cannot be read: {error}"
        return None
    if len(sizes) == 1:
        return sizes.pop()
    if sizes:
        silent["block_size"] = f"its ranks have different ones, {', '.join(map(str, sorted(sizes)[:8]))}"
    else:
        silent["block_size"] = f"its {_METRICS} has no {_CACHE_CONFIG}{_because(reply)}"
    return None


def _stated_size(labels: Mapping[str, str]) -> tuple[int, ...]:
    for name in ("effective_attention_block_size", "block_size"):
        if _is_number(labels.get(name, "")):
            size = int(labels[name])
            unit = int(labels["prefix_match_unit"]) if _is_number(labels.get("prefix_match_unit", "")) else 0
            return (unit if unit and size % unit == 0 and size // unit <= CHUNK_BLOCKS_MAX else size,)
    return ()


def _is_number(text: str) -> bool:
    """Return whether a text is a number with fewer digits than Python refuses to parse."""
    return text.isdecimal() and len(text) < 10


# ---- SGLang ----------------------------------------------------------------------------------------


def _ranks_of_sglang(
    server: Mapping[str, Any], silent: dict[str, str], reply: HttpReply | Unanswered
) -> tuple[list[_Stated], int | None]:
    stated = server.get("kv_events")
    if not isinstance(stated, dict):
        page, dcp = server.get("page_size"), server.get("dcp_size", 1)
        size = page * dcp if type(page) is int and type(dcp) is int else None
        if size is None:
            silent["block_size"] = f"its {_SERVER} has no page_size{_because(reply)}"
        why = "publishes no events" if "kv_events" in server else "does not name its event sockets"
        silent["endpoint"] = f"its {_SERVER} says that it {why}; start it with --kv-events-config{_because(reply)}"
        return [], size
    size, dp_size = stated.get("block_size"), stated.get("dp_size", 1)
    host, base = stated.get("endpoint_host"), stated.get("endpoint_port_base")
    replay = stated.get("replay_endpoint_port_base")
    if type(size) is not int:
        size = None
        silent["block_size"] = f"kv_events in its {_SERVER} has no block_size"
    if not isinstance(host, str) or type(base) is not int:
        silent["endpoint"] = f"kv_events in its {_SERVER} has no endpoint_host and endpoint_port_base"
        return [], size
    if type(dp_size) is not int or not 0 < dp_size <= RANKS_MAX:
        silent["endpoint"] = f"kv_events in its {_SERVER} has dp_size {shown(dp_size)}, which is not 1 to {RANKS_MAX}"
        return [], size
    place = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return [
        (rank, f"tcp://{place}:{base + rank}", f"tcp://{place}:{replay + rank}" if type(replay) is int else None, None)
        for rank in range(dp_size)
    ], size


def _master_of(server: Any) -> tuple[str | None, str | None]:
    """Return the HTTP address of the master of SGLang's Mooncake store, and the tag of its keys, as far as named."""
    if not isinstance(server, dict) or server.get("hicache_storage_backend") != "mooncake":
        return None, None
    config = server.get("hicache_storage_backend_extra_config")
    try:
        document = bounded_loads(config.encode()) if isinstance(config, str) else config
    except ValueError:
        return None, None
    if not isinstance(document, dict) or not isinstance(place := document.get("master_server_address"), str):
        return None, None
    port = document.get("master_metrics_port", _MASTER_PORT)
    url = f"http://{place.rpartition(':')[0]}:{port}"
    tag = document.get("extra_backend_tag")
    is_tag = isinstance(tag, str) and key_forms(sglang_forms("", 0, tag)) is not None
    return url if type(port) is int and is_engine_url(url) else None, tag if is_tag else None


# ---- answers ---------------------------------------------------------------------------------------


def _json(reply: HttpReply | Unanswered) -> Any:
    if isinstance(reply, Unanswered) or reply.status != 200:
        return None
    try:
        return bounded_loads(reply.body)
    except ValueError:
        return None


def _cards(models: Any) -> list[tuple[str, str | None]] | None:
    """Return the names of ``/v1/models``, each with the model that it is an adapter of; None if it is not such an
    answer.
    """
    data = models.get("data") if isinstance(models, dict) else None
    if not isinstance(data, list):
        return None
    cards: dict[str, str | None] = {}
    for card in data:
        if isinstance(card, dict) and isinstance(card.get("id"), str) and 0 < len(card["id"]) <= NAME_MAX:
            parent = card.get("parent")
            cards.setdefault(card["id"], parent if isinstance(parent, str) else None)
    return list(cards.items())


def _release(answer: Any) -> str | None:
    release = answer.get("version") if isinstance(answer, dict) else None
    return release if isinstance(release, str) and 0 < len(release) <= NAME_MAX else None


def _kind(server: Any, sources: Any) -> EngineKind | None:
    if isinstance(sources, dict | list):
        return naming_sockets_at(_SOURCES)
    if isinstance(server, dict) and ("kv_events" in server or "page_size" in server):
        return naming_sockets_at(_SERVER)
    return None


def _kind_by_metrics(reply: HttpReply | Unanswered) -> EngineKind | None:
    """Return the kind of an engine by the names of its metrics: vLLM before 0.32 has no path that names its sockets."""
    if isinstance(reply, HttpReply) and reply.status == 200 and _VLLM_METRIC.search(reply.body):
        return naming_sockets_at(_SOURCES)
    return None


def _is_absent(reply: HttpReply | Unanswered) -> bool:
    """Return whether the server has said that it has no such path. A silent or failing server may have it later."""
    return isinstance(reply, HttpReply) and reply.status < 500 and reply.status not in (401, 403, 429)


def _names_sockets(kind: EngineKind | None, server: Any, sources: Any) -> bool:
    if kind is not None and kind.traits.sockets_path == _SERVER:
        return isinstance(server, dict) and "kv_events" in server
    return isinstance(sources, dict | list)


def _because(reply: HttpReply | Unanswered) -> str:
    if isinstance(reply, Unanswered):
        return f" ({reply.sentence})"
    if reply.status in (401, 403):
        return (
            f" (status {reply.status}; set WAYMARK_ENGINE_API_KEY to the key of the engine, and name its host in "
            "WAYMARK_ENGINE_KEY_HOSTS)"
        )
    return "" if reply.status == 200 else f" (status {reply.status})"


def _no_engine(base: str, reply: HttpReply | Unanswered) -> InvalidValue | RemoteUnavailable:
    if isinstance(reply, Unanswered):
        return _unavailable(base, reply.sentence)
    if reply.status >= 500 or reply.status == 429:
        return _unavailable(base, f"it answers {_MODELS} with status {reply.status}")
    return InvalidValue(
        f"url {shown(base)} is no engine: {_MODELS} is answered without a list of models{_because(reply)}; "
        "give the URL of the HTTP API of an engine, or of another server with OpenAI's API",
        field="url",
    )


def _unavailable(base: str, why: str) -> RemoteUnavailable:
    return RemoteUnavailable(f"the engine {base} cannot be used now: {why}")


def base_of(url: str) -> str:
    """Return the URL without the slash at its end, and without the ``/v1`` that clients of OpenAI's API append."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def host_of(url: str) -> str:
    """Return the host of a URL as an endpoint has it: an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def instance_id_of(url: str) -> str:
    """Return ``10.0.0.7:8000`` for ``http://10.0.0.7:8000/``, the name of an engine that was registered without a
    name.
    """
    parts = urlsplit(url)
    return parts.netloc if parts.port is not None else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


# The sockets that an engine may name as its own: those at its own host, and those that the operator allows.
#
# An engine reports the address that it binds, which is a wildcard more often than not; subscribers connect to the host
# of the registered URL. Any other host may belong to a stranger, so a registration by URL never leads there by itself.


_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})


class UnusableSocket(Exception):
    """The sentence about an unusable socket."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class HostNames:
    """Turns the sockets that an engine reports into endpoints to connect to."""

    def __init__(self, allowed: AllowedEndpoints) -> None:
        self._allowed = allowed

    async def own(self, url: str, endpoint: str, field: str, rank: int) -> str:
        """Return the endpoint of ``rank`` of the engine at ``url``. Raise UnusableSocket, or InvalidValue if it is not
        allowed.
        """
        asked_at = urlsplit(url).hostname or ""
        about = f"rank {rank} says that its {field} is {shown(endpoint)}"
        host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not endpoint.startswith("tcp://") or not colon:
            raise UnusableSocket(f"{about}, which cannot be reached from elsewhere; it must be tcp://*:port")
        host = host.strip("[]")
        if host not in _WILDCARDS and host.lower() != asked_at and not await _is_same(host, asked_at):
            if is_loopback(host):
                raise UnusableSocket(
                    f"{about}, which only processes on its own host can reach; it must be tcp://*:port"
                )
            if not self._allowed.is_named(endpoint):
                raise UnusableSocket(
                    f"{about}, on another host than its URL; allow that host in WAYMARK_ALLOWED_ENDPOINTS"
                )
            own = endpoint
        else:
            own = f"tcp://{f'[{asked_at}]' if ':' in asked_at else asked_at}:{port}"
        if not is_endpoint(own):
            raise UnusableSocket(f"{about}, and an endpoint is {ENDPOINT}")
        try:
            self._allowed.check(own, field)
        except InvalidValue as error:
            raise UnusableSocket(error.sentence) from None
        return own


async def _is_same(host: str, asked_at: str) -> bool:
    """Return whether the engine's host has this address; two names of the loopback are the same."""
    if is_loopback(host) and is_loopback(asked_at):
        return True
    try:
        return ip_address(host) in {ip_address(address) for _, address in await addresses_of(asked_at)}
    except ValueError:
        return False

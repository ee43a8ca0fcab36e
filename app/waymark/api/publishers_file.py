"""Reads the publishers that an operator lists in ``WAYMARK_PUBLISHERS_FILE``, at the start and when the file changes.

The file is JSON or YAML, in one of three shapes:

- A list of bodies of ``POST /register``, also those with ``url``:
  ``- {type: vLLM, modelname: llama, instance_id: pod-1, block_size: 16, endpoint: "tcp://10.0.0.7:5557"}``
- The configuration of Mooncake's Conductor. Its ``kvevent_instance`` has the same objects by name. An object without an
  instance_id gets its name as such, and ``ip`` and ``port`` may replace an endpoint.
- The list of llm-d's file discovery, ``endpoints``. Each has a name, an address, a port and labels.

An entry is validated like a body of ``/register``. One error names every mistake: the file, the entry, the field, its
value, and the way out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import yaml

from waymark.api.registration_schemas import RegisterByUrlRequest, RegisterRequest
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, SettingsError
from waymark.base.shown import kind, shown
from waymark.discovery.describe import instance_id_of
from waymark.discovery.drafts import WantedEngine
from waymark.discovery.pods import role_in
from waymark.domain.names import DEFAULT_TENANT, Origin, Registration

_FILE_BYTES_MAX = 16 * 2**20
_COMPLAINTS_MAX = 20

_SHAPES = "give a list of registrations, or an object with kvevent_instance or endpoints"


class _UnreadableFile(Exception):
    """The file is neither usable JSON nor usable YAML; the text says why."""


def read_publishers(path: str, allowed_endpoints: Sequence[str] = ()) -> list[Registration]:
    """Read the registrations of the file, in order, without the engines that must first be asked for theirs.

    Raise ``SettingsError`` if anything in the file is wrong.
    """
    allowed = AllowedEndpoints(allowed_endpoints)
    return [
        replace(engine.draft.registration(allowed), origin=engine.origin)
        for engine in read_wanted(path, allowed_endpoints)
        if engine.url is None
    ]


def read_wanted(
    path: str, allowed_endpoints: Sequence[str] = (), ports: tuple[int, int, int] = (0, 0, 0)
) -> list[WantedEngine]:
    """Read the engines and publishers of the file, in order. Raise ``SettingsError`` if anything in it is wrong.

    ``ports`` are for engines whose sockets are not named: event port and replay port of rank 0, and the number of
    ranks.
    """
    about = f"WAYMARK_PUBLISHERS_FILE {path}"
    try:
        entries = _entries(_parsed(Path(path)))
    except (OSError, _UnreadableFile) as exc:
        raise SettingsError(f"{about} cannot be used: {exc}") from None
    allowed = AllowedEndpoints(allowed_endpoints)
    labelled: dict[tuple[str, str, int], tuple[str, WantedEngine]] = {}
    complaints: list[str] = []
    for label, entry in entries:
        try:
            name, wanted = _wanted(path, entry, allowed, ports)
        except InvalidValue as exc:
            complaints.append(f"{about}, {label}: {exc.sentence}")
            continue
        former, _ = labelled.setdefault(name, (label, wanted))
        if former != label:
            complaints.append(
                f"{about}, {label}: instance_id, tenant_id and dp_rank are those of {former}; give each publisher a "
                "dp_rank or instance_id of its own"
            )
    if len(complaints) > _COMPLAINTS_MAX:
        complaints[_COMPLAINTS_MAX:] = [f"{about}: {len(complaints) - _COMPLAINTS_MAX} more entries are wrong"]
    if complaints:
        raise SettingsError("\n".join(complaints))
    return [wanted for _, wanted in labelled.values()]


def _wanted(
    path: str, entry: Any, allowed: AllowedEndpoints, ports: tuple[int, int, int]
) -> tuple[tuple[str, str, int], WantedEngine]:
    """Return the name of an entry, which must be unique, and the engine that it describes."""
    if not isinstance(entry, dict):
        raise InvalidValue(f"it is {kind(entry)}; give an object with the fields of POST /register")
    if entry.get("url"):
        request = RegisterByUrlRequest.of(entry)
        allowed.check(request.url, "url")
        draft, url = request.draft(), request.url
        name = (draft.instance_id or instance_id_of(url), draft.tenant_id or DEFAULT_TENANT, -1)
        return name, WantedEngine(_origin(path, name), draft, url, ports)
    draft = RegisterRequest.of(_with_endpoint(entry)).draft()
    name = draft.registration(allowed).name.rank
    return name, WantedEngine(_origin(path, name), draft)


def _origin(path: str, name: tuple[str, str, int]) -> Origin:
    return Origin("file", f"{path} {'|'.join(map(str, name))}")


def _with_endpoint(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert an entry of the Conductor's first configurations, with ``ip`` and ``port``, to today's form."""
    # There -1 means no adapter. Other numbers cannot be converted, because adapters have names here.
    if entry.get("lora_id") not in (None, -1):
        raise InvalidValue(f"lora_id is {shown(entry['lora_id'])}; give lora_name, or leave both out", field="lora_id")
    ip, port = entry.get("ip"), entry.get("port")
    if ip is None and port is None:
        return entry
    if entry.get("endpoint"):
        raise InvalidValue("endpoint and ip or port are both given; give endpoint alone", field="endpoint")
    if not isinstance(ip, str) or type(port) is not int:
        raise InvalidValue(f"ip is {shown(ip)} and port is {shown(port)}; give endpoint as tcp://host:port", field="ip")
    return entry | {"endpoint": f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"}


def _entries(content: Any) -> list[tuple[str, Any]]:
    """Return every entry with its name for complaints."""
    if isinstance(content, list):
        return [(f"entry {number}", entry) for number, entry in enumerate(content, 1)]
    if isinstance(content, dict) and isinstance(content.get("endpoints"), list):
        return [(f"endpoint {number}", _converted(endpoint)) for number, endpoint in enumerate(content["endpoints"], 1)]
    instances = content.get("kvevent_instance") if isinstance(content, dict) else None
    if not isinstance(instances, dict):
        raise _UnreadableFile(f"it has no publishers; {_SHAPES}")
    return [
        (f"kvevent_instance {shown(name)}", {"instance_id": name} | entry if isinstance(entry, dict) else entry)
        for name, entry in instances.items()
    ]


def _converted(entry: Any) -> Any:
    """Convert an entry of llm-d's list of endpoints, ``{name, namespace, address, port, labels}``, to one with a
    URL.
    """
    if not isinstance(entry, dict) or "address" not in entry:
        return entry
    address, port = entry["address"], entry.get("port", 8000)
    if not isinstance(address, str) or not str(port).isdecimal():
        return entry | {"url": f"{address}:{port}"}  # this is refused later, with the field and its value
    fields = {name: value for name, value in entry.items() if name not in ("address", "port", "name", "namespace")}
    host = f"[{address}]" if ":" in address else address
    if entry.get("name"):
        namespace = entry.get("namespace")
        fields["instance_id"] = f"{namespace}/{entry['name']}" if namespace else entry["name"]
    labels = fields.get("labels")
    role = role_in(labels) if isinstance(labels, dict) else None
    return {"url": f"http://{host}:{port}"} | ({"role": role} if role else {}) | fields


# ---- JSON and YAML ---------------------------------------------------------------------------------


def _parsed(path: Path) -> Any:
    with path.open("rb") as file:
        raw = file.read(_FILE_BYTES_MAX + 1)
    if len(raw) > _FILE_BYTES_MAX:
        raise _UnreadableFile(f"it is longer than {_FILE_BYTES_MAX} bytes; leave some to POST /register")
    is_json = path.suffix == ".json"
    try:
        text = raw.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_with_unique_names) if is_json else yaml.load(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise _UnreadableFile(f"the file is not {'JSON' if is_json else 'YAML'}: {' '.join(str(exc).split())}") from exc
    try:
        # Only values that JSON has, as in a body of POST /register: names are texts, numbers have 64 bits.
        return orjson.loads(orjson.dumps(content))
    except orjson.JSONEncodeError as exc:
        raise _UnreadableFile(f"it holds what JSON has not ({exc}); put names and other strings in quotes") from exc


def _with_unique_names(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return an object. Raise ``_UnreadableFile`` if a name is repeated: the parsers would silently keep the last of
    two values.
    """
    fields: dict[Any, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _UnreadableFile(f"{shown(name)} is there twice in one object; remove one of them")
        fields[name] = value
    return fields


class _Loader(yaml.SafeLoader):
    """Loads only YAML's plain values."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = (name for name, _ in node.value if name.tag != "tag:yaml.org,2002:merge")
    try:
        _with_unique_names((loader.construct_object(name, deep=True), None) for name in own)
    except TypeError:  # a list or an object as a name
        raise _UnreadableFile(f"line {node.start_mark.line + 1}: a name is no text; {_SHAPES}") from None
    fields: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return fields


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)

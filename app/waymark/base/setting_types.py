"""The types of the settings as pydantic validates them, and the sentences about wrong values.

``waymark.base.settings`` has the table. It names these types, and imports this module when a value needs to be
validated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo

from waymark.base.shown import hide_password, shown

_MIB = 2**20
_DAY = 86_400


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


def _split_lower(text: Any) -> Any:
    return _split_values(_lower(text))


def _split_files(text: Any) -> Any:
    """Split ``cert=FILE,key=FILE``. A word without ``=`` stays."""
    return _split_values(text.removeprefix("true,")) if isinstance(text, str) and "=" in text else text


def _split_tls(text: Any) -> Any:
    values = _split_values(text)
    if "verify" in values:
        values = {**values, "verify": _lower(values["verify"])}
        if values["verify"] not in ("full", "ca", "none"):
            raise ValueError("verify is full (the CA and the host name), ca (only the CA) or none")
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


RedisUrl = Annotated[str, AfterValidator(_checked_url)]
KeyPrefix = Annotated[str, AfterValidator(_checked_prefix)]
EngineUrl = Annotated[str, AfterValidator(_checked_engine)]
TokenSource = Annotated[str, AfterValidator(_checked_source)]
MediumName = Annotated[str, Field(pattern=r"^([A-Z0-9_]{1,32}|\*)$")]
Ttl = Annotated[int, Field(ge=0, le=365 * _DAY)]
Port = Annotated[int, Field(ge=0, le=65535)]
Limit = Annotated[int, Field(ge=0, le=10**12)]
AnswersBytes = Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)]
AnswersTtl = Annotated[int, Field(ge=1, le=3650 * _DAY)]


Split = BeforeValidator(_split)
SplitValues = BeforeValidator(_split_values)
SplitLower = BeforeValidator(_split_lower)
SplitFiles = BeforeValidator(_split_files)
SplitTls = BeforeValidator(_split_tls)
SplitSeconds = BeforeValidator(_split_seconds)
SplitKeys = BeforeValidator(_split_keys)
ParsedSources = BeforeValidator(_parsed_sources)
Lower = BeforeValidator(_lower)
ZeroOrHundred = AfterValidator(_zero_or_hundred)
Token = Annotated[SecretStr, AfterValidator(_checked_token)]


# ---- validation ------------------------------------------------------------------------------------


@cache
def model_of(table: type) -> type[BaseModel]:
    """Return the model with the fields of ``table``, whose annotations name types of this module."""
    kinds = get_type_hints(table, {"Path": Path, **globals()}, include_extras=True)
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        default = getattr(table, name)
        if isinstance(default, Mapping):
            default = dict(default)
        fields[name] = kind, Field(default_factory=default) if callable(default) else default
    config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )
    return create_model(table.__name__, __config__=config, **fields)


def validate(table: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values as the settings have them. Raise ``ValidationError``."""
    model = model_of(table).model_validate(values)
    return {name: getattr(model, name) for name in model.model_fields_set}


def complaints_of(error: ValueError, table: type, variables: Mapping[str, str]) -> list[str]:
    """Return a sentence for each complaint of pydantic's; ``variables`` is our part of the environment."""
    assert isinstance(error, ValidationError)
    return [_complaint(problem, table, variables) for problem in error.errors(include_url=False, include_input=False)]


def _complaint(error: Any, table: type, variables: Mapping[str, str]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    name = str(error["loc"][0])
    variable = f"WAYMARK_{name.upper()}"
    field = model_of(table).model_fields[name]
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
    return " or ".join(_kind_text(kind, field) for kind in _leaves(field.annotation))


def _kind_text(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "list, separated by commas"
    if get_origin(kind) is dict:
        return "JSON object" if field.annotation == dict[str, TokenSource] else "`NAME=VALUE`, separated by commas"
    if kind is bool:
        return "`true` or `false`"
    if kind in (int, float):
        least = next(mark.ge for mark in field.metadata if isinstance(mark, Ge))
        most = next(mark.le for mark in field.metadata if isinstance(mark, Le))
        return f"{'integer' if kind is int else 'number'}, {least} to {most}"
    return "secret" if kind is SecretStr else "text"


def default_text(field: FieldInfo) -> str:
    """Return the value of the setting when its variable is unset, for people."""
    if field.default_factory is not None:
        return "host name, process id, random"
    default = field.default
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)

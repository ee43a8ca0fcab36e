"""The types of a registration's fields: each takes a value from JSON, or says what is wrong with it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from waymark.domain.engines import TRAITS, EngineKind
from waymark.domain.names import is_endpoint
from waymark.domain.prefixes import is_source
from waymark.domain.targets import LABEL_BYTES_MAX, LABELS_MAX, WEIGHT_MAX, Role, is_engine_url, is_url

#: Each kind by its name and its aliases, in lower case.
KINDS = {kind.lower(): kind for kind in EngineKind} | {
    alias: kind for kind, traits in TRAITS.items() for alias in traits.aliases
}


def _kind(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    found = KINDS.get(value.lower())
    if found is None:
        raise PydanticCustomError("invalid_value", "no such type")
    return found


def _endpoint(value: Any) -> Any:
    if value == "":
        return None
    if isinstance(value, str) and not is_endpoint(value) and not is_source(value):
        raise PydanticCustomError("invalid_value", "no such endpoint")
    return value


def _url(value: Any) -> Any:
    if value == "":
        return None
    if isinstance(value, str) and not is_url(value):
        raise PydanticCustomError("invalid_value", "no such URL")
    return value


def _engine_url(value: Any) -> Any:
    if isinstance(value, str) and value and not is_engine_url(value):
        raise PydanticCustomError("invalid_value", "no such URL")
    return value or None


def _role(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    if value not in tuple(Role):
        raise PydanticCustomError("invalid_value", "no such role")
    return Role(value)


def _labels(value: dict[str, str]) -> dict[str, str]:
    if len(value) > LABELS_MAX or any(len(text.encode()) > LABEL_BYTES_MAX for pair in value.items() for text in pair):
        raise PydanticCustomError("out_of_range", "too many labels, or too long ones")
    return value


#: Media in ``medium_endpoints``.
MEDIA_MAX = 16


def _sockets(value: dict[str, Any]) -> dict[str, str]:
    if len(value) > MEDIA_MAX:
        raise PydanticCustomError("out_of_range", "too many media")
    if any(endpoint is not None and not is_endpoint(endpoint) for endpoint in value.values()):
        raise PydanticCustomError("invalid_value", "no such endpoint")
    return {medium: endpoint for medium, endpoint in value.items() if endpoint is not None}


Kind = Annotated[EngineKind, BeforeValidator(_kind), WithJsonSchema({"enum": [*EngineKind], "type": "string"})]
Endpoint = Annotated[str | None, BeforeValidator(_endpoint)]
MediumEndpoints = Annotated[dict[str, Endpoint], AfterValidator(_sockets)]
EngineUrlField = Annotated[str, BeforeValidator(_engine_url)]
OptionalEngineUrlField = Annotated[str | None, BeforeValidator(_engine_url)]
OptionalUrl = Annotated[str | None, BeforeValidator(_url)]
ARole = Annotated[Role, BeforeValidator(_role), WithJsonSchema({"enum": [*Role], "type": "string"})]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
Weight = Annotated[float, Field(ge=0, le=WEIGHT_MAX, allow_inf_nan=False)]

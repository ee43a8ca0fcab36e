"""Common parts of request bodies: names, hashes and sizes. A null means that the field is absent.

A model says in each field's ``description`` what the field must be; that sentence is in the published contract
and in the error of a value that does not fit.

pydantic builds the validator of a model when it is first needed, not when a process starts. Most models only describe
answers, in the published contract, and are never validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from waymark.api.http.bodies import LongField
from waymark.api.http.errors import InvalidBody
from waymark.base.shown import is_beyond_64_bits, kind, shown, shown_url
from waymark.domain.names import BLOCK_SIZE_MAX, NAME_BYTES_MAX, U32_MAX, U64_MASK

T = TypeVar("T")

#: Fields whose values are secrets of a tenant; an error names the field without its value.
_SECRET = frozenset({"additionalsalt", "additional_salt", "cache_salt"})
#: Fields whose values may hold a password.
_URLS = frozenset(
    {
        "url", "address", "metrics_url", "endpoint", "replay_endpoint", "snapshot_endpoint", "medium_endpoints",
        "kv_events_endpoint", "kv_events_endpoints",
    }
)  # fmt: skip

_SHAPE_ERRORS = frozenset({"missing", "invalid_type", "invalid_value", "out_of_range"})


_TOKENS = ("token_ids", "tokens")
_LONG_LISTS = (*_TOKENS, "seq_hashes", "block_hashes")


def optional(description: str, default: Any = None, **options: Any) -> Any:
    """Return a field that may be absent."""
    return Field(default=default, description=description, **options)


class Model(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(defer_build=True)


class Root(RootModel[T], Generic[T]):
    """A body other than an object."""

    model_config = ConfigDict(defer_build=True)


class ErrorBody(Model):
    """The body of every answer outside the Dynamo API that is not a 2xx."""

    error: str = Field(description="a sentence with the problem, the value and the remedy")
    reason: str = Field(
        description="one of: invalid_json, invalid_msgpack, missing, invalid_type, invalid_value, out_of_range, "
        "conflict, gap, not_found, method_not_allowed, too_large, unsupported_content_type, unauthorized, "
        "unavailable, no_target, starting, saturated, no_tokenizer, internal"
    )
    field: str | None = optional("the field that the sentence is about, as the client spelled it")
    index: int | None = optional("the position inside that field, counted from 0")
    applied: int | None = optional("the number of events that were applied before a gap")
    expected: int | None = optional("the event_id to continue from after a gap")


RANK = f"an integer of 0..{U32_MAX}"


def _within_bounds(text: str) -> str:
    if len(text) > NAME_BYTES_MAX or len(text.encode()) > NAME_BYTES_MAX:
        raise PydanticCustomError("out_of_range", "longer than a name may be")
    return text


def _not_empty(text: str) -> str:
    if not text:
        raise PydanticCustomError("invalid_value", "empty")
    return text


def _absent_if_empty(value: Any) -> Any:
    return None if value == "" else value


NonEmptyName = Annotated[str, AfterValidator(_not_empty), AfterValidator(_within_bounds)]
"""Any text of 1..4096 bytes."""

OptionalName = Annotated[Annotated[str, AfterValidator(_within_bounds)] | None, BeforeValidator(_absent_if_empty)]
"""Like ``NonEmptyName``, but absent, null and the empty string all become None."""


# Long lists are not validated by pydantic, but packed (see ``prompts``). This is their published description.
TokenIds = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": U32_MAX}})
]

_HASH: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": -(2**63), "maximum": U64_MASK},
        {"type": "string", "pattern": "^-?[0-9]{1,20}$"},
    ]
}
Hash = Annotated[Any, WithJsonSchema(_HASH)]
HashList = Annotated[Any, WithJsonSchema({"type": "array", "items": _HASH})]
BlockSize = Annotated[int, Field(ge=1, le=BLOCK_SIZE_MAX)]
RankNumber = Annotated[int, Field(ge=0, le=U32_MAX)]


class RequestBody(Model):
    """A request body. Unknown fields are ignored, a null counts as absent, and values are never converted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    wire_names: ClassVar[dict[str, tuple[str, ...]]] = {}
    may_have_any_list: ClassVar[bool] = False
    """Whether a body has one of several long lists; otherwise it may have the first one only."""
    long_fields: ClassVar[tuple[LongField, ...]] = ()
    """The lists that may make up most of a body, the usual one first."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.wire_names = {name: _spellings_of(name, field) for name, field in cls.model_fields.items()}
        names = [name for name in _LONG_LISTS if name in cls.wire_names]
        cls.long_fields = tuple(
            LongField(cls.wire_names[name], is_hashes=name not in _TOKENS)
            for name in (names if cls.may_have_any_list else names[:1])
        )

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Return the validated body. ``InvalidBody`` names the first field that does not fit, as the client spelled
        it.
        """
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for name, spellings in cls.wire_names.items():
            for spelling in spellings:
                value = fields.get(spelling)
                if value is None:
                    continue
                if name in values and values[name] != value:
                    raise InvalidBody(
                        f"{spelled[name]} and {spelling} name the same thing and differ; send one of them",
                        field=spelling,
                    )
                values[name] = value
                spelled[name] = spelling
        try:
            return cls.model_validate(values, by_name=True)
        except ValidationError as exc:
            raise _unfit(exc, cls, spelled) from None

    @classmethod
    def spellings(cls, name: str) -> tuple[str, ...]:
        """Return every name of a field on the wire, the usual one first."""
        return cls.wire_names[name]

    @classmethod
    def spelling(cls, name: str, fields: dict[str, Any]) -> str:
        """Return the client's spelling of a present field."""
        return next(spelling for spelling in cls.wire_names[name] if fields.get(spelling) is not None)


def _spellings_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (alias,) if isinstance(alias, str) else (name,)


def _unfit(error: ValidationError, model: type[BaseModel], spelled: Mapping[str, str]) -> InvalidBody:
    """Return the first of pydantic's errors as an ``InvalidBody``. ``spelled`` maps field names to the client's
    spelling.
    """
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    described = model.model_fields[name]
    field = spelled.get(name) or described.alias or name
    wanted = described.description or "as documented"
    if first["type"] == "missing":
        return InvalidBody(f"{field} is missing; it must be {wanted}", reason="missing", field=field)
    value = first["input"]
    if name in _SECRET:
        text = kind(value)
    else:
        text = shown_url(value) if name in _URLS and isinstance(value, str) else shown(value)
    return InvalidBody(f"{field} is {text}; it must be {wanted}", reason=_slug(first["type"], value), field=field)


def _slug(pydantic_type: str, value: Any) -> str:
    if is_beyond_64_bits(value) or pydantic_type.startswith(("greater_than", "less_than", "string_too")):
        return "out_of_range"
    if pydantic_type in _SHAPE_ERRORS:
        return pydantic_type
    return "invalid_type" if pydantic_type.endswith("_type") else "invalid_value"

"""Common parts of request bodies: names, hashes and sizes. A null means that the field is absent.

A model says in each field's ``description`` what the field must be; that sentence is in the published contract
and in the error of a value that does not fit.

pydantic builds the validator of a model when it is first needed, not when a process starts. Most models only describe
answers, in the published contract, and are never validated.
"""

from __future__ import annotations

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

from waymark.api.http.errors import InvalidBody, unfit
from waymark.domain.names import BLOCK_SIZE_MAX, NAME_BYTES_MAX, U32_MAX, U64_MASK

T = TypeVar("T")


class Model(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(defer_build=True)


class Root(RootModel[T], Generic[T]):
    """A body other than an object."""

    model_config = ConfigDict(defer_build=True)


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

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.wire_names = {name: _spellings_of(name, field) for name, field in cls.model_fields.items()}

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
            raise unfit(exc, cls, spelled) from None

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

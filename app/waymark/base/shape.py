"""The base class of published answers, with their conversion to plain values and back."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

S = TypeVar("S", bound="AnswerShape")
_PartReader = Callable[[Any, str], Any]


class _FieldReader(NamedTuple):
    name: str
    read: _PartReader | None
    has_default: bool
    is_nullable: bool


#: The results of ``_readers``, which need the types of all fields.
_READERS: dict[type[AnswerShape], list[_FieldReader]] = {}


class AnswerShape:
    """An answer, or a part of one: a frozen dataclass, whose field order is that of the JSON text.

    The string below a field is its sentence in OpenAPI.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"use_attribute_docstrings": True}

    OPTIONAL: ClassVar[Sequence[str]] = ()
    """The fields that an answer leaves out while they are None or empty."""
    ADDED: ClassVar[Mapping[str, Any]] = {}
    """The values of fields that a former release does not send."""

    def absent(self) -> Sequence[str]:
        """Return the names of the fields that this answer leaves out."""
        return [name for name in self.OPTIONAL if getattr(self, name) in (None, (), [])]


def quick(shape: type[S], /, **values: Any) -> S:
    """Return a shape with exactly these fields, for answers with thousands of shapes: the constructor of a frozen class
    takes four times as long.
    """
    answer = shape.__new__(shape)
    object.__setattr__(answer, "__dict__", values)
    return answer


def plain(value: Any) -> Any:
    """Return a value with a dict in place of each shape, without the fields that the shape leaves out."""
    if isinstance(value, AnswerShape):
        return {name: plain(part) for name, part in present(value).items()}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def present(shape: AnswerShape) -> dict[str, Any]:
    """Return the fields of an answer that it does not leave out, for an encoder that meets a shape."""
    if not isinstance(shape, AnswerShape):
        raise TypeError(f"an answer has no {type(shape).__name__}")
    present_fields = vars(shape)
    absent = shape.OPTIONAL and shape.absent()
    if absent:
        present_fields = present_fields.copy()
        for name in absent:
            del present_fields[name]
    return present_fields


def _hints(shape: type[AnswerShape]) -> dict[str, Any]:
    hints = get_type_hints(shape)
    return {field.name: hints[field.name] for field in fields(shape)}  # type: ignore[arg-type]


def parse(shape: type[S], value: Any, path: str = "the answer") -> S:
    """Return the shape that an answer contains. Unknown fields are ignored, since a later release may send them. A null
    is a missing field if the type of the field has no null.

    Raise ``ValueError`` with the path of a part that does not fit.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not an object")
    values: dict[str, Any] = {}
    if shape not in _READERS:
        _READERS[shape] = _readers(shape)
    for name, read, has_default, is_nullable in _READERS[shape]:
        part = value.get(name)
        if part is not None:
            values[name] = part if read is None else read(part, f"{path}.{name}")
        elif is_nullable and name in value:
            values[name] = None
        elif name in shape.ADDED:
            values[name] = shape.ADDED[name]
        elif not has_default:
            raise ValueError(f"{path} has no {name}")
    return shape(**values)


def _readers(shape: type[AnswerShape]) -> list[_FieldReader]:
    # A default is an attribute of the class.
    return [
        _FieldReader(name, _reader(hint), hasattr(shape, name), _has_null(hint)) for name, hint in _hints(shape).items()
    ]


def _has_null(hint: Any) -> bool:
    return hint in (Any, types.NoneType) or types.NoneType in get_args(hint)


def _reader(hint: Any) -> _PartReader | None:
    """Return the function that reads a value of this type; None if JSON has such values itself."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return next(filter(None, map(_reader, arguments)), None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_value = _reader(arguments[1])
        return of_value and (lambda value, path: _mapping(value, path, of_value))
    if origin is tuple:
        of_parts = [_reader(argument) for argument in arguments]
        return (lambda value, path: _parts(value, path, of_parts)) if any(of_parts) else None
    if isinstance(origin, type) and issubclass(origin, Sequence):
        of_item = _reader(arguments[0])
        return of_item and (lambda value, path: _sequence(value, path, of_item))
    if isinstance(hint, type) and issubclass(hint, AnswerShape):
        return lambda value, path: parse(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value, path: _member(hint, value)
    return None


def _mapping(value: Any, path: str, reader: _PartReader) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not an object")
    return {name: reader(part, f"{path}.{name}") for name, part in value.items()}


def _sequence(value: Any, path: str, reader: _PartReader) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path} is not a list")
    return tuple([reader(part, f"{path}[{index}]") for index, part in enumerate(value)])


def _parts(value: Any, path: str, readers: Sequence[_PartReader | None]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(readers):
        raise ValueError(f"{path} is not a list of {len(readers)}")
    return tuple(
        [
            part if reader is None else reader(part, f"{path}[{index}]")
            for index, (part, reader) in enumerate(zip(value, readers, strict=True))
        ]
    )


def _member(kind: type[Enum], value: Any) -> Any:
    """Return the member with this value; the value itself if only a later release knows it."""
    try:
        return kind(value)
    except ValueError:
        return value

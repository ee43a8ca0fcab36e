"""The base class of published answers, with their conversion to plain values and back."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

S = TypeVar("S", bound="AnswerShape")
_PartReader = Callable[[Any, str], Any]


class _FieldReader(NamedTuple):
    name: str
    read: _PartReader | None
    has_default: bool
    is_nullable: bool


#: The results of ``_defaults``, which a process needs for only a few of its many shapes.
_DEFAULTS: dict[type[AnswerShape], tuple[dict[str, Any], frozenset[str]]] = {}
#: The results of ``_readers``, which need the types of all fields.
_READERS: dict[type[AnswerShape], list[_FieldReader]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
class AnswerShape:
    """An answer, or a part of one. Its annotations are its fields, as in a frozen dataclass with keyword arguments.

    The field order is that of the JSON text, and the string below a field is its sentence in OpenAPI. A dataclass
    compiles its methods when its module is imported: for more than a hundred shapes, that took a sixth of the time in
    which a replica starts. Here all shapes share their methods.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"use_attribute_docstrings": True}

    OPTIONAL: ClassVar[Sequence[str]] = ()
    """The fields that an answer leaves out while they are None or empty."""
    ADDED: ClassVar[Mapping[str, Any]] = {}
    """The values of fields that a former release does not send."""

    def __init__(self, **values: Any) -> None:
        defaults, required = _defaults(type(self))
        if not required <= values.keys() <= defaults.keys():
            wrong = ", ".join(sorted((required - values.keys()) | (values.keys() - defaults.keys())))
            raise TypeError(f"{type(self).__name__} lacks these fields, or does not have them: {wrong}")
        vars(self).update(defaults | values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: its {name} does not change")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    def absent(self) -> Sequence[str]:
        """Return the names of the fields that this answer leaves out."""
        return [name for name in self.OPTIONAL if getattr(self, name) in (None, (), [])]


def field_names(shape: type[AnswerShape]) -> list[str]:
    """Return the names of the fields, in order: those of the last base class are the first."""
    return list(_defaults(shape)[0])


def _defaults(shape: type[AnswerShape]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the value of each omitted field, in the order of the fields, and the fields that no caller may omit."""
    known = _DEFAULTS.get(shape)
    if known is not None:
        return known
    annotations = {
        name: kind
        for base in reversed(shape.__mro__)
        if issubclass(base, AnswerShape)
        for name, kind in base.__annotations__.items()
    }
    # An annotation is text. A default is an attribute of the class.
    names = [name for name, kind in annotations.items() if not kind.startswith("ClassVar")]
    required = frozenset(name for name in names if not hasattr(shape, name))
    _DEFAULTS[shape] = defaults = {name: getattr(shape, name, None) for name in names}, required
    return defaults


def quick(shape: type[S], /, **values: Any) -> S:
    """Return a shape with exactly these fields, for answers with thousands of shapes: the constructor, which checks the
    names, takes longer.
    """
    answer = shape.__new__(shape)
    object.__setattr__(answer, "__dict__", values)
    return answer


def changed(shape: S, /, **values: Any) -> S:
    """Return a shape with other values of these fields."""
    return type(shape)(**(vars(shape) | values))


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
    return {name: hints[name] for name in field_names(shape)}


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

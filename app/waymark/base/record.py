"""Classes of values. Both the classes and their objects are created quickly.

A dataclass compiles the text of its methods while its module is imported. A replica imports a hundred such classes, and
makes objects of few of them before its first answer. A record is made by ``dataclass``, too, but only when its first
object is made, or when something asks for its fields; until then it has its name, its slots and its own methods. The
methods that compare, hash and show an object are the same functions for all records.

mypy takes ``record`` for ``dataclass``, so it refuses to assign to a field of a frozen one. Nothing refuses that at run
time, so an object is made in a third of the time, too. Only frozen records have a hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from threading import RLock
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool = False, slots: bool) -> Callable[[type], type]:
        """Return a decorator. ``slots`` is for mypy."""
        return lambda definition: _Definition(definition, is_hashed=frozen).made


#: One record at a time is completed. It may complete those that it inherits from.
_completing = RLock()
_METHODS = ("__init__", "__eq__", "__hash__", "__repr__")
_FACTS = ("__dataclass_fields__", "__dataclass_params__", "__match_args__")


class _Definition:
    """The class as it is written, from which the record is completed."""

    def __init__(self, definition: Any, *, is_hashed: bool) -> None:
        # Without a docstring, a dataclass makes one of its signature, which takes longer than all the rest.
        definition.__doc__ = definition.__doc__ or definition.__name__
        self._definition = definition
        self._is_complete = False
        own = vars(definition)
        names = [name for name, kind in definition.__annotations__.items() if not kind.startswith("ClassVar")]
        inherited = {slot for base in definition.__mro__[1:] for slot in vars(base).get("__slots__", ())}
        left_out = {*names, "__dict__", "__weakref__"}
        namespace = {name: value for name, value in own.items() if name not in left_out}
        namespace |= {name: _Fact(name, self) for name in _FACTS}
        self._missing = [name for name in _METHODS if name == "__init__" or own.get(name) is None]
        namespace |= {name: self._completing(name) for name in self._missing}
        if not is_hashed and "__hash__" in self._missing:
            self._missing.remove("__hash__")
            namespace["__hash__"] = None
        namespace["__slots__"] = tuple(name for name in names if name not in inherited)
        namespace["__qualname__"] = definition.__qualname__
        self.made: Any = type(definition)(definition.__name__, definition.__bases__, namespace)

    def _completing(self, name: str) -> Callable[..., Any]:
        """Return a method that completes the record, and then calls the record's own method of that name."""

        def method(self_: Any, *arguments: Any, **named: Any) -> Any:
            self.complete()
            return getattr(self.made, name)(self_, *arguments, **named)

        return method

    def complete(self) -> None:
        """Give the record the methods and the facts of a dataclass."""
        with _completing:
            if self._is_complete:
                return
            whole: Any = dataclass(slots=True, eq=False, repr=False)(self._definition)
            methods = {"__init__": whole.__init__, **_shared_methods(whole)}
            for name in _FACTS:
                setattr(self.made, name, getattr(whole, name))
            for name in self._missing:
                setattr(self.made, name, methods[name])
            self._is_complete = True


class _Fact:
    """An attribute of the class. Its first reader completes the record."""

    def __init__(self, name: str, definition: _Definition) -> None:
        self._name = name
        self._definition = definition

    def __get__(self, _: object, owner: type) -> Any:
        self._definition.complete()
        return getattr(owner, self._name)


def _shared_methods(whole: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that only need to know the fields."""
    values = _values([field.name for field in fields(whole) if field.compare])
    hashed = _values([field.name for field in fields(whole) if (field.compare if field.hash is None else field.hash)])
    shown = [field.name for field in fields(whole) if field.repr]

    def __eq__(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    def __repr__(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    return {method.__name__: method for method in (__eq__, __hash__, __repr__)}


def _values(names: Sequence[str]) -> Callable[[object], object]:
    """Return a function that reads these attributes of an object."""
    return attrgetter(*names) if names else lambda _: ()

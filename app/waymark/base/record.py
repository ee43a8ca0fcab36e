"""Frozen classes of values. Both the classes and their objects are created quickly.

A frozen dataclass compiles the text of six methods while its module is imported, and a replica imports a hundred of
them: that was a fifth of the time in which it starts. A record compiles its ``__init__`` alone, and the other methods
are the same functions for all records. mypy takes ``record`` for ``dataclass``, so it refuses to assign to a field.
Nothing refuses that at run time, so an object is made in a third of the time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(**_: bool) -> Callable[[type], type]:
        """Return a decorator. The arguments are for mypy."""
        return _record


def _record(definition: type) -> Any:
    # Without a docstring, a dataclass makes one of its signature, which takes longer than all the rest.
    definition.__doc__ = definition.__doc__ or definition.__name__
    made: Any = dataclass(slots=True, eq=False, repr=False)(definition)
    values = _values([field.name for field in fields(made) if field.compare])
    hashed = _values([field.name for field in fields(made) if (field.compare if field.hash is None else field.hash)])
    shown = [field.name for field in fields(made) if field.repr]

    def __eq__(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    def __repr__(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    for method in (__eq__, __hash__, __repr__):
        if vars(definition).get(method.__name__) is None:
            setattr(made, method.__name__, method)
    return made


def _values(names: Sequence[str]) -> Callable[[object], object]:
    """Return a function that reads these attributes of an object."""
    return attrgetter(*names) if names else lambda _: ()

"""Constants of policies and plugins: named, with a default, a range and a sentence.

One table of constants defines the overrides of a request, the fields of a file, and the text of the docs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.base.shown import SHOWN_MAX, shown


@dataclass(frozen=True, slots=True)
class Constant:
    """One number, switch or word; the type of the default is the type of the value."""

    name: str
    default: float | bool | str
    sentence: str
    least: float = 0.0
    most: float = math.inf
    choices: tuple[str, ...] = ()
    """The values that a word can have; empty for a number or a switch."""

    def read(self, value: Any, field: str) -> float | bool | str:
        """Check a value and return it. ``InvalidValue`` names field, value and range."""
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise InvalidValue(
                    f"{field} is {shown(value)}; it must be true or false", field=field, reason="invalid_type"
                )
            return value
        if isinstance(self.default, str):
            if value not in self.choices:
                raise InvalidValue(
                    f"{field} is {shown(value)}; it must be one of {', '.join(self.choices)}", field=field
                )
            return str(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(f"{field} is {shown(value)}; it must be a number", field=field, reason="invalid_type")
        if not (math.isfinite(value) and self.least <= value <= self.most):
            raise InvalidValue(
                f"{field} is {shown(value)}; it must be {self.range_text()}", field=field, reason="out_of_range"
            )
        return float(value)

    def range_text(self) -> str:
        """Return the allowed values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return ", ".join(self.choices)
        if math.isinf(self.most):
            return f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


class Values:
    """The constants of a table with their values, asked by name and type."""

    def __init__(self, values: Mapping[str, float | bool | str]) -> None:
        self._values = dict(values)
        self._numbers = {name: float(value) for name, value in values.items() if not isinstance(value, bool | str)}

    def number(self, name: str) -> float:
        return self._numbers[name]

    def is_on(self, name: str) -> bool:
        return self._values[name] is True

    def word(self, name: str) -> str:
        return str(self._values[name])


def read_constants(table: Iterable[Constant], given: Mapping[str, Any], field: str) -> Values:
    """Return all constants of a table: the given ones, checked, and the defaults of the rest.

    An unknown name raises ``InvalidValue`` that names the nearest known one.
    """
    by_name = {constant.name: constant for constant in table}
    for name in given:
        if name not in by_name:
            place = f"{field}.{name[:SHOWN_MAX]}"
            raise InvalidValue(f"{place} is not known; {nearest(name, by_name)}", field=place, reason="invalid_value")
    return Values(
        {
            name: constant.read(given[name], f"{field}.{name}") if name in given else constant.default
            for name, constant in by_name.items()
        }
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the way out of a misspelt name: the nearest known one, else all of them."""
    names = sorted(known)
    # Comparing a name of a megabyte takes half a second, and it would not be near any other.
    close = get_close_matches(name, names, n=1) if len(name) <= SHOWN_MAX else []
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(names)}" if names else "it takes none"

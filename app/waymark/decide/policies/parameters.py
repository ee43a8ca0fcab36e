"""Parameters of plugins held against the kinds that ``plugins`` gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.decide.policies.constants import nearest
from waymark.decide.policies.filters import OPERATORS

#: Go's durations: numbers with units, such as ``2m`` or ``1h30m``.
_DURATION = re.compile(r"([0-9]+(\.[0-9]*)?(ns|us|ms|s|m|h))+")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for pair in value.items() for each in pair)


def _is_expressions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and row.keys() <= {"key", "operator", "values"}
        and isinstance(row.get("key"), str)
        and row.get("operator") in OPERATORS
        and _is_texts(row.get("values", []))
        for row in value
    )


def _is_duration(value: Any) -> bool:
    return isinstance(value, str) and _DURATION.fullmatch(value) is not None


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "texts": (_is_texts, "a list of texts"),
    "labels": (_is_labels, "texts by name"),
    "expressions": (_is_expressions, f"a list of key, operator ({', '.join(OPERATORS)}) and values"),
    "duration": (_is_duration, "a duration such as 2s, 5m or 1h30m"),
}


def check_parameters(given: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Raise ``InvalidValue`` at the first name or value that is not known, nested ones too."""
    for name, value in given.items():
        if name not in known:
            raise InvalidValue(f"{where}.{name} is not known; {nearest(name, known)}", field=f"{where}.{name}")
        kind = known[name]
        if isinstance(kind, Mapping):
            if not isinstance(value, dict):
                raise InvalidValue(f"{where}.{name} must be a mapping by name", field=f"{where}.{name}")
            check_parameters(value, kind, f"{where}.{name}")
            continue
        fits, sentence = _KINDS[kind]
        if not fits(value):
            raise InvalidValue(f"{where}.{name} is {shown(value)}; it must be {sentence}", field=f"{where}.{name}")

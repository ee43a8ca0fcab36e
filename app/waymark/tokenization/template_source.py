"""What the source of a chat template shows before it is compiled."""

from __future__ import annotations

import re

# Marks for training, in the templates of some models; engines take them as if they were not there.
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_CONTENT = r"""(?:\.content|\[\s*['"]content['"]\s*\])"""
_CONTENT_SET = re.compile(rf"\{{%[-+]?\s*set\s+(\w+)\s*=\s*\w+{_CONTENT}")
#: A call with the form of a date, or a look whether it can be asked. What another use gives cannot be foreseen.
_CLOCK = re.compile(r"""strftime_now(?:\s*\(\s*(['"])(?P<form>[^'"\\]*)\1\s*\)|\s+is\s+(?:not\s+)?defined)""")
_LOOP = re.compile(rf"\{{%[-+]?\s*for\s+\w+\s+in\s+(\w+)({_CONTENT})?\s*(?:\||if\b|-?%\}})")
#: SGLang takes a template with one of these words for one that goes through parts.
_MEDIA_WORDS = ("image", "audio", "video", "vision")


def compilable(source: str) -> str:
    """The source without what only training needs."""
    return _GENERATION.sub(_as_if, source)


def takes_parts(source: str) -> bool:
    """Whether a template goes through the parts of a content; otherwise it takes contents as texts."""
    contents = set(_CONTENT_SET.findall(source))
    return any(of_message or name in contents for name, of_message in _LOOP.findall(source))


def dates_of(source: str) -> tuple[str, ...] | None:
    """The forms in which a template asks for the date; None where it asks in other ways."""
    found = list(_CLOCK.finditer(source))
    if len(found) != source.count("strftime_now"):
        return None
    return tuple(dict.fromkeys(each["form"] for each in found if each["form"] is not None))


def takes_parts_for_sglang(source: str) -> bool:
    """As ``takes_parts``, by the rules of SGLang. It knows fewer loops, and takes words of the source for a sign."""
    loops = _LOOP.findall(source)
    return any(word in source for word in _MEDIA_WORDS) or any(
        of_message and name in ("message", "msg", "m") for name, of_message in loops
    )


def _as_if(mark: re.Match[str]) -> str:
    before, end, after = mark.groups()
    return "{%" + before + (" endif " if end else " if true ") + after + "%}"

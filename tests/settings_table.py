"""The settings as pages and charts list them: variable, type, default and sentence of each."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from waymark.base.setting_types import default_text, model_of, type_text
from waymark.base.settings import PREFIX, Settings


class Described(NamedTuple):
    """A setting, described for people."""

    variable: str
    type: str
    default: str
    sentence: str
    group: str
    """The comment above the group that it is in."""


def describe() -> list[Described]:
    """Every setting in the order of declaration."""
    sentences, groups = _sentences(), _groups()
    return [
        Described(PREFIX + name.upper(), type_text(field), default_text(field), sentences[name], groups[name])
        for name, field in model_of(Settings).model_fields.items()
    ]


def _sentences() -> dict[str, str]:
    """The docstring of each field. Pydantic would read them at each start of a process."""
    (declared,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(declared, ast.ClassDef)
    found: dict[str, str] = {}
    for node, below in pairwise(declared.body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                found[name] = inspect.cleandoc(sentence)
            case _:
                continue
    return found


def _groups() -> dict[str, str]:
    """The group of each field."""
    group, found = "", dict[str, str]()
    for comment, name in re.findall(r"^    (?:# (.+)|(\w+): .+)$", inspect.getsource(Settings), re.MULTILINE):
        if comment:
            group = comment
        elif name:
            found[name] = group
    return found


def markdown_table() -> str:
    """The table that stands in ``docs/configuration.md``, without a final newline."""
    lines = ["| Variable | Type | Default | What it is |", "|---|---|---|---|"]
    for group, settings in groupby(describe(), attrgetter("group")):
        lines.append(f"| **{group}** | | | |")
        for variable, kind, default, sentence, _ in settings:
            shown = default if default == "none" or " " in default else f"`{default}`"
            lines.append(f"| `{variable}` | {kind} | {shown} | {sentence} |")
    return "\n".join(lines)

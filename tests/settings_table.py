"""The settings in the form of pages and charts: the variable, the type, the default and the sentence of each."""

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
    """The description of a setting for readers."""

    variable: str
    type: str
    default: str
    sentence: str
    group: str
    """The comment above its group."""


def describe() -> list[Described]:
    """Return every setting, in the order of declaration."""
    sentences, groups = _sentences(), _groups()
    return [
        Described(PREFIX + name.upper(), type_text(field), default_text(field), sentences[name], groups[name])
        for name, field in model_of(Settings).model_fields.items()
    ]


def _sentences() -> dict[str, str]:
    """Return the docstring of each field. Pydantic could read them, but it would do so whenever a process starts."""
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
    """Return the group of each field."""
    group, found = "", dict[str, str]()
    for comment, name in re.findall(r"^    (?:# (.+)|(\w+): .+)$", inspect.getsource(Settings), re.MULTILINE):
        if comment:
            group = comment
        elif name:
            found[name] = group
    return found


def markdown_table() -> str:
    """Return the table in ``docs/configuration.md``, without a final newline."""
    lines = ["| Variable | Type | Default | What it is |", "|---|---|---|---|"]
    for group, settings in groupby(describe(), attrgetter("group")):
        lines.append(f"| **{group}** | | | |")
        for variable, kind, default, sentence, _ in settings:
            shown = default if default == "none" or " " in default else f"`{default}`"
            lines.append(f"| `{variable}` | {kind} | {shown} | {sentence} |")
    return "\n".join(lines)

"""The settings as pages and charts list them: variable, type, default and sentence of each."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import NamedTuple

from waymark.base.settings import PREFIX, Settings, default_text, type_text


class Described(NamedTuple):
    """A setting, described for people."""

    variable: str
    type: str
    default: str
    sentence: str


def describe() -> list[Described]:
    """Every setting in the order of declaration."""
    sentences = _sentences()
    return [
        Described(PREFIX + name.upper(), type_text(field), default_text(field), sentences[name])
        for name, field in Settings.model_fields.items()
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


def markdown_table() -> str:
    """The table that stands in ``docs/configuration.md``, without a final newline."""
    lines = ["| Variable | Type | Default | What it is |", "|---|---|---|---|"]
    for variable, kind, default, sentence in describe():
        shown = default if default == "none" or " " in default else f"`{default}`"
        lines.append(f"| `{variable}` | {kind} | {shown} | {sentence} |")
    return "\n".join(lines)

"""The flags of ``waymark simulate``: one for each field of the options, and of the faults.

The fields are read from the source that declares them, as pydantic does for their sentences. So help and completion
import nothing of the simulator; a test compares what is read here with the fields themselves.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SIMULATOR = Path(__file__).parents[1] / "simulator"
#: Readers of a flag's text, the first whose type is in the annotation.
_READERS: dict[str, Any] = {"tuple": lambda text: tuple(text.split(",")), "Path": Path, "int": int, "float": float}


class Declared(NamedTuple):
    """A field as its class declares it."""

    name: str
    word: str
    """Its alias, where it has one."""
    annotation: str
    default: Any
    sentence: str


def fields(file: str, name: str) -> Iterator[Declared]:
    """The fields of a class that have a sentence, in order."""
    tree = ast.parse((_SIMULATOR / file).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node, below in zip(found.body, found.body[1:], strict=False):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=field), annotation=annotation, value=ast.expr() as value),
                ast.Expr(value=ast.Constant(value=str(sentence))),
            ):
                default, word = _default(value)
                yield Declared(field, word or field, ast.unparse(annotation), default, " ".join(sentence.split()))
            case _:
                continue


def _default(value: ast.expr) -> tuple[Any, str | None]:
    """The default and the alias: a literal, or the arguments of ``Field``."""
    if not isinstance(value, ast.Call):
        return ast.literal_eval(value), None
    alias = next((each.value for each in value.keywords if each.arg == "alias"), None)
    return ast.literal_eval(value.args[0]), None if alias is None else ast.literal_eval(alias)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them; what is not given stays None in the parsed arguments."""
    faults = parser.add_argument_group(
        "faults", "What goes wrong on purpose with events. Numbers count batches; 0 means never."
    )
    answers = parser.add_argument_group(
        "faults of answers", "What goes wrong on purpose with answers over HTTP. Numbers count requests; 0 means never."
    )
    for file, name, prefix, group in (
        ("options.py", "SimulateOptions", "", parser),
        ("faults.py", "Faults", "fault-", faults),
        ("faults.py", "AnswerFaults", "fault-", answers),
    ):
        for field in fields(file, name):
            _add_flag(group, f"--{prefix}{field.word.replace('_', '-')}", field)


def _add_flag(group: Any, flag: str, field: Declared) -> None:
    sentence = field.sentence.replace("``", "").replace("%", "%%")
    if field.annotation == "bool":
        action, flag = ("store_false", flag.replace("--has-", "--no-")) if field.default else ("store_true", flag)
        group.add_argument(flag, dest=field.name, action=action, default=None, help=sentence)
        return
    shown = "" if field.default in (None, "", ()) else f" ({field.default})"
    reader = next((each for name, each in _READERS.items() if name in field.annotation), str)
    group.add_argument(flag, dest=field.name, type=reader, metavar=field.word.upper(), help=sentence + shown)

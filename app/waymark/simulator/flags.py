"""The flags of ``waymark simulate``, one for each option, and the options that they make."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from waymark.simulator.faults import AnswerFaults, Faults, Options
from waymark.simulator.options import SimulateOptions

#: A type in the annotation of a field -> what reads the text of its flag; the text of any other is its value.
_READERS: dict[Any, Any] = {tuple: lambda text: tuple(text.split(",")), Path: Path, int: int, float: float}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; the parsed arguments have None for one that is not given."""
    for name, field in SimulateOptions.model_fields.items():
        options = field.annotation
        if isinstance(options, type) and issubclass(options, Options):
            group = parser.add_argument_group(name.replace("_", " "), _sentence(field))
            for fault, each in options.model_fields.items():
                _add_flag(group, f"--fault-{fault}", fault, each)
        else:
            _add_flag(parser, f"--{field.alias or name}", name, field)


def options_of(arguments: argparse.Namespace) -> SimulateOptions:
    """What the flags say; ``InvalidValue`` where it does not fit."""
    return SimulateOptions(
        **_given(arguments, SimulateOptions),
        faults=Faults(**_given(arguments, Faults)),
        answer_faults=AnswerFaults(**_given(arguments, AnswerFaults)),
    )


def _add_flag(group: Any, flag: str, name: str, field: FieldInfo) -> None:
    flag, sentence = flag.replace("_", "-"), _sentence(field)
    if field.annotation is bool:
        action, flag = ("store_false", flag.replace("--has-", "--no-")) if field.default else ("store_true", flag)
        group.add_argument(flag, dest=name, action=action, default=None, help=sentence)
        return
    default = "" if field.default in (None, "", ()) else f" ({field.default})"
    metavar = (field.alias or name).upper()
    group.add_argument(flag, dest=name, type=_reader(field), metavar=metavar, help=sentence + default)


def _reader(field: FieldInfo) -> Any:
    """What reads the text of the flag; None among the types of the field says that it may be left out."""
    types = {get_origin(each) or each for each in (field.annotation, *get_args(field.annotation))}
    return next((reader for kind, reader in _READERS.items() if kind in types), str)


def _sentence(field: FieldInfo) -> str:
    """The sentence of the field as argparse prints it."""
    return " ".join((field.description or "").split()).replace("``", "").replace("%", "%%")


def _given(arguments: argparse.Namespace, options: type[Options]) -> dict[str, Any]:
    values = {field.alias or name: getattr(arguments, name, None) for name, field in options.model_fields.items()}
    return {name: value for name, value in values.items() if value is not None}

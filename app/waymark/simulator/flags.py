"""The flags of ``waymark simulate``: one for each field of the options, and of the faults."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from waymark.simulator.faults import AnswerFaults, Faults, Options
from waymark.simulator.options import SimulateOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them; what is not given stays None in the parsed arguments."""
    faults = parser.add_argument_group("faults", "What goes wrong on purpose. Numbers count batches; 0 is never.")
    answers = parser.add_argument_group("faults of answers", "The same over HTTP. Numbers count requests; 0 is never.")
    kinds: tuple[tuple[type[Options], str, Any], ...] = (
        (SimulateOptions, "", parser),
        (Faults, "fault-", faults),
        (AnswerFaults, "fault-", answers),
    )
    for options, prefix, group in kinds:
        for name, field in options.model_fields.items():
            if name not in ("faults", "answer_faults"):
                _add_flag(group, f"--{prefix}{_word(name, field).replace('_', '-')}", name, field)


def _add_flag(group: Any, flag: str, name: str, field: FieldInfo) -> None:
    sentence = " ".join((field.description or "").split()).replace("``", "").replace("%", "%%")
    if field.annotation is bool:
        action, flag = ("store_false", flag.replace("--has-", "--no-")) if field.default else ("store_true", flag)
        group.add_argument(flag, dest=name, action=action, default=None, help=sentence)
        return
    shown = "" if field.default in (None, "", ()) else f" ({field.default})"
    group.add_argument(
        flag, dest=name, type=_reader(field.annotation), metavar=_word(name, field).upper(), help=sentence + shown
    )


def _word(name: str, field: FieldInfo) -> str:
    return field.alias or name


def _reader(kind: Any) -> Any:
    """What turns a flag's text into a field's value."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is tuple:
        return lambda text: tuple(text.split(","))
    return next((each for each in (Path, int, float) if each in kinds), str)


def options_of(arguments: argparse.Namespace) -> SimulateOptions:
    """What the flags say; ``InvalidValue`` where it does not fit."""
    return SimulateOptions(
        **_given(arguments, SimulateOptions),
        faults=Faults(**_given(arguments, Faults)),
        answer_faults=AnswerFaults(**_given(arguments, AnswerFaults)),
    )


def _given(arguments: argparse.Namespace, options: type[Options]) -> dict[str, Any]:
    values = {_word(name, field): getattr(arguments, name, None) for name, field in options.model_fields.items()}
    return {name: value for name, value in values.items() if value is not None}

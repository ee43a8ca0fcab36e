"""Options from the words of ``waymark simulate``, whose flags are in ``cli/option_flags.py``."""

from __future__ import annotations

import argparse
from typing import Any

from waymark.simulator.faults import AnswerFaults, Faults, Options
from waymark.simulator.options import SimulateOptions


def options_of(arguments: argparse.Namespace) -> SimulateOptions:
    """What the flags say; ``InvalidValue`` where it does not fit."""
    return SimulateOptions(
        **_given(arguments, SimulateOptions),
        faults=Faults(**_given(arguments, Faults)),
        answer_faults=AnswerFaults(**_given(arguments, AnswerFaults)),
    )


def _given(arguments: argparse.Namespace, options: type[Options]) -> dict[str, Any]:
    values = {field.alias or name: getattr(arguments, name, None) for name, field in options.model_fields.items()}
    return {name: value for name, value in values.items() if value is not None}
